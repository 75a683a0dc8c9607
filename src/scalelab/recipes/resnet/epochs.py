"""R2, R3 and R4: epochs on more devices, what of them is communication, and the bandwidth that follows.

One measurement serves all three rows. A CIFAR-10 epoch is as many steps as it has whole batches, so epoch times follow
from step times; what differs between devices is the step at the same batch per device, so it is weak scaling.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from scalelab.analysis.communication import count_wire_bytes
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_subtraction
from scalelab.analysis.stats import estimate_unpaired_ratio
from scalelab.recipes.evidence import (
    Compared,
    divide_steps,
    find_arm,
    keep_tables,
    list_arms,
    make_beside_table,
    say,
    scale,
)
from scalelab.recipes.feasibility import choose, make_sampling
from scalelab.recipes.recipe import Finding, Outcomes, Row, Size
from scalelab.recipes.resnet import published
from scalelab.recipes.resnet.checks import DEVICES, count_epoch_steps, find_effective_bandwidth, subtract_ideal
from scalelab.recipes.resnet.rows import make_job
from scalelab.report.document import Table
from scalelab.studies.scaling.study import WeakScaling
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.study import Study
from scalelab.workloads.catalogue import make_options


def make_parts(size: Size) -> dict[str, Study]:
    return {
        f"batch{batch}": WeakScaling(
            ranks=choose(size, small=(1, 2), full=(1, 2, 4)),
            batch_per_rank=batch,
            job=make_job(size),
            sampling=make_sampling(size, comm_free=True),
        )
        for batch in published.BATCHES
    }


def make_r2(size: Size) -> Row:
    return Row(id="R2", title="More devices", parts=make_parts(size), conclude=partial(find_r2, size), num_tables=0)


def make_r3(size: Size) -> Row:
    return Row(
        id="R3",
        title="Computation and communication",
        parts=make_parts(size),
        conclude=partial(find_r3, size),
        reads="R2",
    )


def make_r4(size: Size) -> Row:
    return Row(
        id="R4",
        title="Bandwidth of the all-reduce",
        parts=make_parts(size),
        conclude=partial(find_r4, size),
        reads="R2",
    )


def list_pairs(outcomes: Outcomes) -> list[tuple[int, Arm, Arm]]:
    """Batch per device, one device, and more of them, where all were measured."""
    pairs = []
    for batch in published.BATCHES:
        outcome = outcomes.get(f"batch{batch}")
        plain = find_arm(outcome, strategy="single")
        spread = [arm for arm in list_arms(outcome) if arm.trial.num_ranks > 1]
        pairs += [(batch, plain, arm) for arm in spread if plain is not None]
    return pairs


def find_r2(size: Size, outcomes: Outcomes) -> Finding:
    pairs = list_pairs(outcomes)
    if not pairs:
        return Finding()
    lines, gains = [], []
    for batch, plain, arm in pairs:
        ranks = arm.trial.num_ranks
        ratio = count_epoch_steps(1, batch) / count_epoch_steps(ranks, batch)
        speedup = scale(divide_steps(plain, arm), ratio)
        there = published.EPOCH_SECONDS[1][batch] / published.EPOCH_SECONDS[ranks][batch]
        lines.append(Compared(f"1 → {ranks} devices, batch {batch}", speedup, there))
        gains.append(f"on {ranks} at batch {batch} {say('ratio', speedup)}")
    lines += compare_two_to_four(outcomes)
    table = make_beside_table("ratio", lines, title="Speedup of an epoch", size=size)
    seconds = make_beside_table("seconds", list_epochs(pairs), title="An epoch of 50,000 images, by steps", size=size)
    answers = [
        f"Over one device, an epoch runs {'; '.join(gains)} times as fast.",
        "Strong or weak? The images of an epoch are fixed and so is the batch per device: strong in the epoch, weak in"
        " the step.",
    ]
    strong = find_strong_point(outcomes)
    if strong is not None:
        answers.append(strong)
    return Finding(tables=keep_tables(table, seconds), answers=tuple(answers))


def compare_two_to_four(outcomes: Outcomes) -> list[Compared]:
    """The speedups that were printed; without four devices they stand alone."""
    lines = []
    for batch, there in published.SPEEDUPS_TWO_TO_FOUR.items():
        two, four = (find_arm(outcomes.get(f"batch{batch}"), num_ranks=num_devices) for num_devices in DEVICES)
        ratio = count_epoch_steps(2, batch) / count_epoch_steps(4, batch)
        lines.append(
            Compared(f"2 → 4 devices, batch {batch}", scale(divide_steps(two, four), ratio), there, f"{there:.2f}")
        )
    return lines


def list_epochs(pairs: list[tuple[int, Arm, Arm]]) -> list[Compared]:
    lines: dict[str, Compared] = {}
    for batch, plain, spread in pairs:
        for arm in (plain, spread):
            ranks = arm.trial.num_ranks
            num_steps = count_epoch_steps(ranks, batch)
            what = f"{ranks} device{'s'[: ranks > 1]}, batch {batch}"
            there = published.EPOCH_SECONDS[ranks][batch]
            lines[what] = Compared(what, scale(arm.step, num_steps), there, f"{there:.3f} s")
    return list(lines.values())


def find_strong_point(outcomes: Outcomes) -> str | None:
    """The same samples per step on one device and on four: 1 × 128 against 4 × 32."""
    one = find_arm(outcomes.get("batch128"), strategy="single")
    four = find_arm(outcomes.get("batch32"), num_ranks=4)
    there = published.EPOCH_SECONDS[1][128] / published.EPOCH_SECONDS[4][32]
    if one is None or four is None:
        return f"The strong point, 1 × 128 against 4 × 32, needs four devices (published: {there:.2f}×)."
    ours = say("ratio", estimate_unpaired_ratio(one.clean, four.clean))
    return f"The strong point, 1 × 128 against 4 × 32, is {ours}×, from two measurements (published: {there:.2f}×)."


def find_r3(size: Size, outcomes: Outcomes) -> Finding:
    pairs = list_pairs(outcomes)
    lines = []
    for batch, plain, arm in pairs:
        ranks = arm.trial.num_ranks
        ratio = divide_steps(plain, arm)
        ours = None if ratio is None else ratio.map(lambda share: 1 - share)
        there = subtract_ideal(ranks, batch, as_used=False) / published.EPOCH_SECONDS[ranks][batch]
        lines.append(Compared(f"{ranks} devices, batch {batch}", ours, there))
    table = make_beside_table(
        "share",
        lines,
        title="Communication by subtraction, share of the epoch",
        size=size,
        notes=("(T_N − T_1/N) / T_N; published: with the logged 19.704 s for batch 512",),
    )
    seconds = make_beside_table(
        "seconds",
        list_shares_of_epoch(pairs),
        title="An epoch by subtraction: computation T_1/N, communication T_N − T_1/N",
        size=size,
        notes=(f"published for batch 512: with {published.USED_FOR_512} s in place of the logged T_1",),
    )
    known = [(line.what, line.ours) for line in lines if line.ours is not None]
    if not known:
        return Finding()
    words = "; ".join(f"{say('share', ours)} on {what}" for what, ours in known)
    answer = (
        f"By subtraction, communication is {words}. It is everything that does not shrink, also computation that is"
        " slower beside other ranks."
    )
    return Finding(tables=keep_tables(table, seconds), answers=(answer,))


def list_shares_of_epoch(pairs: list[tuple[int, Arm, Arm]]) -> Iterator[Compared]:
    for batch, plain, arm in pairs:
        ranks = arm.trial.num_ranks
        what = f"{ranks} devices, batch {batch}"
        num_steps = count_epoch_steps(ranks, batch)
        rest = communication_by_subtraction(plain.clean, arm.clean, ranks, is_weak=True)
        used = published.USED_FOR_512 if batch == 512 else published.EPOCH_SECONDS[1][batch]
        yield Compared(f"{what}: computation", scale(plain.step, num_steps), used / ranks)
        printed = published.COMMUNICATION_SECONDS[ranks][batch]
        yield Compared(f"{what}: communication", scale(rest, num_steps), float(printed), f"{printed} s")


def find_r4(size: Size, outcomes: Outcomes) -> Finding:
    lines, unresolved = [], []
    for batch, plain, arm in list_pairs(outcomes):
        ranks = arm.trial.num_ranks
        what = f"{ranks} devices, batch {batch}"
        bandwidth = measure_bandwidth(plain, arm)
        if bandwidth is None:
            unresolved.append(what)
        lines.append(Compared(what, bandwidth, find_effective_bandwidth(ranks, batch)))
    if not lines:
        return Finding()
    table = make_beside_table(
        "bytes",
        lines,
        title="Effective bandwidth of one all-reduce per step, per second",
        size=size,
        notes=("2·M·(N − 1)/N bytes per step over T_N − T_1; published: corrected, one in every step",),
    )
    known = [f"{say('bytes', line.ours)}/s on {line.what}" for line in lines if line.ours is not None]
    answers = [f"With one all-reduce in every step, {'; '.join(known)}."] if known else []
    if unresolved:
        answers.append(f"On {', '.join(unresolved)} the time of communication cannot be told from nothing.")
    return Finding(tables=keep_tables(table, compare_utilization(size, outcomes)), answers=tuple(answers))


def compare_utilization(size: Size, outcomes: Outcomes) -> Table | None:
    """The published method: the time of one all-reduce at the assumed bandwidth over an epoch's communication."""
    lines = []
    for batch, plain, arm in list_pairs(outcomes):
        ranks = arm.trial.num_ranks
        printed = published.UTILIZATION_PERCENT[ranks][batch]
        per_step = scale(measure_bandwidth(plain, arm), 1 / published.BANDWIDTH_BYTES_PER_SECOND)
        ours = scale(per_step, 1 / count_epoch_steps(ranks, batch))
        lines.append(Compared(f"{ranks} devices, batch {batch}", ours, float(printed) / 100, f"{printed} %"))
    return make_beside_table(
        "share",
        lines,
        title=f"By the published method: utilisation of {published.BANDWIDTH_BYTES_PER_SECOND / 1e9:g} GB/s",
        size=size,
        notes=("one all-reduce over the communication of a whole epoch, though an epoch has one in every step",),
    )


def measure_bandwidth(plain: Arm, arm: Arm) -> Estimate | None:
    """Ring bytes of a step over what the step is longer than on one device; None where that may be nothing."""
    ranks = arm.trial.num_ranks
    excess = communication_by_subtraction(plain.clean, arm.clean, ranks, is_weak=True)
    if excess.low is None or excess.low <= 0:
        return None
    num_parameters = make_options(arm.trial.workload, arm.trial.options).count_parameters()
    sent = count_wire_bytes("all_reduce", 4 * num_parameters, ranks)
    return None if sent is None else excess.map(lambda seconds: sent / seconds)
