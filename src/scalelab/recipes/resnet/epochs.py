"""R2: epochs on more devices.

One measurement serves R3 and R4 too. A CIFAR-10 epoch is as many steps as it has whole batches, so epoch times follow
from step times; between devices the batch per device is fixed, so steps scale weakly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from operator import itemgetter
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_unpaired_ratio
from scalelab.recipes.evidence import (
    UNTOLD,
    Compared,
    compare_independent,
    divide_steps,
    find_arm,
    keep_tables,
    list_spread,
    make_beside_table,
    say,
    say_wide,
    scale,
)
from scalelab.recipes.recipe import Answer, Main, Outcomes, Size, pair_questions
from scalelab.recipes.resnet import published
from scalelab.recipes.resnet.published import DEVICES, STRONG_FOR_EPOCHS
from scalelab.recipes.resnet.training import ONE_RUN, make_timed_table, name_batch, read_epoch
from scalelab.report.document import Table
from scalelab.report.tables import INTERVAL_NOTE, Field, make_table, ratio_column, seconds_column, text_column
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import DIGITS_IMAGES
from scalelab.studies.shared.sweep import OVERSUBSCRIBED
from scalelab.units import Quantity, format_count

APART = "timed one after the other, so load differs: speedups are those of steps"
UNLIKE = "not divided where devices share cores, as the published ones did not"
TIMES = "epochs: of the median step; speedups: by launch; 1 device: plain loop"
EIGHTH = "in small: 1/4 of the batch (for 32), 1/8 of 8192, on a narrow ResNet-18"
QUARTER = "in small, a quarter of the published batch, (for 32), on a narrow ResNet-18"
Pair = tuple[int, Arm, Arm]
"""Batch per device, one device, and more of them."""


def count_steps(arm: Arm) -> float:
    """Steps of an epoch: whole ones of 50,000 images; of digits, whose epochs have few, with the part of the last."""
    if arm.trial.options.get("data") == "digits":
        return DIGITS_IMAGES / arm.trial.global_batch
    return published.TRAIN_IMAGES // arm.trial.global_batch


def speed_up(one: Arm | None, other: Arm | None) -> Estimate | None:
    """An epoch of the one over an epoch of the other."""
    return scale(divide_steps(one, other), count_steps(one) / count_steps(other)) if one and other else None


def list_pairs(outcomes: Outcomes) -> list[Pair]:
    """Every batch and number of devices that was measured on one device too."""
    pairs = []
    for batch in published.BATCHES:
        outcome = outcomes.get(f"batch{batch}")
        plain = find_arm(outcome, strategy="single")
        pairs += [(batch, plain, arm) for arm in list_spread(outcome) if plain is not None]
    return pairs


def prefer_uncrowded(pairs: Sequence[Pair]) -> Sequence[Pair]:
    """Those whose devices share no cores, which is no communication; where all do, all."""
    return [pair for pair in pairs if not pair[2].trial.is_oversubscribed] or pairs


def name_pair(arm: Arm) -> str:
    shared = " sharing cores" if arm.trial.is_oversubscribed else ""
    return f"{format_count(arm.trial.num_ranks, 'device')}{shared}, batch {arm.trial.batch_per_rank}"


def name_beside(arm: Arm, published_batch: int) -> str:
    """What a line is called that stands beside a published number."""
    shared = " sharing cores" if arm.trial.is_oversubscribed else ""
    batch = name_batch(arm.trial.batch_per_rank, published_batch)
    return f"{format_count(arm.trial.num_ranks, 'device')}{shared}, {batch}"


def list_shared(pairs: Sequence[Pair], *leads: str) -> set[str]:
    """The lines of devices that share cores, by what their names begin with: published devices did not."""
    crowded = [name_beside(arm, batch) for batch, _, arm in pairs if arm.trial.is_oversubscribed]
    return {f"{lead}{name}" for name in crowded for lead in leads or ("",)}


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
        there = published.EPOCH_SECONDS[1][batch] / published.EPOCH_SECONDS[ranks][batch]
        lines.append(Compared(f"1 → {name_beside(arm, batch)}", speed_up(plain, arm), there))
    gains = [
        f"{say('ratio', line.ours)} (1 → {name_pair(arm)})" for line, (_, _, arm) in zip(lines, pairs, strict=True)
    ]
    notes = (QUARTER,) if size == "small" else ()
    main = make_main("ratio", "speedup", lines)
    doubled = list(describe_two_to_four(outcomes))
    unlike = list_shared(pairs, "1 → ")
    title = "Speedup of an epoch"
    apart = (*notes, *((UNLIKE,) if unlike else ()))
    return Answer(
        main=main,
        lead=f"{doubled[0]} {STRONG_FOR_EPOCHS}." if doubled else "",
        tables=keep_tables(
            make_training_table(outcomes),
            make_beside_table("ratio", lines, title=title, size=size, notes=apart, unlike=unlike),
            make_beside_table("seconds", list_epochs(pairs), title="An epoch, from steps", size=size),
            compare_timed(size, outcomes),
        ),
        sentences=(
            *(doubled or [f"Speedup of an epoch over one device: {', '.join(gains)}."]),
            describe_strong_point(outcomes),
        ),
        questions=pair_questions(
            "resnet", "R2", answer_scaling(pairs, outcomes) | ({"speedup": doubled[0]} if doubled else {})
        ),
    )


def make_training_table(outcomes: Outcomes) -> Table | None:
    """The table that the question asks for: the time of an epoch on every number of devices, and what more gain."""
    rows: list[tuple[Any, ...]] = []
    for batch in published.BATCHES:
        outcome = outcomes.get(f"batch{batch}")
        one, *more = find_arm(outcome, strategy="single"), *(find_arm(outcome, num_ranks=n) for n in DEVICES)
        if one is not None and any(more):
            rows.append((batch, one, *more))
    crowded = sorted({arm.trial.num_ranks for row in rows for arm in row[2:] if arm and arm.trial.is_oversubscribed})

    def time_column(place: int, devices: int) -> Field[tuple[Any, ...]]:
        mark = OVERSUBSCRIBED if devices in crowded else ""
        header = f"{format_count(devices, 'device')}{mark}"
        return seconds_column(
            f"seconds_{devices}",
            header,
            lambda row: scale(row[place].step, count_steps(row[place])) if row[place] else None,
            unit_of="" if place == 1 else "seconds_1",
        )

    shared = (f"{OVERSUBSCRIBED} share cores, so they cannot be faster than as many devices as there are cores",)
    table = make_table(
        rows,
        text_column("batch", "batch per device", lambda row: name_batch(row[1].trial.batch_per_rank, row[0])),
        *(time_column(place, n) for place, n in enumerate((1, *DEVICES), start=1)),
        ratio_column("speedup_2", "1 → 2", lambda row: speed_up(row[1], row[2])),
        ratio_column("speedup_4", "2 → 4", lambda row: speed_up(row[2], row[3])),
        text_column(
            "published", "published 2 → 4", lambda row: f"{published.SPEEDUPS_TWO_TO_FOUR[row[0]]:.2f}", align="right"
        ),
        title="Training time and speedup of an epoch",
        notes=(INTERVAL_NOTE, TIMES, *(shared if crowded else ())),
    )
    return table if rows else None


def compare_timed(size: Size, outcomes: Outcomes) -> Table | None:
    """Epoch 2 with loading, timed as a whole; a row per number of devices and batch."""
    lines = [
        read_epoch(outcomes.get(f"timed{n}x{batch}"), f"{n} devices, ", size, batch, published.EPOCH_SECONDS[n][batch])
        for n in DEVICES
        for batch in published.BATCHES
    ]
    return make_timed_table(lines, "Epoch 2 with loading, timed", APART, ONE_RUN)


def answer_scaling(pairs: list[Pair], outcomes: Outcomes) -> dict[str, str]:
    """Strong or weak, which of them is better, and the numbers that say so: of the most devices at every batch."""
    fair = prefer_uncrowded(pairs)
    most = max(arm.trial.num_ranks for _, _, arm in fair)
    arms = {batch: (plain, arm) for batch, plain, arm in fair if arm.trial.num_ranks == most}
    found = {batch: divide_steps(plain, arm) for batch, (plain, arm) in arms.items()}
    known = {batch: efficiency for batch, efficiency in found.items() if efficiency is not None}
    listed = ", ".join(
        f"{say('share', efficiency)} at batch {arms[batch][1].trial.batch_per_rank}"
        for batch, efficiency in known.items()
    )
    answers = {
        "kind": f"{STRONG_FOR_EPOCHS}: the images of an epoch stay the same while devices are added, but so does the"
        " batch per device: a step has N times the samples on N devices, so steps scale weakly.",
        "weak": f"{judge_weak(outcomes)} With a fixed batch per device, the computation per step is unchanged and only"
        f" the all-reduce is added: efficiency, a step on 1 device over one on {most}, is {listed}. With a fixed global"
        " batch, computing shrinks as 1/N while the gradients keep their bytes.",
    }
    if (point := find_data_point(pairs)) is not None:
        answers["data_point"] = point
    return answers


def find_data_point(pairs: list[Pair]) -> str | None:
    """The speedup of an epoch at two batches, as far apart as possible where they differ clearly, else at all.

    None where no number of devices was measured at two batches.
    """
    by_devices: dict[int, list[tuple[int, Arm, Estimate]]] = {}
    for batch, plain, arm in prefer_uncrowded(pairs):
        speedup = speed_up(plain, arm)
        if speedup is not None:
            by_devices.setdefault(arm.trial.num_ranks, []).append((batch, arm, speedup))
    every = [
        (one, other)
        for found in by_devices.values()
        for one, other in sorted(combinations(sorted(found, key=itemgetter(0)), 2), key=measure_span, reverse=True)
    ]
    if not every:
        return None
    verdicts = [compare_independent(other[2], one[2]) for one, other in every]
    place = next((index for index, verdict in enumerate(verdicts) if verdict), 0)
    (first, arm, before), (last, later, after) = every[place]
    ranks = arm.trial.num_ranks
    shared = " sharing cores" if arm.trial.is_oversubscribed else ""
    there = [published.EPOCH_SECONDS[1][batch] / published.EPOCH_SECONDS[ranks][batch] for batch in (first, last)]
    numbers = (
        f"speedup 1 → {ranks} devices{shared} is {say('ratio', before)} at batch {arm.trial.batch_per_rank} and"
        f" {say('ratio', after)} at batch {later.trial.batch_per_rank} per device (from the published times:"
        f" {there[0]:.2f} at batch {first}, {there[1]:.2f} at {last})"
    )
    return {
        1: f"The larger batch scales better: {numbers}. The bytes are the same at every batch, so communication is"
        " spread over more computing.",
        -1: f"The larger batch scales worse: {numbers}. The bytes are the same at every batch, so this is not"
        " communication.",
        0: f"{UNTOLD}: {numbers}, and the intervals overlap.",
    }[verdicts[place]]


def measure_span(pair: tuple[tuple[int, Arm, Estimate], tuple[int, Arm, Estimate]]) -> float:
    """How far two batches are apart."""
    (few, _, _), (many, _, _) = pair
    return many / few


def judge_weak(outcomes: Outcomes) -> str:
    """Both from one device with the middle batch: four devices with as many images each, or with a quarter of them.

    Weak efficiency over strong is T_1/T_4(b) over T_1/(4·T_4(b/4)): how long four small steps take against a large one.
    """
    weak, strong = (find_arm(outcomes.get(f"batch{batch}"), num_ranks=4) for batch in (128, 32))
    one = find_arm(outcomes.get("batch128"), strategy="single")
    if weak is None or strong is None or one is None:
        there = f"from the published times: {_compare_published():.2f} times the efficiency"
        return f"{UNTOLD}: it takes four devices ({there})."
    ratio = estimate_unpaired_ratio(strong.clean, weak.clean).map(lambda steps: 4 * steps)
    low, high = ratio.ends
    verdict = "Better" if low > 1 else "Worse" if high < 1 else UNTOLD
    shared = " (oversubscribed, so both share the same cores)" if weak.trial.is_oversubscribed else ""
    batch = one.trial.batch_per_rank
    return (
        f"{verdict}: from 1 × {batch} to 4 × {batch}, efficiency is {say('ratio', ratio)} times that from 1 × {batch}"
        f" to 4 × {strong.trial.batch_per_rank} (devices × images each){shared} (from the published"
        f" times: {_compare_published():.2f})."
    )


def _compare_published() -> float:
    return 4 * published.EPOCH_SECONDS[4][32] / 4 / published.EPOCH_SECONDS[4][128]


def describe_two_to_four(outcomes: Outcomes) -> Iterator[str]:
    """Whether the second two devices help, in one sentence; nothing where four devices were not measured."""
    found: dict[int, tuple[Arm, Estimate]] = {}
    for batch in published.BATCHES:
        two, four = (find_arm(outcomes.get(f"batch{batch}"), num_ranks=num_devices) for num_devices in DEVICES)
        ratio = speed_up(two, four)
        if four is not None and ratio is not None:
            found[batch] = (four, ratio)
    if not found:
        return
    listed = ", ".join(
        f"{say_wide('ratio', ratio)} at batch {arm.trial.batch_per_rank}" for arm, ratio in found.values()
    )
    there = ", ".join(f"{published.SPEEDUPS_TWO_TO_FOUR[batch]:.2f}" for batch in found)
    verdict = judge_more_devices([ratio for _, ratio in found.values()])
    yield f"2 → 4 devices: {verdict}{explain_crowd([arm for arm, _ in found.values()])}: {listed} (published: {there})."


def judge_more_devices(ratios: Sequence[Estimate]) -> str:
    """By the ends of the intervals of all batches."""
    faster = [ratio.is_above(1) for ratio in ratios]
    if all(faster):
        return "a speedup at every batch"
    return "a speedup at some batches only" if any(faster) else "no speedup is shown"


def explain_crowd(arms: Sequence[Arm]) -> str:
    """` because 4 ranks share 2 cores, which 2 ranks keep busy`; empty where every rank has cores of its own."""
    crowded = next((arm for arm in arms if arm.trial.is_oversubscribed), None)
    if crowded is None:
        return ""
    cores, ranks = count_cores(crowded), crowded.trial.num_ranks
    shared = format_count(cores, "core") if cores else "cores"
    full = f", which {cores} ranks already keep busy" if cores and 1 < cores < ranks else ""
    return f", because {ranks} ranks share {shared}{full}"


def count_cores(arm: Arm) -> int | None:
    """That the ranks of an arm have together; None where this is unknown."""
    cores = {(rank.host, core) for result in arm.completed[:1] for rank in result.ranks for core in rank.cores}
    return len(cores) or None


def list_epochs(pairs: list[Pair]) -> list[Compared]:
    lines: dict[str, Compared] = {}
    for batch, plain, spread in pairs:
        for arm in (plain, spread):
            ranks = arm.trial.num_ranks
            there = published.EPOCH_SECONDS[ranks][batch]
            ours = scale(arm.step, count_steps(arm))
            what = name_beside(arm, batch)
            lines[what] = Compared(what, ours, there, f"{there:.3f} s")
    return list(lines.values())


def describe_strong_point(outcomes: Outcomes) -> str:
    """The same samples per step on one device and on four: 1 × 128 against 4 × 32."""
    one = find_arm(outcomes.get("batch128"), strategy="single")
    four = find_arm(outcomes.get("batch32"), num_ranks=4)
    there = published.EPOCH_SECONDS[1][128] / published.EPOCH_SECONDS[4][32]
    if one is None or four is None:
        needs = "needs four devices (from the published times:"
        return f"The strong-scaling point, 1 × 128 against 4 × 32, {needs} {there:.2f}×)."
    ours = say("ratio", estimate_unpaired_ratio(one.clean, four.clean))
    point = f"1 × {one.trial.batch_per_rank} against 4 × {four.trial.batch_per_rank}"
    shared = ", sharing cores" if four.trial.is_oversubscribed else ""
    return (
        f"The strong-scaling point, {point}{shared}, is {ours}× (two studies; from the published times: {there:.2f}×)."
    )
