"""Compilation: the same training run with and without torch.compile.

A compiled step is faster or not, and the first one waits for the compiler. Both are measured in the same launches. The
cost of compiling is everything before the steps have settled, beyond what the eager run takes there: loading the
compiler, and the excess of the first steps over a settled one.

The first launch is reported apart from the others. torch caches what it has compiled on disk, so later launches find
most of it there, and so does the first if an earlier run has filled the cache.

    break-even steps = cost / saving per step

The ends of its interval are the least favourable pairs, the smallest cost over the largest saving and the largest over
the smallest: wider than necessary, and never too narrow. A saving that may be zero has no break-even.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, estimate_difference, estimate_location, judge
from scalelab.checks import check_at_least
from scalelab.errors import UsageError
from scalelab.records.trial import StepKind, Trial, TrialResult
from scalelab.report.charts.column_charts import draw_columns
from scalelab.report.charts.plot import Axis, Row, plot_lines
from scalelab.report.document import Chart, Section, Table
from scalelab.report.findings import MAIN, REASON, Finding, FindingKind
from scalelab.report.tables import (
    INTERVAL_NOTE,
    Field,
    make_column,
    make_table,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.losses import compare_last_losses, read_losses
from scalelab.studies.shared.study import Configuration, Sampling
from scalelab.studies.shared.sweep import (
    Sweep,
    SweepStudy,
    judge_row,
    memory_column,
    relative_column,
    samples_column,
    step_column,
)
from scalelab.units import format_interval, format_quantity

EAGER, COMPILED = "eager", "compiled"
FIRST_LAUNCH, LATER_LAUNCHES = "first launch", "later launches"
USUAL_STEPS = 1000
"""How far the balance is drawn where it never breaks even."""
NUM_POINTS = 5

BREAK_EVEN = FindingKind(
    "break-even",
    "What compiling costs before steps settle, what it saves per step, and after how many steps it pays off",
    REASON,
    ("cost_seconds", "saving_seconds", "steps"),
)


@dataclass(frozen=True, kw_only=True)
class Compile(SweepStudy):
    """The job with and without torch.compile: step time, time to the first step, and when compiling pays off."""

    batch_per_rank: int = 32
    """Samples per step on each rank."""
    sampling: Sampling = field(default_factory=lambda: Sampling(rounds=6, phase_steps=0, comm_free_steps=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("batch_per_rank", self.batch_per_rank, 1)
        if self.job.shape.compile:
            raise UsageError("--compile: this study varies it: leave it out")

    @property
    def reference_name(self) -> str:
        return EAGER

    def list_rows(self) -> Iterable[Configuration]:
        compiled = replace(self.job, shape=replace(self.job.shape, compile=True))
        yield self.configure(EAGER, self.batch_per_rank, self.job)
        yield self.configure(COMPILED, self.batch_per_rank, compiled)

    def list_settings(self) -> Iterable[str]:
        yield f"batch {self.batch_per_rank} per rank"

    def refuse(self, trial: Trial, results: Sequence[TrialResult]) -> str | None:
        """On a CPU, torch.compile needs a C++ compiler."""
        wanted = os.environ.get("CXX", "g++")
        if not trial.shape.compile or trial.device != "cpu" or shutil.which(wanted):
            return None
        return f"torch.compile needs a C++ compiler on a CPU, and there is no {wanted}: install one, or name it in CXX"

    def list_columns(self, sweep: Sweep) -> Iterable[Field[Arm]]:
        expected = read_losses(sweep.reference)
        yield step_column()
        yield samples_column(is_detail=True)
        yield relative_column(sweep.reference, "× eager")
        yield seconds_column("first_start_seconds", FIRST_LAUNCH, lambda arm: measure_starts(arm).first)
        yield seconds_column("later_start_seconds", LATER_LAUNCHES, lambda arm: measure_starts(arm).later)
        yield memory_column()
        yield share_column(
            "loss_difference", "loss difference", lambda arm: compare_last_losses(read_losses(arm), expected)
        )

    def list_notes(self, sweep: Sweep) -> Iterable[str]:
        yield f"{FIRST_LAUNCH}, {LATER_LAUNCHES}: time to the end of the first step"

    def draw_charts(self, table: Table, sweep: Sweep) -> Iterable[Chart | None]:
        yield draw_columns(table, ["step_seconds"], title="Step time, eager and compiled")
        yield draw_columns(
            table,
            ["first_start_seconds", "later_start_seconds"],
            title="Time to the end of the first step",
            axis_title="time",
            caption="Thin lines are 95 % confidence intervals; the first launch is a single number and has none.",
        )

    def list_sections(self, sweep: Sweep) -> Iterable[Section]:
        payoffs = find_payoffs(sweep)
        if payoffs:
            table, chart = make_payoff_table(payoffs), draw_payoffs(payoffs)
            yield Section(heading="When compiling pays", tables=(table,), charts=(chart,))

    def list_findings(self, sweep: Sweep) -> Iterator[Finding]:
        for label, ratio in sweep.ratios.items():
            yield judge_row(label, ratio, EAGER, weight=MAIN)
            yield from (describe_payoff(payoff, judge(ratio)) for payoff in find_payoffs(sweep))


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

    is_first: bool
    cost: Estimate
    """Seconds beyond what the eager run takes until steps have settled."""
    saving: Estimate
    """Seconds per step."""
    steps: Estimate | None
    """After how many steps the saving has paid the cost; None: never, or unknown."""

    @property
    def label(self) -> str:
        return FIRST_LAUNCH if self.is_first else LATER_LAUNCHES

    def balance_after(self, num_steps: int) -> Estimate:
        """Seconds saved less the cost, with the least favourable pairs of ends, as the break-even has them."""
        cost, saving = self.cost, self.saving
        value = num_steps * saving.value - cost.value
        if saving.low is None or saving.high is None:
            return Estimate(value=value)
        least, most = cost.ends
        return Estimate(value=value, low=num_steps * saving.low - most, high=num_steps * saving.high - least)


def measure_starts(arm: Arm) -> Starts:
    """How long the first step takes to arrive."""
    by_round = {result.trial.round: _find_first_end(result) for result in arm.completed}
    later = [seconds for number, seconds in by_round.items() if number > 1]
    return Starts(first=by_round.get(1), later=estimate_location(later) if later else None)


def _find_first_end(result: TrialResult) -> float:
    steps = list(result.step_seconds(StepKind.CLEAN).values())
    return (result.first_step_seconds or 0.0) + (steps[0] if steps else 0.0)


def find_payoffs(sweep: Sweep) -> list[Payoff]:
    """For the first launch and for later ones, as far as both rows have completed them."""
    eager, compiled = sweep.reference, sweep.arms.get(COMPILED)
    if eager is None or compiled is None or not eager.is_measured or not compiled.is_measured:
        return []
    saving = estimate_difference(eager.clean, compiled.clean)
    plain, built = _measure_overheads(eager), _measure_overheads(compiled)
    costs = {number: built[number] - plain[number] for number in built if number in plain}
    later = [seconds for number, seconds in costs.items() if number > 1]
    known = [(True, Estimate(value=costs[1]))] if 1 in costs else []
    if later:
        known.append((False, estimate_location(later)))
    return [
        Payoff(is_first=is_first, cost=cost, saving=saving, steps=find_break_even(cost, saving))
        for is_first, cost in known
    ]


def find_break_even(cost: Estimate, saving: Estimate) -> Estimate | None:
    """The number of steps after which a cost is paid; None if the saving is not clearly above zero."""
    if saving.ends[0] <= 0 or saving.value <= 0:
        return None
    steps = max(cost.value, 0.0) / saving.value
    if saving.low is None or saving.high is None:
        return Estimate(value=steps)
    least, most = cost.ends
    return Estimate(value=steps, low=max(least, 0.0) / saving.high, high=max(most, 0.0) / saving.low)


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
    return make_table(
        payoffs,
        text_column("launch", "launch", lambda payoff: payoff.label),
        seconds_column("cost_seconds", "cost", lambda payoff: payoff.cost),
        seconds_column("saving_seconds", "saved per step", lambda payoff: payoff.saving),
        make_column("number", "break_even_steps", "break-even steps", lambda payoff: payoff.steps),
        notes=(
            INTERVAL_NOTE,
            "the cost of the first launch is a single number and has no ±",
            "the first launch finds torch's cache if an earlier run has filled it; an empty one costs more",
        ),
    )


def describe_payoff(payoff: Payoff, verdict: Verdict) -> Finding:
    who = "The first launch pays" if payoff.is_first else "Later launches, which find a cache, pay"
    breaks = "breaks" if payoff.is_first else "break"
    text = f"{who} {format_quantity('seconds', payoff.cost)} for compiling before steps settle"
    if payoff.cost.value <= 0:
        text += ": nothing to win back"
    elif payoff.steps is not None:
        text += f", and {breaks} even after {format_interval('number', payoff.steps)} steps"
    elif verdict is Verdict.SLOWER:
        text += f" and never {breaks} even"
    else:
        text += "; no saving is certain, so it may never break even"
    return BREAK_EVEN(
        payoff.label, f"{text}.", cost_seconds=payoff.cost, saving_seconds=payoff.saving, steps=payoff.steps
    )


def draw_payoffs(payoffs: Sequence[Payoff]) -> Chart:
    """What compiling has saved after a number of steps, less its cost; above zero it has paid."""
    ends = [payoff.steps.value for payoff in payoffs if payoff.steps is not None]
    most = max(NUM_POINTS, round(2 * max(ends))) if ends else USUAL_STEPS
    steps = [round(most * number / (NUM_POINTS - 1)) for number in range(NUM_POINTS)]
    rows: list[Row] = [
        {"steps": count, "balance": payoff.balance_after(count), "series": payoff.label}
        for payoff in payoffs
        for count in steps
    ]
    zero: list[Row] = [{"steps": count, "balance": 0.0, "series": "break-even"} for count in (0, most)]
    return plot_lines(
        title="Time saved by compiling",
        x=Axis(field="steps", title="steps", quantity="number"),
        y=Axis(field="balance", title="time saved", quantity="seconds", is_signed=True),
        rows=rows,
        guides=zero,
        caption="Steps times the saving, less the cost: compiling has paid where a line crosses zero. Vertical lines"
        " span the least to the most favourable ends of the 95 % intervals of both.",
    )
