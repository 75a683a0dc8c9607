"""R2, R3 and R4: epochs on more devices, how much of them is communication, and the bandwidth that follows.

One measurement serves all three rows. A CIFAR-10 epoch is as many steps as it has whole batches, so epoch times follow
from step times; between devices the batch per device is fixed, so steps scale weakly.

In small, lenet stands for ResNet-18 where times matter: a step of ResNet-18 takes seconds on a core. What DDP sends
does not depend on speed, and is counted on ResNet-18 itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_subtraction
from scalelab.analysis.stats import estimate_unpaired_ratio
from scalelab.analysis.traffic import count_wire_bytes
from scalelab.recipes.evidence import (
    Compared,
    compare_estimates,
    divide_steps,
    find_arm,
    keep_tables,
    list_spread,
    make_beside_table,
    say,
    scale,
)
from scalelab.recipes.feasibility import choose, make_sampling, make_sized_job
from scalelab.recipes.published import pair_questions
from scalelab.recipes.recipe import Answer, Main, Outcomes, Row, Size
from scalelab.recipes.resnet import published
from scalelab.recipes.resnet.published import DEVICES, count_epoch_steps, subtract_ideal
from scalelab.records.trial import Option
from scalelab.report.document import Table
from scalelab.studies.scaling.study import WeakScaling
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job
from scalelab.units import Quantity, format_count
from scalelab.workloads.catalogue import make_options

LOADER_WORKERS = 2
Pair = tuple[int, Arm, Arm]
"""Batch per device, one device, and more of them."""


def make_job(size: Size, *, is_counted: bool = False, **fields: Any) -> Job:
    """ResNet-18 on CIFAR-10 with two loader workers; in small, lenet on random images without any.

    What is counted and not timed is ResNet-18 in both sizes, on random images.
    """
    images: dict[str, Option] = {"data": "cifar10", "workers": LOADER_WORKERS}
    return make_sized_job(
        size,
        workload="resnet18" if is_counted or size == "full" else "lenet",
        options={} if is_counted or size == "small" else images,
        **fields,
    )


def make_epoch_rows(size: Size) -> tuple[Row, Row, Row]:
    parts = {
        f"batch{batch}": WeakScaling(
            ranks=choose(size, small=(1, 2), full=(1, 2, 4)),
            batch_per_rank=batch,
            job=make_job(size),
            sampling=make_sampling(size, comm_free=True),
        )
        for batch in published.BATCHES
    }
    r2, r3, r4 = (partial(answer, size) for answer in (answer_r2, answer_r3, answer_r4))
    return (
        Row(id="R2", title="More devices", parts=parts, conclude=r2, num_tables=0),
        Row(id="R3", title="Computation and communication", parts=parts, conclude=r3, reads="R2"),
        Row(id="R4", title="All-reduce bandwidth", parts=parts, conclude=r4, reads="R2"),
    )


def list_pairs(outcomes: Outcomes) -> list[Pair]:
    """Every batch and number of devices that was measured on one device too."""
    pairs = []
    for batch in published.BATCHES:
        outcome = outcomes.get(f"batch{batch}")
        plain = find_arm(outcome, strategy="single")
        pairs += [(batch, plain, arm) for arm in list_spread(outcome) if plain is not None]
    return pairs


def name_pair(batch: int, arm: Arm) -> str:
    return f"{format_count(arm.trial.num_ranks, 'device')}, batch {batch}"


def make_main(quantity: Quantity, what: str, lines: list[Compared]) -> Main | None:
    """The first line with a number of ours, as a row's main number."""
    line = next((line for line in lines if line.ours is not None), None)
    return None if line is None else Main(quantity, f"{what}, {line.what}", *line[1:])


def answer_r2(size: Size, outcomes: Outcomes) -> Answer:
    pairs = list_pairs(outcomes)
    if not pairs:
        return Answer()
    lines = []
    for batch, plain, arm in pairs:
        ranks = arm.trial.num_ranks
        ratio = count_epoch_steps(1, batch) / count_epoch_steps(ranks, batch)
        there = published.EPOCH_SECONDS[1][batch] / published.EPOCH_SECONDS[ranks][batch]
        lines.append(Compared(f"1 → {ranks} devices, batch {batch}", scale(divide_steps(plain, arm), ratio), there))
    gains = [f"{say('ratio', line.ours)} ({line.what})" for line in lines]
    main = make_main("ratio", "speedup", lines)
    lines += compare_two_to_four(outcomes)
    return Answer(
        main=main,
        tables=keep_tables(
            make_beside_table("ratio", lines, title="Speedup of an epoch", size=size),
            make_beside_table("seconds", list_epochs(pairs), title="An epoch of 50,000 images, from steps", size=size),
        ),
        sentences=(f"Speedup of an epoch over one device: {', '.join(gains)}.", describe_strong_point(outcomes)),
        questions=pair_questions("resnet", "R2", answer_scaling(pairs, describe_strong_point(outcomes))),
    )


def answer_scaling(pairs: list[Pair], strong_point: str) -> dict[str, str]:
    """Strong or weak, which of them is better, and the numbers that say so: of the most devices at every batch."""
    most = max(arm.trial.num_ranks for _, _, arm in pairs)
    found = {batch: divide_steps(plain, arm) for batch, plain, arm in pairs if arm.trial.num_ranks == most}
    known = {batch: efficiency for batch, efficiency in found.items() if efficiency is not None}
    listed = ", ".join(f"{say('share', efficiency)} at batch {batch}" for batch, efficiency in known.items())
    answers = {
        "kind": "Both: images per epoch and batch per device are fixed, so epochs scale strongly and steps weakly (a"
        " step on N devices has N times the samples).",
        "weak": "Better: with a fixed batch per device, computing per step stays what it is and only the all-reduce is"
        f" added. Efficiency of a step on {most} devices, T_1/T_N: {listed}. With a fixed global batch, computing"
        f" shrinks as 1/N while the gradients keep their bytes. {strong_point}",
    }
    if len(known) > 1:
        first, last = min(known), max(known)
        words = {1: "rises", -1: "falls", 0: "does not change beyond its interval"}
        verdict = words[compare_estimates(known[last], known[first])]
        answers["data_point"] = (
            f"From batch {first} to {last} per device, efficiency on {most} devices {verdict}:"
            f" {say('share', known[first])} and {say('share', known[last])} (published, 2 → 4 devices:"
            f" {published.SPEEDUPS_TWO_TO_FOUR[first]}× and {published.SPEEDUPS_TWO_TO_FOUR[last]}×). The bytes are the"
            " same, so more computing per step leaves communication a smaller share."
        )
    return answers


def compare_two_to_four(outcomes: Outcomes) -> Iterator[Compared]:
    """The speedups that were printed; without four devices they stand alone."""
    for batch, there in published.SPEEDUPS_TWO_TO_FOUR.items():
        two, four = (find_arm(outcomes.get(f"batch{batch}"), num_ranks=num_devices) for num_devices in DEVICES)
        ratio = count_epoch_steps(2, batch) / count_epoch_steps(4, batch)
        ours = scale(divide_steps(two, four), ratio)
        yield Compared(f"2 → 4 devices, batch {batch}", ours, there, f"{there:.2f}")


def list_epochs(pairs: list[Pair]) -> list[Compared]:
    lines: dict[str, Compared] = {}
    for batch, plain, spread in pairs:
        for arm in (plain, spread):
            ranks = arm.trial.num_ranks
            there = published.EPOCH_SECONDS[ranks][batch]
            ours = scale(arm.step, count_epoch_steps(ranks, batch))
            what = name_pair(batch, arm)
            lines[what] = Compared(what, ours, there, f"{there:.3f} s")
    return list(lines.values())


def describe_strong_point(outcomes: Outcomes) -> str:
    """The same samples per step on one device and on four: 1 × 128 against 4 × 32."""
    one = find_arm(outcomes.get("batch128"), strategy="single")
    four = find_arm(outcomes.get("batch32"), num_ranks=4)
    there = published.EPOCH_SECONDS[1][128] / published.EPOCH_SECONDS[4][32]
    if one is None or four is None:
        return f"The strong-scaling point, 1 × 128 against 4 × 32, needs four devices (published: {there:.2f}×)."
    ours = say("ratio", estimate_unpaired_ratio(one.clean, four.clean))
    return f"The strong-scaling point, 1 × 128 against 4 × 32, is {ours}× (two studies; published: {there:.2f}×)."


def answer_r3(size: Size, outcomes: Outcomes) -> Answer:
    pairs = list_pairs(outcomes)
    lines = []
    for batch, plain, arm in pairs:
        ranks = arm.trial.num_ranks
        ratio = divide_steps(plain, arm)
        ours = None if ratio is None else ratio.map(lambda share: 1 - share)
        there = subtract_ideal(ranks, batch, as_used=False) / published.EPOCH_SECONDS[ranks][batch]
        lines.append(Compared(name_pair(batch, arm), ours, there))
    known = [f"{say('share', line.ours)} ({line.what})" for line in lines if line.ours is not None]
    if not known:
        return Answer()
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
        notes=(f"published for batch 512: with {published.USED_FOR_512} s instead of the logged T_1",),
    )
    sentences = (
        f"Communication by subtraction: {', '.join(known)}.",
        "It includes everything that does not shrink, such as computation that other ranks slow down.",
    )
    main = make_main("share", "communication", lines)
    questions = pair_questions("resnet", "R3", {"parts": " ".join(sentences)})
    return Answer(main=main, tables=keep_tables(table, seconds), sentences=sentences, questions=questions)


def list_shares_of_epoch(pairs: list[Pair]) -> Iterator[Compared]:
    for batch, plain, arm in pairs:
        ranks = arm.trial.num_ranks
        what = name_pair(batch, arm)
        num_steps = count_epoch_steps(ranks, batch)
        rest = communication_by_subtraction(plain.clean, arm.clean, ranks, is_weak=True)
        ideal = published.COMPUTATION_SECONDS[ranks][batch]
        yield Compared(f"{what}: computation", scale(plain.step, num_steps), float(ideal), f"{ideal} s")
        printed = published.COMMUNICATION_SECONDS[ranks][batch]
        yield Compared(f"{what}: communication", scale(rest, num_steps), float(printed), f"{printed} s")


def answer_r4(size: Size, outcomes: Outcomes) -> Answer:
    lines = [
        Compared(name_pair(batch, arm), measure_bandwidth(plain, arm), None)
        for batch, plain, arm in list_pairs(outcomes)
    ]
    if not lines:
        return Answer()
    table = make_beside_table(
        "bytes",
        lines,
        title="Effective bandwidth of one all-reduce per step, per second",
        size=size,
        notes=("2·M·(N − 1)/N bytes per step over T_N − T_1; published: one all-reduce per epoch, in the next tables",),
    )
    known = [f"{say('bytes', line.ours)}/s ({line.what})" for line in lines if line.ours is not None]
    unresolved = [line.what for line in lines if line.ours is None]
    sentences = [f"Bandwidth with one all-reduce per step: {', '.join(known)}."] if known else []
    if unresolved:
        sentences.append(f"Communication time is not resolved at {'; '.join(unresolved)}.")
    return Answer(
        main=make_main("bytes", "bytes/s by the published method", list_published_rates(outcomes)),
        tables=keep_tables(table, *compare_as_published(size, outcomes)),
        sentences=tuple(sentences),
        questions=pair_questions("resnet", "R4", {"bandwidth": " ".join(sentences)}),
    )


def list_published_rates(outcomes: Outcomes) -> list[Compared]:
    """The published method: the bytes of one all-reduce over the communication of a whole epoch."""
    lines = []
    for batch, plain, arm in list_pairs(outcomes):
        ranks = arm.trial.num_ranks
        ours = scale(measure_bandwidth(plain, arm), 1 / count_epoch_steps(ranks, batch))
        rate = published.EFFECTIVE_GIGABYTES_PER_SECOND[ranks][batch]
        lines.append(Compared(name_pair(batch, arm), ours, 1e9 * float(rate), f"{rate} GB/s"))
    return lines


def compare_as_published(size: Size, outcomes: Outcomes) -> Iterator[Table | None]:
    rates, limit = list_published_rates(outcomes), published.BANDWIDTH_BYTES_PER_SECOND
    percents = [published.UTILIZATION_PERCENT[arm.trial.num_ranks][batch] for batch, _, arm in list_pairs(outcomes)]
    shares = [
        Compared(
            line.what,
            scale(line.ours, 1 / limit) if isinstance(line.ours, Estimate) else None,
            float(percent) / 100,
            f"{percent} %",
        )
        for line, percent in zip(rates, percents, strict=True)
    ]
    notes = ("one all-reduce over the communication of a whole epoch, although every step has one",)
    yield make_beside_table("bytes", rates, title="By the published method: bytes per second", size=size, notes=notes)
    title = f"By the published method: utilization of {limit / 1e9:g} GB/s"
    yield make_beside_table("share", shares, title=title, size=size, notes=notes)


def measure_bandwidth(plain: Arm, arm: Arm) -> Estimate | None:
    """Ring bytes of a step over how much longer it is than on one device; None where that may be zero."""
    ranks = arm.trial.num_ranks
    excess = communication_by_subtraction(plain.clean, arm.clean, ranks, is_weak=True)
    if excess.low is None or excess.low <= 0:
        return None
    num_parameters = make_options(arm.trial.workload, arm.trial.options).count_parameters()
    sent = count_wire_bytes("all_reduce", 4 * num_parameters, ranks)
    return None if sent is None else excess.map(lambda seconds: sent / seconds)
