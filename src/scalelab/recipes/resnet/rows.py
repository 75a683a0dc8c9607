"""The resnet recipe: DDP on CIFAR-10.

R1: the batch size. R3: how much of an epoch is communication. R2 is in `epochs`, R4 and R6 in `messages`, R5 in
`learning`, R7 in `training`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_subtraction
from scalelab.analysis.stats import Verdict, judge
from scalelab.recipes.evidence import (
    UNTOLD,
    Compared,
    compare_estimates,
    describe_limit,
    divide_steps,
    explain_limit,
    find_arm,
    is_out_of_memory,
    keep_tables,
    list_arms,
    make_beside_table,
    say,
    say_wide,
    scale,
)
from scalelab.recipes.feasibility import choose, make_sampling
from scalelab.recipes.recipe import Answer, Outcomes, Recipe, Row, Size, pair_questions
from scalelab.recipes.resnet import published
from scalelab.recipes.resnet.epochs import (
    EIGHTH,
    Pair,
    answer_r2,
    count_cores,
    count_steps,
    list_pairs,
    list_shared,
    make_main,
    name_beside,
    name_pair,
)
from scalelab.recipes.resnet.learning import make_r5
from scalelab.recipes.resnet.messages import answer_r4, make_r6
from scalelab.recipes.resnet.published import DEVICES, make_checks
from scalelab.recipes.resnet.training import (
    ONE_RUN,
    TimedEpoch,
    choose_batch,
    compare_timed_images,
    make_job,
    make_r7,
    make_timed,
    measure_computing,
    name_batch,
    time_computing,
    time_images,
    time_loading,
)
from scalelab.report.document import Table
from scalelab.report.findings import Known
from scalelab.report.tables import INTERVAL_NOTE, count_column, make_column, make_table, seconds_column, text_column
from scalelab.studies.batch_size import BatchSize
from scalelab.studies.scaling.study import WeakScaling
from scalelab.studies.shared.arms import Arm, describe_status
from scalelab.studies.shared.study import Study
from scalelab.units import choose_unit, format_count, format_estimate, format_quantity, format_share

CLEARLY_LESS = 0.95
"""Throughput below this share of that of a smaller batch has fallen."""
GROWS, FLAT = "Throughput grows", ("Throughput stays the same", "Throughput falls", "Throughput is flat or falls")
SMALL_LIMIT = "600MB"
"""What a rank may allocate in small, so that the largest batch does not fit."""


def make_rows(size: Size) -> Sequence[Row]:
    return (make_r1(size), *make_epoch_rows(size), make_r5(size), make_r6(size), make_r7(size))


def make_epoch_rows(size: Size) -> tuple[Row, Row, Row]:
    parts: dict[str, Study] = {
        f"batch{batch}": WeakScaling(
            ranks=(1, *DEVICES),
            batch_per_rank=choose_batch(size, batch),
            job=make_job(size),
            sampling=make_sampling(size, rounds=8, steps=6, comm_free=True, phase_steps=2),
        )
        for batch in published.BATCHES
    }
    shows = tuple(parts)
    parts |= {f"timed{n}x{batch}": make_timed(size, batch, n) for n in DEVICES for batch in published.BATCHES}
    names = {key: f"batch {choose_batch(size, batch)}" for key, batch in zip(shows, published.BATCHES, strict=True)}
    names |= {
        f"timed{n}x{batch}": f"epochs of batch {choose_batch(size, batch)}, {n} devices"
        for n in DEVICES
        for batch in published.BATCHES
    }
    shown: dict[str, Any] = {"shows": shows, "names": names}
    r2, r3, r4 = (partial(answer, size) for answer in (answer_r2, answer_r3, answer_r4))
    return (
        Row(id="R2", title="More devices", parts=parts, conclude=r2, num_tables=0, **shown),
        Row(id="R3", title="Computation and communication", parts=parts, conclude=r3, reads="R2", **shown),
        Row(id="R4", title="All-reduce bandwidth", parts=parts, conclude=r4, reads="R2", **shown),
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
    return Answer(
        main=main, tables=keep_tables(make_parts_table(pairs), table), sentences=sentences, questions=questions
    )


def say_share(share: Estimate | float | None) -> str:
    """With its estimate where it is above 0; else its upper end."""
    is_positive = isinstance(share, Estimate) and (share.low is None or share.low > 0)
    return say_wide("share", share) if is_positive else say("share", share)


def explain_shares(lines: Sequence[Compared], pairs: Sequence[Pair]) -> str:
    """How the share depends on the batch: by the ends of the batches of the fewest devices."""
    fewest = min(arm.trial.num_ranks for _, _, arm in pairs)
    known = [
        (arm.trial.batch_per_rank, line.ours)
        for line, (_, _, arm) in zip(lines, pairs, strict=True)
        if arm.trial.num_ranks == fewest and isinstance(line.ours, Estimate)
    ]
    if len(known) < 2:
        return "Every batch sends the same bytes."
    words = {1: ", as it does here", 0: "; here it is unresolved", -1: "; here it grows"}
    came = f"{words[compare_estimates(known[0][1], known[-1][1])]} from batch {known[0][0]} to {known[-1][0]}"
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


def make_parts_table(pairs: Sequence[Pair]) -> Table:
    """The table that the question asks for: an epoch on N devices in its two parts."""

    def print_there(table: Mapping[int, Mapping[int, str]]) -> Callable[[Pair], str]:
        return lambda pair: f"{table[pair[2].trial.num_ranks][pair[0]]} s"

    computed, sent = print_there(published.COMPUTATION_SECONDS), print_there(published.COMMUNICATION_SECONDS)
    return make_table(
        pairs,
        text_column("what", "setup", lambda pair: name_beside(pair[2], pair[0])),
        make_column("number", "total", "total T_N [s]", lambda pair: scale(pair[2].step, count_steps(pair[2]))),
        make_column("number", "computation", "computation [s]", lambda pair: scale(pair[1].step, count_steps(pair[2]))),
        text_column("published_computation", "published", computed, align="right"),
        make_column("number", "communication", "communication [s]", lambda pair: subtract_epoch(*pair[1:])),
        text_column("published_communication", "published", sent, align="right"),
        title="An epoch by subtraction: computation T_1/N, communication T_N − T_1/N",
        notes=(
            INTERVAL_NOTE,
            "total: median of all steps; communication: by launch, so ± do not add up",
            f"published for batch 512: with {published.USED_FOR_512} s instead of the logged T_1",
        ),
    )


def subtract_epoch(plain: Arm, arm: Arm) -> Estimate:
    """T_N − T_1/N of an epoch: its steps times T_N − T_1 of a step, as the batch per device is fixed."""
    rest, num_steps = (
        communication_by_subtraction(plain.clean, arm.clean, arm.trial.num_ranks, is_weak=True),
        count_steps(arm),
    )
    return rest.map(lambda seconds: seconds * num_steps)


def make_r1(size: Size) -> Row:
    asked = (*published.COMPUTE_SECONDS, published.OUT_OF_MEMORY_BATCH)
    study = BatchSize(
        batches=tuple(choose_batch(size, batch) for batch in asked),
        job=make_job(size, memory_limit=choose(size, small=SMALL_LIMIT, full=None)),
        sampling=make_sampling(size, rounds=8, steps=8, phase_steps=2),
    )
    return Row(
        id="R1",
        title="Batch on one device",
        parts={"batches": study, **{f"timed{batch}": make_timed(size, batch) for batch in published.COMPUTE_SECONDS}},
        conclude=partial(answer_r1, size),
        expects=partial(is_out_of_memory, study.batches[-1]),
        shows=("batches",),
        names={f"timed{batch}": f"epochs of batch {choose_batch(size, batch)}" for batch in published.COMPUTE_SECONDS},
    )


def answer_r1(size: Size, outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("batches")
    lines: list[Compared] = []
    epochs: dict[int, Estimate] = {}
    is_random = not any("data" in arm.trial.options for arm in list_arms(outcome))  # before 0.2, in published batches
    for batch, seconds in published.COMPUTE_SECONDS.items():
        own = choose_batch("full" if is_random else size, batch)
        arm = find_arm(outcome, global_batch=own)
        computing = scale(measure_computing(arm), count_steps(arm)) if arm else None
        epochs |= {own: computing} if computing is not None else {}
        lines.append(Compared(name_batch(own, batch), computing, seconds, f"{seconds:.3f} s"))
    sentences = []
    if outcome is not None and list_arms(outcome):
        largest = max(arm.trial.global_batch for arm in list_arms(outcome))
        limit = describe_limit(outcome) or "none runs out of memory"
        sentences.append(
            f"The largest batch that ran is {largest}; {limit} (published: batch {published.OUT_OF_MEMORY_BATCH} runs"
            " out of memory)."
        )
        sentences += explain_limit(outcome)
    return Answer(
        main=make_main("seconds", "epoch", lines),
        lead=f"{sentences[0]}{name_epochs(epochs, sorted(epochs))}" if sentences and epochs else "",
        tables=keep_tables(make_epoch_table(size, lines, outcomes), time_loading(size, outcomes)),
        sentences=tuple(sentences),
        questions=pair_questions(
            "resnet",
            "R1",
            ({"largest": sentences[0]} if sentences else {})
            | answer_batches(list_arms(outcome), epochs, time_images(size, outcomes)),
        ),
    )


def make_epoch_table(size: Size, lines: Sequence[Compared], outcomes: Outcomes) -> Table | None:
    """The table that the question asks for: an epoch without loading by batch, up to one that does not fit."""
    outcome, too_large = outcomes.get("batches"), published.OUT_OF_MEMORY_BATCH
    own, arms = choose_batch(size, too_large), outcome.arms.values() if outcome else ()
    failed = next((arm for arm in arms if not arm.is_measured and arm.trial.global_batch == own), None)
    timed = {line.what: line for line in time_computing(size, outcomes).values()}
    if all(line.ours is None for line in lines) and not any(line.seconds for line in timed.values()):
        return None
    last = (name_batch(own, too_large), describe_status(failed) if failed else None, "out of memory")
    nothing = TimedEpoch("", None, None, "")
    rows: list[tuple[str, Known, str]] = [*((line.what, line.ours, line.printed) for line in lines), last]
    return make_table(
        rows,
        text_column("batch", "batch", lambda row: row[0]),
        seconds_column("epoch_seconds", "epoch, from steps", lambda row: row[1]),
        seconds_column("timed_seconds", "epoch 2, timed", lambda row: timed.get(row[0], nothing).seconds),
        count_column("images", "its images", lambda row: timed.get(row[0], nothing).images),
        text_column("published", "published", lambda row: row[2], align="right"),
        title="An epoch without loading",
        notes=(INTERVAL_NOTE, f"timed: {ONE_RUN}", *((EIGHTH,) if size == "small" else ())),
    )


def name_epochs(epochs: Mapping[int, Estimate], batches: Sequence[int]) -> str:
    """` An epoch without loading takes 2.4 ± 0.1 s at batch 8, …`, from steps that took turns; empty where unknown."""
    unit = choose_unit("seconds", list(epochs.values()))
    known = [batch for batch in batches if batch in epochs]
    said = [f"{format_estimate(epochs[batch], unit)} {unit.symbol} at batch {batch}" for batch in known]
    return f" An epoch without loading takes {', '.join(said)}, from steps." if said else ""


def judge_growth(gain: Estimate) -> str:
    """What throughput does from one batch to a larger one, by the ends of the interval of their quotient."""
    low, high = gain.ends
    verdict = judge(gain)
    if verdict is Verdict.SLOWER:
        return GROWS
    if verdict is Verdict.NO_DIFFERENCE:
        return FLAT[0]
    if high < CLEARLY_LESS:
        return FLAT[1]
    if high < 2 - CLEARLY_LESS:
        return FLAT[2]
    return "Throughput is flat or grows" if low > CLEARLY_LESS else UNTOLD


def answer_batches(
    arms: Sequence[Arm], epochs: Mapping[int, Estimate], timed: Mapping[int, float] | None = None
) -> dict[str, str]:
    """Whether throughput grows from the smallest batch to the next, and whether it still does after that."""
    ordered = sorted(arms, key=lambda arm: arm.trial.global_batch)
    gains: dict[tuple[int, int], Estimate] = {}
    for before, arm in pairwise(ordered):
        pair = before.trial.global_batch, arm.trial.global_batch
        gain = scale(divide_steps(before, arm), pair[1] / pair[0])
        if gain is not None:
            gains[pair] = gain
    if len(gains) < 2:
        return {}
    verdicts = [judge_growth(gain) for gain in gains.values()]
    times = [
        f"{format_quantity('ratio', gain)} times the images/s from batch {few} to {many}"
        for (few, many), gain in gains.items()
    ]
    later = ". ".join(  # neighbours with one verdict share it
        f"{verdict}: {', '.join(said for _, said in group)}"
        for verdict, group in groupby(zip(verdicts[1:], times[1:], strict=True), key=lambda pair: pair[0])
    )
    batches = [arm.trial.global_batch for arm in ordered]
    return {
        "grows": f"{'Yes. ' if verdicts[0] == GROWS else ''}{verdicts[0]}: {times[0]}."
        " A step has a cost that does not grow with its images (kernel launches,"
        " Python, the optimizer), and a larger batch spreads it over more of them.",
        "flattens": f"{judge_flat(verdicts, batches)} {later}.{name_epochs(epochs, batches)}"
        f"{compare_timed_images(timed or {}, gains)} {explain_end(list(gains.values())[-1])}".strip(),
    }


def judge_flat(verdicts: Sequence[str], batches: Sequence[int]) -> str:
    """From which batch on no larger one gains, by the verdicts from each to the next."""
    flat = next((place for place in range(len(verdicts)) if all(one in FLAT for one in verdicts[place:])), None)
    if flat is not None:
        rises = next((place for place in range(flat, len(verdicts)) if verdicts[place] == FLAT[1]), None)
        if rises == flat:
            return f"No, it falls up to batch {batches[flat]} and then rises again."
        return (
            f"Yes, from batch {batches[flat]} on{'' if rises is None else f', up to {batches[rises]}; then it rises'}."
        )
    if verdicts[-1] == GROWS:
        return f"No, not up to batch {batches[-1]}."
    return "" if UNTOLD in verdicts[1:] else f"{UNTOLD}."  # which the verdict itself says


def explain_end(last: Estimate) -> str:
    """Why the last step to a larger batch gains what it does."""
    busy = "Once every core or multiprocessor is busy, an image takes the time of its arithmetic and memory traffic"
    if judge(last) is Verdict.SLOWER:
        return f"{busy}; that is not reached here."
    gains = f"{busy}: a larger batch gains nothing more"
    if not last.is_below(1):
        return f"{gains}. Whether that is reached is open here."
    return f"{gains}. Why it loses was not measured; activations that no longer fit the caches are one possible reason."


RESNET = Recipe(
    name="resnet",
    title="DDP on CIFAR-10",
    assignment="a course's homework 5, part A: six questions",
    stand_in="4 instead of 64 channels, 1/4 of the batches (1/8 of 8192, in R5 1/34), digits without CIFAR-10",
    make_rows=make_rows,
    make_checks=make_checks,
)
