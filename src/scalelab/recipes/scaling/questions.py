"""The eighteen questions of the scaling assignment, each answered with this run's numbers and a reason.

Every function gives the answers of one row, in the order of its questions; nothing where too little was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_ablation, communication_by_subtraction
from scalelab.analysis.stats import Verdict, judge
from scalelab.recipes.evidence import (
    UNTOLD,
    divide_steps,
    find_arm,
    list_arms,
    list_spread,
    quote,
    say_wide,
    scale,
)
from scalelab.recipes.recipe import Outcome
from scalelab.records.strategies import find_strategy
from scalelab.studies.reproducibility import MEAN_ERROR, OTHER_SEED, WARMUP
from scalelab.studies.scaling.answer import AMDAHL
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.losses import LOSSES_EQUAL
from scalelab.studies.strategies.report import EXCESS, OTHER_PROGRAMS, UTILIZATION, VARIATION
from scalelab.units import (
    Unit,
    choose_unit,
    format_bytes,
    format_count,
    format_share,
    format_value,
    is_known,
)
from scalelab.workloads.catalogue import make_options

BYTES_PER_PARAMETER = 4
Answers = dict[str, str]
"""By the name of the question."""


def answer_timing(outcome: Outcome | None) -> Answers:
    if not list_arms(outcome):
        return {}
    return {
        "warmup": join(
            "Because the first steps also pay what is paid once: memory and thread pools, lazy imports, DDP's buckets"
            " and connections, and on a GPU the CUDA context, kernel loading and autotuning, and clocks that rise.",
            *quote(outcome, WARMUP.name, MEAN_ERROR.name),
            "So they are run and not counted.",
        ),
        "randomness": join(
            "Because two runs must differ only in what is compared. With a fixed seed, weights, data and order are the"
            " same: equal losses prove that both runs did the same work, so a difference in time does not come from the"
            " data, and a change in the loss comes from the change in the code.",
            *quote(outcome, LOSSES_EQUAL.name, OTHER_SEED.name),
        ),
    }


def answer_strong(outcome: Outcome | None) -> Answers:
    spread = list_spread(outcome)
    plain = choose_reference(outcome, spread)
    if plain is None or not spread:
        return {}
    over = "the plain loop" if find_strategy(plain.trial.strategy).is_plain else plain.trial.strategy
    fair = [arm for arm in spread if not arm.trial.is_oversubscribed]
    excess = {arm.trial.num_ranks: scale(divide_steps(arm, plain), arm.trial.num_ranks) for arm in fair}
    verdicts = {ranks: judge(ratio) for ranks, ratio in excess.items() if ratio is not None}
    below = [ranks for ranks, verdict in verdicts.items() if verdict is Verdict.SLOWER]
    is_resolved = bool(verdicts) and Verdict.UNRESOLVED not in verdicts.values()
    said = "No" if below else "Yes, within the error" if is_resolved else UNTOLD
    listed = "; ".join(
        f"{name_ranks(arm)}: speedup {say_wide('ratio', divide_steps(plain, arm))}, efficiency"
        f" {say_wide('share', scale(divide_steps(plain, arm), 1 / arm.trial.num_ranks))}"
        for arm in spread
    )
    place = "Nowhere significantly." if is_resolved else f"{UNTOLD}: the intervals include the ideal."
    if below:
        first = next(arm for arm in fair if arm.trial.num_ranks == below[0])
        efficiency = scale(divide_steps(plain, first), 1 / below[0])
        place = f"At {below[0]} ranks already, from 100 % to {say_wide('share', efficiency)}."
    split = [split_step(plain, arm, over) for arm in spread if arm.trial.num_ranks in below or arm not in fair]
    parts = join(*split, LEFT_OVER) if any(split) else ""
    return {
        "linear": f"{said}. Over {over} on one rank, {listed}.",
        "drop": place,
        "quantitative": join(name_threads([plain, *spread]), parts, *quote(outcome, AMDAHL.name))
        if parts or below
        else f"{UNTOLD}: the loss is within its interval.",
    }


LEFT_OVER = (
    "What is left over, in steps without the all-reduce too, is compute that does not shrink with the batch, or slows"
    " down beside other ranks."
)


def name_threads(arms: Sequence[Arm]) -> str:
    """How much hardware ranks add: nothing can be gained where one already has it all."""
    threads = {arm.trial.threads_per_rank for arm in arms}
    if len(threads) != 1:
        return ""
    (each,) = threads
    fair = max((arm.trial.num_ranks for arm in arms if not arm.trial.is_oversubscribed), default=1)
    crowded = ", and more ranks share these" if any(arm.trial.is_oversubscribed for arm in arms) else ""
    return (
        f"Every rank computes with {format_count(each, 'thread')}, the plain loop too: {fair} ranks have {fair} times"
        f" its cores{crowded}."
    )


def split_step(plain: Arm, arm: Arm, over: str) -> str:
    """A step as its ideal, exposed communication and the rest, in numbers that add up as they are printed."""
    if not any(arm.comm_free):
        return ""
    ranks, exposed = arm.trial.num_ranks, communication_by_ablation(arm.clean, arm.comm_free).seconds
    chosen = choose_unit("seconds", [arm.step])
    unit = replace(chosen, decimals=max(chosen.decimals, 1))
    parts = (arm.step.value, plain.step.value / ranks, exposed.value)
    whole, ideal, sent = (round(part / unit.factor, unit.decimals) for part in parts)
    rest = whole - ideal - sent
    left = communication_by_subtraction(plain.clean, arm.comm_free, ranks)  # a step without its all-reduce
    ideals = plain.step.map(lambda seconds: seconds / ranks)
    said = [
        format_part(number * unit.factor, found, unit)
        for number, found in zip((whole, ideal, sent, abs(rest)), (arm.step, ideals, exposed, left), strict=True)
    ]
    slow = f"+ {said[3]} left over" if rest >= 0 else f"− {said[3]} by which compute is faster than its ideal"
    return (
        f"A step on {name_ranks(arm)} takes {said[0]} = {said[1]} (1/{ranks} of {over}) + {said[2]} of exposed"
        f" communication {slow}; the ideal is {format_share(ideal / whole)} of it, the efficiency by medians."
    )


def format_part(seconds: float, measured: Estimate, unit: Unit) -> str:
    """`6.1 ± 1.1 ms`: a part that was rounded to add up, with the interval of its estimate."""
    number, width = format_value(seconds, unit), measured.half_width
    if width is None or measured.low is None or measured.high is None:
        return f"{number} {unit.symbol}"
    if width <= seconds:
        return f"{number} ± {format_value(width, unit)} {unit.symbol}"
    low, high = sorted((abs(measured.low), abs(measured.high))) if measured.value < 0 else (measured.low, measured.high)
    return f"{number} ({format_value(low, unit)} to {format_value(high, unit)}) {unit.symbol}"


def choose_reference(outcome: Outcome | None, spread: Sequence[Arm]) -> Arm | None:
    """The plain loop on one rank; where its intervals tell nothing, the strategy itself on one rank if that does."""
    ones = [find_arm(outcome, strategy="single"), find_arm(outcome, strategy="ddp", num_ranks=1)]
    found = [arm for arm in ones if arm is not None]
    telling = [
        arm for arm in found if all((ratio := divide_steps(arm, other)) and is_known(ratio) for other in spread[:1])
    ]
    return next(iter(telling or found), None)


def name_ranks(arm: Arm) -> str:
    """`4 ranks (oversubscribed)`."""
    return f"{arm.trial.num_ranks} ranks{' (oversubscribed)' if arm.trial.is_oversubscribed else ''}"


def answer_strategies(outcome: Outcome | None) -> Answers:
    dp, ddp = (find_arm(outcome, strategy=wanted) for wanted in ("dp", "ddp"))
    if dp is None or ddp is None:
        return {}
    ranks, model = ddp.trial.num_ranks, BYTES_PER_PARAMETER * count_parameters(ddp)
    through, each = 2 * (ranks - 1) * model, 2 * (ranks - 1) / ranks * model
    ratio = divide_steps(dp, ddp)
    emulated = " (DP's replicas are threads of one process here)" if dp.trial.is_emulated else ""
    verdict = judge(ratio) if ratio is not None else Verdict.UNRESOLVED
    verdicts = {
        Verdict.SLOWER: f"DDP is faster on {ranks} devices already",
        Verdict.FASTER: f"DP is still faster on {ranks} devices",
        Verdict.NO_DIFFERENCE: f"no difference on {ranks} devices",
        Verdict.UNRESOLVED: f"the interval includes no difference on {ranks} devices, where the hub carries only"
        f" {through / each:.0f} times the bytes of a DDP rank; on 8 it carries 8 times",
    }
    accepted = {
        Verdict.SLOWER: "here DDP is the better choice",
        Verdict.FASTER: "here DP is acceptable",
        Verdict.NO_DIFFERENCE: "here DP is acceptable",
        Verdict.UNRESOLVED: "as that may be 1 or more, this run does not show whether DP is acceptable here",
    }
    return {
        "device_0": join(
            "Because one process drives all devices and device 0 is its hub: it scatters the batch, sends the model to"
            " every replica in every step, gathers all outputs, computes the loss, adds up all gradients and updates"
            f" alone. The parameters are {format_bytes(model)}; sent out and returned as gradients,"
            f" {format_bytes(through)} pass through it in a step on {ranks} devices.",
            *quote(outcome, UTILIZATION.name, EXCESS.name),
        ),
        "architecture": join(
            "Because no device is special: every rank is a process with its own interpreter, keeps its replica, and"
            " takes part in a ring all-reduce of gradients in which each rank sends 2·M·(N − 1)/N bytes,"
            f" {format_bytes(each)} here and never more than {format_bytes(2 * model)}, bucket by bucket while backward"
            " still runs. In DP the bytes through device 0, 2·M·(N − 1), grow with the devices.",
            f"Here a DP step takes {say_wide('ratio', ratio)} times as long as a DDP step{emulated}:"
            f" {verdicts[verdict]}.",
            name_other_programs(outcome),
            *quote(outcome, VARIATION.name),
        ),
        "acceptable": (
            "On one machine with two or so devices, when a step computes for long against copying the model"
            f" ({format_bytes(through)} here), as with many samples per device, and when starting several processes is"
            " the harder part: notebooks, debugging, inference. The measure is DP's step over DDP's,"
            f" {say_wide('ratio', ratio)}{emulated}: {accepted[verdict]}."
        ),
    }


def name_other_programs(outcome: Outcome | None) -> str:
    """The load of other programs under each strategy, which a difference between strategies may come from."""
    cautions = outcome.document.cautions if outcome and outcome.document else ()
    found = [one.message for one in cautions if one.kind == OTHER_PROGRAMS.name]
    return f"Not all of that need be the strategy: {'; '.join(found)}." if found else ""


def join(*sentences: str) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def count_parameters(arm: Arm) -> int:
    return make_options(arm.trial.workload, arm.trial.options).count_parameters()
