"""A scaling study in words with numbers: is it linear, where does efficiency drop, why."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import karp_flatt
from scalelab.analysis.stats import Verdict, estimate_ratio, judge
from scalelab.studies.scaling.answer import ScalingAnswer
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import break_arm
from scalelab.studies.shared.communication import compare_trace, compare_ways
from scalelab.studies.shared.profiled import describe_traced
from scalelab.units import Quantity, format_interval, format_quantity, format_share

WORTH_A_LOOK = 0.05
"""A rank that waits for others during a larger share of its step is named."""


def summarise_scaling(answer: ScalingAnswer) -> tuple[str, ...]:
    """The findings, the main one first."""
    return tuple(_find_sentences(answer))


def _find_sentences(answer: ScalingAnswer) -> Iterator[str]:
    several = [arm for arm in answer.spread if arm.trial.num_ranks > 1]
    fair = [arm for arm in several if not arm.trial.is_oversubscribed]
    best = (fair or several)[-1:]
    for arm in best:
        yield from _describe_speedup(answer, arm)
        if fair:
            yield from _describe_linearity(answer, fair)
            yield from _explain_loss(answer, arm)
            yield from _compare_methods(answer, arm)
            yield from compare_ways(answer, arm)
            yield from describe_traced(arm)
            exposed = answer.exposed(arm)
            yield from compare_trace(arm, exposed.seconds if exposed else None)
            yield from _name_waiting(arm)
    yield from _describe_law(answer)
    yield from _describe_machinery(answer)
    yield from _describe_oversubscribed(answer)
    yield from _describe_control(answer)


def _describe_speedup(answer: ScalingAnswer, arm: Arm) -> Iterator[str]:
    base = answer.base
    speedup, efficiency = answer.speedup(arm, base), answer.efficiency(arm, base)
    if base is None or speedup is None or efficiency is None:
        return
    where = "the plain loop on 1 rank" if base is answer.plain else f"{base.label}"
    who, ratio, share = (
        f"{answer.strategy} on {arm.trial.num_ranks} ranks",
        _say("ratio", speedup),
        _say("share", efficiency),
    )
    if answer.is_strong:
        yield f"{who} ran {ratio} times as fast as {where}: {share} of ideal."
    else:
        yield f"{who} did {ratio} times the work per second of {where}: {share} of ideal."


def _describe_linearity(answer: ScalingAnswer, fair: list[Arm]) -> Iterator[str]:
    """Whether the time per rank's work stays the same, and where it grows most."""
    efficiencies = [(arm, answer.efficiency(arm, answer.one_rank)) for arm in fair]
    known = [(arm, value) for arm, value in efficiencies if value is not None]
    if not known:
        return
    last, efficiency = known[-1]
    verdict = judge(efficiency.map(lambda ratio: 1 / ratio))
    n = last.trial.num_ranks
    words = {
        Verdict.NO_DIFFERENCE: f"Scaling is linear up to {n} ranks: efficiency is within 5 % of 100 %",
        Verdict.SLOWER: f"Scaling is not linear: at {n} ranks efficiency over {answer.strategy} × 1 is",
        Verdict.FASTER: f"Scaling is better than linear: at {n} ranks efficiency over {answer.strategy} × 1 is",
        Verdict.UNRESOLVED: f"Whether scaling is linear is unresolved: at {n} ranks efficiency is",
    }[verdict]
    value = "" if verdict is Verdict.NO_DIFFERENCE else f" {_say('share', efficiency)}"
    drop = _find_largest_drop(known) if verdict is Verdict.SLOWER and len(known) > 1 else ""
    yield f"{words}{value}{drop}."


def _find_largest_drop(known: list[tuple[Arm, Estimate]]) -> str:
    steps = [(1, 1.0), *((arm.trial.num_ranks, value.value) for arm, value in known)]
    (low, before), (high, after) = max(pairwise(steps), key=lambda pair: pair[0][1] - pair[1][1])
    return f"; it drops most from {low} to {high} ranks, {format_share(before)} to {format_share(after)}"


def _explain_loss(answer: ScalingAnswer, arm: Arm) -> Iterator[str]:
    """The excess over the ideal step, split into exchange that is exposed and computation that does not shrink."""
    excess, exposed, unshrunk = answer.excess(arm), answer.exposed(arm), answer.unshrunk(arm)
    efficiency = answer.efficiency(arm, answer.one_rank)
    if excess is None or exposed is None or unshrunk is None or efficiency is None:
        return
    if judge(efficiency.map(lambda ratio: 1 / ratio)) is not Verdict.SLOWER:
        return
    n = arm.trial.num_ranks
    ideal = f"1/{n} of the {answer.strategy} × 1 step" if answer.is_strong else f"the {answer.strategy} × 1 step"
    slow = "slows down beside other ranks"
    if answer.is_strong:
        slow = f"does not shrink with the batch, or {slow}"
    yield (
        f"Why: at {n} ranks a step is {_say('seconds', excess)} longer than {ideal}: {_say('seconds', exposed.seconds)}"
        f" is exposed gradient exchange, {_say('seconds', unshrunk)} is computation that {slow}"
        f"{_name_larger(exposed.seconds, unshrunk)}."
    )
    optimizer = arm.phase("optimizer")
    before = answer.one_rank.phase("optimizer") if answer.one_rank else None
    if answer.is_strong and optimizer is not None and before is not None:
        yield (
            f"The optimizer updates every parameter on every rank: {_say('seconds', optimizer)} a step on {n} ranks,"
            f" {_say('seconds', before)} on one."
        )


def _name_larger(exchange: Estimate, computation: Estimate) -> str:
    """Which of two causes is the larger, where their intervals leave no doubt."""
    if exchange.low is not None and computation.high is not None and exchange.low > computation.high:
        return "; mostly exchange"
    if computation.low is not None and exchange.high is not None and computation.low > exchange.high:
        return "; mostly computation"
    return ""


def _compare_methods(answer: ScalingAnswer, arm: Arm) -> Iterator[str]:
    excess, exposed = answer.excess(arm), answer.exposed(arm)
    if excess is None or exposed is None or excess.low is None or exposed.seconds.low is None:
        return
    assert excess.high is not None
    assert exposed.seconds.high is not None
    overlap = excess.low <= exposed.seconds.high and exposed.seconds.low <= excess.high
    cause = ", because subtraction also counts what is not communication" if excess.low > exposed.seconds.high else ""
    verdict = "overlap" if overlap else f"do not overlap{cause}"
    yield (
        f"Communication at {arm.trial.num_ranks} ranks: {_say('seconds', exposed.seconds)} by ablation"
        f" ({_say('share', exposed.share)} of the step), {_say('seconds', excess)} by subtraction; the intervals"
        f" {verdict}."
    )


def _name_waiting(arm: Arm) -> Iterator[str]:
    """The rank that waits most for slower ones, where that is worth a look."""
    worst = max(break_arm(arm) or (), key=lambda parts: parts.parts["waiting"].value, default=None)
    if worst is None or worst.share("waiting").value < WORTH_A_LOOK:
        return
    if (worst.parts["waiting"].low or 0.0) > 0:
        yield (
            f"Rank {worst.rank} waits {_say('seconds', worst.parts['waiting'])} of every step for slower ranks:"
            " scalelab run imbalance tells which, and in which phase."
        )


def _describe_law(answer: ScalingAnswer) -> Iterator[str]:
    fit = answer.amdahl or answer.gustafson
    if fit is None:
        return
    serial = fit.serial_fraction
    law = "Amdahl" if answer.is_strong else "Gustafson"
    last = answer.fair[-1]
    speedup = answer.speedup(last, answer.one_rank)
    if serial.value >= 1:
        is_sure = speedup is not None and speedup.high is not None and speedup.high < 1
        doubt = (
            "More ranks are slower than one" if is_sure else "It is unresolved whether more ranks are faster than one"
        )
        yield f"{doubt}: {law}'s law does not describe it."
        return
    point = karp_flatt(speedup, last.trial.num_ranks) if speedup and answer.is_strong and len(answer.fair) > 2 else None
    flatt = f" (Karp–Flatt at {last.trial.num_ranks} ranks: {_say('share', point)})" if point else ""
    yield f"By {law}'s law this is worth a serial fraction of {_say('share', serial)}{flatt}."
    if answer.usl is not None:
        peak = answer.usl.peak_ranks
        top = f"; throughput would peak near {peak:.0f} ranks" if peak else "; the data show no peak"
        yield (
            f"Universal scalability law: contention {_say('share', answer.usl.contention)}, coherency"
            f" {_say('share', answer.usl.coherency)}{top}."
        )


def _describe_machinery(answer: ScalingAnswer) -> Iterator[str]:
    """What the strategy costs before there is anybody to talk to."""
    if answer.plain is None or answer.one_rank is None:
        return
    ratio = estimate_ratio(answer.one_rank.clean, answer.plain.clean)
    who = f"{answer.strategy} on 1 rank against the plain loop"
    yield f"{who}: {format_interval('ratio', ratio)} times the step time, {judge(ratio)}."


def _describe_oversubscribed(answer: ScalingAnswer) -> Iterator[str]:
    crowded = [arm for arm in answer.spread if arm.trial.is_oversubscribed]
    if crowded:
        listed = ", ".join(str(arm.trial.num_ranks) for arm in crowded)
        yield f"{listed} ranks had to share cores: their rows say how sharing hurts, not how the job scales."


def _describe_control(answer: ScalingAnswer) -> Iterator[str]:
    ratio = answer.control_ratio
    if ratio is not None:
        factor = format_interval("ratio", ratio)
        yield f"Control: the plain loop measured twice differs by a factor of {factor}, {judge(ratio)}."


def _say(quantity: Quantity, value: Estimate) -> str:
    return format_quantity(quantity, value)
