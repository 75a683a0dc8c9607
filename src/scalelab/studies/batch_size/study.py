"""Batch size: throughput and memory against the batch, up to the limit of memory.

Every batch runs in fresh processes, so that the memory of a row is its own and no larger row before it has left its
peak. The batches come in ascending order, and once one is out of memory no larger one is tried: it would be too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from scalelab.analysis.batch_size import SATURATED_SHARE, SaturationFit, fit_saturation
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_ratio
from scalelab.checks import check_at_least
from scalelab.errors import UsageError
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Column, Document, Section, Table, make_row
from scalelab.report.findings import Caution, as_findings
from scalelab.studies.batch_size.charts import draw_memory, draw_steps, draw_throughput
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Configuration, Sampling
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import (
    CONTROL,
    INTERVAL_NOTE,
    MaybeStrategy,
    SweepColumn,
    choose_strategy,
    describe_measurement,
    describe_placement,
    find_sweep_cautions,
    keep_charts,
    make_sweep_table,
    memory_column,
    plan_sweep,
    step_column,
)
from scalelab.studies.shared.work import measure_rate
from scalelab.units import format_bytes, format_quantity, format_share

POOR_FIT = 0.1
"""A root mean square residual above which a straight line is not called a description."""


@dataclass(frozen=True, kw_only=True)
class BatchSize(Study):
    """The batch grows until memory ends; throughput, memory and a model of both."""

    name: ClassVar[str] = "batch-size"
    title: ClassVar[str] = "Batch size"
    question: ClassVar[str] = "How do throughput and memory grow with the batch, and where do they end?"

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Samples per step on each rank, ascending."""
    ranks: int = 1
    """Ranks of every row."""
    strategy: MaybeStrategy = None
    """How the training is spread. None: single on one rank, ddp on more."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(comm_free_steps=0))

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 1)
        check_batches(self.batches)

    def plan(self) -> list[Trial]:
        return plan_sweep(self.job, self.sampling, [self._configure(batch) for batch in self.batches])

    def _configure(self, batch: int) -> Configuration:
        return Configuration(
            name=f"batch-{batch}",
            label=f"batch {batch}",
            strategy=choose_strategy(self.strategy, self.ranks),
            num_ranks=self.ranks,
            global_batch=batch * self.ranks,
        )

    def refuse(self, trial: Trial, results: Sequence[TrialResult]) -> str | None:
        """A batch larger than one that was out of memory would be too."""
        full = [r.trial.batch_per_rank for r in results if r.status is Status.OUT_OF_MEMORY]
        if full and trial.batch_per_rank > min(full):
            return f"batch {min(full)} was out of memory, and {trial.batch_per_rank} is larger"
        return None

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        rows = [arm for arm in arms.values() if arm.configuration != CONTROL]
        first = next((arm for arm in rows if arm.is_measured), None)
        fit = fit_saturation({arm.trial.batch_per_rank: arm.clean for arm in rows if arm.is_measured})
        charts = keep_charts(draw_throughput(rows, fit, self._unit), draw_memory(rows))
        sections = [Section(tables=(self._make_table(arms.values(), first),), charts=charts)]
        if fit is not None:
            line = keep_charts(draw_steps(rows, fit))
            heading = "The step as a straight line"
            sections.append(Section(heading=heading, tables=(make_fit_table(rows, fit),), charts=line))
        where = describe_placement(self.strategy, self.ranks)
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(self.job, self.sampling, arms.values(), where, self.job.dtype),
            sections=tuple(sections),
            findings=as_findings(self._find_sentences(rows, fit)),
            cautions=(*find_sweep_cautions(arms, first), *warn_of_fit(fit)),
        )

    @property
    def _unit(self) -> str:
        return "tokens" if getattr(self.job.built_in, "num_tokens", None) else "samples"

    def _make_table(self, arms: Iterable[Arm], first: Arm | None) -> Table:
        columns = [
            step_column(),
            SweepColumn(
                column=Column(key=f"{self._unit}_per_second", header=f"{self._unit}/s", quantity="rate"),
                read=measure_rate,
            ),
            SweepColumn(
                column=Column(key="gain", header="× first", quantity="ratio"),
                read=lambda arm: compare_rates(arm, first),
            ),
            memory_column(),
        ]
        label = first.label if first else "the first batch"
        note = f"× first: throughput over that of {label}, round by round; peak memory is this row's own"
        return make_sweep_table(arms, columns, notes=(note,))

    def _find_sentences(self, rows: Sequence[Arm], fit: SaturationFit | None) -> Iterator[str]:
        measured = [arm for arm in rows if arm.is_measured]
        if not measured:
            return
        best = max(measured, key=lambda arm: measure_rate(arm).value)
        rate = format_quantity("rate", measure_rate(best))
        yield f"The highest throughput is {rate} {self._unit}/s, at {best.label} per rank."
        yield from describe_limit(rows)
        yield from describe_saturation(measured, fit)
        yield from describe_memory(measured)


def check_batches(batches: Sequence[int]) -> None:
    """Refuse batches that are none, fall, or repeat, naming the flag."""
    if not batches:
        raise UsageError("--batches needs at least one number, for example --batches 8 16 32")
    for batch in batches:
        check_at_least("batches", batch, 1)
    if list(batches) != sorted(set(batches)):
        raise UsageError(f"--batches {' '.join(map(str, batches))} must rise: give each once, in ascending order")


def compare_rates(arm: Arm, first: Arm | None) -> Estimate | float | None:
    """Samples per second over those of another row, round by round."""
    if first is None or not arm.is_measured:
        return None
    if arm is first:
        return 1.0
    factor = arm.trial.global_batch / first.trial.global_batch
    return estimate_ratio(first.clean, arm.clean).map(lambda ratio: ratio * factor)


def make_fit_table(rows: Sequence[Arm], fit: SaturationFit) -> Table:
    """Measured steps beside those of t₀ + c · batch."""
    columns = (
        Column(key="batch", header="batch per rank", quantity="count"),
        Column(key="measured_seconds", header="measured", quantity="seconds"),
        Column(key="model_seconds", header="t₀ + c · batch", quantity="seconds"),
        Column(key="distance", header="off by", quantity="share"),
        Column(key="share_of_most", header="of the most", quantity="share"),
    )
    made = []
    for arm in rows:
        if not arm.is_measured:
            continue
        batch = arm.trial.batch_per_rank
        model = fit.predict_seconds(batch)
        most = fit.most_samples_per_second
        share = None if most is None else batch / arm.step.value / most.value
        made.append(make_row(batch, arm.step, model, arm.step.value / model - 1 if model else None, share))
    notes = [INTERVAL_NOTE, "of the most: throughput over what it would tend to with ever larger batches, 1/c"]
    if fit.residual_ratio is None:
        notes.append("two batches determine the line exactly: it cannot be checked against them")
    return Table(columns=columns, rows=tuple(made), notes=tuple(notes))


def describe_limit(rows: Sequence[Arm]) -> Iterator[str]:
    failed = [arm for arm in rows if arm.failure and arm.failure.status is Status.OUT_OF_MEMORY]
    full = next((arm for arm in failed if not arm.is_measured), None)
    ran = [arm.trial.batch_per_rank for arm in rows if arm.is_measured]
    for arm in failed:
        if arm.is_measured:
            yield f"{arm.label} was out of memory in some rounds and ran in others: it lies at the limit."
    if full is None and not failed:
        yield f"No batch was out of memory; the largest that ran is {max(ran)}."
    if full is None:
        return
    yield (
        f"Batch {full.trial.batch_per_rank} is out of memory, {max(ran)} ran: scalelab run max-batch finds the exact"
        " limit."
    )


def describe_saturation(measured: Sequence[Arm], fit: SaturationFit | None) -> Iterator[str]:
    """What a step costs whatever the batch, and where a larger one stops paying."""
    if fit is None:
        return
    fixed, slope = (format_quantity("seconds", part) for part in (fit.fixed_seconds, fit.sample_seconds))
    yield f"A step costs {fixed} whatever the batch, and {slope} for every sample."
    most, enough, half = fit.most_samples_per_second, fit.saturated_batch, fit.half_batch
    if most is None or enough is None or half is None:
        yield "A sample costs nothing that could be measured: throughput grows with the batch as far as was measured."
        return
    last = measured[-1].trial.batch_per_rank
    reached = last / measured[-1].step.value / most.value
    beyond = "" if enough.value <= last else " (beyond the batches that were measured: an extrapolation)"
    yield (
        f"Throughput is half of what it can become at batch {format_quantity('number', half)}, and"
        f" {format_share(SATURATED_SHARE)} of it at {format_quantity('number', enough)}{beyond}; batch {last} reaches"
        f" {format_share(min(reached, 1.0))}."
    )


def describe_memory(measured: Sequence[Arm]) -> Iterator[str]:
    """The slope of memory between the smallest and the largest batch that ran."""
    known = [(arm.trial.batch_per_rank, arm.peak_memory_bytes) for arm in measured if arm.peak_memory_bytes]
    if len(known) < 2:
        return
    (small, low), (large, high) = known[0], known[-1]
    assert low is not None
    assert high is not None
    yield (
        f"Memory grows from {format_bytes(low)} at batch {small} to {format_bytes(high)} at batch {large}, by"
        f" {format_bytes((high - low) / (large - small))} a sample on average."
    )


def warn_of_fit(fit: SaturationFit | None) -> Iterator[Caution]:
    if fit is not None and fit.residual_ratio is not None and fit.residual_ratio > POOR_FIT:
        yield Caution(
            message=f"a straight line misses the steps by {format_share(fit.residual_ratio)} (root mean square): fixed"
            " and per-sample cost are averages over a curve",
            next_step="look at the column off by, and give --batches of one region only",
        )
