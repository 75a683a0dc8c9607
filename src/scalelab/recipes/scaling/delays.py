"""Task 5A of the scaling assignment: a delay in every step, beside the additive model and Amdahl's law."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import compare_with_model
from scalelab.analysis.stats import (
    DIFFERENT,
    Verdict,
    estimate_difference,
    estimate_location,
    estimate_ratio,
    judge,
    pair_medians,
)
from scalelab.recipes.evidence import UNTOLD, divide_speedups, divide_steps, list_arms, say_wide
from scalelab.recipes.recipe import Outcome
from scalelab.recipes.scaling.questions import Answers, join
from scalelab.studies.delay import ADDED, format_delay
from scalelab.studies.shared.arms import Arm
from scalelab.units import format_interval


def answer_delay(outcome: Outcome | None) -> Answers:
    arms = {(arm.trial.num_ranks, arm.trial.perturbation.seconds): arm for arm in list_arms(outcome)}
    ranks = max((n for (n, _), arm in arms.items() if not arm.trial.is_oversubscribed), default=1)
    delays = sorted(delay for num_ranks, delay in arms if num_ranks == ranks and (1, delay) in arms)
    if ranks == 1 or len(delays) < 2:
        return {}
    speedups = {delay: divide_steps(arms[1, delay], arms[ranks, delay]) for delay in delays}
    curve = ", ".join(f"{say_wide('ratio', found)} at {1e3 * delay:g} ms" for delay, found in speedups.items())
    first, longest = delays[1], delays[-1]
    phase = arms[1, longest].trial.perturbation.delay_phase
    return {
        "scaling": join(
            f"{judge_change(arms, ranks, longest)} Speedup on {ranks} ranks: {curve}{name_crowded(arms, longest)}. All"
            f" ranks sleep at once, right before {phase}, so more ranks do not divide the delay.",
            *quote_added(outcome, first),
            explain_added(arms, first),
        ),
        "linearly": join(judge_curve(arms, ranks, delays), describe_model(arms, ranks, delays), explain_excess(arms)),
        "amdahl": relate_to_law(arms, ranks, [first, longest]),
    }


def explain_added(arms: Mapping[tuple[int, float], Arm], delay: float) -> str:
    """Why a step gets longer by more or less than its delay, where it does: neither cause is measured."""
    wanted = sorted(n for n, seconds in arms if seconds == delay and (n, 0.0) in arms)
    more = {n: estimate_difference(arms[n, delay].clean, arms[n, 0.0].clean) for n in wanted}
    signs = {n: find_sign(added.map(lambda seconds: seconds - delay)) for n, added in more.items()}
    causes = {
        1: "More than the delay on {}: waking up late and cold caches may add to it, which is not measured.",
        -1: "Less on {}: that it takes the place of waiting would explain it, and is not measured.",
    }
    found = {sign: " and ".join(str(n) for n in wanted if signs[n] == sign) for sign in causes}
    ranks = {sign: "1 rank" if listed == "1" else f"{listed} ranks" for sign, listed in found.items() if listed}
    return join(*(causes[sign].format(words) for sign, words in ranks.items()))


def describe_model(arms: Mapping[tuple[int, float], Arm], ranks: int, delays: Sequence[float]) -> str:
    """What adding the delay to both steps predicts, and whether the measurement rejects it."""
    said, verdicts = [], {}
    for delay in delays[1:]:
        predicted, over = predict_speedup(arms, ranks, delay), compare_model(arms, ranks, delay, ranks_share=False)
        measured = divide_steps(arms[1, delay], arms[ranks, delay])
        if over is None or measured is None:
            continue
        said.append(f"{predicted.value:.2f} at {1e3 * delay:g} ms ({measured.value:.2f} measured)")
        verdicts[delay] = judge(over)
    rejected = [f"{1e3 * delay:g}" for delay, verdict in verdicts.items() if verdict in DIFFERENT]
    answer = (
        f"the measurement rejects it at {', '.join(rejected)} ms" if rejected else "the measurement does not reject it"
    )
    return (
        "If a step only gets longer by d, the speedup is S(d) = (T(1) + d)/(T(N) + d), T(N) being the step on N ranks"
        f" without a delay: a hyperbola toward 1. This predicts {', '.join(said)}; {answer}."
    )


def relate_to_law(arms: Mapping[tuple[int, float], Arm], ranks: int, delays: Sequence[float]) -> str:
    """Measured speedups beside Amdahl's law, in which everything but the delay scales perfectly."""
    said, verdicts = [], []
    for delay in dict.fromkeys(delays):
        serial = find_serial(arms[1, 0.0].step, delay)
        law, over = 1 / (serial.value + (1 - serial.value) / ranks), compare_model(arms, ranks, delay, ranks_share=True)
        if over is None:
            continue
        verdicts.append(judge(over))
        measured = say_wide("ratio", divide_steps(arms[1, delay], arms[ranks, delay]))
        said.append(
            f"with d = {1e3 * delay:g} ms, f = {say_wide('share', serial)} and S = {law:.2f} (at most 1/f ="
            f" {1 / serial.value:.2f} on any number of ranks), measured {measured}, {format_interval('ratio', over)} of"
            " the law"
        )
    why = {
        Verdict.FASTER: "We measured less, because the law lets all but the delay shrink as 1/N and leaves out"
        " communication and work that ranks do not share.",
        Verdict.SLOWER: "We measured more, so the delay is not paid in full.",
    }
    ending = why[verdicts[0]] if verdicts and len(set(verdicts)) == 1 and verdicts[0] in why else ""
    return join(
        "Amdahl's law is S = 1/(f + (1 − f)/N), f being the share of a step on one rank that does not shrink. The delay"
        f" d is such a part, f = d/(T(1) + d), so the law falls from {ranks} toward 1 as d grows.",
        ending,
        f"On {ranks} ranks: {'; '.join(said)}.",
        "Both end at 1, where f is 1." if ending else "",
    )


def find_serial(step: Estimate, delay: float) -> Estimate:
    """f = d/(T_1 + d)."""
    return step.map(lambda seconds: delay / (seconds + delay))


def compare_model(
    arms: Mapping[tuple[int, float], Arm], ranks: int, delay: float, *, ranks_share: bool
) -> Estimate | None:
    """The measured speedup over the model's, launch by launch, with T_N as measured or as T_1/N (`ranks_share`)."""
    part = 1 / ranks if ranks_share else 1.0
    needed = [(1, delay), (ranks, delay), (1, 0.0), (1 if ranks_share else ranks, 0.0)]
    if not set(needed) <= set(arms):
        return None
    measured = [arms[key].clean for key in needed[:2]]
    return compare_with_model(
        measured,
        lambda steps: steps[0] / steps[1],
        [arms[key].clean for key in needed[2:]],
        lambda steps: (steps[0] + delay) / (part * steps[1] + delay),
    )


def name_crowded(arms: Mapping[tuple[int, float], Arm], longest: float) -> str:
    """The change on ranks that share cores, where it is largest; empty where none do."""
    crowded = sorted({n for (n, _), arm in arms.items() if arm.trial.is_oversubscribed})
    found = [n for n in crowded if {(1, 0.0), (n, 0.0), (1, longest), (n, longest)} <= set(arms)]
    return "".join(
        f"; on {n} ranks, which share cores, from {say_wide('ratio', divide_steps(arms[1, 0.0], arms[n, 0.0]))} to"
        f" {say_wide('ratio', divide_steps(arms[1, longest], arms[n, longest]))}"
        for n in found
    )


def predict_speedup(arms: Mapping[tuple[int, float], Arm], ranks: int, delay: float) -> Estimate:
    """(T_1 + d)/(T_N + d) from the steps without a delay, round by round, as the study's table has it."""
    one, many = ([[step + delay for step in steps] for steps in arms[n, 0.0].clean] for n in (1, ranks))
    return estimate_ratio(one, many)


def explain_excess(arms: Mapping[tuple[int, float], Arm]) -> str:
    """Why ranks gain more than the additive model, where they do: those that share cores, and those that do not."""
    above: dict[bool, dict[int, list[str]]] = {False: {}, True: {}}
    for (n, delay), arm in sorted(arms.items(), key=lambda item: item[0]):
        over = compare_model(arms, n, delay, ranks_share=False) if n > 1 and delay else None
        if over is not None and judge(over) is Verdict.SLOWER:
            above[arm.trial.is_oversubscribed].setdefault(n, []).append(f"{1e3 * delay:g}")
    causes = {
        False: "the delay adds less than its time to a step; that it takes the place of waiting would explain it, and"
        " was not measured",
        True: "they share cores, so while one sleeps another computes",
    }
    return join(
        *(
            f"More than the model on {n} ranks with {', '.join(delays)} ms: {causes[key]}."
            for key, found in above.items()
            for n, delays in found.items()
        )
    )


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
    return f"By the additive model it moves the speedup toward 1, here {sides}. {UNTOLD}: {times}."


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
    pace = "steep at first, flatter later" if direction == bend else "flat at first, steeper later"
    side = "above" if bend > 0 else "below"
    nearest, furthest = sorted(abs(end or 0.0) for end in (apart.low, apart.high))
    return (
        f"{what}, and non-linearly: {pace}. Between its ends the curve lies on average {abs(apart.value):.2f}"
        f" ({nearest:.2f} to {furthest:.2f}) {side} the straight line."
    )


HYPERBOLA = "By the additive model it is non-linear"


def find_sign(estimate: Estimate) -> int:
    """1 where the whole interval lies above 0, −1 where below, else 0; 0 without an interval."""
    if estimate.low is None or estimate.high is None:
        return 0
    return int(estimate.low > 0) - int(estimate.high < 0)
