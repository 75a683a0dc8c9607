"""What compiling costs before the first settled step, what it saves in each, and when the one has paid the other."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scalelab.analysis.break_even import find_break_even
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.location import estimate_location
from scalelab.analysis.stats import Verdict, estimate_difference, estimate_ratio, judge
from scalelab.report.document import Column, Table, make_row
from scalelab.studies.arms import Arm
from scalelab.studies.sweep import INTERVAL_NOTE
from scalelab.trial import StepKind, TrialResult
from scalelab.units import format_interval, format_quantity


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
