"""The tables of the study of memory.

The findings and the warnings of the study of memory, in words.

The figures of `memory`: categories, forecast above measured, and what a device would hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scalelab.analysis.memory import CATEGORIES
from scalelab.records.observations import MemoryReport
from scalelab.records.trial import Status
from scalelab.report.charts.memory import SIDES, plot_categories
from scalelab.report.charts.plot import Row
from scalelab.report.document import Cell, Chart, Column, Table, make_cell, make_row
from scalelab.report.findings import Caution
from scalelab.studies.memory.answer import NO_FORECAST, MemoryRow, find_failures
from scalelab.studies.shared.sweep import draw_columns, keep_charts
from scalelab.units import format_bytes, format_share

FORECAST_MARK = "°"
ERROR_DIGITS = 4
"""A hundredth of a percent: more is of no use to anybody."""


def make_peak_table(rows: Sequence[MemoryRow]) -> Table:
    """Forecast against measurement."""
    return Table(
        columns=(
            Column(key="run", header="run", align="left"),
            Column(key="forecast_bytes", header="forecast", quantity="bytes"),
            Column(key="peak_bytes", header="peak", quantity="bytes"),
            Column(key="forecast_error", header="error", quantity="share"),
            Column(key="peak_phase", header="peak in", align="left"),
        ),
        rows=tuple(
            make_row(
                row.label,
                row.forecast.peak_bytes if row.forecast else None,
                row.measured.peak_bytes if row.measured else row.status,
                None if row.error is None else round(row.error, ERROR_DIGITS),
                (row.report.peak_phase or None) if row.report else None,
            )
            for row in rows
        ),
        notes=("bytes of one rank, of the one that takes the most",),
    )


def make_reading_table(rows: Sequence[MemoryRow]) -> Table:
    """What is often read instead of the peak."""
    known = [(row, row.report) for row in rows if row.report is not None]
    columns = [
        Column(key="run", header="run", align="left"),
        Column(key="peak_bytes", header="peak", quantity="bytes"),
        Column(key="current_bytes", header="after step", quantity="bytes"),
        Column(key="states_bytes", header="states only", quantity="bytes"),
        Column(key="process_bytes", header="process", quantity="bytes"),
    ]
    has_reserved = any(report.reserved_bytes is not None for _, report in known)
    if has_reserved:
        columns.append(Column(key="reserved_bytes", header="reserved", quantity="bytes"))
    cells = []
    for row, report in known:
        reserved = [report.reserved_bytes] if has_reserved else []
        cells.append(
            make_row(
                _name_row(row), report.peak_bytes, report.current_bytes, row.states_bytes, row.process_bytes, *reserved
            )
        )
    return Table(columns=tuple(columns), rows=tuple(cells), notes=_explain_mark(known))


def make_category_table(rows: Sequence[MemoryRow]) -> Table:
    """What was alive at the peak; categories that nobody has are left out."""
    known = [(row, row.report) for row in rows if row.report is not None]
    present = [name for name in CATEGORIES if any(report.by_category.get(name) for _, report in known)]
    columns = [Column(key=f"{name}_bytes", header=name, quantity="bytes") for name in present]
    return Table(
        columns=(Column(key="run", header="run", align="left"), *columns),
        rows=tuple(
            make_row(_name_row(row), *(report.by_category.get(name, 0) for name in present)) for row, report in known
        ),
        notes=_explain_mark(known),
    )


def _name_row(row: MemoryRow) -> Cell:
    return make_cell(row.label, mark="" if row.measured else FORECAST_MARK)


def _explain_mark(known: Sequence[tuple[MemoryRow, MemoryReport]]) -> tuple[str, ...]:
    return (f"{FORECAST_MARK} forecast: it was not measured",) if any(not row.measured for row, _ in known) else ()


def make_fit_table(rows: Sequence[MemoryRow], device_bytes: int) -> Table:
    """Whether a device of this size would hold each configuration."""
    cells = []
    for row in rows:
        peak = row.forecast.peak_bytes if row.forecast else None
        cells.append(
            make_row(
                row.label,
                peak,
                None if peak is None else peak / device_bytes,
                None if peak is None else device_bytes - peak,
                None if peak is None else ("yes" if peak <= device_bytes else "no"),
            )
        )
    return Table(
        columns=(
            Column(key="run", header="run", align="left"),
            Column(key="forecast_bytes", header="forecast", quantity="bytes"),
            Column(key="used_share", header="of the device", quantity="share"),
            Column(key="margin_bytes", header="margin", quantity="bytes"),
            Column(key="fits", header="fits", align="left"),
        ),
        rows=tuple(cells),
        notes=(f"a device of {format_bytes(device_bytes)}, by forecast",),
    )


MOST_ERROR = 0.05
"""A forecast that is further off has something in it that fake tensors do not show."""
LEAST_ERROR = 0.0001
"""Below this a forecast is called exact enough to bound it."""
MOST_NAMED = 3
"""Categories that the first sentence names."""


def summarise_memory(rows: Sequence[MemoryRow], device_bytes: int | None) -> tuple[str, ...]:
    """The main finding first: the peak, what it is made of, how good the forecast is, what is often read instead."""
    known = [row for row in rows if row.report is not None]
    if not known:
        return ("Nothing is known of the memory: no trial completed.",)
    main = max(
        (row for row in known if row.trial.strategy == known[0].trial.strategy),
        key=lambda row: (row.measured is not None, row.batch),
    )
    return (
        *_answer_fit(rows, device_bytes),
        *_describe_peak(main),
        *_judge_forecast(rows),
        *_compare_strategies(main, known),
        *_describe_growth(main, known),
        *_describe_process(main),
    )


def _describe_peak(row: MemoryRow) -> Iterator[str]:
    report = row.report
    assert report is not None
    peak = report.peak_bytes
    largest = sorted(report.by_category.items(), key=lambda item: -item[1])[:MOST_NAMED]
    made = ", ".join(f"{format_share(size / peak)} {name}" for name, size in largest)
    how = "peaks at" if row.measured else "would peak, by forecast, at"
    where = f" in {report.peak_phase}" if report.peak_phase else ""
    yield f"{row.label}, {how} {format_bytes(peak)} per rank{where}: {made}."
    states = row.states_bytes
    if states:
        kept = report.by_category.get("activations", 0) + report.by_category.get("output", 0)
        yield (
            f"Parameters, gradients and optimizer alone are {format_bytes(states)}, {format_share(states / peak)} of"
            f" that peak; activations and the output are {format_share(kept / peak)} of it."
        )
    if report.current_bytes is not None:
        yield (
            f"After the step {format_bytes(report.current_bytes)} are still allocated,"
            f" {format_share(report.current_bytes / peak)} of the peak: what is read after zero_grad is no peak."
        )


def _judge_forecast(rows: Sequence[MemoryRow]) -> Iterator[str]:
    errors = [(abs(row.error), row) for row in rows if row.error is not None]
    if errors:
        worst, row = max(errors, key=lambda pair: pair[0])
        yield (
            f"The forecast, for which nothing was allocated, is off by {_bound(worst)} over {len(errors)} measured"
            f" row{'s'[: len(errors) > 1]} ({row.label})."
        )


def _bound(error: float) -> str:
    return f"at most {format_share(error)}" if error >= LEAST_ERROR else f"less than {format_share(LEAST_ERROR)}"


def _compare_strategies(main: MemoryRow, known: Sequence[MemoryRow]) -> Iterator[str]:
    """Every other strategy with the same batch, measured against measured or forecast against forecast."""
    for row in known:
        if row.batch != main.batch or row.trial.strategy == main.trial.strategy:
            continue
        pair = _match(main, row)
        if pair is None:
            continue
        base, other = pair
        change = other.peak_bytes - base.peak_bytes
        word = "more" if change >= 0 else "less"
        exchange = other.by_category.get("buckets", 0)
        yield (
            f"{row.label}, takes {format_bytes(abs(change))} {word} per rank than {main.label}"
            f" ({format_share(abs(change) / base.peak_bytes)}); {format_bytes(exchange)} of its peak are for the"
            " exchange."
        )


def _match(first: MemoryRow, second: MemoryRow) -> tuple[MemoryReport, MemoryReport] | None:
    for pair in ((first.measured, second.measured), (first.forecast, second.forecast)):
        if pair[0] is not None and pair[1] is not None:
            return pair[0], pair[1]
    return None


def _describe_growth(main: MemoryRow, known: Sequence[MemoryRow]) -> Iterator[str]:
    """What another sample costs: the difference of the smallest and the largest batch."""
    alike = [row for row in known if row.trial.strategy == main.trial.strategy]
    least = min(alike, key=lambda row: row.batch)
    pair = _match(least, main)
    if pair is not None and main.batch > least.batch:
        slope = (pair[1].peak_bytes - pair[0].peak_bytes) / (main.batch - least.batch)
        yield (
            f"From batch {least.batch} to {main.batch} the peak grows by {format_bytes(slope)} for every further sample"
            " of a rank."
        )


def _describe_process(row: MemoryRow) -> Iterator[str]:
    rank, process = row.rank, row.process_bytes
    if rank is None or process is None or rank.memory is None or row.trial.device != "cpu":
        return
    start = rank.start_memory_bytes
    before = f", {format_bytes(start)} of it before the model was built (Python and torch)" if start else ""
    yield (
        f"The process took {format_bytes(process)}{before}; the data set, pages that the allocator keeps, and what"
        " libraries take for themselves are in that too."
    )


def _answer_fit(rows: Sequence[MemoryRow], device_bytes: int | None) -> Iterator[str]:
    """For every strategy the largest of the batches that fits."""
    if device_bytes is None:
        return
    for strategy in dict.fromkeys(row.trial.strategy for row in rows):
        found = [(row.batch, row.forecast) for row in rows if row.trial.strategy == strategy]
        sizes = {batch: report.peak_bytes for batch, report in found if report is not None}
        if not sizes:
            continue
        name = next(row for row in rows if row.trial.strategy == strategy).trial
        who = strategy if strategy == "single" else f"{strategy} × {name.num_ranks}"
        yield _say_fit(who, sizes, device_bytes)


def _say_fit(who: str, sizes: Mapping[int, int], device_bytes: int) -> str:
    """Whether the largest batch fits; else the largest that does, and what the next one lacks."""
    device = format_bytes(device_bytes)
    fitting = [batch for batch, size in sizes.items() if size <= device_bytes]
    too_large = min((batch for batch in sizes if batch not in fitting), default=None)
    lacks = ""
    if too_large is not None:
        missing = format_bytes(sizes[too_large] - device_bytes)
        lacks = f"batch {too_large} needs {format_bytes(sizes[too_large])}, {missing} too much"
    if not fitting:
        return f"{who} does not fit into {device}: {lacks}, by forecast."
    margin = device_bytes - sizes[max(fitting)]
    left = f"{format_bytes(margin)} ({format_share(margin / device_bytes)}) would be left"
    if too_large is None:
        return f"{who} fits into {device} with every batch asked for: with {max(fitting)} per rank {left}, by forecast."
    return f"{who} fits into {device} with batch {max(fitting)} per rank, where {left}; {lacks}, by forecast."


def find_memory_cautions(
    rows: Sequence[MemoryRow], device_bytes: int | None, missing: Sequence[str]
) -> tuple[Caution, ...]:
    """What failed, what the forecast cannot know, and what was not measured."""
    return (*_name_failures(rows), *_name_errors(rows), *_name_missing(missing), *_name_limits(rows, device_bytes))


def _name_failures(rows: Sequence[MemoryRow]) -> Iterator[Caution]:
    failures = find_failures(rows)
    for reason in dict.fromkeys(result.reason for result in failures if result.reason.startswith(NO_FORECAST)):
        yield Caution(message=reason, next_step="rely on what was measured")
    for result in failures:
        trial, status = result.trial, result.status
        if result.reason.startswith(NO_FORECAST):
            continue
        what = "the forecast of " if trial.is_forecast else ""
        logs = f"{status.advice}; its logs are in trials/{trial.name}"
        yield Caution(
            message=f"{what}{trial.label or trial.configuration} {status.words}: {result.reason}",
            next_step="measure it on a larger machine; the forecast stands" if status is Status.NOT_RUN else logs,
        )


def _name_errors(rows: Sequence[MemoryRow]) -> Iterator[Caution]:
    far = [row for row in rows if row.error is not None and abs(row.error) > MOST_ERROR]
    if far:
        worst = max(far, key=lambda row: abs(row.error or 0.0))
        yield Caution(
            message=f"the forecast of {worst.label} is off by {format_share(worst.error)}: kernels take memory while"
            " they run that fake tensors do not show, convolutions above all",
            next_step="trust the measured peak, and leave such a margin where only the forecast is known",
        )


def _name_missing(missing: Sequence[str]) -> Iterator[Caution]:
    if missing:
        yield Caution(
            message=f"not measured, for want of GPUs: {', '.join(missing)}",
            next_step="measure it on a machine with as many; the forecast stands",
        )


def _name_limits(rows: Sequence[MemoryRow], device_bytes: int | None) -> Iterator[Caution]:
    if device_bytes is None:
        return
    kernels = ", and it is of a CPU's operators, which keep more than a GPU's fused ones" if _is_on_cpu(rows) else ""
    yield Caution(
        message="the forecast has no fragmentation, no CUDA context (about half a gigabyte) and no workspace of"
        f" libraries in it{kernels}",
        next_step="leave a tenth of the device free, and confirm with max-batch on the device itself",
    )


def _is_on_cpu(rows: Sequence[MemoryRow]) -> bool:
    return any(row.trial.device == "cpu" for row in rows)


PIXELS = 1 / 2000
"""A category below this share of the largest peak would be no pixel wide."""


def draw_categories(rows: Sequence[MemoryRow]) -> tuple[Chart, ...]:
    """Every configuration with its forecast and its measurement, in pieces."""
    pieces: list[Row] = []
    totals: list[Row] = []
    peaks = [report.peak_bytes for row in rows for report in (row.forecast, row.measured) if report is not None]
    least = max(peaks, default=0) * PIXELS
    for row in rows:
        for side, report in zip(SIDES, (row.forecast, row.measured), strict=True):
            place = {"name": row.label, "side": side, "key": row.label}
            status = "" if report is not None else row.status if side == "measured" else "there is none"
            totals.append(place | {"memory_bytes": report.peak_bytes if report else None, "status": status})
            sizes = report.by_category if report is not None else {}
            pieces += [
                place | {"series": name, "memory_bytes": sizes[name]}
                for name in CATEGORIES
                if sizes.get(name, 0) > least
            ]
    chart = plot_categories(
        title="Memory by category",
        rows=sorted(pieces, key=lambda piece: CATEGORIES.index(str(piece["series"]))),
        totals=totals,
        caption="Bytes of one rank at the highest point of a step, of the rank that takes the most, the forecast above"
        " the measurement; pieces are in the order of the legend, those too small to be seen are in the table. The same"
        " in every launch, so without intervals.",
    )
    return keep_charts(chart)


def draw_fit(table: Table, device_bytes: int) -> tuple[Chart, ...]:
    """Every forecast beside the device."""
    chart = draw_columns(
        table,
        ["forecast_bytes"],
        title=f"Beside a device of {format_bytes(device_bytes)}",
        reference=float(device_bytes),
        caption="Forecasts; the dashed line is the memory of the device.",
    )
    return keep_charts(chart)
