"""The eighteen questions of the scaling assignment, each answered with this run's numbers and a reason.

Every function gives the answers of one row, in the order of its questions; nothing where too little was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_ablation
from scalelab.analysis.stats import Verdict, estimate_ratio, judge
from scalelab.recipes.evidence import (
    UNTOLD,
    divide_speedups,
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
from scalelab.records.trial import Option
from scalelab.studies.reproducibility import MEAN_ERROR, OTHER_SEED, WARMUP
from scalelab.studies.scaling.answer import AMDAHL
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.losses import LOSSES_EQUAL
from scalelab.studies.strategies.report import EXCESS, OTHER_PROGRAMS, UTILIZATION, VARIATION
from scalelab.units import choose_unit, format_bytes, format_interval, format_share, format_value, is_known
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
        place = (
            f"At {below[0]} ranks, from 100 % to {say_wide('share', efficiency)}: the fewest that are significantly"
            " below ideal."
        )
    return {
        "linear": f"{said}. Over {over} on one rank, {listed}.",
        "drop": place,
        "quantitative": join(
            *(split_step(plain, arm, over) for arm in spread if arm.trial.num_ranks in below or arm not in fair),
            *quote(outcome, AMDAHL.name),
        )
        or f"{UNTOLD}: the loss is within its interval.",
    }


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
    said = [f"{format_value(number * unit.factor, unit)} {unit.symbol}" for number in (whole, ideal, sent, abs(rest))]
    slow = (
        f"+ {said[3]} of compute that does not shrink with the batch or slows down beside other ranks"
        if rest >= 0
        else f"− {said[3]} by which compute is faster than its ideal"
    )
    return (
        f"A step on {name_ranks(arm)} takes {said[0]} = {said[1]} (1/{ranks} of {over}) + {said[2]} of exposed"
        f" communication {slow}: {said[1]} of {said[0]} is {format_share(ideal / whole)}, the efficiency by medians."
    )


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


def answer_sizes(outcome: Outcome | None) -> Answers:
    by_size = list_sizes(outcome)
    if len(by_size) < 2:
        return {}
    small, large = by_size[0], by_size[-1]
    speedups = {
        ranks: (divide_steps(small[1], small[ranks]), divide_steps(large[1], large[ranks]))
        for ranks in sorted(small.keys() & large.keys())
        if ranks > 1
    }
    known = {ranks: (one, other) for ranks, (one, other) in speedups.items() if one is not None and other is not None}
    if not known:
        return {}
    gains = {ranks: divide_speedups((large[1], large[ranks]), (small[1], small[ranks])) for ranks in known}
    listed = "; ".join(
        f"{name_ranks(large[ranks])}: {say_wide('ratio', of_large)} for {name(large[1])}, {say_wide('ratio', of_small)}"
        f" for {name(small[1])}"
        for ranks, (of_small, of_large) in known.items()
    )
    fair = max((ranks for ranks in known if not large[ranks].trial.is_oversubscribed), default=max(known))
    rates = [f"{find_flops(arms[1]) / 1e9:.3g} GFLOP/s ({name(arms[1])})" for arms in (small, large)]
    return {
        "efficient": join(
            judge_sizes(gains),
            f"Speedup over one rank, {listed}.",
            describe_gains(gains),
        ),
        "differ": join(
            "A step computes 6·P·B operations and all-reduces 4·P bytes, so per byte both models compute the same, and"
            " size alone does not decide. What does not grow with P can: kernel launches, Python, the latency of every"
            f" bucket; caches hold a small model only. Here, a step on {fair} ranks takes"
            f" {say_wide('seconds', small[fair].step)} and {say_wide('seconds', large[fair].step)}, and one rank"
            f" computes at {' and '.join(rates)}.",
            *describe_exposed(outcome),
        ),
        "bottleneck": find_threshold([arms[ranks] for arms in (small, large) for ranks in known]),
    }


def describe_exposed(outcome: Outcome | None) -> Iterator[str]:
    """The share of a step that communication adds to it, of every model on the most ranks that share no cores."""
    found = []
    for arms in list_sizes(outcome):
        fair = [arm for ranks, arm in arms.items() if ranks > 1 and not arm.trial.is_oversubscribed]
        arm = max(fair, key=lambda arm: arm.trial.num_ranks, default=None)
        ratio = measure_balance(arm) if arm is not None else None
        if arm is not None and ratio is not None:
            share = ratio.map(lambda balance: max(0.0, balance / (1 + balance)))
            found.append(f"{format_interval('share', share)} for {name(arm)} on {name_ranks(arm)}")
    if found:
        yield f"Exposed communication, as a share of the step: {', '.join(found)}."


def judge_sizes(gains: Mapping[int, Estimate | None]) -> str:
    """Which model DDP speeds up more, by the large one's speedup over the small one's on every number of ranks."""
    words = {
        Verdict.SLOWER: "In the large one",
        Verdict.FASTER: "In the small one",
        Verdict.NO_DIFFERENCE: "In neither",
    }
    verdicts = {ranks: judge(gain) for ranks, gain in gains.items() if gain is not None}
    clear = {verdict: [ranks for ranks, found in verdicts.items() if found is verdict] for verdict in words}
    said = [f"{words[verdict]}: clear on {join_ranks(found)}" for verdict, found in clear.items() if found]
    open_ranks = [ranks for ranks, found in verdicts.items() if found is Verdict.UNRESOLVED]
    if not said:
        values = [gain.value for gain in gains.values() if gain is not None]
        higher = "large" if min(values) > 1 else "small" if max(values) < 1 else ""
        tends = f"; by the estimates, in the {higher} one" if higher else ""
        return f"{UNTOLD}, as the intervals include no difference{tends}."
    rest = f"; not resolved on {join_ranks(open_ranks)}" if open_ranks else ""
    return f"{'. '.join(said)}{rest}."


def describe_gains(gains: Mapping[int, Estimate | None]) -> str:
    """The speedup of the large model over that of the small one, round by round."""
    listed = ", ".join(
        f"{format_interval('ratio', gain)} on {ranks} ranks" for ranks, gain in gains.items() if gain is not None
    )
    return f"The large model's speedup over the small one's, round by round: {listed}." if listed else ""


def join_ranks(ranks: Sequence[int]) -> str:
    """`2 and 4 ranks`."""
    return f"{' and '.join(map(str, ranks))} ranks"


def find_flops(arm: Arm) -> float:
    """FLOP/s of a step on one rank."""
    options = make_options(arm.trial.workload, arm.trial.options)
    return options.flops_per_sample() * arm.trial.global_batch / arm.step.value


def list_sizes(outcome: Outcome | None) -> list[dict[int, Arm]]:
    """The arms of every model by number of ranks, one rank among them; the smallest model first."""
    found: dict[Option, dict[int, Arm]] = {}
    for arm in list_arms(outcome):
        found.setdefault(arm.trial.options["dim"], {}).setdefault(arm.trial.num_ranks, arm)
    complete = [arms for arms in found.values() if 1 in arms and len(arms) > 1]
    return sorted(complete, key=lambda arms: count_parameters(arms[1]))


def find_threshold(cases: Sequence[Arm]) -> str:
    """Where the exposed all-reduce of a step takes as long as its computing, from steps with and without it.

    With b samples per rank, computing takes c·b and the all-reduce m·(N − 1)/N (a ring, Patarasuk and Yuan 2009), so
    their ratio r is known from one measurement: it is 1 at r·b samples per rank, over a link r times as fast, or, with
    the global batch fixed, at 1 + (N − 1)/r ranks.
    """
    bound = [f"{name(arm)} on {name_ranks(arm)}" for arm in cases if is_bound_by_sending(arm)]
    here = f" Here it is for {' and '.join(bound)}." if bound else ""
    return join(
        f"When the all-reduce of a step takes longer than its computing.{here}",
        *(describe_balance(arm) for arm in cases if not arm.trial.is_oversubscribed or is_bound_by_sending(arm)),
        "Computing grows with the samples of a rank while the gradients keep their bytes.",
        "With the global batch fixed, the samples of a rank shrink as 1/N: more ranks end on the side of"
        " communication.",
    )


def measure_balance(arm: Arm) -> Estimate | None:
    """Exposed communication over computing: a step over one without communication, less 1."""
    return estimate_ratio(arm.clean, arm.comm_free).map(lambda whole: whole - 1) if any(arm.comm_free) else None


def is_bound_by_sending(arm: Arm) -> bool:
    ratio = measure_balance(arm)
    return ratio is not None and ratio.low is not None and ratio.low > 1


def describe_balance(arm: Arm) -> str:
    """Exposed communication over computing in one case, and what follows; within its interval."""
    ranks, batch = arm.trial.num_ranks, arm.trial.batch_per_rank
    where = f"{name(arm)} on {name_ranks(arm)} with {batch} samples each"
    ratio = measure_balance(arm)
    if ratio is None:
        return f"{where}: not measured without communication."
    if ratio.low is None or ratio.high is None:
        return f"{where}: unknown, because this run has no interval."
    listed = f"{where}: exposed communication over computing is {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    if ratio.low <= 0:
        most = (
            f", so the threshold is below {max(0.0, ratio.high) * batch:.0f} samples per rank" if ratio.high < 1 else ""
        )
        return f"{listed}, which includes 0: this run does not show where the threshold lies{most}."
    threshold, limit = scale_text(ratio, batch), ratio.map(lambda r: 1 + (ranks - 1) / r)
    verdict = "this run does not show which of the two is the bottleneck"
    if ratio.low > 1:
        exposed = ratio.value / (1 + ratio.value) * arm.step.value
        cause = "; it includes waiting for a core" if arm.trial.is_oversubscribed else ""
        verdict = (
            f"communication is the bottleneck, {say_wide('seconds', exposed)} of a step of"
            f" {say_wide('seconds', arm.step.value)}{cause}"
        )
    elif ratio.high < 1:
        verdict = f"computing is the bottleneck, up to {limit.value:.0f} ranks at this global batch"
    return f"{listed}, so the threshold is {threshold} samples per rank and {verdict}."


def scale_text(ratio: Estimate, factor: float) -> str:
    """`12 (9 to 15)`."""
    ends = (
        "" if ratio.low is None or ratio.high is None else f" ({ratio.low * factor:.0f} to {ratio.high * factor:.0f})"
    )
    return f"{ratio.value * factor:.0f}{ends}"


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
    return {
        "device_0": join(
            "Because one process drives all devices and device 0 is its hub: it scatters the batch, sends the model to"
            " every replica in every step, gathers all outputs, computes the loss, adds up all gradients and updates"
            f" alone. Of {format_bytes(model)} of parameters, {format_bytes(through)} pass through it in a step on"
            f" {ranks} devices.",
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
            "On one machine with two or so devices, when a step is long against copying the model"
            f" ({format_bytes(through)} here), as with a large batch or a small model, and when starting several"
            " processes is the harder part: notebooks, debugging, inference. The measure is DP's step over DDP's,"
            f" {say_wide('ratio', ratio)} here: within a few per cent of 1, DP costs nothing that matters."
        ),
    }


def name_other_programs(outcome: Outcome | None) -> str:
    """The load of other programs under each strategy, which a difference between strategies may come from."""
    cautions = outcome.document.cautions if outcome and outcome.document else ()
    found = [one.message for one in cautions if one.kind == OTHER_PROGRAMS.name]
    return f"Not all of that need be the strategy: {'; '.join(found)}." if found else ""


def join(*sentences: str) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def name(arm: Arm) -> str:
    return make_options(arm.trial.workload, arm.trial.options).label


def count_parameters(arm: Arm) -> int:
    return make_options(arm.trial.workload, arm.trial.options).count_parameters()
