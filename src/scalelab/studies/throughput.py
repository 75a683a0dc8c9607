"""Throughput: tokens per second of the job as it is, and what that would mean for a model of another size.

The measurement is the usual one: a few steps to warm up, then some that are timed. It is repeated in fresh processes,
so that its interval knows how launches differ. Beside the median stands what a stopwatch over all timed steps gives:
where the two differ, long steps are the reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.growth import Extrapolation, extrapolate_training
from scalelab.analysis.stats import estimate_over_rounds
from scalelab.checks import check_positive
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.charts.amounts import plot_amounts
from scalelab.report.charts.plot import Axis, Row
from scalelab.report.document import Chart, Column, Document, Section, Table, make_row
from scalelab.report.findings import as_findings
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Configuration, Sampling
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import (
    INTERVAL_NOTE,
    MaybeStrategy,
    SweepColumn,
    check_placement,
    choose_strategy,
    describe_measurement,
    describe_placement,
    find_sweep_cautions,
    make_sweep_table,
    memory_column,
    plan_sweep,
    step_column,
)
from scalelab.studies.shared.work import count_parameters, measure_speed, parameters_column, read_options, speed_column
from scalelab.units import format_quantity

RUN = "throughput"


@dataclass(frozen=True, kw_only=True)
class Throughput(Study):
    """Steps, tokens and operations per second, and the time that a larger model would train at the same speed."""

    name: ClassVar[str] = "throughput"
    title: ClassVar[str] = "Throughput"
    question: ClassVar[str] = "How many tokens per second does this training do, and what would a larger model need?"

    batch_per_rank: int = 8
    """Samples per step on each rank."""
    ranks: int = 1
    """Ranks to train on."""
    strategy: MaybeStrategy = None
    """How the training is spread. None: single on one rank, ddp on more."""
    target_parameters: float = 1e12
    """Parameters of the larger model."""
    target_tokens: float = 1e13
    """Tokens that the larger model is trained on."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(
        default_factory=lambda: Sampling(steps=25, warmup=5, phase_steps=0, comm_free_steps=0, control=False)
    )

    def __post_init__(self) -> None:
        check_placement(self.ranks, self.batch_per_rank)
        check_positive("target_parameters", self.target_parameters)
        check_positive("target_tokens", self.target_tokens)

    def plan(self) -> list[Trial]:
        configuration = Configuration(
            name=RUN,
            label=self.job.label,
            strategy=choose_strategy(self.strategy, self.ranks),
            num_ranks=self.ranks,
            global_batch=self.batch_per_rank * self.ranks,
        )
        return plan_sweep(self.job, self.sampling, [configuration])

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        arm = arms.get(RUN)
        table = make_sweep_table(arms.values(), make_rate_columns(self._unit))
        sections = [Section(tables=(table,), charts=draw_launches(arm, self._unit))]
        future = self.extrapolate(arm) if arm else None
        if future is not None:
            sections.append(Section(heading="A larger model", tables=(self._make_future_table(future),)))
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(
                self.job,
                self.sampling,
                arms.values(),
                describe_placement(self.strategy, self.ranks),
                f"batch {self.batch_per_rank} per rank",
            ),
            sections=tuple(sections),
            findings=as_findings(self._find_sentences(arm, future)),
            cautions=find_sweep_cautions(arms, arm),
        )

    @property
    def _unit(self) -> str:
        options = self.job.built_in
        return "tokens" if getattr(options, "num_tokens", None) else "samples"

    def extrapolate(self, arm: Arm) -> Extrapolation | None:
        """What the larger model would need; None where nothing was measured, or there are no tokens."""
        num_parameters = count_parameters(arm)
        if not arm.is_measured or num_parameters is None or self._unit != "tokens":
            return None
        return extrapolate_training(
            measure_rate(arm),
            num_parameters,
            target_parameters=self.target_parameters,
            target_tokens=self.target_tokens,
        )

    def _make_future_table(self, future: Extrapolation) -> Table:
        columns = (
            Column(key="target_parameters", header="model parameters", quantity="rate"),
            Column(key="target_tokens", header="training tokens", quantity="rate"),
            Column(key="tokens_per_second", header="extrapolated tokens/s", quantity="number"),
            Column(key="days", header="days", quantity="number"),
            Column(key="years", header="years", quantity="number"),
        )
        row = make_row(self.target_parameters, self.target_tokens, future.tokens_per_second, future.days, future.years)
        return Table(columns=columns, rows=(row,), notes=(INTERVAL_NOTE, "a year has 365 days"))

    def _find_sentences(self, arm: Arm | None, future: Extrapolation | None) -> Iterator[str]:
        if arm is None or not arm.is_measured:
            return
        steps = format_quantity("rate", arm.step.map(lambda seconds: 1 / seconds))
        yield f"{arm.label} does {format_quantity('rate', measure_rate(arm))} {self._unit}/s: {steps} steps/s."
        speed = measure_speed(arm)
        if speed is not None:
            yield f"That is {format_quantity('rate', speed)} operations/s by the work of its matrix products."
        watched = watch_rate(arm)
        yield f"A stopwatch over all timed steps says {format_quantity('rate', watched)} {self._unit}/s."
        if future is None:
            yield "There is no extrapolation: the workload does not say how many tokens a sample has."
            return
        yield (
            f"A model of {_say_count(self.target_parameters)} parameters would do"
            f" {format_quantity('number', future.tokens_per_second)} tokens/s here:"
            f" {format_quantity('number', future.days)} days for {_say_count(self.target_tokens)} tokens,"
            f" {format_quantity('number', future.years)} years."
        )
        yield (
            "That assumes as many operations per second as now, a cost in proportion to the parameters, no"
            " communication, and a device that the model fits into: an order of magnitude, no forecast."
        )


def make_rate_columns(unit: str) -> list[SweepColumn]:
    return [
        step_column(),
        SweepColumn(
            column=Column(key="steps_per_second", header="steps/s", quantity="rate"),
            read=lambda arm: arm.step.map(lambda seconds: 1 / seconds),
        ),
        SweepColumn(column=Column(key=f"{unit}_per_second", header=f"{unit}/s", quantity="rate"), read=measure_rate),
        SweepColumn(column=Column(key="stopwatch_rate", header="by stopwatch", quantity="rate"), read=watch_rate),
        speed_column(),
        memory_column(),
        parameters_column(),
    ]


def count_tokens(arm: Arm) -> int:
    """What one step works on: tokens where samples have them, otherwise samples."""
    tokens: int = getattr(read_options(arm.trial), "num_tokens", 1)
    return arm.trial.global_batch * tokens


def measure_rate(arm: Arm) -> Estimate:
    """Tokens or samples per second, by the median step."""
    return arm.step.map(lambda seconds: count_tokens(arm) / seconds)


def watch_rate(arm: Arm) -> Estimate:
    """The same over all timed steps together: their number over their total time."""
    launches = [steps for steps in arm.clean if len(steps)]
    whole = count_tokens(arm) / statistics.fmean(seconds for steps in launches for seconds in steps)
    return estimate_over_rounds(whole, [count_tokens(arm) / statistics.fmean(steps) for steps in launches])


def draw_launches(arm: Arm | None, unit: str) -> tuple[Chart, ...]:
    """Every launch by the median step and by a stopwatch, and all of them together."""
    if arm is None or not arm.is_measured:
        return ()
    rows: list[Row] = []
    for number, steps in enumerate(arm.clean, start=1):
        found = {"median step": statistics.median(steps), "stopwatch": statistics.fmean(steps)} if len(steps) else {}
        for series in ("median step", "stopwatch"):
            rate = count_tokens(arm) / found[series] if found else None
            status = "" if found else "not measured"
            rows.append({"name": f"launch {number}", "series": series, "rate": rate, "status": status})
    for series, whole in (("median step", measure_rate(arm)), ("stopwatch", watch_rate(arm))):
        rows.append({"name": "all launches", "series": series, "rate": whole})
    chart = plot_amounts(
        title=f"{unit.capitalize()} per second, launch by launch",
        x=Axis(field="rate", title=f"{unit}/s", quantity="rate", from_zero=False),
        rows=rows,
        caption="Thin lines are 95 % confidence intervals of all launches; the axis need not begin at zero. A stopwatch"
        " counts long steps in, a median leaves them out.",
    )
    return () if chart is None or len(arm.completed) < 2 else (chart,)


def _say_count(number: float) -> str:
    return format_quantity("rate", number)
