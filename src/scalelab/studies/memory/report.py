"""The answer of the memory study: the peak and what it consists of, forecast beside measured, and what would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from scalelab.analysis.memory import CATEGORIES
from scalelab.records.observations import MemoryReport
from scalelab.records.strategies import find_strategy
from scalelab.records.tasks import Script
from scalelab.records.trial import Status
from scalelab.report.charts.column_charts import draw_columns, draw_stacks, keep_charts
from scalelab.report.charts.plot import MOST_SERIES
from scalelab.report.document import Cell, Chart, Table, make_cell
from scalelab.report.findings import ASIDE, DETAIL, MAIN, REASON, Caution, CautionKind, Finding, FindingKind, Known
from scalelab.report.tables import bytes_column, make_table, share_column, text_column
from scalelab.studies.memory.answer import MemoryRow, find_failures
from scalelab.studies.shared.cautions import FAILED, NOT_RUN, VERBS
from scalelab.units import format_bytes, format_count, format_share

FORECAST_MARK = "°"
ERROR_DIGITS = 4
"""A forecast error is rounded to a hundredth of a percent."""
MOST_ERROR = 0.05
"""A larger forecast error has a cause that fake tensors do not show."""
LEAST_ERROR = 0.0001
"""The smallest forecast error that is given as a number."""
MOST_NAMED = 3
"""Categories that the main finding names."""

MEMORY = FindingKind(
    "memory", "Peak memory of one rank, and what it consists of", MAIN, ("peak_bytes", "phase", "is_measured")
)
STATES = FindingKind(
    "memory-states", "Parameters, gradients and optimizer states within the peak", DETAIL, ("states_bytes", "share")
)
AFTER_STEP = FindingKind("memory-after-step", "What is still allocated after a step", ASIDE, ("current_bytes", "share"))
FORECAST_ERROR = FindingKind("forecast-error", "How far the memory forecast is off", REASON, ("error", "rows"))
STRATEGIES = FindingKind(
    "memory-strategies",
    "Peak memory of a strategy against the first one",
    REASON,
    ("change_bytes", "share", "bucket_bytes"),
    free=("change_bytes", "share"),
)
GROWTH = FindingKind(
    "memory-per-sample", "What one more sample per rank adds to the peak", REASON, ("bytes_per_sample",)
)
PROCESS = FindingKind("process-memory", "Resident memory of the whole process", ASIDE, ("process_bytes", "start_bytes"))
FITS = FindingKind(
    "fits",
    "The largest batch that fits into a device, by forecast",
    MAIN,
    ("batch", "margin_bytes"),
    free=("margin_bytes",),
)
NOTHING = FindingKind("not-measured", "No trial completed", MAIN)

NO_FORECAST = CautionKind("no-forecast", "The memory of the workload cannot be forecast", "note")
FORECAST_OFF = CautionKind("forecast-off", "A forecast is off by more than 5 %", "noise", ("error",))
FRAGMENTED = CautionKind(
    "fragmented", "The caching allocator reserved far more than was allocated", "note", ("reserved_bytes", "peak_bytes")
)
MOST_RESERVED = 1.2
FEW_GPUS = CautionKind("few-gpus", "Rows need more GPUs than this machine has", "note")
FORECAST_LIMITS = CautionKind("forecast-limits", "What a memory forecast leaves out", "note")


def make_peak_table(rows: Sequence[MemoryRow]) -> Table:
    """Forecast against measurement; a script has no forecast."""
    has_forecast = not all(isinstance(row.trial.task, Script) for row in rows) or not rows
    return make_table(
        rows,
        text_column("run", "run", lambda row: row.label),
        bytes_column("forecast_bytes", "forecast", lambda row: row.forecast_bytes) if has_forecast else None,
        bytes_column("peak_bytes", "peak", lambda row: row.measured.peak_bytes if row.measured else row.status),
        share_column(
            "forecast_error", "error", lambda row: None if row.error is None else round(row.error, ERROR_DIGITS)
        )
        if has_forecast
        else None,
        text_column("peak_phase", "peak in", lambda row: (row.report.peak_phase or None) if row.report else None),
        notes=("bytes per rank, of the rank with the most",),
    )


def make_reading_table(rows: Sequence[MemoryRow]) -> Table:
    """What is often read instead of the peak."""
    known = [row for row in rows if row.report]
    has_reserved = any(row.report and row.report.reserved_bytes is not None for row in known)
    return make_table(
        known,
        text_column("run", "run", _name_row),
        bytes_column("peak_bytes", "peak", read_report(lambda report: report.peak_bytes)),
        bytes_column("current_bytes", "after step", read_report(lambda report: report.current_bytes)),
        bytes_column("states_bytes", "states only", lambda row: row.states_bytes),
        bytes_column("process_bytes", "process", lambda row: row.process_bytes),
        bytes_column("reserved_bytes", "reserved", read_report(lambda report: report.reserved_bytes))
        if has_reserved
        else None,
        notes=_explain_mark(known),
    )


def make_category_table(rows: Sequence[MemoryRow]) -> Table:
    """What was alive at the peak; categories that no row has are left out."""
    known = [row for row in rows if row.report]
    present = [name for name in CATEGORIES if any(row.report and row.report.by_category.get(name) for row in known)]
    columns = [
        bytes_column(f"{name}_bytes", name, read_report(lambda report, name=name: report.by_category.get(name, 0)))  # type: ignore[misc]
        for name in present
    ]
    return make_table(known, text_column("run", "run", _name_row), *columns, notes=_explain_mark(known))


def read_report(read: Callable[[MemoryReport], Known]) -> Callable[[MemoryRow], Known]:
    return lambda row: read(row.report) if row.report else None


def _name_row(row: MemoryRow) -> Cell:
    return make_cell(row.label, mark="" if row.measured else FORECAST_MARK)


def _explain_mark(known: Sequence[MemoryRow]) -> tuple[str, ...]:
    return () if all(row.measured for row in known) else (f"{FORECAST_MARK} forecast, not measured",)


def make_fit_table(rows: Sequence[MemoryRow], device_bytes: int) -> Table:
    """Whether a device of this size would hold each configuration."""

    def read_peak(read: Callable[[int], Known]) -> Callable[[MemoryRow], Known]:
        return lambda row: None if row.forecast_bytes is None else read(row.forecast_bytes)

    return make_table(
        rows,
        text_column("run", "run", lambda row: row.label),
        bytes_column("forecast_bytes", "forecast", lambda row: row.forecast_bytes),
        share_column("used_share", "of the device", read_peak(lambda peak: peak / device_bytes)),
        bytes_column("margin_bytes", "margin", read_peak(lambda peak: device_bytes - peak)),
        text_column("fits", "fits", read_peak(lambda peak: "yes" if peak <= device_bytes else "no")),
        notes=(f"a device of {format_bytes(device_bytes)}, by forecast",),
    )


def summarise_memory(rows: Sequence[MemoryRow], device_bytes: int | None) -> Iterator[Finding]:
    """What fits; the peak and what it consists of; the forecast; other strategies; what is often read instead."""
    known = [row for row in rows if row.report is not None]
    if not known:
        yield NOTHING("", "Memory is unknown: no trial completed.")
        return
    main = max(
        (row for row in known if row.trial.strategy == known[0].trial.strategy),
        key=lambda row: (row.measured is not None, row.batch),
    )
    if device_bytes is not None:
        yield from _answer_fit(rows, device_bytes)
    yield from _describe_peak(main)
    yield from _judge_forecast(rows)
    yield from _compare_strategies(main, known)
    yield from _describe_growth(main, known)
    yield from _describe_process(main)


def _describe_peak(row: MemoryRow) -> Iterator[Finding]:
    report = row.report
    assert report is not None
    peak, phase = report.peak_bytes, report.peak_phase
    largest = sorted(report.by_category.items(), key=lambda item: -item[1])[:MOST_NAMED]
    made = ", ".join(f"{format_share(size / peak)} {name}" for name, size in largest)
    how = "peaks at" if row.measured else "peaks by forecast at"
    yield MEMORY(
        row.label,
        f"{row.label}, {how} {format_bytes(peak)} per rank{f' in {phase}' if phase else ''}: {made}.",
        peak_bytes=peak,
        phase=phase or None,
        is_measured=row.measured is not None,
    )
    states, current = row.states_bytes, report.current_bytes
    if states:
        kept = report.by_category.get("activations", 0) + report.by_category.get("output", 0)
        absent = (
            "" if report.by_category.get("gradients") else ", not all of it at the peak, which has no gradients yet"
        )
        yield STATES(
            row.label,
            f"Parameters, gradients and optimizer states alone take {format_bytes(states)},"
            f" {format_share(states / peak)} of the peak{absent}; activations and the output take"
            f" {format_share(kept / peak)} of it.",
            states_bytes=states,
            share=states / peak,
        )
    if current is not None:
        yield AFTER_STEP(
            row.label,
            f"After the step {format_bytes(current)} is still allocated, {format_share(current / peak)} of the peak:"
            " memory read after zero_grad is not the peak.",
            current_bytes=current,
            share=current / peak,
        )


def _judge_forecast(rows: Sequence[MemoryRow]) -> Iterator[Finding]:
    errors = [(abs(row.error), row) for row in rows if row.error is not None]
    if errors:
        worst, row = max(errors, key=lambda pair: pair[0])
        bound = f"at most {format_share(worst)}" if worst >= LEAST_ERROR else f"less than {format_share(LEAST_ERROR)}"
        yield FORECAST_ERROR(
            row.label,
            f"The forecast, which allocates nothing, is off by {bound} over"
            f" {format_count(len(errors), 'measured row')} ({row.label}).",
            error=worst,
            rows=len(errors),
        )


def _compare_strategies(main: MemoryRow, known: Sequence[MemoryRow]) -> Iterator[Finding]:
    """Every other strategy with the same batch, measured against measured or forecast against forecast."""
    for row in known:
        pair = _match(main, row)
        if row.batch != main.batch or row.trial.strategy == main.trial.strategy or pair is None:
            continue
        base, other = pair
        change, buckets = other.peak_bytes - base.peak_bytes, other.by_category.get("buckets", 0)
        yield STRATEGIES(
            row.label,
            f"{row.label}, takes {format_bytes(abs(change))} {'more' if change >= 0 else 'less'} per rank than"
            f" {main.label} ({format_share(abs(change) / base.peak_bytes)}); communication buckets are"
            f" {format_bytes(buckets)} of its peak.",
            change_bytes=change,
            share=change / base.peak_bytes,
            bucket_bytes=buckets,
        )


def _match(first: MemoryRow, second: MemoryRow) -> tuple[MemoryReport, MemoryReport] | None:
    for one, other in ((first.measured, second.measured), (first.forecast, second.forecast)):
        if one is not None and other is not None:
            return one, other
    return None


def _describe_growth(main: MemoryRow, known: Sequence[MemoryRow]) -> Iterator[Finding]:
    """What one more sample costs: the difference of the smallest and the largest batch."""
    alike = [row for row in known if row.trial.strategy == main.trial.strategy]
    least = min(alike, key=lambda row: row.batch)
    pair = _match(least, main)
    if pair is not None and main.batch > least.batch:
        slope = (pair[1].peak_bytes - pair[0].peak_bytes) / (main.batch - least.batch)
        yield GROWTH(
            main.label,
            f"From batch {least.batch} to {main.batch} the peak grows by {format_bytes(slope)} per sample and rank.",
            bytes_per_sample=slope,
        )


def _describe_process(row: MemoryRow) -> Iterator[Finding]:
    rank, process = row.rank, row.process_bytes
    if rank is None or process is None or rank.memory is None or row.trial.device != "cpu":
        return
    start = rank.start_memory_bytes
    before = f", {format_bytes(start)} of it before the model was built (Python and torch)" if start else ""
    yield PROCESS(
        row.label,
        f"The process took {format_bytes(process)}{before}; this includes the data set, pages that the allocator keeps"
        " and memory of libraries.",
        process_bytes=process,
        start_bytes=start,
    )


def _answer_fit(rows: Sequence[MemoryRow], device_bytes: int) -> Iterator[Finding]:
    """For every strategy the largest of the batches that fits."""
    for strategy in dict.fromkeys(row.trial.strategy for row in rows):
        alike = [row for row in rows if row.trial.strategy == strategy]
        sizes = {row.batch: row.forecast_bytes for row in alike if row.forecast_bytes is not None}
        if sizes:
            who = find_strategy(strategy).name_on(alike[0].trial.num_ranks)
            weight = MAIN if strategy == rows[0].trial.strategy else REASON
            yield replace(_describe_fit(who, sizes, device_bytes), weight=weight)


def _describe_fit(who: str, sizes: Mapping[int, int], device_bytes: int) -> Finding:
    """Whether the largest batch fits; else the largest that does, and what the next one lacks."""
    device = format_bytes(device_bytes)
    fitting = [batch for batch, size in sizes.items() if size <= device_bytes]
    too_large = min((batch for batch in sizes if batch not in fitting), default=None)
    lacks = ""
    if too_large is not None:
        missing = format_bytes(sizes[too_large] - device_bytes)
        lacks = f"batch {too_large} needs {format_bytes(sizes[too_large])}, {missing} too much"
    if not fitting:
        return FITS(who, f"{who} does not fit into {device}: {lacks} (forecast).", batch=None, margin_bytes=None)
    batch = max(fitting)
    margin = device_bytes - sizes[batch]
    left = f"{format_bytes(margin)} ({format_share(margin / device_bytes)}) to spare"
    if too_large is None:
        text = f"{who} fits into {device} at every given batch: at {batch} per rank with {left} (forecast)."
    else:
        text = f"{who} fits into {device} at batch {batch} per rank with {left}; {lacks} (forecast)."
    return FITS(who, text, batch=batch, margin_bytes=margin)


def find_memory_cautions(
    rows: Sequence[MemoryRow], device_bytes: int | None, missing: Sequence[str]
) -> Iterator[Caution]:
    """What failed, what the forecast cannot know, and what was not measured."""
    yield from _name_failures(rows)
    far = [row for row in rows if row.error is not None and abs(row.error) > MOST_ERROR]
    if far:
        worst = max(far, key=lambda row: abs(row.error or 0.0))
        yield FORECAST_OFF(
            worst.label,
            f"the forecast of {worst.label} is off by {format_share(worst.error)}: kernels allocate memory that fake"
            " tensors do not show, convolutions above all",
            "trust the measured peak; where only a forecast is known, leave that margin",
            error=worst.error,
        )
    yield from _name_fragmented(rows)
    if missing:
        yield FEW_GPUS(
            ", ".join(missing),
            f"not measured, too few GPUs: {', '.join(missing)}",
            "measure on a machine with enough GPUs; the forecast holds",
        )
    if device_bytes is not None:
        is_on_cpu = any(row.trial.device == "cpu" for row in rows)
        kernels = ", and uses CPU operators, which keep more than a GPU's fused ones" if is_on_cpu else ""
        yield FORECAST_LIMITS(
            "",
            "the forecast leaves out fragmentation, the CUDA context (about 0.5 GB) and library workspaces" + kernels,
            "leave a tenth of the device free, and confirm with max-batch on the device",
        )


def _name_fragmented(rows: Sequence[MemoryRow]) -> Iterator[Caution]:
    """The row whose allocator reserved most over what was allocated."""
    known = [(row.label, row.measured) for row in rows if row.measured]
    held = [(label, one.reserved_bytes, one.peak_bytes) for label, one in known if one.reserved_bytes]
    label, reserved, peak = max(held, key=lambda one: one[1] / one[2], default=("", 0, 0))
    if reserved <= MOST_RESERVED * peak:
        return
    yield FRAGMENTED(
        label,
        f"{label}: the allocator reserved {format_bytes(reserved)} for a peak of {format_bytes(peak)}",
        "try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        reserved_bytes=reserved,
        peak_bytes=peak,
    )


def _name_failures(rows: Sequence[MemoryRow]) -> Iterator[Caution]:
    named: set[str] = set()
    for result in find_failures(rows):
        trial, status, label = result.trial, result.status, result.trial.label or result.trial.configuration
        if trial.is_forecast and status is Status.INVALID:
            if result.reason not in named:
                yield NO_FORECAST(label, result.reason, "use the measured peak")
            named.add(result.reason)
            continue
        what = "the forecast of " if trial.is_forecast else ""
        kind = NOT_RUN if status is Status.NOT_RUN else FAILED
        advice = "; ".join(filter(None, (result.advice, f"logs are in trials/{trial.name}")))
        yield kind(
            label,
            f"{what}{label} {VERBS[status]}: {result.reason}",
            "measure it on a larger machine; the forecast holds" if status is Status.NOT_RUN else advice,
            status=status.value,
        )


def draw_peaks(table: Table) -> tuple[Chart, ...]:
    """The forecast of every configuration beside its measurement."""
    names = {"forecast_bytes": "forecast", "peak_bytes": "measured"}
    columns = {column.key: names[column.key] for column in table.columns if column.key in names}
    caption = "The rank with the most. The same in every launch, so there are no intervals."
    return keep_charts(draw_columns(table, columns, title="Peak memory", axis_title="peak", caption=caption))


def draw_categories(table: Table) -> tuple[Chart, ...]:
    """What every peak consists of: the largest categories."""
    rows = [[known.value if (known := cell.estimate) else 0.0 for cell in cells] for cells in table.rows]
    sizes = {column.key: max(row[index] for row in rows) for index, column in enumerate(table.columns) if index}
    largest = sorted(sizes, key=lambda key: -sizes[key])[:MOST_SERIES]
    shown = [key for key in sizes if key in largest]
    caption = f"The {len(shown)} largest categories at the peak of a step, of the rank with the most."
    return keep_charts(draw_stacks(table, shown, title="Memory by category", axis_title="memory", caption=caption))


def draw_fit(table: Table, device_bytes: int) -> tuple[Chart, ...]:
    """Every forecast beside the device."""
    chart = draw_columns(
        table,
        ["forecast_bytes"],
        title=f"Forecast against a device of {format_bytes(device_bytes)}",
        reference=float(device_bytes),
        caption="The dashed line is the memory of the device.",
    )
    return keep_charts(chart)
