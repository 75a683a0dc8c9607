"""Task 4 of the scaling assignment: DataParallel against DDP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.quality import estimate_variation
from scalelab.analysis.stats import Verdict, judge
from scalelab.recipes.evidence import (
    compare_estimates,
    divide_steps,
    find_arm,
    list_arms,
    list_tables,
    quote,
)
from scalelab.recipes.feasibility import count_moments
from scalelab.recipes.recipe import (
    Answer,
    Main,
    Outcome,
    Outcomes,
)
from scalelab.recipes.scaling.questions import (
    BYTES_PER_PARAMETER,
    Answers,
    count_parameters,
    join,
)
from scalelab.report.document import Table
from scalelab.report.tables import Field, bytes_column, share_column
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.sweep import make_sweep_table, step_column
from scalelab.studies.strategies.answer import DeviceSummary, list_devices
from scalelab.studies.strategies.report import EXCESS, OTHER_PROGRAMS, UTILIZATION, VARIATION
from scalelab.units import (
    format_bytes,
    format_interval,
    format_share,
)

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
        "device_0": join(
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
        "architecture": join(
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
