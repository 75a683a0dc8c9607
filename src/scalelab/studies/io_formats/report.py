"""The tables and figures of io-formats: cost of a format, a batch, order and access, workers, and training.

The reference of every row is a memory map of the plain array (`npy`, read lazily) on as many ranks; that of training
is the same training from memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.fetches import FetchSeries, PassTimes
from scalelab.analysis.stats import estimate_location, estimate_ratio
from scalelab.records.tasks import MEMORY, Dataset, Pass
from scalelab.records.trial import TrialResult
from scalelab.report.charts.amounts import plot_amounts
from scalelab.report.charts.column_charts import INTERVALS, draw_columns, keep_charts
from scalelab.report.charts.plot import Axis, Row, plot_lines
from scalelab.report.document import Cell, Chart, Table, make_cell
from scalelab.report.findings import Known
from scalelab.report.tables import (
    INTERVAL_NOTE,
    Field,
    bytes_column,
    make_column,
    make_table,
    rate_column,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.shared.arms import NOT_YET, Arm
from scalelab.studies.shared.breakdown import collect_phases, estimate_part, estimate_phase_share, read_load, read_train
from scalelab.studies.shared.sweep import OVERSUBSCRIBED, make_sweep_table, relative_column, samples_column, step_column
from scalelab.units import format_count

CUT = "‡"
IN_MEMORY = f"train-{MEMORY}"
"""The training that all others are compared with."""
PASSES = (("sequential", "batch"), ("sequential", "item"), ("shuffled", "batch"), ("shuffled", "item"))
BLOCKS = ("blocks", "batch")
"""A pass of data sets that are too large to be kept in memory."""
ORDER_WORDS = {"sequential": "in order", "shuffled": "shuffled", "blocks": "by blocks"}
MAIN_NOTE = "shuffled, page cache warm, whole batches; naive: sample by sample"
MOST_WORKER_SERIES = 8


def name_set(dataset: Dataset, num_ranks: int = 1) -> str:
    """The format, and the number of ranks where that is varied."""
    what = "as-it-is" if dataset.is_as_it_is else dataset.format
    return f"{what} × {num_ranks}" if num_ranks > 1 else what


def name_reader(dataset: Dataset, num_ranks: int = 1) -> str:
    """The same with the way to read, for tables."""
    mode = "" if dataset.format == MEMORY else f" {dataset.mode}"
    return f"{name_set(dataset)}{mode}" + (f" × {num_ranks}" if num_ranks > 1 else "")


def count_shown_ranks(every: Sequence[FetchSeries], series: FetchSeries) -> int:
    """Its ranks where rows differ in them; 1 where all have as many, which no name has to say."""
    return series.trial.num_ranks if len({one.trial.num_ranks for one in every}) > 1 else 1


def find_map(every: Sequence[FetchSeries], series: FetchSeries) -> FetchSeries | None:
    """The memory map of the same samples on as many ranks: `npy`, read lazily."""
    alike = (
        one
        for one in every
        if (one.dataset.format, one.dataset.mode, one.dataset.workers, one.dataset.is_as_it_is)
        == ("npy", "lazy", 0, False)
        and one.trial.num_ranks == series.trial.num_ranks
    )
    return next(alike, None)


def compare_epochs(above: PassTimes | None, below: PassTimes | None) -> Estimate | float | None:
    """How many times as long an epoch takes, round by round; exactly 1 for one over itself."""
    if above is None or below is None:
        return None
    return 1.0 if above is below else estimate_ratio(above.epochs, below.epochs)


def compare_with_map(every: Sequence[FetchSeries], series: FetchSeries) -> Estimate | float | None:
    reference = find_map(every, series)
    return compare_epochs(series.main, reference.main) if reference is not None else None


def read_rate(series: FetchSeries) -> Estimate | None:
    """Samples of all ranks per second."""
    return series.main.epoch_seconds.map(lambda seconds: series.num_samples / seconds) if series.main else None


def find_alike(every: Sequence[FetchSeries], series: FetchSeries) -> list[FetchSeries]:
    """Those that differ only in their workers."""

    def describe(one: FetchSeries) -> tuple[str, str, bool, int]:
        return one.dataset.format, one.dataset.mode, one.dataset.is_as_it_is, one.trial.num_ranks

    return [one for one in every if describe(one) == describe(series)]


def estimate_utilization(arm: Arm, reference: Arm | None) -> Estimate | None:
    """Compute time over total time, round by round: AU of the rules of MLPerf Storage (MLCommons).

    The compute time of a step is that of training from memory, so that what reading takes from compute, such as cores
    for workers, counts as well. Compute that appears to take longer than everything counts as all of it.
    """
    if reference is None:
        return None
    found = []
    for result in arm.completed:
        compute = next(
            (_mean_compute(one) for one in reference.completed if one.trial.round == result.trial.round), None
        )
        place = result.trial.round - 1
        steps = arm.clean[place] if place < len(arm.clean) else []
        if compute is not None and len(steps):
            found.append(min(1.0, compute / statistics.fmean(steps)))
    return estimate_location(found) if found else None


def _mean_compute(result: TrialResult) -> float | None:
    """Forward, backward and optimizer of the median timed step."""
    found = collect_phases(result, read_train)
    return statistics.median(found) if found else None


def _list_notes(every: Sequence[FetchSeries]) -> Iterator[str]:
    if any(series.main is not None and not series.main.is_whole for series in every):
        yield f"{CUT} cut short by --budget: the epoch is extrapolated from the batches read"
    if any(series.trial.is_oversubscribed for series in every):
        yield f"{OVERSUBSCRIBED} oversubscribed: its ranks share cores"


def _make_table(every: Sequence[FetchSeries], *fields: Field[FetchSeries]) -> Table:
    """One row per series; one that gave nothing has its status."""

    def name(series: FetchSeries) -> Cell:
        return make_cell(series.label, mark=OVERSUBSCRIBED if series.trial.is_oversubscribed else "")

    def find_status(series: FetchSeries) -> str | None:
        if series.main is not None:
            return None
        return series.failure.status.words if series.failure else NOT_YET

    notes = (INTERVAL_NOTE, *_list_notes(every))
    return make_table(every, text_column("run", "format", name), *fields, notes=notes, status=find_status)


def read_main(read: Callable[[PassTimes], Known | Cell]) -> Callable[[FetchSeries], Known | Cell]:
    return lambda series: read(series.main) if series.main else None


def make_cost_table(every: Sequence[FetchSeries]) -> Table:
    """What every format costs: once to write, at every start to open, in every epoch to read."""

    def mark_epoch(main: PassTimes) -> Cell:
        return make_cell(main.epoch_seconds, mark="" if main.is_whole else CUT)

    return _make_table(
        every,
        seconds_column(
            "write_seconds", "write", lambda one: one.write_seconds, note="until it is on disk", is_detail=True
        ),
        bytes_column("file_bytes", "on disk", lambda one: one.file_bytes),
        seconds_column(
            "open_seconds", "open", lambda one: one.open_seconds, note="eager: includes loading", is_detail=True
        ),
        seconds_column(
            "first_epoch_seconds", "first epoch", read_main(lambda main: main.first_epoch_seconds), is_detail=True
        ),
        seconds_column("epoch_seconds", "epoch", read_main(mark_epoch), note=MAIN_NOTE),
        rate_column("samples_per_second", "samples/s", read_rate, shows_interval=False),
        make_column(
            "ratio",
            "map_ratio",
            "× map",
            lambda one: compare_with_map(every, one),
            note="over an epoch of a memory-mapped .npy",
        ),
        make_column(
            "ratio",
            "memcpy_ratio",
            "× memcpy",
            lambda one: compare_epochs(one.main, one.memcpy),
            note="over gathering in memory",
            is_detail=True,
        ),
    )


def make_batch_table(every: Sequence[FetchSeries]) -> Table:
    """One batch, and what memory reading takes."""
    unit = {"unit_of": "fetch_seconds"}
    late, slowest = read_main(lambda main: main.late_seconds), read_main(lambda main: main.slowest_seconds)
    return _make_table(
        every,
        seconds_column(
            "fetch_seconds", "fetch", read_main(lambda main: main.fetch_seconds), note="median batch; " + MAIN_NOTE
        ),
        seconds_column("late_seconds", "p95", late, shows_interval=False, **unit),
        seconds_column("slowest_seconds", "slowest", slowest, **unit),
        make_column(
            "latency",
            "copy_seconds",
            "copy",
            read_main(lambda main: main.copy_seconds),
            note="to a tensor on the device",
        ),
        bytes_column("private_bytes", "private", lambda one: one.private_bytes, note="added to the process, no maps"),
        bytes_column("peak_bytes", "peak RSS", lambda one: one.peak_bytes, note="mapped files included"),
        make_column(
            "ratio",
            "amplification",
            "amplification",
            lambda one: one.amplification,
            note="bytes decompressed per byte delivered",
        ),
    )


def make_pass_table(every: Sequence[FetchSeries], cache: str) -> Table | None:
    """The median batch of every pass; None if there was none of them."""

    def find_pass(series: FetchSeries, order: str, access: str) -> PassTimes | None:
        return series.passes.get(Pass(order=order, access=access, cache=cache).name)  # type: ignore[arg-type]

    def make_pass_column(order: str, access: str) -> Field[FetchSeries]:
        return seconds_column(
            f"{order}_{access}_seconds",
            f"{ORDER_WORDS[order]}, by {access}",
            lambda one: times.fetch_seconds if (times := find_pass(one, order, access)) else None,
            unit_of="" if (order, access) == PASSES[0] else "sequential_batch_seconds",
        )

    measured = [one for one in every if any(find_pass(one, *which) for which in (*PASSES, BLOCKS))]
    if not measured:
        return None
    is_cold = cache == "cold"
    has_blocks = any(find_pass(series, *BLOCKS) and series.shuffle for series in measured)
    return make_table(
        measured,
        text_column("run", "format", lambda one: one.label),
        *(make_pass_column(*which) for which in PASSES),
        make_pass_column(*BLOCKS) if has_blocks else None,
        seconds_column("open_seconds", "open", lambda one: one.cold_open_seconds) if is_cold else None,
        share_column("resident_share", "still cached", lambda one: one.resident_share) if is_cold else None,
        title="From disk" if is_cold else "From the page cache",
        notes=(INTERVAL_NOTE, "the median batch of each pass"),
    )


def list_workers(every: Sequence[FetchSeries]) -> list[int]:
    """The numbers of workers that were tried, ascending."""
    return sorted({series.dataset.workers for series in every})


def make_worker_table(every: Sequence[FetchSeries]) -> Table | None:
    """Samples per second by the number of workers; None if there were none."""
    counts = list_workers(every)
    rates: dict[str, dict[int, Estimate | None]] = {}
    for series in every:
        if series.main is not None and any(one.dataset.workers for one in find_alike(every, series)):
            name = name_reader(series.dataset, count_shown_ranks(every, series))
            rates.setdefault(name, {})[series.dataset.workers] = read_rate(series)
    if not rates:
        return None

    def make_rate_column(count: int) -> Field[str]:
        unit = f"workers_{counts[0]}_rate" if count != counts[0] else ""
        return rate_column(
            f"workers_{count}_rate", format_count(count, "worker"), lambda name: rates[name].get(count), unit_of=unit
        )

    note = "samples/s of all ranks, shuffled and warm, after the first epoch; the ranks only read"
    first: Field[str] = text_column("run", "format", str)
    return make_table(rates, first, *map(make_rate_column, counts), notes=(INTERVAL_NOTE, note))


def make_training_table(arms: Mapping[str, Arm]) -> Table:
    """The step of every training, and how long it waits for input."""
    reference = arms.get(IN_MEMORY)
    note = "accelerator utilization (MLPerf Storage): compute of training from memory over total time of this one"
    columns = [
        step_column(),
        seconds_column("input_seconds", "wait", lambda arm: estimate_part(arm, read_load), note="for the batch"),
        share_column("input_share", "of the step", lambda arm: estimate_phase_share(arm, "input")),
        share_column("accelerator_utilization", "AU", lambda arm: estimate_utilization(arm, reference), note=note),
        relative_column(reference, header="× memory"),
        samples_column(),
    ]
    return make_sweep_table(arms.values(), columns, name_header="format")


def draw_costs(table: Table, every: Sequence[FetchSeries]) -> tuple[Chart, ...]:
    """An epoch by format and way to read, and the size of the files."""
    caption = f"{INTERVALS} Shuffled, page cache warm, whole batches; naive: sample by sample."
    return keep_charts(
        draw_columns(table, ["epoch_seconds"], title="Epoch by format", caption=caption), _draw_files(every)
    )


def _draw_files(every: Sequence[FetchSeries]) -> Chart | None:
    sizes: dict[str, Row] = {}
    for series in every:
        name = name_set(series.dataset, count_shown_ranks(every, series))
        if series.file_bytes and name not in sizes:
            sizes[name] = {"name": name, "file_bytes": series.file_bytes, "series": "", "key": name}
    return plot_amounts(
        title="Size on disk",
        x=Axis(field="file_bytes", title="on disk", quantity="bytes"),
        rows=list(sizes.values()),
        caption="The same samples in every format.",
    )


def draw_batches(every: Sequence[FetchSeries]) -> tuple[Chart, ...]:
    """The median batch by order and access, of what is read lazily."""
    table = make_pass_table([series for series in every if series.dataset.mode == "lazy"], "warm")
    if table is None:
        return ()
    columns = [f"{order}_{access}_seconds" for order, access in PASSES]
    caption = f"{INTERVALS} The median batch, read lazily, page cache warm."
    title = "Batch by order and access"
    return keep_charts(draw_columns(table, columns, title=title, axis_title="fetch", caption=caption))


def draw_workers(table: Table, counts: Sequence[int]) -> tuple[Chart, ...]:
    """Samples per second against the number of workers."""
    shown, rest = table.rows[:MOST_WORKER_SERIES], table.rows[MOST_WORKER_SERIES:]
    rows: list[Row] = [
        {"workers": count, "rate": cell.estimate, "series": str(cells[0].value), "key": str(cells[0].value)}
        for cells in shown
        for count, cell in zip(counts, cells[1:], strict=True)
        if cell.estimate is not None
    ]
    if len(rows) < 2:
        return ()
    left_out = f" In the table only: {', '.join(str(cells[0].value) for cells in rest)}." if rest else ""
    chart = plot_lines(
        title="Samples per second by workers",
        x=Axis(field="workers", title="workers", quantity="number"),
        y=Axis(field="rate", title="samples/s", quantity="rate"),
        rows=rows,
        caption=f"Vertical lines are 95 % CIs.{left_out}",
    )
    return (chart,)


def draw_trainings(table: Table) -> tuple[Chart, ...]:
    """The step of every training, and how long it waits."""
    columns = {"step_seconds": "whole step", "input_seconds": "waiting for the batch"}
    return keep_charts(
        draw_columns(table, columns, title="Training step by format", axis_title="time"),
        draw_columns(
            table,
            ["step_ratio"],
            title="Step over that from memory",
            reference=1.0,
            from_zero=False,
            caption=f"{INTERVALS} Right of the dashed line reading costs time.",
        ),
    )
