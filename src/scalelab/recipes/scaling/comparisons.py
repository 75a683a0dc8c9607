"""Tasks 3 and 4 of the scaling assignment: a small model beside a large one, and DataParallel beside DDP.

When communication is the bottleneck is in `limits`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.quality import estimate_variation
from scalelab.analysis.speedup import estimate_centre, scale_exposed
from scalelab.analysis.stats import Verdict, estimate_ratio, judge
from scalelab.recipes.evidence import (
    UNTOLD,
    compare_estimates,
    count_parameters,
    divide_speedups,
    divide_steps,
    find_arm,
    list_arms,
    list_tables,
    quote,
    say_wide,
    scale,
)
from scalelab.recipes.feasibility import count_moments
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes
from scalelab.recipes.scaling.limits import (
    describe_exposed,
    find_threshold,
    join_ranks,
    list_sizes,
    measure_exposed,
    name,
)
from scalelab.recipes.scaling.questions import BYTES_PER_PARAMETER, Answers, name_ranks
from scalelab.report.document import Table, make_cell
from scalelab.report.tables import (
    INTERVAL_NOTE,
    Field,
    bytes_column,
    count_column,
    make_table,
    ratio_column,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.shared.arms import Arm, join_words
from scalelab.studies.shared.sweep import (
    divide_by_ranks,
    explain_marks,
    find_marks,
    make_sweep_table,
    measure_speedup,
    step_column,
)
from scalelab.studies.strategies.answer import DeviceSummary, list_devices
from scalelab.studies.strategies.report import EXCESS, OTHER_PROGRAMS, UTILIZATION, VARIATION
from scalelab.units import format_bytes, format_interval, format_share
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
        "efficient": join_words(
            judge_sizes(gains, [ranks for ranks in known if large[ranks].trial.is_oversubscribed]),
            f"The small model is {name(small[1])}, the large one {name(large[1])} (width × layers).",
            f"Speedup over one rank, {listed}.",
            "In both models more ranks are slower than one." if all(map(is_loss, speedups.values())) else "",
            describe_gains(gains),
        ),
        "differ": join_words(
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


def compare_computing(pairs: Sequence[tuple[Arm, Arm]]) -> str:
    """How much of one rank's step remains on several without the all-reduce: 1/N where computing is shared in full."""
    if not all(any(many.comm_free) for _, many in pairs):
        return ""
    share = 1 / pairs[0][1].trial.num_ranks
    left = [estimate_ratio(many.comm_free, one.clean) for one, many in pairs]
    listed = " and ".join(format_interval("ratio", ratio) for ratio in left)
    is_more = all(ratio.is_above(share) for ratio in left)
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


STUDY_TABLES = 3
"""Of the study after ours: strategies, devices, and these over time."""
BEARABLE = 1.1
"""DP's step over DDP's up to which DP is acceptable."""


def answer_strategies(outcome: Outcome | None) -> Answers:
    dp, ddp = (find_arm(outcome, strategy=wanted) for wanted in ("dp", "ddp"))
    if dp is None or ddp is None:
        return {}
    ranks, model = ddp.trial.num_ranks, BYTES_PER_PARAMETER * count_parameters(ddp)
    through, each = 2 * (ranks - 1) * model, 4 * (ranks - 1) / ranks * model
    ratio = divide_steps(dp, ddp)
    emulated = " (DP's replicas are threads of one process here)" if dp.trial.is_emulated else ""
    verdict, loaded = judge(ratio) if ratio is not None else Verdict.UNRESOLVED, name_other_programs(outcome)
    verdicts = {
        Verdict.SLOWER: f"DDP is faster on {ranks} devices already",
        Verdict.FASTER: f"DP is still faster on {ranks} devices",
        Verdict.NO_DIFFERENCE: f"no difference on {ranks} devices",
        Verdict.UNRESOLVED: f"the interval includes no difference on {ranks} devices",
    }
    accepted = {
        Verdict.SLOWER: "here DDP is the better choice",
        Verdict.FASTER: "here DP is acceptable",
        Verdict.NO_DIFFERENCE: "here DP is acceptable",
        Verdict.UNRESOLVED: "as that may be 1 or more, this run does not show whether DP is acceptable here",
    }
    if verdict is Verdict.UNRESOLVED and ratio is not None and ratio.high is not None and ratio.high <= BEARABLE:
        accepted[verdict] = f"at most {format_share(ratio.high - 1)} longer, so here DP is acceptable in place of DDP"
    said = "unknown" if ratio is None else format_interval("ratio", ratio)
    return {
        "device_0": join_words(
            "Because one process drives all devices and device 0 is its hub: it scatters the batch, sends the model to"
            " every replica in every step, gathers all outputs, computes the loss, adds up all gradients and updates"
            " alone. With M bytes of parameters and N devices, 2·M·(N − 1) bytes of parameters and gradients pass"
            f" through device 0 in a step, {format_bytes(through)} here (M = {format_bytes(model)}, N = {ranks}).",
            *quote(outcome, EXCESS.name),
            explain_excess(outcome, dp, model),
            *quote(outcome, UTILIZATION.name, subject=dp.label),
            compare_busy(dp),
            *quote(outcome, UTILIZATION.name, subject=ddp.label),
        ),
        "architecture": join_words(
            "Because no device is special: every rank is a process with its own interpreter, keeps its replica, and"
            " takes part in a ring all-reduce, bucket by bucket while backward still runs. Sent and received,"
            f" 4·M·(N − 1)/N bytes pass through each of N ranks, {format_bytes(each)} here and never more than"
            f" {format_bytes(4 * model)}; through device 0 of DP pass 2·M·(N − 1), N/2 times as many, so the advantage"
            " begins with N > 2.",
            f"Here a DP step takes {said} times as long as a DDP step{emulated}: {verdicts[verdict]}.{loaded}",
            *quote(outcome, VARIATION.name),
        ),
        "acceptable": (
            "On one machine with two or so devices, when computing takes much longer than moving parameters and"
            f" gradients ({format_bytes(through)} here), as with many samples per device, and when one process is worth"
            " more than speed: notebooks, debugging, inference. The measure is DP's step over DDP's,"
            f" {said}: {accepted[verdict]}.{compare_with_one(outcome, dp)}"
        ),
    }


def make_device_table(arms: Sequence[Arm]) -> Table:
    """What the task compares: how busy device 0 and the others are, how much step times vary, and what devices hold."""
    busy = {arm.label: [one.utilization.busy if one.utilization else None for one in list_own(arm)] for arm in arms}
    held = {arm.label: [one.memory for one in list_own(arm)] for arm in arms}
    columns: list[Field[Arm]] = [
        step_column(),
        share_column("variation", "step variation", lambda arm: estimate_variation(arm.clean)),
        share_column("busy_0", "busy: device 0", lambda arm: busy[arm.label][0]),
        share_column("busy_others", "others", lambda arm: average(busy[arm.label][1:])),
        bytes_column("bytes_0", "memory: device 0", lambda arm: held[arm.label][0], shows_interval=False),
        bytes_column("bytes_others", "others", lambda arm: average(held[arm.label][1:]), unit_of="bytes_0"),
    ]
    notes = [
        "variation: standard deviation over mean; others: their mean; busy: of the time, on a CPU of a rank's cores",
        "memory: of torch's allocator on a GPU; on a CPU the growth of a process, of emulated replicas their tensors",
    ]
    if any(found[0] is None for found in busy.values()):
        notes.append("busy –: too few steps, as devices are sampled 20 times a second")
    return replace(make_sweep_table(arms, columns, notes=notes), title="Utilization, variance and memory")


def list_own(arm: Arm) -> list[DeviceSummary]:
    """The devices of an arm, without the process that emulated replicas share."""
    return list_devices(arm)[: arm.trial.num_ranks]


def average(found: Sequence[Estimate | None]) -> Estimate | None:
    """Of all but device 0: the one there is, or the mean of several, without an interval."""
    known = [one for one in found if one is not None]
    if len(known) < 2:
        return known[0] if known else None
    return Estimate(value=fmean(one.value for one in known))


def explain_excess(outcome: Outcome | None, dp: Arm, model: int) -> str:
    """What device 0 holds alone, where it holds more than the others: the optimizer's tensors."""
    kept = count_moments(dp.trial)
    if not quote(outcome, EXCESS.name) or not kept:
        return ""
    return f"It alone keeps the optimizer's tensors, {kept}·M = {format_bytes(kept * model)}."


def compare_with_one(outcome: Outcome | None, dp: Arm) -> str:
    """Whether DP gains anything at all over the plain loop on one device."""
    ratio = divide_steps(dp, find_arm(outcome, strategy="single"))
    if ratio is None:
        return ""
    verdict = {
        Verdict.SLOWER: "for this job one device is the better choice",
        Verdict.FASTER: "DP gains over it",
        Verdict.NO_DIFFERENCE: "DP gains nothing over it",
        Verdict.UNRESOLVED: "the interval includes no difference",
    }[judge(ratio)]
    times = format_interval("ratio", ratio)
    return f" A DP step takes {times} times as long as the plain loop on one device: {verdict}."


def compare_busy(dp: Arm) -> str:
    """What it means that replicas of one process are busy alike, although one of them is the hub."""
    found = [device.utilization.busy for device in list_devices(dp)[: dp.trial.num_ranks] if device.utilization]
    if not dp.trial.is_emulated or len(found) < 2 or any(compare_estimates(found[0], other) for other in found[1:]):
        return ""
    return (
        f"The replicas are busy alike, {sum(busy.value for busy in found):.1f} cores together: as threads of one"
        " process they share its interpreter lock. So busy shares do not show the hub here; its memory does."
    )


def name_other_programs(outcome: Outcome | None) -> str:
    """The load of other programs under each strategy, which a difference between strategies may come from."""
    cautions = outcome.document.cautions if outcome and outcome.document else ()
    found = [one.message for one in cautions if one.kind == OTHER_PROGRAMS.name]
    return f" But {'; '.join(found)}, so the ratio is not the strategies' alone." if found else ""


def answer_s4(outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("strategies")
    dp, ddp = (find_arm(outcome, strategy=name) for name in ("dp", "ddp"))
    ratio = divide_steps(ddp, dp)
    if ratio is None or dp is None:
        return Answer(sentences=quote(outcome))
    emulated = ", whose replicas are threads here" if dp.trial.is_emulated else ""
    loaded = name_other_programs(outcome)
    verdict = {
        Verdict.FASTER: "DDP is faster than DP",
        Verdict.SLOWER: "DP is faster than DDP",
        Verdict.NO_DIFFERENCE: "DDP and DP are equally fast",
        Verdict.UNRESOLVED: "No difference between DDP and DP shows",
    }[judge(ratio)]
    times = format_interval("ratio", ratio)
    sentence = f"{verdict}: a DDP step takes {times} times as long as a DP step{emulated}.{loaded}"
    return Answer(
        main=Main("ratio", "DDP step over DP step", ratio),
        tables=(make_device_table(list_arms(outcome)), *(list_tables(outcome)[:STUDY_TABLES] if outcome else ())),
        sentences=(sentence, *quote(outcome)),
    )
