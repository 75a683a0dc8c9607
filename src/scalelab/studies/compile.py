"""Compilation: the same training with and without torch.compile.

A compiled step is faster or not, and the first one waits for the compiler. Both are measured in the same launches. What
compiling costs is everything before the steps have settled, over what the plain training takes there: loading the
compiler, and the excess of the first steps over a settled one.

The first launch is told from the others. torch keeps what it has compiled in a cache on disk, so later launches find
most of it there, and so does the first where an earlier run has filled the cache.

The figures of `compile`: what a step takes, what is waited for before the first, and when the one pays the other.

What compiling costs before the first settled step, what it saves in each, and when the one has paid the other.

When something pays that costs once and saves in every step.

    steps = cost / saving

The ends of the interval are the least favourable pairs, the smallest cost over the largest saving and the largest over
the smallest: wider than it need be, and never too narrow. Where a saving may be nothing there is no break-even.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, estimate_difference, estimate_location, estimate_ratio, judge
from scalelab.errors import UsageError
from scalelab.records.trial import StepKind, Trial, TrialResult
from scalelab.report.charts.plot import Axis, Row, plot_lines
from scalelab.report.document import Chart, Column, Document, Section, Table, make_row
from scalelab.report.findings import as_findings
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.losses import compare_last_losses, read_losses
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
    draw_columns,
    find_sweep_cautions,
    keep_charts,
    list_keys,
    make_sweep_table,
    memory_column,
    plan_sweep,
    ratio_column,
    samples_column,
    step_column,
)
from scalelab.units import format_interval, format_quantity


def find_break_even(cost: Estimate, saving: Estimate) -> Estimate | None:
    """The number of steps after which a cost has come back; None where the saving is not surely above zero."""
    surely = saving.value if saving.low is None else saving.low
    if surely <= 0 or saving.value <= 0:
        return None
    steps = max(cost.value, 0.0) / saving.value
    if saving.low is None or saving.high is None:
        return Estimate(value=steps)
    least, most = (cost.value if end is None else end for end in (cost.low, cost.high))
    return Estimate(value=steps, low=max(least, 0.0) / saving.high, high=max(most, 0.0) / saving.low)


@dataclass(frozen=True, kw_only=True)
class Starts:
    """From the launch to the end of the first step."""

    first: float | None
    """Of the first round."""
    later: Estimate | None
    """Of the other rounds."""


@dataclass(frozen=True, kw_only=True)
class Payoff:
    """Compiling in the first launch, or in a later one."""

    label: str
    cost: Estimate
    """Seconds more than the plain training takes until steps have settled."""
    saving: Estimate
    """Seconds per step."""
    steps: Estimate | None
    """After how many steps the cost has come back; None: never, or nobody can say."""


def measure_starts(arm: Arm) -> Starts:
    """How long the first step is waited for."""
    by_round = {result.trial.round: _find_first_end(result) for result in arm.completed}
    later = [seconds for number, seconds in by_round.items() if number > 1]
    return Starts(first=by_round.get(1), later=estimate_location(later) if later else None)


def _find_first_end(result: TrialResult) -> float:
    steps = list(result.step_seconds(StepKind.CLEAN).values())
    return (result.first_step_seconds or 0.0) + (steps[0] if steps else 0.0)


def find_payoffs(eager: Arm | None, compiled: Arm | None) -> list[Payoff]:
    """For the first launch and for later ones, as far as both rows have completed them."""
    if eager is None or compiled is None or not eager.is_measured or not compiled.is_measured:
        return []
    saving = estimate_difference(eager.clean, compiled.clean)
    plain, built = _measure_overheads(eager), _measure_overheads(compiled)
    costs = {number: built[number] - plain[number] for number in built if number in plain}
    later = [seconds for number, seconds in costs.items() if number > 1]
    found = []
    if 1 in costs:
        found.append(_make_payoff("first launch", Estimate(value=costs[1]), saving))
    if later:
        found.append(_make_payoff("later launches", estimate_location(later), saving))
    return found


def _make_payoff(label: str, cost: Estimate, saving: Estimate) -> Payoff:
    return Payoff(label=label, cost=cost, saving=saving, steps=find_break_even(cost, saving))


def _measure_overheads(arm: Arm) -> dict[int, float]:
    """By round: from the launch to the first step, and what the first steps take over as many settled ones."""
    found = {}
    num_first = max(arm.num_dropped, 1)
    for result in arm.completed:
        settled = arm.clean[result.trial.round - 1]
        if settled:
            steps = list(result.step_seconds(StepKind.CLEAN).values())[:num_first]
            excess = sum(steps) - len(steps) * statistics.median(settled)
            found[result.trial.round] = (result.first_step_seconds or 0.0) + excess
    return found


def make_payoff_table(payoffs: Sequence[Payoff]) -> Table:
    columns = (
        Column(key="launch", header="launch", align="left"),
        Column(key="cost_seconds", header="cost", quantity="seconds"),
        Column(key="saving_seconds", header="saved per step", quantity="seconds"),
        Column(key="break_even_steps", header="pays after steps", quantity="number"),
    )
    rows = tuple(make_row(payoff.label, payoff.cost, payoff.saving, payoff.steps) for payoff in payoffs)
    notes = (INTERVAL_NOTE, "the cost of the first launch is one number and has no ±")
    return Table(columns=columns, rows=rows, notes=notes)


def summarise_compile(eager: Arm | None, compiled: Arm | None, payoffs: Sequence[Payoff]) -> tuple[str, ...]:
    """The findings, the main one first."""
    return tuple(_find_sentences(eager, compiled, payoffs))


def _find_sentences(eager: Arm | None, compiled: Arm | None, payoffs: Sequence[Payoff]) -> Iterator[str]:
    if compiled is not None and not compiled.is_measured and compiled.failure is not None:
        yield f"The compiled training did not run, {compiled.failure.status.words}: {compiled.failure.reason}."
    if eager is None or compiled is None or not eager.is_measured or not compiled.is_measured:
        return
    ratio = estimate_ratio(compiled.clean, eager.clean)
    yield f"A compiled step takes {format_interval('ratio', ratio)} times as long as an eager one: {judge(ratio)}."
    for payoff in payoffs:
        cost = format_quantity("seconds", payoff.cost)
        which = "The first launch pays" if payoff.label == "first launch" else "Later launches, which find a cache, pay"
        yield f"{which} {cost} for it before steps have settled{_describe_return(payoff, judge(ratio))}."
    if payoffs:
        yield "Where an earlier run has filled torch's cache, the first launch finds it too; an empty one costs more."


def _describe_return(payoff: Payoff, verdict: Verdict) -> str:
    if payoff.cost.value <= 0:
        return ", which is nothing to bring back"
    if payoff.steps is not None:
        return f", which comes back after {format_interval('number', payoff.steps)} steps"
    if verdict is Verdict.SLOWER:
        return ", which never comes back"
    return "; no saving is sure, so it may never come back"


USUAL_STEPS = 1000
"""How far the balance is drawn where it never pays."""
NUM_POINTS = 5


def draw_compiled(table: Table, arms: Sequence[Arm]) -> tuple[Chart, ...]:
    keys = list_keys(arms)
    starts = {"first_start_seconds": "first launch", "later_start_seconds": "later launches"}
    return keep_charts(
        draw_columns(table, ["step_seconds"], title="Step, eager and compiled", keys=keys),
        draw_columns(
            table,
            starts,
            title="From the launch to the end of the first step",
            keys=keys,
            axis_title="time",
            caption="Thin lines are 95 % confidence intervals; the first launch is one number and has none.",
        ),
    )


def draw_payoffs(payoffs: Sequence[Payoff]) -> tuple[Chart, ...]:
    """What compiling has brought in after so many steps, less what it cost; above zero it has paid."""
    ends = [payoff.steps.value for payoff in payoffs if payoff.steps is not None]
    most = max(NUM_POINTS, round(2 * max(ends))) if ends else USUAL_STEPS
    steps = [round(most * number / (NUM_POINTS - 1)) for number in range(NUM_POINTS)]
    rows: list[Row] = [
        {"steps": count, "balance": balance_after(payoff, count), "series": payoff.label}
        for payoff in payoffs
        for count in steps
    ]
    zero: list[Row] = [{"steps": count, "balance": 0.0, "series": "paid"} for count in (0, most)]
    chart = plot_lines(
        title="Time won by compiling, after so many steps",
        x=Axis(field="steps", title="steps", quantity="number"),
        y=Axis(field="balance", title="won", quantity="seconds", is_signed=True),
        rows=rows,
        guides=zero,
        caption="Steps times the saving, less the cost: where a line passes zero, compiling has paid. Vertical lines"
        " reach from the smallest saving and the largest cost within their 95 % intervals to the reverse.",
    )
    return (chart,)


def balance_after(payoff: Payoff, num_steps: int) -> Estimate:
    """With the least favourable pairs of ends, as the break-even has them."""
    cost, saving = payoff.cost, payoff.saving
    value = num_steps * saving.value - cost.value
    if saving.low is None or saving.high is None:
        return Estimate(value=value)
    least, most = (cost.value if end is None else end for end in (cost.low, cost.high))
    return Estimate(value=value, low=num_steps * saving.low - most, high=num_steps * saving.high - least)


EAGER, COMPILED = "eager", "compiled"


@dataclass(frozen=True, kw_only=True)
class Compile(Study):
    """The job as it is and under torch.compile: step, time to the first step, and the steps after which it pays."""

    name: ClassVar[str] = "compile"
    title: ClassVar[str] = "Compilation"
    question: ClassVar[str] = "Is the compiled training faster, and after how many steps does compiling pay?"

    ranks: int = 1
    """Ranks of both rows."""
    strategy: MaybeStrategy = None
    """How the training is spread. None: single on one rank, ddp on more."""
    batch_per_rank: int = 32
    """Samples per step on each rank."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(rounds=6, phase_steps=0, comm_free_steps=0))

    def __post_init__(self) -> None:
        check_placement(self.ranks, self.batch_per_rank)
        if self.job.shape.compile:
            raise UsageError("--compile is what this study varies: leave it out")

    def plan(self) -> list[Trial]:
        compiled = replace(self.job, shape=replace(self.job.shape, compile=True))
        rows = [
            Configuration(
                name=name,
                label=name,
                strategy=choose_strategy(self.strategy, self.ranks),
                num_ranks=self.ranks,
                global_batch=self.batch_per_rank * self.ranks,
                job=job,
            )
            for name, job in ((EAGER, self.job), (COMPILED, compiled))
        ]
        return plan_sweep(self.job, self.sampling, rows)

    def refuse(self, trial: Trial, results: Sequence[TrialResult]) -> str | None:
        """Without a C++ compiler there is nothing to launch on a CPU."""
        if not trial.shape.compile or trial.device != "cpu":
            return None
        wanted = os.environ.get("CXX", "g++")
        if shutil.which(wanted):
            return None
        return f"torch.compile needs a C++ compiler on a CPU, and there is no {wanted}: install one, or name it in CXX"

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        eager, compiled = arms.get(EAGER), arms.get(COMPILED)
        payoffs = find_payoffs(eager, compiled)
        columns = [
            step_column(),
            samples_column(),
            ratio_column(eager, "× eager"),
            *make_start_columns(),
            memory_column(),
            SweepColumn(
                column=Column(key="loss_difference", header="loss difference", quantity="share"),
                read=lambda arm: compare_last_losses(read_losses(arm), read_losses(eager)),
            ),
        ]
        table = make_sweep_table(arms.values(), columns)
        sections = [Section(tables=(table,), charts=draw_compiled(table, list(arms.values())))]
        if payoffs:
            paid = make_payoff_table(payoffs)
            sections.append(Section(heading="When compiling pays", tables=(paid,), charts=draw_payoffs(payoffs)))
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
            findings=as_findings(summarise_compile(eager, compiled, payoffs)),
            cautions=find_sweep_cautions(arms, eager),
        )


def make_start_columns() -> list[SweepColumn]:
    """From the launch to the end of the first step, in the first launch and in the others."""

    def read_first(arm: Arm) -> float | None:
        return measure_starts(arm).first

    return [
        SweepColumn(
            column=Column(key="first_start_seconds", header="first launch", quantity="seconds"), read=read_first
        ),
        SweepColumn(
            column=Column(key="later_start_seconds", header="later launches", quantity="seconds"),
            read=lambda arm: measure_starts(arm).later,
        ),
    ]
