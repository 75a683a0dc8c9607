"""Batch size: throughput and memory as the batch grows, up to the memory limit.

Every batch runs in fresh processes, so the peak memory of a row is its own and not that of a larger row before it.
Batches run in ascending order, and once one is out of memory no larger one is tried.

A step is fitted as t₀ + c · batch (`analysis/batch_limits.py`): throughput tends to 1/c as the batch grows. Where it
has most of that, a larger batch stops paying.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from scalelab.analysis.batch_limits import SATURATED_SHARE, SaturationFit, fit_saturation
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_ratio
from scalelab.checks import check_at_least
from scalelab.errors import UsageError
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.charts.column_charts import INTERVALS, draw_columns, draw_lines, keep_charts
from scalelab.report.charts.plot import Axis, Row, plot_lines
from scalelab.report.document import Chart, Section, Table
from scalelab.report.findings import DETAIL, MAIN, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import (
    INTERVAL_NOTE,
    PAIRED_NOTE,
    Field,
    bytes_column,
    count_column,
    make_table,
    rate_column,
    ratio_column,
    seconds_column,
    share_column,
)
from scalelab.studies.shared.arms import Arm, describe_failures, describe_status, join_words
from scalelab.studies.shared.study import Configuration, Sampling
from scalelab.studies.shared.sweep import PEAK_CAPTION, Sweep, SweepStudy, memory_column, step_column
from scalelab.studies.shared.work import count_tokens, measure_rate, name_samples
from scalelab.units import format_bytes, format_known, format_quantity, format_share, is_known

POOR_FIT = 0.1
"""A root mean square residual above which a straight line does not describe the steps."""
LOG_FROM = 8
"""The largest batch over the smallest above which the axis of batches is logarithmic."""
NUM_CURVE_POINTS = 48

HIGHEST_THROUGHPUT = FindingKind(
    "highest-throughput", "The batch with the highest throughput", MAIN, ("batch", "per_second")
)
MEMORY_LIMIT = FindingKind(
    "memory-limit", "The largest batch that ran and the smallest that was out of memory", REASON, ("largest", "failed")
)
STEP_COST = FindingKind(
    "step-cost", "Fixed cost of a step and cost per sample", REASON, ("fixed_seconds", "sample_seconds")
)
SATURATION = FindingKind(
    "saturation", "The batch that reaches most of the throughput", REASON, ("half_batch", "saturated_batch", "reached")
)
MEMORY_GROWTH = FindingKind("memory-growth", "Memory per sample, between the extremes", DETAIL, ("bytes_per_sample",))
POOR_LINE = CautionKind("poor-fit", "A straight line does not describe the step times", "note", ("residual",))


@dataclass(frozen=True, kw_only=True)
class BatchSize(SweepStudy):
    """Increase the batch until memory runs out: throughput, memory and a model of both."""

    takes_script: ClassVar[bool] = True

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Samples per step on each rank, ascending."""
    sampling: Sampling = field(default_factory=lambda: Sampling(comm_free_steps=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_batches(self.batches)

    @property
    def reference_name(self) -> str:
        return f"batch-{self.batches[0]}"

    def list_rows(self) -> Iterator[Configuration]:
        self.job.check_sets_batch(self.name)
        return (self.configure(f"batch-{batch}", batch, label=f"batch {batch}") for batch in self.batches)

    def list_settings(self) -> Iterable[str]:
        yield self.job.dtype

    def refuse(self, trial: Trial, results: Sequence[TrialResult]) -> str | None:
        """A batch larger than one that was out of memory would be too."""
        full = [r.trial.batch_per_rank for r in results if r.status is Status.OUT_OF_MEMORY]
        if full and trial.batch_per_rank > min(full):
            return f"batch {min(full)} was out of memory, and {trial.batch_per_rank} is larger"
        return None

    def list_columns(self, sweep: Sweep) -> Iterable[Field[Arm]]:
        first = next(iter(sweep.measured), None)
        yield step_column()
        unit = name_samples(self.job, sweep.rows)
        yield rate_column(f"{unit}_per_second", f"{unit}/s", measure_rate)
        yield ratio_column("gain", f"× {first.label if first else 'first'}", lambda arm: compare_rates(arm, first))
        yield memory_column()
        if find_limit(sweep) is not None:
            yield bytes_column("limited_bytes", "counted by the limit", read_limited_bytes, is_detail=True)

    def list_notes(self, sweep: Sweep) -> Iterable[str]:
        yield f"×: throughput; {PAIRED_NOTE}; peak memory is the row's own"

    def draw_charts(self, table: Table, sweep: Sweep) -> Iterable[Chart | None]:
        yield draw_throughput(sweep, fit_sweep(sweep), name_samples(self.job, sweep.rows))
        yield draw_memory(table, find_limit(sweep))

    def list_sections(self, sweep: Sweep) -> Iterable[Section]:
        fit = fit_sweep(sweep)
        if fit is not None:
            table = make_fit_table(sweep.measured, fit)
            chart = draw_lines(
                table,
                Axis(field="batch", title="batch per rank", quantity="count"),
                {"measured_seconds": "measured"},
                title="Step time by batch",
                guides={"model_seconds": "t₀ + c · batch"},
                is_joined=False,
                axis_title="step",
            )
            yield Section(heading="The step as a straight line", tables=(table,), charts=keep_charts(chart))

    def list_findings(self, sweep: Sweep) -> Iterator[Finding]:
        measured = sweep.measured
        if not measured:
            return
        best = max(measured, key=lambda arm: measure_rate(arm).value)
        rate, unit = measure_rate(best), name_samples(self.job, sweep.rows)
        text = f"Throughput is highest at {best.label} per rank: {format_quantity('rate', rate)} {unit}/s."
        if not is_known(rate):
            text = "Which batch has the highest throughput is unknown: the intervals are wider than the numbers."
        yield HIGHEST_THROUGHPUT(best.label, text, batch=best.trial.batch_per_rank, per_second=rate)
        yield from describe_limit(sweep)
        yield from describe_saturation(measured, fit_sweep(sweep))
        yield from describe_memory(measured)

    def list_cautions(self, sweep: Sweep) -> Iterable[Caution]:
        return warn_of_fit(fit_sweep(sweep))


def check_batches(batches: Sequence[int]) -> None:
    """Reject batches that are none, fall, or repeat, naming the flag."""
    if not batches:
        raise UsageError("--batches needs at least one number, for example --batches 8 16 32")
    for batch in batches:
        check_at_least("batches", batch, 1)
    if list(batches) != sorted(set(batches)):
        raise UsageError(f"--batches {' '.join(map(str, batches))} must rise: give each once, in ascending order")


def fit_sweep(sweep: Sweep) -> SaturationFit | None:
    return fit_saturation({arm.trial.batch_per_rank: arm.clean for arm in sweep.measured})


def compare_rates(arm: Arm, first: Arm | None) -> Estimate | float | None:
    """Samples per second over those of another row, round by round."""
    if first is None or not arm.is_measured:
        return None
    if arm is first:
        return 1.0
    factor = arm.step_samples / first.step_samples
    return estimate_ratio(first.clean, arm.clean).map(lambda ratio: ratio * factor)


def find_limit(sweep: Sweep) -> int | None:
    """The memory limit of a rank, as ranks found it or as it was set."""
    found = [rank.limit_bytes for arm in sweep.rows for result in arm.results for rank in result.ranks]
    told = [arm.trial.memory_limit_bytes for arm in sweep.rows]
    return min([size for size in found if size] or [size for size in told if size], default=None)


def read_limited_bytes(arm: Arm) -> int | None:
    """The peak of what a limit counts: allocations beyond torch itself."""
    found = [rank.limited_bytes for rank in arm.reports if rank.limited_bytes is not None]
    return max(found, default=None)


def make_fit_table(measured: Sequence[Arm], fit: SaturationFit) -> Table:
    """Measured steps beside those of t₀ + c · batch."""

    def predict(arm: Arm) -> float:
        return fit.predict_seconds(arm.trial.batch_per_rank)

    def miss(arm: Arm) -> float | None:
        return arm.step.value / predict(arm) - 1 if predict(arm) else None

    def reach(arm: Arm) -> float | None:
        most = fit.most_samples_per_second
        return None if most is None else arm.trial.batch_per_rank / arm.step.value / most.value

    exact = "two batches determine the line exactly: they cannot check it"
    return make_table(
        measured,
        count_column("batch", "batch per rank", lambda arm: arm.trial.batch_per_rank),
        seconds_column("measured_seconds", "measured", lambda arm: arm.step),
        seconds_column("model_seconds", "t₀ + c · batch", predict),
        share_column("distance", "error", miss),
        share_column("share_of_most", "of the maximum", reach),
        notes=(
            INTERVAL_NOTE,
            "of the maximum: throughput over its limit for ever larger batches, 1/c",
            *((exact,) if fit.residual_ratio is None else ()),
        ),
    )


FITTED = "The curve is fitted to the step: t₀ is its fixed time, c the time per sample."
SATURATED = (
    f"{format_share(SATURATED_SHARE)} of the maximum: the batch at which the curve has that share of its limit, 1/c."
)


def make_batch_axis(batches: Sequence[int]) -> Axis:
    """Batches usually double: their axis is logarithmic where they span much."""
    is_log = bool(batches) and max(batches) / min(batches) >= LOG_FROM
    ticks = tuple(map(float, batches)) if is_log else ()
    return Axis(field="batch", title="batch per rank", quantity="count", is_log=is_log, ticks=ticks)


def draw_throughput(sweep: Sweep, fit: SaturationFit | None, unit: str) -> Chart | None:
    """Tokens or samples per second by batch, with the fit and the batch that saturates it."""
    measured = sweep.measured
    if len(measured) < 2:
        return None
    batches = [arm.trial.batch_per_rank for arm in measured]
    rows: list[Row] = [_place(arm, rate=measure_rate(arm), series="measured") for arm in measured]
    failed: list[Row] = [
        _place(arm, status=describe_status(arm), series="measured") for arm in sweep.rows if arm.failure
    ]
    guides: list[Row] = []
    is_decided = False
    if fit is not None:
        tokens = count_tokens(measured[0]) / batches[0]
        span = batches[-1] / batches[0]
        for batch in (batches[0] * span ** (number / NUM_CURVE_POINTS) for number in range(NUM_CURVE_POINTS + 1)):
            seconds = fit.predict_seconds(batch)
            if seconds > 0:
                guides.append({"batch": batch, "rate": tokens * batch / seconds, "series": "batch / (t₀ + c · batch)"})
        enough = fit.saturated_batch
        most = max(measure_rate(arm).value for arm in measured)
        if enough is not None and enough.ends[1] <= batches[-1] and batches[0] <= enough.value:
            is_decided = holds_from(enough.value, measured)
        if enough is not None and is_decided:
            label = f"{format_share(SATURATED_SHARE)} of the maximum"
            guides += [{"batch": enough.value, "rate": rate, "series": label} for rate in (0.0, most)]
    return plot_lines(
        title="Throughput by batch",
        x=make_batch_axis([arm.trial.batch_per_rank for arm in sweep.rows]),
        y=Axis(field="rate", title=f"{unit}/s", quantity="rate"),
        rows=rows,
        guides=guides,
        failed=failed,
        caption=join_words(
            INTERVALS,
            FITTED if fit else "",
            SATURATED if is_decided else "",
            *describe_failures((str(row["key"]), str(row["status"])) for row in failed),
        ),
    )


def holds_from(batch: float, measured: Sequence[Arm]) -> bool:
    """Whether the measured throughput, too, stays near its maximum from that batch on."""
    most = max(measure_rate(arm).value for arm in measured)
    larger = [measure_rate(arm).value for arm in measured if arm.trial.batch_per_rank >= batch]
    return all(rate >= SATURATED_SHARE * most for rate in larger)


def _place(arm: Arm, **fields: Estimate | str) -> Row:
    return {"batch": arm.trial.batch_per_rank, "key": arm.label, **fields}


def draw_memory(table: Table, limit: int | None) -> Chart | None:
    columns = {"peak_memory_bytes": "peak memory"}
    if limit is None:
        return draw_columns(table, columns, title="Memory by batch", axis_title="memory", caption=PEAK_CAPTION)
    return draw_columns(
        table,
        columns | {"limited_bytes": "counted by the limit"},
        title="Memory by batch",
        axis_title="memory",
        reference=limit,
        caption=f"{PEAK_CAPTION} The dashed line is the limit, {format_bytes(limit)}: it counts what a rank allocates"
        " beyond torch itself, which is less than all memory of its process.",
    )


def describe_limit(sweep: Sweep) -> Iterator[Finding]:
    failed = [arm for arm in sweep.rows if arm.failure and arm.failure.status is Status.OUT_OF_MEMORY]
    largest = max(arm.trial.batch_per_rank for arm in sweep.measured)
    for arm in failed:
        if arm.is_measured:
            text = f"{arm.label} was out of memory in some rounds and ran in others: it is at the limit."
            yield MEMORY_LIMIT(arm.label, text, largest=largest, failed=arm.trial.batch_per_rank)
    full = next((arm for arm in failed if not arm.is_measured), None)
    if full is not None:
        batch = full.trial.batch_per_rank
        text = f"Batch {batch} is out of memory, {largest} ran: `scalelab run max-batch` finds the exact limit."
        yield MEMORY_LIMIT(full.label, text, largest=largest, failed=batch)
    elif not failed:
        text = f"No batch was out of memory; the largest that ran is {largest}."
        yield MEMORY_LIMIT("", text, largest=largest, failed=None, weight=DETAIL)


def describe_saturation(measured: Sequence[Arm], fit: SaturationFit | None) -> Iterator[Finding]:
    """What a step costs whatever the batch, and where a larger one stops paying."""
    if fit is None:
        return
    share = measured[0].trial.batch_per_rank / measured[0].rank_samples  # a script may take several batches per step
    each = fit.sample_seconds.map(lambda seconds: seconds * share)
    fixed, slope = (format_known("seconds", part) for part in (fit.fixed_seconds, each))
    text = f"Fixed cost of a step: {fixed}; cost per sample: {slope}."
    yield STEP_COST("", text, fixed_seconds=fit.fixed_seconds, sample_seconds=each)
    most, enough, half = fit.most_samples_per_second, fit.saturated_batch, fit.half_batch
    if most is None or enough is None or half is None:
        yield SATURATION("", "The cost per sample is too small to measure: throughput grows with every batch here.")
        return
    if not is_known(enough):
        text = "Where throughput saturates is unknown: the interval of the fit is wider than its number."
        yield SATURATION("", text, half_batch=half, saturated_batch=enough)
        return
    last = measured[-1].trial.batch_per_rank
    reached = min(last / measured[-1].step.value / most.value, 1.0)
    beyond = "" if enough.value <= last else " (an extrapolation beyond the batches measured)"
    ranks = measured[-1].trial.num_ranks
    each_rank = f" per rank ({format_quantity('number', ranks * half.value)} global)" if ranks > 1 else ""
    of_rank = " per rank" if ranks > 1 else ""
    yield SATURATION(
        "",
        f"Throughput reaches half its fitted maximum at batch {format_quantity('number', half)}{each_rank} and"
        f" {format_share(SATURATED_SHARE)} at {format_quantity('number', enough)}{beyond}; batch {last}{of_rank}"
        f" reached {format_share(reached)} of it as measured.",
        half_batch=half,
        saturated_batch=enough,
        reached=reached,
    )


def describe_memory(measured: Sequence[Arm]) -> Iterator[Finding]:
    """The slope of memory between the smallest and the largest batch that ran."""
    known = [(arm.trial.batch_per_rank, peak) for arm in measured if (peak := arm.peak_memory_bytes)]
    if len(known) < 2:
        return
    (small, low), (large, high) = known[0], known[-1]
    slope = (high - low) / (large - small)
    text = (
        f"Peak memory grows from {format_bytes(low)} at batch {small} to {format_bytes(high)} at batch {large},"
        f" {format_bytes(slope)} per sample on average."
    )
    yield MEMORY_GROWTH("", text, bytes_per_sample=slope)


def warn_of_fit(fit: SaturationFit | None) -> Iterator[Caution]:
    if fit is not None and fit.residual_ratio is not None and fit.residual_ratio > POOR_FIT:
        yield POOR_LINE(
            "",
            f"a straight line misses the step times by {format_share(fit.residual_ratio)} (root mean square): fixed and"
            " per-sample cost are averages over a curve",
            "look at the column error, and give --batches of one region only",
            residual=fit.residual_ratio,
        )
