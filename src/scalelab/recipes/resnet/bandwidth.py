"""R4: the bandwidth that follows from the communication of R3, by step and as it was published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_subtraction
from scalelab.analysis.traffic import count_wire_bytes
from scalelab.recipes.evidence import Compared, keep_tables, make_beside_table, say, scale
from scalelab.recipes.recipe import Answer, Outcomes, Size, pair_questions
from scalelab.recipes.resnet import published
from scalelab.recipes.resnet.epochs import count_steps, list_pairs, make_main, name_beside, name_pair
from scalelab.report.document import Table
from scalelab.studies.shared.arms import Arm
from scalelab.units import is_known
from scalelab.workloads.catalogue import make_options

LIMIT = published.BANDWIDTH_BYTES_PER_SECOND


def answer_r4(size: Size, outcomes: Outcomes) -> Answer:
    pairs = list_pairs(outcomes)
    lines = [Compared(name_pair(arm), measure_bandwidth(plain, arm), None) for _, plain, arm in pairs]
    if not lines:
        return Answer()
    table = make_beside_table(
        "bandwidth",
        lines,
        title="Effective bandwidth of one all-reduce per step",
        size=size,
        notes=("2·M·(N − 1)/N bytes per step over T_N − T_1; published: one all-reduce per epoch, in the next tables",),
    )
    told = [line for line in lines if isinstance(line.ours, Estimate) and is_known(line.ours)]
    known = [f"{say('bytes', line.ours)}/s ({line.what})" for line in told]
    bounds = [
        f"at least {say('bytes', bound)}/s ({line.what})"
        for line, (_, plain, arm) in zip(lines, pairs, strict=True)
        if line not in told and (bound := bound_bandwidth(plain, arm)) is not None
    ]
    gradients = count_gradient_bytes(pairs[0][2])
    sentences = [f"Bandwidth with one all-reduce per step: {', '.join((*known, *bounds))}."] if known or bounds else []
    sentences.append(f"M = {gradients:,} bytes of gradients (4 per parameter).")
    sentences += explain_sharing([arm for _, _, arm in pairs])
    shares = [line for line in list_utilization(outcomes) if isinstance(line.ours, Estimate) and is_known(line.ours)]
    if shares:
        said = ", ".join(f"{say('share', line.ours)} ({line.what}; {line.printed})" for line in shares)
        sentences.append(f"Utilization of {LIMIT / 1e9:g} GB/s by one all-reduce per epoch, ours; published: {said}.")
    return Answer(
        main=make_main("bandwidth", "bandwidth", list_published_rates(outcomes)),
        tables=keep_tables(table, *compare_as_published(size, outcomes)),
        sentences=tuple(sentences),
        questions=pair_questions("resnet", "R4", {"bandwidth": " ".join(sentences)}),
    )


def list_published_rates(outcomes: Outcomes) -> list[Compared]:
    """The published method: the bytes of one all-reduce over the communication of a whole epoch."""
    lines = []
    for batch, plain, arm in list_pairs(outcomes):
        ranks = arm.trial.num_ranks
        ours = scale(measure_bandwidth(plain, arm), 1 / count_steps(arm))
        rate = published.EFFECTIVE_GIGABYTES_PER_SECOND[ranks][batch]
        lines.append(Compared(name_beside(arm, batch), ours, 1e9 * float(rate), f"{rate} GB/s"))
    return lines


def list_utilization(outcomes: Outcomes) -> Iterator[Compared]:
    """The same over the published bandwidth of a link."""
    for line, (batch, _, arm) in zip(list_published_rates(outcomes), list_pairs(outcomes), strict=True):
        ours = scale(line.ours, 1 / LIMIT) if isinstance(line.ours, Estimate) else None
        percent = published.UTILIZATION_PERCENT[arm.trial.num_ranks][batch]
        yield Compared(line.what, ours, float(percent) / 100, f"{percent} %")


def compare_as_published(size: Size, outcomes: Outcomes) -> Iterator[Table | None]:
    rates, shares = list_published_rates(outcomes), list_utilization(outcomes)
    title, notes = "By the published method", ("one all-reduce per epoch, although every step has one",)
    yield make_beside_table("bandwidth", rates, title=title, size=size, notes=notes)
    yield make_beside_table(
        "share", shares, title=f"{title}: utilization of {LIMIT / 1e9:g} GB/s", size=size, notes=notes
    )


def measure_bandwidth(plain: Arm, arm: Arm) -> Estimate | None:
    """Ring bytes of a step over how much longer it is than on one device; None if that may be zero."""
    excess = communication_by_subtraction(plain.clean, arm.clean, arm.trial.num_ranks, is_weak=True)
    if excess.low is None or excess.low <= 0:
        return None
    sent = count_wire_bytes("all_reduce", count_gradient_bytes(arm), arm.trial.num_ranks)
    return None if sent is None else excess.map(lambda seconds: sent / seconds)


def bound_bandwidth(plain: Arm, arm: Arm) -> float | None:
    """The least bandwidth that the longest possible communication leaves; None if that is unknown."""
    excess = communication_by_subtraction(plain.clean, arm.clean, arm.trial.num_ranks, is_weak=True)
    sent = count_wire_bytes("all_reduce", count_gradient_bytes(arm), arm.trial.num_ranks)
    return None if sent is None or excess.high is None or excess.high <= 0 else sent / excess.high


def count_gradient_bytes(arm: Arm) -> int:
    return 4 * make_options(arm.trial.workload, arm.trial.options).count_parameters()


def explain_sharing(arms: Sequence[Arm]) -> Iterator[str]:
    """Why ranks that share cores show no bandwidth."""
    crowded = sorted({arm.trial.num_ranks for arm in arms if arm.trial.is_oversubscribed})
    if crowded:
        yield (
            f"On {' and '.join(map(str, crowded))} devices that share cores this is not a bandwidth: M is the same at"
            " every batch, while T_N − T_1 has all the time that ranks wait for a core."
        )
