"""Tasks 5B and 5C of the scaling assignment: the batch, and a slow rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_ablation
from scalelab.analysis.stats import Verdict, estimate_difference, judge
from scalelab.recipes.evidence import (
    UNTOLD,
    compare_estimates,
    divide_speedups,
    divide_steps,
    find_arm,
    list_arms,
    list_spread,
    quote,
    say_wide,
)
from scalelab.recipes.recipe import Outcome
from scalelab.recipes.scaling.delays import find_sign
from scalelab.recipes.scaling.questions import Answers, format_part, join
from scalelab.studies.batch_scaling import DOUBLING, LARGE_GAIN
from scalelab.studies.batch_size import SATURATION, STEP_COST
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import WAITING
from scalelab.studies.shared.losses import find_first_difference, read_losses
from scalelab.studies.straggler import STRAGGLER, RankComparison
from scalelab.units import choose_unit, format_interval


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
    lost, by_fit = judge_losses(pairs), find_saturation(outcome, pairs[last][1].trial.num_ranks)
    return {
        "improve": f"{verdict}{lost}. Speedup over the plain loop: {listed}{times}. {why}",
        "saturate": join(
            *quote(outcome, DOUBLING.name),
            by_fit,
            "It saturates because a step costs F + c·b for b samples per rank, F for kernel launches, the all-reduce"
            " and"
            " the optimizer: throughput b/(F + c·b) is at half its maximum where c·b = F, and a doubling gains less"
            " than"
            f" {LARGE_GAIN:g} times only where c·b is over {FIXED_COSTS:.1f} F.",
            *quote(outcome, STEP_COST.name),
            *(() if by_fit else quote(outcome, SATURATION.name)),
        ),
    }


FIXED_COSTS = (2 - LARGE_GAIN) / (2 * LARGE_GAIN - 2)
"""c·b over F from which doubling b gains less than that: 2·(F + c·b)/(F + 2·c·b)."""


def find_saturation(outcome: Outcome | None, ranks: int) -> str:
    """The batch from which a doubling gains too little, by the fit; empty where one was measured, or none is known."""
    findings = outcome.document.findings if outcome and outcome.document else ()
    is_measured = any(one.values.get("global_batch") is not None for one in findings if one.kind == DOUBLING.name)
    halves = [one.values.get("half_batch") for one in findings if one.kind == SATURATION.name]
    half = next((found for found in halves if isinstance(found, Estimate)), None)
    if half is None or is_measured:
        return ""
    each, shared = (
        f"{n * FIXED_COSTS * half.value:.0f}{say_ends(half, n * FIXED_COSTS)} {words}"
        for n, words in ((1, "samples per rank"), (ranks, "global"))
    )
    return (
        f"By the fit (extrapolated) it saturates at {each}, {shared}; half of its maximum is at {half.value:.0f} per"
        f" rank ({ranks * half.value:.0f} global)."
    )


def say_ends(estimate: Estimate, factor: float) -> str:
    """` (12 to 15)`; empty without an interval."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f" ({factor * estimate.low:.0f} to {factor * estimate.high:.0f})"


def judge_losses(pairs: Mapping[int, tuple[Arm, Arm]]) -> str:
    """Where ranks gain nothing at all, whatever the trend."""
    found = {batch: judge(ratio) for batch, pair in sorted(pairs.items()) if (ratio := divide_steps(*pair)) is not None}
    slower = [batch for batch, verdict in found.items() if verdict is Verdict.FASTER]
    faster = [batch for batch, verdict in found.items() if verdict is Verdict.SLOWER]
    if not slower:
        return ""
    ranks = next(iter(pairs.values()))[1].trial.num_ranks
    where = "every one of these batches" if len(slower) == len(pairs) else f"batch {', '.join(map(str, slower))}"
    gain = f"faster at {', '.join(map(str, faster))}" if faster else "not clearly faster at any"
    rest = f", and {gain}" if len(slower) < len(pairs) else ""
    return f", but {ranks} ranks are slower than the plain loop at {where}{rest}"


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
            f" {say_wide('seconds', whole)}. {compare_cost(cost, delay, find_waiting(usual))}"
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


def compare_cost(cost: Estimate, delay: float, waiting: Estimate | None = None) -> str:
    """Whether a step gets longer by the whole sleep of one rank; `waiting`: what a rank waits without it."""
    longer = f"A step gets {say_wide('seconds', cost)} longer"
    sign = find_sign(cost.map(lambda seconds: seconds - delay))
    if sign == 0:
        return f"{longer}, which is consistent with {1e3 * delay:g} ms." if cost.high is not None else f"{longer}."
    if sign > 0:
        return f"{longer}, more than it sleeps; waking up late would explain that, and is not measured."
    saved = f"{longer}, less than it sleeps"
    if waiting is None:
        return f"{saved}; waiting that it replaces would explain that, and is not measured."
    anyway = format_part(waiting.value, waiting, choose_unit("seconds", [cost]))
    missing = cost.map(lambda seconds: delay - seconds)
    is_all = compare_estimates(missing, waiting) <= 0
    part = "the sleep replaces that" if is_all else "the sleep replaces that, which is only a part of the difference"
    return (
        f"{saved} by {say_wide('seconds', missing)}: without the sleep, a rank waits {anyway} per step for the others"
        f" anyway, and {part}."
    )


def find_waiting(arm: Arm) -> Estimate | None:
    """Of the rank that waits longest; None where that is unknown or may be nothing."""
    longest = RankComparison(arm=arm).longest_waiting
    waiting = None if longest is None else longest.parts["waiting"]
    return waiting if waiting is not None and (waiting.low or 0.0) > 0 else None


def describe_slow_rank(outcome: Outcome | None, slow: Arm) -> Iterator[str]:
    """Who is slow and by how much, with the share of the step as it was measured."""
    for finding in outcome.document.findings if outcome and outcome.document else ():
        longer = finding.values.get("seconds")
        if finding.kind != STRAGGLER.name or finding.subject != slow.label:
            continue
        if finding.values.get("verdict") != "slow" or not isinstance(longer, Estimate):
            yield finding.text
            continue
        who, where = (finding.values[name] for name in ("rank", "phase"))
        yield f"Rank {who} spends {say_wide('seconds', longer)} more in {where} of every step than another rank."


def describe_waiting(outcome: Outcome | None) -> Iterator[str]:
    for finding in outcome.document.findings if outcome and outcome.document else ():
        waiting = finding.values.get("seconds")
        if finding.kind == WAITING.name and isinstance(waiting, Estimate):
            who = finding.subject.capitalize()
            yield f"{who} waits {say_wide('seconds', waiting)} per step for the others, the longest of all."


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
