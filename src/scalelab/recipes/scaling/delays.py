"""A sleep in every step. Task 5A: on all ranks, beside an additive model and Amdahl's law. Task 5C: on rank 0 alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

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
from scalelab.recipes.evidence import (
    UNTOLD,
    compare_estimates,
    divide_speedups,
    divide_steps,
    list_arms,
    list_findings,
    say_wide,
)
from scalelab.recipes.recipe import Outcome
from scalelab.recipes.scaling.questions import Answers, format_part
from scalelab.report.document import Table
from scalelab.report.tables import PAIRED_NOTE, Field, ratio_column, seconds_column
from scalelab.studies.delay import ADDED, format_delay
from scalelab.studies.shared.arms import Arm, join_words
from scalelab.studies.shared.breakdown import WAITING
from scalelab.studies.shared.losses import find_first_difference, read_losses
from scalelab.studies.shared.sweep import (
    make_sweep_table,
    measure_speedup,
    step_column,
)
from scalelab.studies.straggler import STRAGGLER, RankComparison
from scalelab.units import choose_unit, format_interval


def key_arms(outcome: Outcome | None) -> dict[tuple[int, float], Arm]:
    """By number of ranks and delay."""
    return {(arm.trial.num_ranks, arm.trial.perturbation.seconds): arm for arm in list_arms(outcome)}


def answer_delay(outcome: Outcome | None) -> Answers:
    arms = key_arms(outcome)
    ranks = max((n for (n, _), arm in arms.items() if not arm.trial.is_oversubscribed), default=1)
    delays = sorted(delay for num_ranks, delay in arms if num_ranks == ranks and (1, delay) in arms)
    if ranks == 1 or len(delays) < 2:
        return {}
    speedups = {delay: divide_steps(arms[1, delay], arms[ranks, delay]) for delay in delays}
    curve = ", ".join(f"{say_wide('ratio', found)} at {1e3 * delay:g} ms" for delay, found in speedups.items())
    first, longest = delays[1], delays[-1]
    phase = arms[1, longest].trial.perturbation.delay_phase
    return {
        "scaling": join_words(
            f"{judge_change(arms, ranks, longest)} Speedup on {ranks} ranks: {curve}{name_crowded(arms, longest)}. All"
            f" ranks sleep at once, right before {phase}, so more ranks do not divide the delay.",
            *quote_added(outcome, first),
        ),
        "linearly": join_words(
            judge_curve(arms, ranks, delays), describe_model(arms, ranks, delays), explain_excess(arms)
        ),
        "amdahl": relate_to_law(arms, ranks, [first, longest]),
    }


def make_law_table(outcome: Outcome | None) -> Table | None:
    """Every delay on every number of ranks: its step and speedup, beside what both models of a delay predict."""
    arms = key_arms(outcome)
    if not all((n, 0.0) in arms and (1, delay) in arms for n, delay in arms):
        return None

    def find_law(arm: Arm) -> Estimate | None:
        n, delay = arm.trial.num_ranks, arm.trial.perturbation.seconds
        return arms[1, 0.0].step.map(lambda step: (step + delay) / (step / n + delay)) if n > 1 else None

    def find_model(arm: Arm) -> Estimate | None:
        n, delay = arm.trial.num_ranks, arm.trial.perturbation.seconds
        return predict_speedup(arms, n, delay) if n > 1 and delay else None

    def find_added(arm: Arm) -> Estimate | None:
        n, delay = arm.trial.num_ranks, arm.trial.perturbation.seconds
        return estimate_difference(arm.clean, arms[n, 0.0].clean) if delay else None

    def find_speedup(arm: Arm) -> Estimate | float | None:
        return measure_speedup(arm, arms[1, arm.trial.perturbation.seconds])

    columns: list[Field[Arm]] = [
        step_column(),
        seconds_column("added_seconds", "added", find_added),
        ratio_column("speedup", "speedup", find_speedup),
        ratio_column("law", "Amdahl's law", find_law, shows_interval=False),
        ratio_column("model", "additive model", find_model, shows_interval=False),
    ]
    notes = (
        "added: to the step without the delay; speedup: over one rank with the same delay",
        "Amdahl's law: (T_1 + d)/(T_1/N + d); additive model: (T_1 + d)/(T_N + d); T: a step without the delay d",
        PAIRED_NOTE,
    )
    table = make_sweep_table(arms.values(), columns, notes=notes)
    return replace(table, title="Injected delay, beside Amdahl's law")


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
    return join_words(
        "Amdahl's law is S = 1/(f + (1 − f)/N), f being the share of a step on one rank that does not shrink. The delay"
        " d is such a part, f = d/(T(1) + d).",
        f"On {ranks} ranks: {'; '.join(said)}.",
        ending,
        f"The law falls from {ranks} toward 1 as d grows{', and both end at 1, where f is 1' if ending else ''}.",
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
    return join_words(
        *(
            f"More than the model on {n} ranks with {', '.join(delays)} ms: {causes[key]}."
            for key, found in above.items()
            for n, delays in found.items()
        )
    )


def quote_added(outcome: Outcome | None, delay: float) -> Iterator[str]:
    """What a delay adds to a step, unless it came out impossible."""
    for finding in list_findings(outcome, ADDED):
        if finding.subject == format_delay(delay) and finding.values.get("seconds") is not None:
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
    return int(estimate.is_above(0)) - int(estimate.is_below(0))


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
        is_longer = cost.is_above(0) or (ratio is not None and ratio.is_above(1))
        verdict = "Every step, and so the whole training run, gets longer" if is_longer else f"{UNTOLD} beyond doubt"
        longer = (
            f"{verdict}: from {say_wide('seconds', usual.step)} to {say_wide('seconds', slow.step)} per step{times}."
            f" One rank sleeps {1e3 * delay:g} ms and all wait for it; with all of its sleep added, a step would take"
            f" {say_wide('seconds', whole)}. {compare_cost(cost, delay, find_waiting(usual))}"
        )
    return {
        "training_time": longer,
        "synchronization": join_words(
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
    return waiting if waiting is not None and waiting.is_above(0) else None


def describe_slow_rank(outcome: Outcome | None, slow: Arm) -> Iterator[str]:
    """Who is slow and by how much, with the share of the step as it was measured."""
    for finding in list_findings(outcome, STRAGGLER):
        longer = finding.values.get("seconds")
        if finding.subject != slow.label:
            continue
        if finding.values.get("verdict") != "slow" or not isinstance(longer, Estimate):
            yield finding.text
            continue
        who, where = (finding.values[name] for name in ("rank", "phase"))
        yield f"Rank {who} spends {say_wide('seconds', longer)} more in {where} of every step than another rank."


def describe_waiting(outcome: Outcome | None) -> Iterator[str]:
    for finding in list_findings(outcome, WAITING):
        waiting = finding.values.get("seconds")
        if isinstance(waiting, Estimate):
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
