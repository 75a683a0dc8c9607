"""The tables of the study of I/O formats.

The figures of `io-formats`: an epoch and a file by format, a batch by order and access, workers, and trainings.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.fetches import FetchSeries, PassTimes
from scalelab.analysis.stats import estimate_location, estimate_ratio
from scalelab.records.settings import MEMORY, Pass
from scalelab.records.trial import TrialResult
from scalelab.report.charts.amounts import plot_amounts
from scalelab.report.charts.plot import Axis, Row, plot_lines
from scalelab.report.document import Cell, Chart, Column, Table, make_cell, make_row
from scalelab.report.findings import Value
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import estimate_phase_share
from scalelab.studies.shared.input_split import collect_phases, estimate_part, read_load, read_train
from scalelab.studies.shared.sweep import (
    INTERVAL_NOTE,
    INTERVALS,
    OVERSUBSCRIBED,
    SweepColumn,
    draw_columns,
    keep_charts,
    list_keys,
    make_sweep_table,
    ratio_column,
    samples_column,
    step_column,
)

CUT = "‡"
IN_MEMORY = f"train-{MEMORY}"
"""The training that all others are compared with."""
PASSES = (("sequential", "batch"), ("sequential", "item"), ("shuffled", "batch"), ("shuffled", "item"))
BLOCKS = ("blocks", "batch")
"""A pass that only sets have which are too large to be kept."""
ORDER_WORDS = {"sequential": "in order", "shuffled": "shuffled", "blocks": "by blocks"}
MAIN_NOTE = "shuffled, the file in the kernel's memory, by whole batches; naive: by samples"


def find_map(every: Sequence[FetchSeries], series: FetchSeries) -> FetchSeries | None:
    """The memory map of the same samples on as many ranks: `npy`, read lazily."""
    alike = (
        one
        for one in every
        if (one.reading.format, one.reading.mode, one.reading.workers, one.reading.is_as_it_is)
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


def say_status(series: FetchSeries) -> str:
    return series.failure.status.words if series.failure else "not run yet"


def make_cost_table(every: Sequence[FetchSeries]) -> Table:
    """What every format costs: once to write, at every start to open, in every epoch to read."""
    columns = (
        Column(key="run", header="format", align="left"),
        Column(key="write_seconds", header="write", quantity="seconds", note="until it is on the disk"),
        Column(key="file_bytes", header="on disk", quantity="bytes"),
        Column(key="open_seconds", header="open", quantity="seconds", note="eager: with loading"),
        Column(key="first_epoch_seconds", header="first epoch", quantity="seconds", note="just opened"),
        Column(key="epoch_seconds", header="epoch", quantity="seconds", note=MAIN_NOTE),
        Column(key="samples_per_second", header="samples/s", quantity="rate", shows_interval=False),
        Column(key="map_ratio", header="× map", quantity="ratio", note="over an epoch of the memory map of .npy"),
        Column(key="memcpy_ratio", header="× memcpy", quantity="ratio", note="over gathering within memory"),
    )
    rows = tuple(_make_row(series, len(columns), _read_costs(every, series)) for series in every)
    return Table(columns=columns, rows=rows, notes=(INTERVAL_NOTE, *_list_notes(every)))


def _read_costs(every: Sequence[FetchSeries], series: FetchSeries) -> Iterator[Value | Estimate | Cell]:
    main = series.main
    if main is None:
        return
    epoch = main.epoch_seconds
    yield series.write_seconds
    yield series.file_bytes
    yield series.open_seconds
    yield main.first_epoch_seconds
    yield make_cell(epoch, mark="" if main.is_whole else CUT)
    yield epoch.map(lambda seconds: series.num_samples / seconds)
    yield compare_with_map(every, series)
    yield compare_epochs(main, series.memcpy)


def _make_row(series: FetchSeries, num_columns: int, cells: Iterator[Value | Estimate | Cell]) -> tuple[Cell, ...]:
    """A row, or its status where nothing was measured."""
    label = make_cell(series.label, mark=OVERSUBSCRIBED if series.trial.is_oversubscribed else "")
    found = list(cells)
    if not found:
        return make_row(label, say_status(series), *[None] * (num_columns - 2))
    return make_row(label, *found)


def make_batch_table(every: Sequence[FetchSeries]) -> Table:
    """One batch, and what memory reading takes."""
    columns = (
        Column(key="run", header="format", align="left"),
        Column(key="fetch_seconds", header="fetch", quantity="seconds", note="the median batch; " + MAIN_NOTE),
        Column(key="late_seconds", header="95 %", quantity="seconds", unit_of="fetch_seconds", shows_interval=False),
        Column(key="slowest_seconds", header="slowest", quantity="seconds", unit_of="fetch_seconds"),
        Column(key="copy_seconds", header="copy", quantity="latency", note="to a tensor on the device"),
        Column(key="private_bytes", header="own memory", quantity="bytes", note="added to the process, without maps"),
        Column(key="peak_bytes", header="peak", quantity="bytes", note="resident at most, mapped files included"),
        Column(key="amplification", header="amplification", quantity="ratio", note="bytes inflated for one delivered"),
    )
    rows = tuple(_make_row(series, len(columns), _read_batch(series)) for series in every)
    return Table(columns=columns, rows=rows, notes=(INTERVAL_NOTE, *_list_notes(every)))


def _read_batch(series: FetchSeries) -> Iterator[Value | Estimate | Cell]:
    main = series.main
    if main is None:
        return
    yield main.fetch_seconds
    yield main.late_seconds
    yield main.slowest_seconds
    yield main.copy_seconds
    yield series.private_bytes
    yield series.peak_bytes
    yield series.amplification


def make_pass_table(every: Sequence[FetchSeries], cache: str) -> Table | None:
    """The median batch of every pass; None where there was none of them."""
    measured = [series for series in every if any(name.endswith(cache) for name in series.passes)]
    if not measured:
        return None
    is_cold = cache == "cold"
    blocks = Pass(order="blocks", cache=cache).name  # type: ignore[arg-type]
    passes = (*PASSES, BLOCKS) if any(blocks in series.passes and series.shuffle for series in measured) else PASSES
    columns = (
        Column(key="run", header="format", align="left"),
        *(_make_pass_column(order, access) for order, access in passes),
        *((Column(key="open_seconds", header="open", quantity="seconds"),) if is_cold else ()),
        *((Column(key="resident_share", header="still in memory", quantity="share"),) if is_cold else ()),
    )
    rows = []
    for series in measured:
        found = [series.passes.get(Pass(order=o, access=a, cache=cache).name) for o, a in passes]  # type: ignore[arg-type]
        cold = (series.cold_open_seconds, series.resident_share) if is_cold else ()
        rows.append(make_row(series.label, *(times.fetch_seconds if times else None for times in found), *cold))
    title = "From the disk" if is_cold else "From the kernel's memory"
    return Table(title=title, columns=columns, rows=tuple(rows), notes=(INTERVAL_NOTE, "the median batch of each pass"))


def _make_pass_column(order: str, access: str) -> Column:
    header = f"{ORDER_WORDS[order]}, by {access}"
    unit = "" if (order, access) == PASSES[0] else "sequential_batch_seconds"
    return Column(key=f"{order}_{access}_seconds", header=header, quantity="seconds", unit_of=unit)


def make_worker_table(every: Sequence[FetchSeries]) -> Table | None:
    """Samples per second by the number of workers; None where there were none."""
    counts = sorted({series.reading.workers for series in every})
    if counts == [0]:
        return None
    columns = (
        Column(key="run", header="format", align="left"),
        *(
            Column(
                key=f"workers_{count}_rate",
                header=f"{count} worker{'s'[: count != 1]}",
                quantity="rate",
                unit_of=f"workers_{counts[0]}_rate" if count != counts[0] else "",
            )
            for count in counts
        ),
    )
    rows: dict[str, dict[int, Estimate]] = {}
    for series in every:
        if series.main is not None and any(one.reading.workers for one in find_alike(every, series)):
            label = series.label.partition(",")[0]
            rate = series.main.epoch_seconds.map(lambda seconds, total=series.num_samples: total / seconds)  # type: ignore[misc]
            rows.setdefault(label, {})[series.reading.workers] = rate
    made = tuple(make_row(label, *(rates.get(count) for count in counts)) for label, rates in rows.items())
    note = "samples per second of all ranks, shuffled and warm, after the first epoch; the ranks do nothing else"
    return Table(columns=columns, rows=made, notes=(INTERVAL_NOTE, note)) if made else None


def find_alike(every: Sequence[FetchSeries], series: FetchSeries) -> list[FetchSeries]:
    """Those that differ in nothing but their workers."""

    def describe(one: FetchSeries) -> tuple[str, str, bool, int]:
        return one.reading.format, one.reading.mode, one.reading.is_as_it_is, one.trial.num_ranks

    return [one for one in every if describe(one) == describe(series)]


def make_training_table(arms: Mapping[str, Arm]) -> Table:
    """The step of every training, and what of it is waiting for input."""
    reference = arms.get(IN_MEMORY)
    wait = Column(key="input_seconds", header="wait", quantity="seconds", note="for the batch, the median step")
    share = Column(key="input_share", header="of the step", quantity="share")
    utilisation = Column(
        key="accelerator_utilisation",
        header="AU",
        quantity="share",
        note="accelerator utilisation (MLPerf Storage): compute of the training from memory over all time of this one",
    )
    columns = [
        step_column(),
        SweepColumn(column=wait, read=lambda arm: estimate_part(arm, read_load)),
        SweepColumn(column=share, read=lambda arm: estimate_phase_share(arm, "input")),
        SweepColumn(column=utilisation, read=lambda arm: estimate_utilisation(arm, reference)),
        ratio_column(reference, header="× memory"),
        samples_column(),
    ]
    return make_sweep_table(arms.values(), columns, name_header="format")


def estimate_utilisation(arm: Arm, reference: Arm | None) -> Estimate | None:
    """Compute time over total time, round by round: AU of the rules of MLPerf Storage (MLCommons).

    The compute time of a step is that of the training whose data are in memory, so that what reading takes from the
    computing, such as cores for workers, counts as well. Compute that seems to take longer than all is all of it.
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
        yield f"{CUT} cut short by --budget: an epoch by the batches that it had"
    if any(series.trial.is_oversubscribed for series in every):
        yield f"{OVERSUBSCRIBED} oversubscribed: its ranks share cores"


MODES = {"lazy": "lazily", "eager": "eagerly", "naive": "naively"}
MOST_WORKER_SERIES = 8


def draw_costs(every: Sequence[FetchSeries]) -> tuple[Chart, ...]:
    """An epoch by format and way to read, and what lies on the disk."""
    return keep_charts(
        plot_amounts(
            title="An epoch by format",
            x=Axis(field="seconds", title="epoch", quantity="seconds"),
            rows=_list_rows(every, lambda series: series.main.epoch_seconds if series.main else None),
            caption=f"{INTERVALS} Shuffled, with the file in the kernel's memory, by whole batches; naively, by"
            f" samples.{_list_failures(every)}",
        ),
        _draw_files(every),
    )


def _draw_files(every: Sequence[FetchSeries]) -> Chart | None:
    sizes: dict[str, Row] = {}
    for series in every:
        name = _name_set(series)
        if series.file_bytes and name not in sizes:
            sizes[name] = {"name": name, "file_bytes": series.file_bytes, "series": "", "key": name}
    return plot_amounts(
        title="Size on disk",
        x=Axis(field="file_bytes", title="on disk", quantity="bytes"),
        rows=list(sizes.values()),
        caption="The same samples in every format; exact, so without intervals. What is held in memory has no file.",
    )


def draw_batches(every: Sequence[FetchSeries]) -> tuple[Chart, ...]:
    """The median batch, by order and access, of what is read lazily."""
    lazy = [series for series in every if series.reading.mode == "lazy" and series.passes]
    rows: list[Row] = []
    for series in lazy:
        for order, access in PASSES:
            times = series.passes.get(Pass(order=order, access=access, cache="warm").name)  # type: ignore[arg-type]
            if times is not None:
                rows.append(
                    {
                        "name": _name_set(series),
                        "series": f"{ORDER_WORDS[order]}, by {access}",
                        "seconds": times.fetch_seconds,
                        "key": _name_set(series),
                    }
                )
    chart = plot_amounts(
        title="A batch by order and access",
        x=Axis(field="seconds", title="fetch", quantity="seconds"),
        rows=rows,
        caption=f"{INTERVALS} The median batch, read lazily, with the file in the kernel's memory.",
    )
    return keep_charts(chart)


def draw_workers(every: Sequence[FetchSeries]) -> tuple[Chart, ...]:
    """Samples per second against the number of workers."""
    rows: list[Row] = []
    for series in every:
        if series.main is not None and any(one.reading.workers for one in find_alike(every, series)):
            total = series.num_samples
            rows.append(
                {
                    "workers": series.reading.workers,
                    "rate": series.main.epoch_seconds.map(lambda seconds, total=total: total / seconds),  # type: ignore[misc]
                    "series": series.label.partition(",")[0],
                    "key": series.label.partition(",")[0],
                }
            )
    names = list(dict.fromkeys(str(row["series"]) for row in rows))
    kept = names[:MOST_WORKER_SERIES]
    left_out = f" In the table only: {', '.join(names[MOST_WORKER_SERIES:])}." if len(names) > len(kept) else ""
    if len(rows) < 2:
        return ()
    chart = plot_lines(
        title="Samples per second by workers",
        x=Axis(field="workers", title="workers", quantity="number"),
        y=Axis(field="rate", title="samples/s", quantity="rate"),
        rows=[row for row in rows if row["series"] in kept],
        caption=f"Vertical lines are 95 % confidence intervals.{left_out}",
    )
    return (chart,)


def draw_trainings(table: Table, arms: Mapping[str, Arm]) -> tuple[Chart, ...]:
    """The step of every training, and the part of it that waits."""
    keys = list_keys(arms.values())
    columns = {"step_seconds": "whole step", "input_seconds": "waiting for the batch"}
    return keep_charts(
        draw_columns(table, columns, title="A training step by format", keys=keys, axis_title="time"),
        draw_columns(
            table,
            ["step_ratio"],
            title="Step over that from memory",
            keys=keys,
            reference=1.0,
            from_zero=False,
            caption=f"{INTERVALS} Right of the dashed line reading costs time.",
        ),
    )


def _list_rows(every: Sequence[FetchSeries], read: Callable[[FetchSeries], Estimate | None]) -> list[Row]:
    rows: list[Row] = []
    for series in every:
        value: Value | Estimate = read(series)
        rows.append(
            {
                "name": _name_set(series),
                "series": "in memory" if series.reading.format == MEMORY else MODES[series.reading.mode],
                "seconds": value,
                "status": say_status(series) if value is None else "",
                "reason": series.failure.reason if series.failure and value is None else "",
                "key": _name_set(series),
            }
        )
    return rows


def _name_set(series: FetchSeries) -> str:
    """The format, and the number of ranks where that is varied: the label without the way to read."""
    words = series.label.split(" ")
    return " ".join(word for word in words if word not in MODES) or series.label


def _list_failures(every: Sequence[FetchSeries]) -> str:
    failed = [f"{series.label} ({say_status(series)})" for series in every if series.main is None]
    return f" Without a number: {', '.join(failed)}." if failed else ""
