"""Task 3 of the scaling assignment: a small and a large model, and where communication outweighs computing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_ablation
from scalelab.analysis.stats import Verdict, estimate_ratio, judge
from scalelab.recipes.evidence import (
    UNTOLD,
    compare_estimates,
    divide_speedups,
    divide_steps,
    list_arms,
    say_wide,
    scale,
)
from scalelab.recipes.recipe import Outcome
from scalelab.recipes.scaling.questions import (
    BYTES_PER_PARAMETER,
    Answers,
    count_parameters,
    join,
    name_ranks,
)
from scalelab.records.trial import Option
from scalelab.studies.shared.arms import Arm
from scalelab.units import format_bytes, format_interval
from scalelab.workloads.catalogue import make_options


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
            judge_sizes(gains, [ranks for ranks in known if large[ranks].trial.is_oversubscribed]),
            f"Speedup over one rank, {listed}.",
            describe_gains(gains),
        ),
        "differ": join(
            "By what does not grow with the model: kernel launches, Python, latencies. A step computes"
            " 6·P·B operations and all-reduces 4·P bytes, so per byte both compute the same, and size alone does not"
            f" decide. Here one rank computes at {' and '.join(rates)}.",
            compare_bytes(small[fair], large[fair]),
            *describe_exposed(outcome),
            compare_computing([(arms[1], arms[fair]) for arms in (small, large)]),
        ),
        "bottleneck": find_threshold([arms[ranks] for arms in (small, large) for ranks in known]),
    }


def compare_bytes(small: Arm, large: Arm) -> str:
    """What a byte of gradients costs in either model: more in the small one where latency is most of it."""
    if not any(small.comm_free) or not any(large.comm_free):
        return ""
    costs = []
    for arm in (small, large):
        num_bytes = BYTES_PER_PARAMETER * count_parameters(arm)
        exposed = communication_by_ablation(arm.clean, arm.comm_free).seconds
        costs.append((exposed, num_bytes, scale(exposed, 1 / num_bytes) or exposed))
    listed = " and ".join(f"{say_wide('seconds', exposed)} for {format_bytes(size)}" for exposed, size, _ in costs)
    (_, _, of_small), (_, _, of_large) = costs
    order, more = compare_estimates(of_small, of_large), of_small.value / of_large.value if of_large.value > 0 else 0.0
    tends = f"by the estimates a byte costs {more:.1f} times as much in the small model, " if more > 1 else ""
    verdict = {
        1: "a byte costs more in the small model, so most of its communication is latency, not bytes",
        0: f"{tends}no difference beyond the intervals",
        -1: "a byte costs more in the large model",
    }[order]
    return f"The all-reduce on {name_ranks(small)} exposes {listed}: {verdict}."


def describe_exposed(outcome: Outcome | None) -> Iterator[str]:
    """The share of a step that communication adds to it, of every model on the most ranks that share no cores."""
    found = []
    for arms in list_sizes(outcome):
        fair = [arm for ranks, arm in arms.items() if ranks > 1 and not arm.trial.is_oversubscribed]
        arm = max(fair, key=lambda arm: arm.trial.num_ranks, default=None)
        ratio = measure_balance(arm) if arm is not None else None
        if arm is not None and ratio is not None:
            found.append(f"{format_interval('share', find_share(ratio))} for {name(arm)} on {name_ranks(arm)}")
    if found:
        yield f"Exposed communication, as a share of the step: {', '.join(found)}."


def compare_computing(pairs: Sequence[tuple[Arm, Arm]]) -> str:
    """How much of one rank's step remains on several without the all-reduce: 1/N where computing is shared in full."""
    if not all(any(many.comm_free) for _, many in pairs):
        return ""
    share = 1 / pairs[0][1].trial.num_ranks
    left = [estimate_ratio(many.comm_free, one.clean) for one, many in pairs]
    listed = " and ".join(format_interval("ratio", ratio) for ratio in left)
    is_more = all(ratio.low is not None and ratio.low > share for ratio in left)
    cause = ": compute is not shared in full" if is_more else ""
    return f"Without it a step takes {listed} of one rank's, {share:.2f} if all were shared{cause}."


def judge_sizes(gains: Mapping[int, Estimate | None], crowded: Collection[int] = ()) -> str:
    """Which model DDP speeds up more, by the large one's speedup over the small one's on every number of ranks.

    What only ranks show that share cores (`crowded`) is said to be theirs.
    """
    words = {
        Verdict.SLOWER: "In the large one",
        Verdict.FASTER: "In the small one",
        Verdict.NO_DIFFERENCE: "In neither",
    }
    verdicts = {ranks: judge(gain) for ranks, gain in gains.items() if gain is not None}
    clear = {verdict: [ranks for ranks, found in verdicts.items() if found is verdict] for verdict in words}
    shared = {True: "clear only on {}, which share cores", False: "clear on {}"}
    said = [
        f"{words[verdict]}: {shared[set(found) <= set(crowded)].format(join_ranks(found))}"
        for verdict, found in clear.items()
        if found
    ]
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
        *map(describe_balance, cases),
        "Computing grows with the samples of a rank while the gradients keep their bytes: with the global batch fixed,"
        " more ranks, each with cores of its own, end on the side of communication.",
    )


def measure_balance(arm: Arm) -> Estimate | None:
    """Exposed communication over computing: a step over one without communication, less 1."""
    return estimate_ratio(arm.clean, arm.comm_free).map(lambda whole: whole - 1) if any(arm.comm_free) else None


def find_share(balance: Estimate) -> Estimate:
    """Of a step, what communication adds to it: r/(1 + r) for exposed communication over computing."""
    return balance.map(lambda ratio: max(0.0, ratio / (1 + ratio)))


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
    so = f"so the threshold is {threshold} samples per rank and "
    verdict = "this run does not show which of the two is the bottleneck"
    if ratio.low > 1:
        cause = "; it includes waiting for a core" if arm.trial.is_oversubscribed else ""
        verdict = f"communication is the bottleneck, {format_interval('share', find_share(ratio))} of the step{cause}"
    elif ratio.high < 1 and arm.trial.is_oversubscribed:
        so, verdict = "so ", "computing is the bottleneck: sharing cores slows it too, and no limit follows"
    elif ratio.high < 1:
        verdict = f"computing is the bottleneck, up to {scale_text(limit, 1)} ranks at this global batch"
    return f"{listed}, {so}{verdict}."


def scale_text(ratio: Estimate, factor: float) -> str:
    """`12 (9 to 15)`."""
    ends = (
        "" if ratio.low is None or ratio.high is None else f" ({ratio.low * factor:.0f} to {ratio.high * factor:.0f})"
    )
    return f"{ratio.value * factor:.0f}{ends}"


def name(arm: Arm) -> str:
    return make_options(arm.trial.workload, arm.trial.options).label
