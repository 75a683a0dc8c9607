"""The eighteen questions of the scaling assignment, each answered with this run's numbers and a reason.

Every function gives the answers of one row, in the order of its questions; nothing where too little was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_subtraction, scale_exposed
from scalelab.analysis.stats import Verdict, estimate_difference, judge
from scalelab.recipes.evidence import (
    UNTOLD,
    count_parameters,
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
from scalelab.studies.shared.arms import Arm, join_words
from scalelab.studies.shared.losses import LOSSES_EQUAL
from scalelab.units import (
    Unit,
    choose_unit,
    format_bytes,
    format_count,
    format_share,
    format_value,
    is_known,
)

BYTES_PER_PARAMETER = 4
Answers = dict[str, str]
"""By the name of the question."""


def answer_timing(outcome: Outcome | None) -> Answers:
    if not list_arms(outcome):
        return {}
    return {
        "warmup": join_words(
            "Because the first steps include one-time costs: memory and thread pools, lazy imports, DDP's buckets and"
            " connections, and on a GPU the CUDA context, kernel loading, autotuning and rising clocks. So they are run"
            " and not counted.",
            *quote(outcome, WARMUP.name, MEAN_ERROR.name),
            "A step is timed on every rank, rank 0 included, from before it takes its batch and starts forward to after"
            " the optimizer, and the slowest rank's time counts. The other tasks drop as many first steps as a test"
            " finds slower than the rest (see each setting line).",
        ),
        "randomness": join_words(
            "Because two runs must differ only in what is compared. With a fixed seed (0, and 1 to compare), weights,"
            " data and order are the same: equal losses prove that both runs did the same work, so a difference in time"
            " or loss comes from the change in the code.",
            *quote(outcome, LOSSES_EQUAL.name, OTHER_SEED.name),
        ),
    }


def answer_strong(outcome: Outcome | None, batches: Outcome | None = None) -> Answers:
    """`batches`: what the plain loop takes with the smaller batch of a rank."""
    spread = list_spread(outcome)
    plain = choose_reference(outcome, spread)
    if plain is None or not spread:
        return {}
    over = "the plain loop" if find_strategy(plain.trial.strategy).is_plain else plain.trial.strategy
    fair = [arm for arm in spread if not arm.trial.is_oversubscribed]
    excess, below, is_resolved = find_losses(plain, fair)
    said = "No" if below else "Yes, within the error" if is_resolved else UNTOLD
    listed = "; ".join(
        f"{name_ranks(arm)}: speedup {say_wide('ratio', divide_steps(plain, arm))}, efficiency"
        f" {say_efficiency(plain, arm)}"
        for arm in spread
    )
    place = "Nowhere significantly." if is_resolved else f"{UNTOLD}: the intervals include the ideal."
    if below:
        first = next(arm for arm in fair if arm.trial.num_ranks == below[0])
        further = list_further(plain, spread)
        place = f"At {below[0]} ranks already, from 100 % to {say_efficiency(plain, first)}{further}."
    shown = [arm for arm in spread if arm.trial.num_ranks in below or arm not in fair]
    own = find_arm(outcome, strategy=spread[0].trial.strategy, num_ranks=1)
    parts = join_words(*(split_step(plain, arm, over, batches, max(excess, default=1), own) for arm in shown))
    return {
        "linear": join_words(f"{said}. Over {over} on one rank, {listed}.", describe_disturbed(plain, own, spread)),
        "drop": place,
        "quantitative": join_words(name_threads([plain, *spread]), parts, *quote(outcome, AMDAHL.name))
        if parts or below
        else f"{UNTOLD}: the loss is within its interval.",
    }


def say_efficiency(plain: Arm, arm: Arm) -> str:
    return say_wide("share", scale(divide_steps(plain, arm), 1 / arm.trial.num_ranks))


def describe_disturbed(plain: Arm, own: Arm | None, spread: Sequence[Arm]) -> str:
    """That the plain loop was too slow, where the strategy on one rank, which does the same and more, is faster."""
    ratio = divide_steps(plain, own)
    if own is None or ratio is None or own is plain or judge(ratio) is not Verdict.SLOWER:
        return ""
    over_own = " and ".join(f"{say_efficiency(own, arm)} on {arm.trial.num_ranks} ranks" for arm in spread)
    return (
        f"{own.label} ran {say_wide('ratio', ratio)} times as fast as the plain loop, although it does the same work"
        " and more: rather noise in the plain loop than a gain, and it makes these efficiencies too high. Over"
        f" {own.label}, efficiency is {over_own}."
    )


def find_losses(plain: Arm, fair: Sequence[Arm]) -> tuple[dict[int, Estimate | None], list[int], bool]:
    """A step over its ideal by ranks, the ranks on which it is surely longer, and whether every verdict is clear."""
    excess = {arm.trial.num_ranks: scale(divide_steps(arm, plain), arm.trial.num_ranks) for arm in fair}
    verdicts = {ranks: judge(ratio) for ranks, ratio in excess.items() if ratio is not None}
    below = [ranks for ranks, verdict in verdicts.items() if verdict is Verdict.SLOWER]
    return excess, below, bool(verdicts) and Verdict.UNRESOLVED not in verdicts.values()


def name_linearity(outcome: Outcome | None) -> str:
    """`Not linear`, for a summary."""
    spread = list_spread(outcome)
    plain = choose_reference(outcome, spread)
    if plain is None or not spread:
        return ""
    _, below, is_resolved = find_losses(plain, [arm for arm in spread if not arm.trial.is_oversubscribed])
    return "Scaling is not linear" if below else "Scaling is linear within the error" if is_resolved else UNTOLD


def list_further(plain: Arm, spread: Sequence[Arm]) -> str:
    """The efficiency on more ranks than the fewest."""
    return "".join(f", to {say_efficiency(plain, arm)} at {name_ranks(arm)}" for arm in spread[1:])


def name_threads(arms: Sequence[Arm]) -> str:
    """How much hardware ranks add: nothing can be gained where one already has it all."""
    threads = {arm.trial.threads_per_rank for arm in arms}
    if len(threads) != 1:
        return ""
    (each,) = threads
    fair = max((arm.trial.num_ranks for arm in arms if not arm.trial.is_oversubscribed), default=1)
    crowded = "; more ranks share these" if any(arm.trial.is_oversubscribed for arm in arms) else ""
    return (
        f"Every rank computes with {format_count(each, 'thread')}, as the plain loop does, so {fair} ranks use"
        f" {fair} times its cores{crowded}."
    )


def split_step(plain: Arm, arm: Arm, over: str, batches: Outcome | None, num_fair: int, own: Arm | None) -> str:
    """A step as its ideal, exposed communication and the rest, in numbers that add up as they are printed."""
    if not any(arm.comm_free):
        return ""
    ranks, exposed = arm.trial.num_ranks, scale_exposed(arm.clean, arm.comm_free, arm.step.value)
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
    cores = num_fair if arm.trial.is_oversubscribed else None
    num_bytes = BYTES_PER_PARAMETER * count_parameters(arm)
    rate = f", {format_bytes(num_bytes)} at {format_bytes(num_bytes / exposed.value)}/s" if exposed.value > 0 else ""
    split = (
        f"A step on {name_ranks(arm)} takes {said[0]} = {said[1]} (1/{ranks} of {over}) + {said[2]} of exposed"
        f" communication ({format_share(sent / whole)} of the step{rate}) {slow}."
    )
    return join_words(split, explain_rest(plain, arm, rest, unit, cores, batches, own) if rest > 0 else "")


def explain_rest(
    plain: Arm,
    arm: Arm,
    rest: float,
    unit: Unit,
    cores: int | None,
    batches: Outcome | None,
    own: Arm | None = None,
) -> str:
    """What is left over in parts that add up: missing cores or what a smaller batch does not save, what the strategy
    takes on one rank already (`own`), and the rest, which nothing here measures."""
    ranks, batch = arm.trial.num_ranks, plain.trial.global_batch
    ratio = measure_smaller(batches, batch, ranks)
    share: Estimate | None = None
    cause = ""
    if cores is not None:
        share = Estimate(value=1 / cores - 1 / ranks)
        cause = f"from missing cores ({ranks} ranks have those of {cores}: 1/{cores} − 1/{ranks} of the plain loop)"
    elif ratio is not None:
        share = ratio.map(lambda found: found - 1 / ranks)
        cause = (
            f"from work that does not shrink with the batch (with {batch // ranks} instead of {batch} samples the plain"
            f" loop still takes {say_wide('ratio', ratio)} of its step, not {1 / ranks:.2f}: S5B)"
        )
    if share is None or share.value <= 0:
        return f"What is left over is compute that does not shrink with the batch{describe_update([plain, arm])}."
    parts = [(share.map(lambda found: found * plain.step.value), cause)]
    if own is not None and find_strategy(plain.trial.strategy).is_plain:
        overhead = estimate_difference(own.clean, plain.clean)
        parts += [(overhead, f"from {own.trial.strategy}'s own work, as on one rank ({own.label} less the plain loop)")]
    said: list[str] = []
    left = rest
    for lost, words in parts:
        known = round(lost.value / unit.factor, unit.decimals)
        if known >= left:
            return f"That is no more than comes {' and '.join([*(found for _, found in parts[: len(said)]), words])}."
        if known > 0:
            said.append(f"{format_part(known * unit.factor, lost, unit)} come {words}")
            left -= known
    unknown = f"{format_value(left * unit.factor, unit)} {unit.symbol} are not explained by this run"
    return f"Of what is left over, {', '.join(said)}, and {unknown} ({name_suspects(cores)} would add to them)."


def name_suspects(cores: int | None) -> str:
    """What may slow computing on several ranks, and was not measured apart."""
    shared = "caches and memory that ranks share, and other programs,"
    return shared if cores is None else f"waiting for a core, switching between ranks, and {shared}"


def measure_smaller(batches: Outcome | None, batch: int, ranks: int) -> Estimate | None:
    """The plain loop's step with one rank's share of the batch, over that with all of it."""
    small, whole = (find_arm(batches, strategy="single", global_batch=size) for size in (batch // ranks, batch))
    return divide_steps(small, whole)


def describe_update(arms: Sequence[Arm]) -> str:
    """What the optimizer takes: every rank updates all parameters, however few samples it has."""
    times = [(arm.trial.num_ranks, arm.phase("optimizer")) for arm in arms]
    known = [f"{say_wide('seconds', found)} on {format_count(n, 'rank')}" for n, found in times if found is not None]
    if len(known) < 2:
        return ""
    return f"; the optimizer, which updates all parameters on every rank, takes {' and '.join(known)}"


def format_part(seconds: float, measured: Estimate, unit: Unit) -> str:
    """`6.1 ± 1.1 ms`: a part that was rounded to add up, with the interval of its estimate."""
    number, width = format_value(seconds, unit), measured.half_width
    if width is None or measured.low is None or measured.high is None:
        return f"{number} {unit.symbol}"
    if width <= seconds / 2:
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
