"""Task 3 of the scaling assignment: a small and a large model. When communication is the bottleneck is in `limits`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import estimate_centre, scale_exposed
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
from scalelab.recipes.scaling.limits import (
    find_share,
    find_threshold,
    join_ranks,
    measure_balance,
    measure_exposed,
    name,
)
from scalelab.recipes.scaling.questions import (
    BYTES_PER_PARAMETER,
    Answers,
    count_parameters,
    join,
    name_ranks,
)
from scalelab.records.trial import Option
from scalelab.report.document import Table, make_cell
from scalelab.report.tables import (
    INTERVAL_NOTE,
    bytes_column,
    count_column,
    make_table,
    ratio_column,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.sweep import divide_by_ranks, explain_marks, find_marks, measure_speedup
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
            f"The small model is {name(small[1])}, the large one {name(large[1])} (width × layers).",
            f"Speedup over one rank, {listed}.",
            "In both models more ranks are slower than one." if all(map(is_loss, speedups.values())) else "",
            describe_gains(gains),
        ),
        "differ": join(
            "Because costs that do not grow with the model (kernel launches, Python, the latency of an all-reduce)"
            " weigh more in a small one.",
            compare_bytes(small[fair], large[fair]),
            *describe_exposed(outcome),
            "Size alone does not decide: with P parameters and batch B, a step computes 6·P·B operations and"
            " all-reduces"
            f" 4·P bytes, the same ratio for both models. But one rank computes at {' and '.join(rates)}.",
            compare_computing([(arms[1], arms[fair]) for arms in (small, large)]),
        ),
        "bottleneck": find_threshold([(arms[1], arms[ranks]) for arms in (small, large) for ranks in known]),
    }


def make_case_table(outcome: Outcome | None) -> Table | None:
    """The table that the task asks for: both cases on every number of ranks, with what communication adds."""
    sizes = list_sizes(outcome)
    if len(sizes) < 2:
        return None
    cases = ("small", *("middle" for _ in sizes[1:-1]), "large")
    rows = [(case, arm, arms[1]) for case, arms in zip(cases, sizes, strict=True) for arm in arms.values()]
    marks = explain_marks([arm for _, arm, _ in rows])
    return make_table(
        rows,
        text_column("case", "case", lambda row: make_cell(f"{row[0]}, {name(row[1])}", mark=find_marks(row[1]))),
        count_column("ranks", "ranks", lambda row: row[1].trial.num_ranks),
        seconds_column("step_seconds", "step", lambda row: estimate_centre(row[1].clean)),
        ratio_column("speedup", "speedup", lambda row: measure_speedup(row[1], row[2])),
        share_column(
            "efficiency",
            "efficiency",
            lambda row: divide_by_ranks(measure_speedup(row[1], row[2]), row[1]),
            shows_interval=False,
            is_detail=True,
        ),
        share_column("exposed", "exposed comm, of the step", lambda row: measure_exposed(row[1])),
        bytes_column("gradient_bytes", "gradients", lambda row: BYTES_PER_PARAMETER * count_parameters(row[1])),
        title="A small and a large model",
        notes=(
            INTERVAL_NOTE,
            *marks,
            "step: the centre of those of the launches; speedup: over one rank of that model",
        ),
    )


def name_better(outcome: Outcome | None) -> Iterator[str]:
    """For which model DDP is more efficient, for a summary: on the most ranks that share no cores."""
    sizes = list_sizes(outcome)
    shared = [n for n in sizes[0] if n in sizes[-1] and not sizes[-1][n].trial.is_oversubscribed] if sizes else []
    if len(sizes) < 2 or max(shared) == 1:
        return
    ranks, small, large = max(shared), sizes[0], sizes[-1]
    gain = divide_speedups((large[1], large[ranks]), (small[1], small[ranks]))
    words = {
        Verdict.SLOWER: "DDP is more efficient for the larger model",
        Verdict.FASTER: "DDP is more efficient for the smaller model",
        Verdict.NO_DIFFERENCE: "DDP is as efficient for both models",
        Verdict.UNRESOLVED: "This run does not show for which model DDP is more efficient",
    }[judge(gain) if gain is not None else Verdict.UNRESOLVED]
    of_small, of_large = (say_wide("ratio", divide_steps(arms[1], arms[ranks])) for arms in (small, large))
    yield f"{words}: on {ranks} ranks its speedup is {of_large} for {name(large[1])}, {of_small} for {name(small[1])}."


def is_loss(speedups: Sequence[Estimate | None]) -> bool:
    """Whether all of these are clearly below 1."""
    return all(speedup is not None and judge(speedup) is Verdict.FASTER for speedup in speedups)


def compare_bytes(small: Arm, large: Arm) -> str:
    """What a byte of gradients costs in either model: more in the small one where latency is most of it."""
    if not any(small.comm_free) or not any(large.comm_free):
        return ""
    costs = []
    for arm in (small, large):
        num_bytes = BYTES_PER_PARAMETER * count_parameters(arm)
        exposed = scale_exposed(arm.clean, arm.comm_free, estimate_centre(arm.clean).value)
        costs.append((exposed, num_bytes, scale(exposed, 1 / num_bytes) or exposed))
    listed = " and ".join(
        f"{say_wide('seconds', exposed)} for {format_bytes(size)} ({1e9 * each.value:.2g} ns per byte)"
        for exposed, size, each in costs
    )
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
    return f"Without the all-reduce a step takes {listed} of one rank's, {share:.2f} if all were shared{cause}."


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


def find_flops(arm: Arm) -> float:
    """FLOP/s of a step on one rank."""
    options = make_options(arm.trial.workload, arm.trial.options)
    return options.flops_per_sample() * arm.trial.global_batch / estimate_centre(arm.clean).value


def list_sizes(outcome: Outcome | None) -> list[dict[int, Arm]]:
    """The arms of every model by number of ranks, one rank among them; the smallest model first."""
    found: dict[Option, dict[int, Arm]] = {}
    for arm in list_arms(outcome):
        found.setdefault(arm.trial.options["dim"], {}).setdefault(arm.trial.num_ranks, arm)
    complete = [arms for arms in found.values() if 1 in arms and len(arms) > 1]
    return sorted(complete, key=lambda arms: count_parameters(arms[1]))
