"""R3 and R4: how much of an epoch is communication, and the bandwidth that follows, by step and as published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_subtraction
from scalelab.analysis.traffic import count_wire_bytes
from scalelab.recipes.evidence import (
    Compared,
    compare_estimates,
    divide_steps,
    keep_tables,
    make_beside_table,
    say,
    say_wide,
    scale,
)
from scalelab.recipes.recipe import Answer, Outcomes, Size, pair_questions
from scalelab.recipes.resnet import published
from scalelab.recipes.resnet.epochs import (
    Pair,
    count_cores,
    count_steps,
    list_pairs,
    list_shared,
    make_main,
    name_beside,
    name_pair,
)
from scalelab.report.document import Table
from scalelab.studies.shared.arms import Arm
from scalelab.units import choose_unit, format_count, format_estimate, format_quantity, format_share
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
        notes=(
            "2·M·(N − 1)/N bytes over t_N − t_1 of a step; published: one all-reduce per epoch, in the next tables",
        ),
    )
    fair = [pair for pair in pairs if not pair[2].trial.is_oversubscribed] or pairs
    rates = [said for _, plain, arm in fair if (said := say_bandwidth(plain, arm))]
    sent = f"M = {count_gradient_bytes(fair[0][2]):,} bytes of gradients (4 per parameter)"
    here = f"Here, with one all-reduce of {sent} per step: {', '.join(rates)}." if rates else f"Here {sent}."
    sentences = [here, *compare_batches(fair), *explain_utilization(fair)]
    sentences += explain_sharing([arm for _, _, arm in pairs])
    return Answer(
        main=make_main("bandwidth", "bandwidth", list_published_rates(fair)),
        tables=keep_tables(table, *compare_as_published(size, pairs)),
        sentences=tuple(sentences),
        questions=pair_questions("resnet", "R4", {"bandwidth": " ".join((correct_published(), *sentences))}),
    )


def correct_published() -> str:
    """What the published method leaves out, at its first number of devices and batch."""
    n, batch = published.DEVICES[0], published.BATCHES[0]
    rate = published.find_effective_bandwidth(n, batch)
    return (
        "The report divides one all-reduce by the communication of a whole epoch, but every step has one:"
        f" {published.count_epoch_steps(n, batch)} on {n} devices at batch {batch}, so its"
        f" {published.COMMUNICATION_SECONDS[n][batch]} s mean {rate / 1e9:.2f} GB/s, {rate / LIMIT:.1f} times the"
        f" {LIMIT / 1e9:g} GB/s that it divides by."
    )


def compare_batches(pairs: Sequence[Pair]) -> Iterator[str]:
    """Whether t_N − t_1 can be transfer at all: the bytes are the same at every batch."""
    by_ranks: dict[int, list[tuple[int, Estimate]]] = {}
    for _, plain, arm in pairs:
        rate = measure_bandwidth(plain, arm)
        if rate is not None:
            by_ranks.setdefault(arm.trial.num_ranks, []).append((arm.trial.batch_per_rank, rate))
    for ranks, found in by_ranks.items():
        (few, first), (many, last) = min(found, key=itemgetter(0)), max(found, key=itemgetter(0))
        if compare_estimates(first, last) == 1:
            yield (
                f"On {ranks} devices the same bytes seem {format_quantity('ratio', first.value / last.value)} times"
                f" slower at batch {many} than at {few}, so t_N − t_1 (a step on N devices less one on 1) is mostly"
                " waiting and contention, which grow with the step, not transfer."
            )


def say_bandwidth(plain: Arm, arm: Arm) -> str:
    """`21 (17 to 25) MB/s (2 devices, batch 8)`; a lower limit where communication may be zero; empty where unknown."""
    found, bound = measure_bandwidth(plain, arm), bound_bandwidth(plain, arm)
    if found is not None and found.low is not None and found.high is not None:
        value, low, high = (print_megabytes(rate) for rate in (found.value, found.low, found.high))
        return f"{value} ({low} to {high}) MB/s ({name_pair(arm)})"
    return "" if bound is None else f"at least {print_megabytes(bound)} MB/s ({name_pair(arm)})"


def print_megabytes(rate: float) -> str:
    """To two digits, and never as a power of ten."""
    return f"{rate / 1e6:,.0f}" if rate >= 1e8 else f"{rate / 1e6:.2g}"


def explain_utilization(pairs: Sequence[Pair]) -> Iterator[str]:
    """The share of the published link's bandwidth, and why it is not a utilization."""
    found = [(arm, scale(measure_bandwidth(plain, arm), 1 / LIMIT)) for _, plain, arm in pairs]
    listed = ", ".join(f"{say_wide('share', share)} ({name_pair(arm)})" for arm, share in found if share is not None)
    if listed:
        yield (f"Of {LIMIT / 1e9:g} GB/s that is {listed}: not a utilization, as that is not this machine's link.")


def list_published_rates(pairs: Sequence[Pair]) -> list[Compared]:
    """The published method: the bytes of one all-reduce over the communication of a whole epoch."""
    lines = []
    for batch, plain, arm in pairs:
        ranks = arm.trial.num_ranks
        ours = scale(measure_bandwidth(plain, arm), 1 / count_steps(arm))
        rate = published.EFFECTIVE_GIGABYTES_PER_SECOND[ranks][batch]
        lines.append(Compared(name_beside(arm, batch), ours, 1e9 * float(rate), f"{rate} GB/s"))
    return lines


def list_utilization(pairs: Sequence[Pair]) -> Iterator[Compared]:
    """The same over the published bandwidth of a link."""
    for line, (batch, _, arm) in zip(list_published_rates(pairs), pairs, strict=True):
        ours = scale(line.ours, 1 / LIMIT) if isinstance(line.ours, Estimate) else None
        percent = published.UTILIZATION_PERCENT[arm.trial.num_ranks][batch]
        yield Compared(line.what, ours, float(percent) / 100, f"{percent} %")


def compare_as_published(size: Size, pairs: Sequence[Pair]) -> Iterator[Table | None]:
    rates, shares = list_published_rates(pairs), list_utilization(pairs)
    title, notes = "By the published method", ("one all-reduce per epoch, although every step has one",)
    yield make_beside_table("bandwidth", rates, title=title, size=size, notes=notes)
    yield make_beside_table(
        "share",
        shares,
        title=f"{title}: utilization of {LIMIT / 1e9:g} GB/s",
        size=size,
        notes=notes,
        unlike=list_shared(pairs) if size == "full" else [name_beside(arm, batch) for batch, _, arm in pairs],
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
            " every batch, while t_N − t_1 has all the time that ranks wait for a core."
        )


def answer_r3(size: Size, outcomes: Outcomes) -> Answer:
    pairs = list_pairs(outcomes)
    lines = []
    for batch, plain, arm in pairs:
        ranks = arm.trial.num_ranks
        ratio = divide_steps(plain, arm)
        ours = None if ratio is None else ratio.map(lambda share: 1 - share)
        there = float(published.COMMUNICATION_SECONDS[ranks][batch]) / published.EPOCH_SECONDS[ranks][batch]
        lines.append(Compared(name_beside(arm, batch), ours, there))
    if all(line.ours is None for line in lines):
        return Answer()
    is_fair = any(not arm.trial.is_oversubscribed for _, _, arm in pairs)
    shares: list[str] = []
    parts: list[str] = []
    for line, (_, plain, arm) in zip(lines, pairs, strict=True):
        is_none = isinstance(line.ours, Estimate) and line.ours.high is not None and line.ours.high <= 0
        if not arm.trial.is_oversubscribed:
            shares.append(f"{'none' if is_none else say_share(line.ours)} ({name_pair(arm)})")
        computing, rest = scale(plain.step, count_steps(arm)), subtract_epoch(plain, arm)
        if not (is_fair and arm.trial.is_oversubscribed):
            parts.append(f"{say_seconds(computing)} and {say_seconds(rest)} ({name_pair(arm)})")
    table = make_beside_table(
        "share",
        lines,
        title="Communication by subtraction, share of the epoch",
        size=size,
        notes=("(T_N − T_1/N) / T_N, T_N: an epoch on N devices; published: from its printed seconds",),
        unlike=list_shared(pairs),
    )
    seconds = make_beside_table(
        "number",
        list_shares_of_epoch(pairs),
        title="An epoch by subtraction: computation T_1/N, communication T_N − T_1/N",
        size=size,
        header="ours [s]",  # as the published ones, although many are below a second
        notes=(
            "communication: launch by launch, not the difference of two medians",
            f"published for batch 512: with {published.USED_FOR_512} s instead of the logged T_1",
        ),
    )
    listed = ", ".join(shares) or "not told here, as ranks share cores"
    times = f"Computation T_1/N and communication T_N − T_1/N of an epoch on N devices, in s: {'; '.join(parts)}."
    sentences = (
        f"Communication by subtraction, as a share of the epoch: {listed}.",
        explain_shares(lines, pairs),
        "It includes everything that does not shrink, such as computation that other ranks slow down.",
        *explain_floor([arm for _, _, arm in pairs]),
    )
    fair = [line for line, (_, _, arm) in zip(lines, pairs, strict=True) if not arm.trial.is_oversubscribed]
    main = make_main("share", "communication", fair or lines)
    questions = pair_questions("resnet", "R3", {"parts": " ".join((times, *sentences))})
    return Answer(main=main, tables=keep_tables(table, seconds), sentences=sentences, questions=questions)


def say_share(share: Estimate | float | None) -> str:
    """With its estimate where it is above 0; else its upper end."""
    is_positive = isinstance(share, Estimate) and (share.low is None or share.low > 0)
    return say_wide("share", share) if is_positive else say("share", share)


def explain_shares(lines: Sequence[Compared], pairs: Sequence[Pair]) -> str:
    """How the share depends on the batch: by the ends of the batches of the fewest devices."""
    fewest = min(arm.trial.num_ranks for _, _, arm in pairs)
    found = [line.ours for line, (_, _, arm) in zip(lines, pairs, strict=True) if arm.trial.num_ranks == fewest]
    known = [share for share in found if isinstance(share, Estimate)]
    if len(known) < 2:
        return "Every batch sends the same bytes."
    verdict = {1: ", as it does here", 0: "; here the intervals overlap", -1: "; here it grows"}
    came = verdict[compare_estimates(known[0], known[-1])]
    return f"Every batch sends the same bytes, so the share should fall as a step computes more{came}."


def explain_floor(arms: Sequence[Arm]) -> Iterator[str]:
    """What the formula gives without any communication where ranks share cores: T_N cannot be below T_1 over cores."""
    crowded = [arm for arm in arms if arm.trial.is_oversubscribed]
    if not crowded:
        return
    floors = [
        f"{ranks} ranks on {format_count(cores, 'core')} give at least {format_share(1 - cores / ranks)} without any"
        for ranks, cores in sorted({(arm.trial.num_ranks, count_cores(arm)) for arm in crowded if count_cores(arm)})
        if cores and cores < ranks
    ]
    why = f": {', '.join(floors)}" if floors else ""
    yield f"Where devices share cores the formula does not give communication{why}."


def say_seconds(time: Estimate | None) -> str:
    """`3.56 ± 1.20`, all in one unit, as the table has it."""
    if time is None:
        return "–"
    if time.low is None or time.high is None or time.half_width is None:
        return f"{time.value:.2f}"
    return format_estimate(time, replace(choose_unit("number", [time]), decimals=2)) if time.high > 0 else "none"


def list_shares_of_epoch(pairs: list[Pair]) -> Iterator[Compared]:
    for batch, plain, arm in pairs:
        ranks = arm.trial.num_ranks
        what = name_beside(arm, batch)
        num_steps = count_steps(arm)
        ideal = published.COMPUTATION_SECONDS[ranks][batch]
        yield Compared(f"{what}: computation", scale(plain.step, num_steps), float(ideal), f"{ideal} s")
        printed = published.COMMUNICATION_SECONDS[ranks][batch]
        yield Compared(f"{what}: communication", subtract_epoch(plain, arm), float(printed), f"{printed} s")


def subtract_epoch(plain: Arm, arm: Arm) -> Estimate:
    """T_N − T_1/N of an epoch: its steps times T_N − T_1 of a step, as the batch per device is fixed."""
    rest, num_steps = (
        communication_by_subtraction(plain.clean, arm.clean, arm.trial.num_ranks, is_weak=True),
        count_steps(arm),
    )
    return rest.map(lambda seconds: seconds * num_steps)
