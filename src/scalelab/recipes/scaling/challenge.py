"""Task 5 of the scaling assignment, the research challenge: an injected delay, the batch, a slow rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_ablation
from scalelab.analysis.stats import Verdict, estimate_difference, estimate_location, estimate_ratio, judge, pair_medians
from scalelab.recipes.evidence import (
    UNTOLD,
    divide_speedups,
    divide_steps,
    find_arm,
    list_arms,
    list_spread,
    quote,
    say_wide,
)
from scalelab.recipes.recipe import Outcome
from scalelab.recipes.scaling.questions import Answers, join
from scalelab.studies.batch_scaling import DOUBLING, LARGE_GAIN
from scalelab.studies.batch_size import SATURATION, STEP_COST
from scalelab.studies.delay.answer import format_delay, name_label
from scalelab.studies.delay.report import ADDED, AMDAHL_OVERLAY
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import WAITING
from scalelab.studies.shared.losses import find_first_difference, read_losses
from scalelab.studies.straggler import STRAGGLER
from scalelab.units import format_interval


def answer_delay(outcome: Outcome | None) -> Answers:
    arms = {(arm.trial.num_ranks, arm.trial.perturbation.seconds): arm for arm in list_arms(outcome)}
    ranks = max((n for (n, _), arm in arms.items() if not arm.trial.is_oversubscribed), default=1)
    delays = sorted(delay for num_ranks, delay in arms if num_ranks == ranks and (1, delay) in arms)
    if ranks == 1 or len(delays) < 2:
        return {}
    speedups = {delay: divide_steps(arms[1, delay], arms[ranks, delay]) for delay in delays}
    curve = ", ".join(f"{say_wide('ratio', found)} at {1e3 * delay:g} ms" for delay, found in speedups.items())
    laws = {delay: predict_speedup(arms, ranks, delay) for delay in delays if delay}
    law = ", ".join(f"{say_wide('ratio', found)} at {1e3 * delay:g} ms" for delay, found in laws.items())
    longest = delays[-1]
    serial = arms[1, 0.0].step.map(lambda seconds: longest / (seconds + longest))
    return {
        "scaling": join(
            f"{judge_change(arms, ranks, longest)} Speedup on {ranks} ranks: {curve}{name_crowded(arms, longest)}. All"
            " ranks sleep at once, so the delay is added to a step on any number of ranks and divided among none.",
            *quote_added(outcome, delays[1]),
        ),
        "linearly": f"{judge_curve(arms, ranks, delays)} The model speedup(d) = (T₁ + d)/(T_N + d), a hyperbola from"
        f" T₁/T_N = {say_wide('ratio', speedups[0.0])} at 0 ms toward 1, predicts {law}.",
        "amdahl": join(
            f"The delay is a serial part: of a step on one rank with {1e3 * longest:g} ms, f = d/(T₁ + d) ="
            f" {say_wide('share', serial)} does not shrink, so by Amdahl's law no number of ranks gains more than 1/f ="
            f" {1 / serial.value:.1f} times.",
            *quote(outcome, AMDAHL_OVERLAY.name, subject=name_label("ddp", ranks, delays[1])),
            "The former tests only whether the delay is added, the latter also communication.",
            explain_excess(arms),
        ),
    }


def name_crowded(arms: Mapping[tuple[int, float], Arm], longest: float) -> str:
    """The change on ranks that share cores, where it is largest; empty where none do."""
    crowded = sorted({n for (n, _), arm in arms.items() if arm.trial.is_oversubscribed})
    found = [n for n in crowded if {(1, 0.0), (n, 0.0), (1, longest), (n, longest)} <= set(arms)]
    return "".join(
        f"; on {n} ranks, which share cores, from {say_wide('ratio', divide_steps(arms[1, 0.0], arms[n, 0.0]))} to"
        f" {say_wide('ratio', divide_steps(arms[1, longest], arms[n, longest]))}"
        for n in found
    )


def predict_speedup(arms: Mapping[tuple[int, float], Arm], ranks: int, delay: float) -> Estimate | None:
    """(T₁ + d)/(T_N + d) from the steps without a delay, round by round, as the study's table has it."""
    one, many = ([[step + delay for step in steps] for steps in arms[n, 0.0].clean] for n in (1, ranks))
    return estimate_ratio(one, many)


def explain_excess(arms: Mapping[tuple[int, float], Arm]) -> str:
    """Why ranks gain more than the law, where they do: those that share cores, and those that do not."""
    above: dict[bool, list[str]] = {False: [], True: []}
    for (n, delay), arm in sorted(arms.items(), key=lambda item: item[0]):
        if n == 1 or not delay or not {(1, 0.0), (n, 0.0), (1, delay)} <= set(arms):
            continue
        one, many = ([[step + delay for step in steps] for steps in arms[ranks, 0.0].clean] for ranks in (1, n))
        law, measured = pair_medians([one, many]), pair_medians([arms[1, delay].clean, arm.clean])
        num_rounds = min(law.shape[1], measured.shape[1])
        ratios = (measured[0] / measured[1])[:num_rounds] / (law[0] / law[1])[:num_rounds]
        if num_rounds > 1 and judge(estimate_location(ratios)) is Verdict.SLOWER:
            above[arm.trial.is_oversubscribed].append(f"{n} ranks with {1e3 * delay:g} ms")
    causes = {
        False: "a delay in place of waiting would explain it (not measured)",
        True: "these ranks share cores, so while one sleeps another computes, and part of the delay is hidden",
    }
    return join(*(f"More than the law at {', '.join(above[key])}: {causes[key]}." for key in above if above[key]))


def quote_added(outcome: Outcome | None, delay: float) -> Iterator[str]:
    """What a delay adds to a step, unless it came out impossible."""
    for finding in outcome.document.findings if outcome and outcome.document else ():
        is_wanted = finding.kind == ADDED.name and finding.subject == format_delay(delay)
        if is_wanted and finding.values.get("seconds") is not None:
            yield finding.text


def judge_change(arms: Mapping[tuple[int, float], Arm], ranks: int, longest: float) -> str:
    """What the longest delay does to the speedup, by both speedups round by round; else what the model gives."""
    change = divide_speedups((arms[1, longest], arms[ranks, longest]), (arms[1, 0.0], arms[ranks, 0.0]))
    usual, law = divide_steps(arms[1, 0.0], arms[ranks, 0.0]), predict_speedup(arms, ranks, longest)
    if change is None:
        return UNTOLD
    times = f"{1e3 * longest:g} ms of delay multiply it by {format_interval('ratio', change)}"
    moved, is_gain = "It moves the speedup toward 1", usual is not None and usual.value > 1
    if is_gain and judge(change) is Verdict.FASTER:
        return f"{moved}, here downwards: {times}; every rank pays the same delay, so scaling gets worse."
    if not is_gain and judge(change) is Verdict.SLOWER:
        return (
            f"{moved}, here upwards: {times}; {ranks} ranks are slower than one without it, and a delay that is the"
            " same on both hides that."
        )
    sides = f"from {say_wide('ratio', usual)} to {say_wide('ratio', law)}"
    return f"By Amdahl's law it moves the speedup toward 1, here {sides}. {UNTOLD}: {times}."


def judge_curve(arms: Mapping[tuple[int, float], Arm], ranks: int, delays: Sequence[float]) -> str:
    """Whether the speedup rises or falls with the delay, and whether it leaves the straight line between its ends."""
    if len(delays) < 3:
        return f"{UNTOLD}: a curve needs three delays."
    medians = pair_medians([arms[n, delay].clean for n in (1, ranks) for delay in delays])
    if medians.shape[1] < 2:
        return f"{UNTOLD}: too few launches completed."
    speedups, places = medians[: len(delays)] / medians[len(delays) :], np.asarray(delays)
    shares = ((places - places[0]) / (places[-1] - places[0]))[1:-1, None]
    apart = (speedups[1:-1] - (1 - shares) * speedups[0] - shares * speedups[-1]).mean(axis=0)
    return describe_curve(estimate_location(speedups[-1] - speedups[0]), estimate_location(apart))


def describe_curve(change: Estimate, apart: Estimate) -> str:
    """A curve by its change from end to end and by its mean distance from the straight line between its ends.

    One that rises and lies above that line is steep at first, as is one that falls and lies below it.
    """
    direction, bend = find_sign(change), find_sign(apart)
    width = f" ± {apart.half_width:.2f}" if apart.half_width is not None else ""
    distance = f"the deviation from a straight line is {apart.value:+.2f}{width}".replace("-", "−")
    if direction == 0:
        return f"{UNTOLD}: the speedup does not change beyond its interval, and {distance}. {HYPERBOLA}."
    what = "It degrades" if direction < 0 else "It does not degrade, it rises"
    if bend == 0:
        return f"{what}; whether linearly, this run does not show: {distance}. {HYPERBOLA}."
    pace = "fast at first and then ever more slowly" if direction == bend else "slowly at first and then ever faster"
    side = "above" if bend > 0 else "below"
    return (
        f"{what}, and non-linearly: {pace}. Between the shortest and the longest delay it is {abs(apart.value):.2f}"
        f" {side} the straight line."
    )


HYPERBOLA = "By Amdahl's law it is non-linear"


def find_sign(estimate: Estimate) -> int:
    """1 where the whole interval lies above 0, −1 where below, else 0; 0 without an interval."""
    if estimate.low is None or estimate.high is None:
        return 0
    return int(estimate.low > 0) - int(estimate.high < 0)


def answer_batches(outcome: Outcome | None) -> Answers:
    pairs: dict[int, tuple[Arm, Arm]] = {}
    for arm in list_spread(outcome):
        plain = find_arm(outcome, num_ranks=1, global_batch=arm.trial.global_batch)
        if plain is not None:
            pairs[arm.trial.global_batch] = (plain, arm)
    if len(pairs) < 2:
        return {}
    first, last = min(pairs), max(pairs)
    gain = divide_speedups(pairs[last], pairs[first])
    same = "The gradients have the same bytes at every batch while computing grows with it"
    verdict, why = {
        Verdict.SLOWER: ("Yes", f"{same}, so their share of a step should shrink{compare_shares(pairs)}."),
        Verdict.FASTER: ("No, it gets worse", f"{same}: what grows here is not communication."),
        Verdict.NO_DIFFERENCE: ("No, it stays the same", f"{same}: little of it is exposed at any of these batches."),
        Verdict.UNRESOLVED: (
            f"By its bytes and operations it should. {UNTOLD}, as the interval includes no change",
            f"{same}, so a gain is expected where communication is exposed.",
        ),
    }[judge(gain) if gain is not None else Verdict.UNRESOLVED]
    times = f" (the last is {format_interval('ratio', gain)} times the first)" if gain is not None else ""
    listed = ", ".join(
        f"{say_wide('ratio', divide_steps(*pair))} at global batch {batch}" for batch, pair in sorted(pairs.items())
    )
    lost = judge_losses(pairs)
    return {
        "improve": f"{verdict}{lost}. Speedup over the plain loop: {listed}{times}. {why}",
        "saturate": join(
            *quote(outcome, DOUBLING.name),
            "A step costs F + c·b, F for kernel launches, the all-reduce and the optimizer, so throughput b/(F + c·b)"
            f" is at half its maximum where c·b = F, and a doubling gains less than {LARGE_GAIN:g} times only where c·b"
            f" is over {(2 - LARGE_GAIN) / (2 * LARGE_GAIN - 2):.1f} F.",
            *quote(outcome, STEP_COST.name, SATURATION.name),
        ),
    }


def judge_losses(pairs: Mapping[int, tuple[Arm, Arm]]) -> str:
    """Whether ranks gain anything at these batches, whatever the trend."""
    found = {batch: judge(ratio) for batch, pair in sorted(pairs.items()) if (ratio := divide_steps(*pair)) is not None}
    slower = [batch for batch, verdict in found.items() if verdict is Verdict.FASTER]
    if Verdict.SLOWER in found.values() or not slower:
        return ""
    ranks = next(iter(pairs.values()))[1].trial.num_ranks
    where = "any of these batches"
    if len(slower) < len(pairs):
        where = f"batch {', '.join(map(str, slower))}, and not clearly faster at any"
    return f", but {ranks} ranks are slower than the plain loop at {where}"


def compare_shares(pairs: Mapping[int, tuple[Arm, Arm]]) -> str:
    """The exposed share of a step at the smallest and at the largest batch; empty where it was not measured."""
    ends = {batch: pairs[batch][1] for batch in (min(pairs), max(pairs))}
    if not all(any(arm.comm_free) for arm in ends.values()):
        return ""
    shares = {batch: communication_by_ablation(arm.clean, arm.comm_free).share for batch, arm in ends.items()}
    listed = ", ".join(f"{say_wide('share', share)} exposed at {batch}" for batch, share in shares.items())
    return f" (measured: {listed})"


def answer_straggler(outcome: Outcome | None) -> Answers:
    arms = list_arms(outcome)
    slow = next((arm for arm in arms if arm.trial.perturbation.seconds), None)
    if slow is None:
        return {}
    delay, ranks = slow.trial.perturbation.seconds, slow.trial.num_ranks
    usual = next((arm for arm in arms if not arm.trial.perturbation.seconds and arm.trial.num_ranks == ranks), None)
    cost = estimate_difference(slow.clean, usual.clean) if usual else None
    longer = UNTOLD
    if usual is not None and cost is not None:
        ratio, whole = divide_steps(slow, usual), usual.step.value + delay
        times = f", {format_interval('ratio', ratio)} times" if ratio is not None else ""
        is_longer = (cost.low or 0) > 0 or (ratio is not None and (ratio.low or 0) > 1)
        verdict = "Every step, and so the whole training run, gets longer" if is_longer else f"{UNTOLD} beyond doubt"
        longer = (
            f"{verdict}: from {say_wide('seconds', usual.step)} to {say_wide('seconds', slow.step)} per step{times}."
            f" One rank sleeps {1e3 * delay:g} ms and all wait for it; with all of its sleep added, a step would take"
            f" {say_wide('seconds', whole)}. {compare_cost(cost, delay)}"
        )
    return {
        "training_time": longer,
        "synchronization": join(
            "That DDP is synchronous: the all-reduce of a bucket ends when the last rank has brought its gradients, so"
            f" a step takes as long as on the slowest of {ranks} ranks, and the others wait inside backward.",
            compare_losses(slow, usual),
            *describe_slow_rank(outcome, slow),
            *describe_waiting(outcome),
        ),
    }


def compare_cost(cost: Estimate, delay: float) -> str:
    """Whether a step gets longer by the whole sleep of one rank."""
    longer = f"A step gets {say_wide('seconds', cost)} longer"
    sign = find_sign(cost.map(lambda seconds: seconds - delay))
    if sign == 0:
        return f"{longer}, which is consistent with {1e3 * delay:g} ms." if cost.high is not None else f"{longer}."
    return (
        f"{longer}, more than it sleeps; waking up late would explain that, and is not measured."
        if sign > 0
        else f"{longer}, less than it sleeps; waiting that it replaces would explain that, and is not measured."
    )


def describe_slow_rank(outcome: Outcome | None, slow: Arm) -> Iterator[str]:
    """Who is slow and by how much, with the share of the step as it was measured."""
    for finding in outcome.document.findings if outcome and outcome.document else ():
        longer = finding.values.get("seconds")
        if finding.kind != STRAGGLER.name or finding.subject != slow.label:
            continue
        if finding.values.get("verdict") != "slow" or not isinstance(longer, Estimate):
            yield finding.text
            continue
        who, where, share = (finding.values[name] for name in ("rank", "phase", "share"))
        part = f", {say_wide('share', share)} of a step without stalls" if isinstance(share, Estimate) else ""
        yield f"Rank {who} is slow in {where}: {say_wide('seconds', longer)} per step longer than another rank{part}."


def describe_waiting(outcome: Outcome | None) -> Iterator[str]:
    for finding in outcome.document.findings if outcome and outcome.document else ():
        waiting = finding.values.get("seconds")
        if finding.kind == WAITING.name and isinstance(waiting, Estimate):
            who = finding.subject.capitalize()
            yield f"{who} waits longest: {say_wide('seconds', waiting)} per step."


def compare_losses(slow: Arm, usual: Arm | None) -> str:
    """Whether a slow rank changes what is learnt."""
    if usual is None or not read_losses(slow) or not read_losses(usual):
        return ""
    step = find_first_difference(read_losses(slow), read_losses(usual))
    return (
        "Losses are bit-equal with and without it: only time is lost."
        if step is None
        else (f"Losses differ from step {step} on.")
    )
