"""The figures of `batch-size` and `max-batch`: throughput, step and memory against the batch, and the search."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.analysis.batch_size import SATURATED_SHARE, SaturationFit
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_median
from scalelab.records.trial import Status, TrialResult
from scalelab.report.charts.batch import (
    describe_failures,
    list_curve_batches,
    make_batch_axis,
    plot_against_batch,
    plot_search,
)
from scalelab.report.charts.plot import Axis, Row
from scalelab.report.document import Chart
from scalelab.report.findings import Value
from scalelab.studies.max_batch.answer import BatchSearch
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.sweep import describe_status, keep_charts
from scalelab.studies.shared.work import count_tokens, measure_rate
from scalelab.units import format_bytes, format_quantity, format_share

MEASURED = "measured"
FLAT = 0.7
"""The smallest over the largest from which on an axis from zero would hide how memory grows."""
INTERVALS = "Vertical lines are 95 % confidence intervals, small dots the medians of single launches."
ChartRow = dict[str, Value | Estimate]


def list_failures(arms: Sequence[Arm]) -> list[ChartRow]:
    """Batches that failed, in some launches or in all."""
    return [describe_failure(arm) for arm in arms if not arm.is_measured or arm.failure is not None]


def describe_failure(arm: Arm) -> ChartRow:
    status, failure = describe_status(arm), arm.failure
    if arm.is_measured:
        num_failed = len(arm.results) - len(arm.completed)
        status = f"{status} in {num_failed} of {len(arm.results)} launches"
    reason = failure.reason if failure else ""
    return {"batch": arm.trial.batch_per_rank, "key": arm.label, "status": status, "reason": reason}


def draw_throughput(arms: Sequence[Arm], fit: SaturationFit | None, unit: str) -> Chart | None:
    """Samples or tokens per second against the batch, with the fit and the batch that saturates it."""
    measured, failed = [arm for arm in arms if arm.is_measured], list_failures(arms)
    rows: list[Row] = [_describe(arm, "rate", measure_rate(arm)) for arm in measured]
    raw: list[Row] = [
        _describe(arm, "rate", count_tokens(arm) / estimate_median([steps]).value)
        for arm in measured
        for steps in arm.clean
        if len(steps)
    ]
    curve: list[Row] = []
    knees, beyond = _find_knee(measured, fit)
    if fit is not None:
        tokens = count_tokens(measured[0]) / measured[0].trial.batch_per_rank
        curve = [
            {"batch": batch, "rate": tokens * batch / seconds, "series": "batch / (t₀ + c · batch)"}
            for batch in list_curve_batches(_list_batches(measured))
            if (seconds := fit.predict_seconds(batch)) > 0
        ]
    return plot_against_batch(
        title="Throughput against the batch",
        x=make_batch_axis(_list_batches(arms)),
        y=Axis(field="rate", title=f"{unit}/s", quantity="rate"),
        rows=rows,
        raw=raw,
        curve=curve,
        failed=failed,
        knees=knees,
        caption=f"{INTERVALS}{beyond}{describe_failures(failed)}",
    )


def _find_knee(measured: Sequence[Arm], fit: SaturationFit | None) -> tuple[list[Row], str]:
    """The batch that saturates the throughput: as a line, or in words where it lies beyond the figure."""
    enough = fit.saturated_batch if fit is not None else None
    if enough is None:
        return [], ""
    share = format_share(SATURATED_SHARE)
    least, last = measured[0].trial.batch_per_rank, measured[-1].trial.batch_per_rank
    if least <= enough.value <= last:
        return [{"batch": enough, "label": f"{share} of the most"}], ""
    where = format_quantity("number", enough)
    side = "beyond" if enough.value > last else "below"
    return [], f" By the fit, {share} of the most that any batch could give is at batch {where}, {side} what is drawn."


def draw_steps(arms: Sequence[Arm], fit: SaturationFit) -> Chart | None:
    """The step against the batch on straight axes, with the line."""
    measured, failed = [arm for arm in arms if arm.is_measured], list_failures(arms)
    rows: list[Row] = [_describe(arm, "step_seconds", arm.step) for arm in measured]
    raw: list[Row] = [
        _describe(arm, "step_seconds", estimate_median([steps]).value)
        for arm in measured
        for steps in arm.clean
        if len(steps)
    ]
    ends = (0, max(_list_batches(measured)))
    curve: list[Row] = [
        {"batch": batch, "step_seconds": fit.predict_seconds(batch), "series": "t₀ + c · batch"} for batch in ends
    ]
    return plot_against_batch(
        title="Step against the batch",
        x=make_batch_axis(_list_batches(arms), is_log=False),
        y=Axis(field="step_seconds", title="step", quantity="seconds"),
        is_joined=False,
        rows=rows,
        raw=raw,
        curve=curve,
        failed=failed,
        caption=f"{INTERVALS} The line meets the axis at t₀, what a step costs whatever the batch."
        f"{describe_failures(failed)}",
    )


def draw_memory(arms: Sequence[Arm]) -> Chart | None:
    """The peak against the batch, the line from the smallest to the largest, and the limit where there is one."""
    measured, failed = [arm for arm in arms if arm.is_measured], list_failures(arms)
    limits = [rank.limit_bytes for arm in arms for result in arm.results for rank in result.ranks if rank.limit_bytes]
    told = [arm.trial.memory_limit_bytes for arm in arms if arm.trial.memory_limit_bytes]
    limit = min(limits or told, default=None)
    rows: list[Row] = [
        _describe(arm, "memory_bytes", arm.peak_memory_bytes) for arm in measured if arm.peak_memory_bytes
    ]
    counted: list[Row] = []
    if limit is not None:
        counted = [
            _describe(arm, "memory_bytes", found, "counted by the limit")
            for arm in measured
            if (found := _find_limited(arm)) is not None
        ]
    sizes = [arm.peak_memory_bytes for arm in measured if arm.peak_memory_bytes]
    is_flat = limit is None and bool(sizes) and min(sizes) > FLAT * max(sizes)
    return plot_against_batch(
        title="Memory against the batch",
        x=make_batch_axis(_list_batches(arms), is_log=False),
        y=Axis(field="memory_bytes", title="peak memory", quantity="bytes", from_zero=not is_flat),
        is_joined=False,
        rows=[*(row | {"series": "peak memory"} for row in map(dict, rows)), *counted],
        curve=_draw_slope(counted or rows),
        levels=[{"memory_bytes": limit, "label": f"limit {format_bytes(limit)}"}] if limit is not None else [],
        failed=failed,
        caption="The highest of any rank in any launch, so without intervals; the line joins the smallest and the"
        f" largest batch.{_explain_axis(limit, is_flat)}{describe_failures(failed)}",
    )


def _explain_axis(limit: int | None, is_flat: bool) -> str:
    if limit is None:
        return " The axis does not begin at zero." if is_flat else ""
    return " A limit counts what a rank allocates beyond torch itself, which is less than what its process has."


def _draw_slope(rows: Sequence[Row]) -> list[Row]:
    if len(rows) < 2:
        return []
    return [
        {"batch": row["batch"], "memory_bytes": row["memory_bytes"], "series": "straight line"}
        for row in (rows[0], rows[-1])
    ]


def _find_limited(arm: Arm) -> int | None:
    found = [rank.limited_bytes for result in arm.completed for rank in result.ranks if rank.limited_bytes is not None]
    return max(found, default=None)


def _describe(arm: Arm, field: str, value: Value | Estimate, series: str = MEASURED) -> ChartRow:
    return {"batch": arm.trial.batch_per_rank, field: value, "series": series, "key": arm.label}


def _list_batches(arms: Sequence[Arm]) -> list[int]:
    return [arm.trial.batch_per_rank for arm in arms]


def draw_search(search: BatchSearch) -> tuple[Chart, ...]:
    """Every probe by its memory, and one after the other."""
    rows = [_describe_probe(search, number, result) for number, result in enumerate(search.results)]
    line, limit = search.line, search.limit_bytes
    known = [row for row in rows if row["peak_bytes"] is not None]
    predicted: list[ChartRow] = [
        row | {"peak_bytes": row["predicted_bytes"], "series": "predicted before"}
        for row in rows
        if row["predicted_bytes"] is not None
    ]
    failed = [row for row in rows if row["peak_bytes"] is None]
    batches = [int(str(row["batch"])) for row in rows]
    curve: list[Row] = []
    if line is not None and batches:
        curve = [
            {"batch": batch, "peak_bytes": line.predict_bytes(batch), "series": "line through the nearest two"}
            for batch in (0, max(batches))
        ]
    memory = plot_against_batch(
        title="Memory of every probe",
        x=make_batch_axis(batches, is_log=False),
        y=Axis(field="peak_bytes", title="peak", quantity="bytes"),
        is_joined=False,
        rows=sorted(known, key=lambda row: int(str(row["batch"]))),
        raw=predicted,
        curve=curve,
        levels=[{"peak_bytes": limit, "label": f"limit {format_bytes(limit)}"}] if limit is not None else [],
        failed=failed,
        extra={"number": "probe"},
        caption="What a limit counts, of the rank that took most; faint dots are what the line before a probe said of"
        f" it.{describe_failures(failed)}",
    )
    return keep_charts(memory, plot_search(rows, largest=search.largest))


def _describe_probe(search: BatchSearch, number: int, result: TrialResult) -> ChartRow:
    is_probe = number < len(search.probes)
    fits = result.status is Status.COMPLETED
    return {
        "batch": result.trial.batch_per_rank,
        "number": number + 1,
        "series": "ran" if fits else "did not fit" if is_probe else "ended the search",
        "key": result.trial.label or result.trial.configuration,
        "status": "ran" if fits else result.status.words,
        "reason": result.reason,
        "ended": f"{result.status.words}: {result.reason}" if result.reason else "ran" if fits else result.status.words,
        "peak_bytes": search.probes[number].peak_bytes if is_probe else None,
        "predicted_bytes": search.predict(number) if is_probe else None,
    }
