"""The polaris recipe: DDP on a supercomputer, from two reports of one homework.

P3 and P7: dimensions and data types. The other rows are in modules of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, judge
from scalelab.recipes.evidence import (
    ACCOUNTED,
    Compared,
    divide_steps,
    find_arm,
    keep_tables,
    list_arms,
    make_beside_table,
    read_memory,
    say,
    scale,
)
from scalelab.recipes.feasibility import choose, choose_ranks, make_sampling
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.formats import make_p6
from scalelab.recipes.polaris.jobs import (
    SHALLOW,
    SMALL_WIDTH,
    is_unequal,
    make_p9,
    make_training_job,
    print_gigabytes,
    print_seconds,
    say_verdict,
)
from scalelab.recipes.polaris.links import make_p1, make_p4, make_p5, make_p10
from scalelab.recipes.polaris.published import make_checks
from scalelab.recipes.polaris.ranks import make_p2
from scalelab.recipes.polaris.scale_up import make_p8
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Recipe, Row, Size, pair_questions
from scalelab.records.trial import Status
from scalelab.report.document import Table
from scalelab.studies.dimensions import BASE, Dimensions
from scalelab.studies.dtypes import REFERENCE, Dtypes
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.study import Study
from scalelab.units import format_interval

LENGTHS = (20, 50, 100)
NO_HALF = "slower: without instructions of the CPU for it, torch converts numbers to float32 and back"


def make_rows(size: Size) -> Sequence[Row]:
    makers = (make_p1, make_p2, make_p3, make_p4, make_p5, make_p6, make_p7, make_p8, make_p9, make_p10)
    return tuple(make(size) for make in makers)


def make_p3(size: Size) -> Row:
    base = choose(size, small=SMALL_WIDTH, full=published.FEATURES)
    samples = choose(size, small=512, full=published.SAMPLES)
    widths = ",".join(str(base * factor) for factor in choose(size, small=(2, 4), full=(2, 4, 8)))
    ranks = choose_ranks(size, published.NUM_RANKS)

    def vary(*dimensions: str, rounds: int = 3) -> Dimensions:
        return Dimensions(
            vary=dimensions,
            ranks=ranks,
            batch_per_rank=published.BATCH_PER_RANK,
            job=make_training_job(size),
            sampling=make_sampling(size, rounds=rounds, phase_steps=0),
        )

    return Row(
        id="P3",
        title="Dimensions",
        parts={
            "matching": vary(f"features+d_model={widths}", "tgt_length=50,100", f"samples={2 * samples}"),
            "fixed": vary(f"features={widths}", rounds=1),
        },
        conclude=partial(answer_p3, size),
        expects=lambda result: result.status is Status.INVALID and is_unequal(result.trial),
        accounts_memory=True,
    )


def answer_p3(size: Size, outcomes: Outcomes) -> Answer:
    matching = outcomes.get("matching")
    base = matching.arms.get(BASE) if matching else None
    tables: list[Table | None] = []
    main: Main | None = None
    sentences: list[str] = []
    if base is not None and base.is_measured:
        there = published.DIMENSIONS_MEMORY_BYTES
        memory = Compared("the baseline", read_memory(base), there, print_gigabytes(there))
        others = [Compared(arm.label, read_memory(arm), None) for arm in list_arms(matching) if arm is not base]
        epochs = _compare_baseline(base)
        main = Main("seconds", *epochs)
        tables = [
            make_beside_table("seconds", [epochs], title="Baseline, by the median step", size=size),
            make_beside_table("bytes", [memory, *others], title="Peak memory of a rank", size=size, notes=(ACCOUNTED,)),
        ]
        grown = [
            f"{say('ratio', ratio)} with {arm.label}"
            for arm in list_arms(matching)
            if arm is not base and (ratio := divide_steps(arm, base)) is not None
        ]
        sentences.append(f"A step of the baseline takes {say('seconds', base.step)}.")
        sentences.append(f"Step over the baseline: {', '.join(grown)}.")
        sentences += describe_width_memory(list_arms(matching))
    failed = list(_describe_invalid(outcomes.get("fixed")))
    sentences += failed
    return Answer(
        main=main,
        tables=keep_tables(*tables),
        sentences=tuple(sentences),
        questions=pair_questions("polaris", "P3", answer_widths(failed, matching) if failed else {}),
    )


def describe_width_memory(arms: Sequence[Arm]) -> Iterator[str]:
    """How the peak grows with the width alone, in one data type."""
    widths: dict[int, int] = {}
    for arm in arms:
        held, width = read_memory(arm), arm.trial.options.get("d_model")
        if held is not None and width is not None and arm.trial.options.get("features") == width:
            widths.setdefault(int(width), held)
    ordered = sorted(widths)
    if len(ordered) < 2:
        return
    grown = ", ".join(
        f"{widths[wide] / widths[narrow]:.1f}× from {narrow} to {wide}" for narrow, wide in pairwise(ordered)
    )
    factor = ordered[1] / ordered[0]
    yield (
        f"With the width alone, all in {arms[0].trial.dtype}, the peak grows {grown}; quadratic growth would be"
        f" {factor**2:.0f}× for {factor:.0f}× the width."
    )


def answer_widths(failed: Sequence[str], matching: Outcome | None) -> dict[str, str]:
    """Whether features must equal d_model: what failed, and what ran once both were raised."""
    widths = {arm.trial.options.get("d_model") for arm in list_arms(matching)}
    listed = ", ".join(map(str, sorted(int(width) for width in widths if width is not None)))
    ran = f" With d_model raised to the features, {listed} run." if listed else ""
    why = "nn.Transformer has no layer that maps features to d_model: it adds and normalizes in the features' own width"
    return {"d_model": f"Yes: {why}. {failed[0]}{ran} It is a shape error, not a lack of memory."}


def _compare_baseline(base: Arm) -> Compared:
    what = f"{published.DIMENSIONS_EPOCHS} epochs of the baseline"
    ours = scale(base.step, count_steps(base, published.DIMENSIONS_EPOCHS))
    there = published.DIMENSIONS_SECONDS
    return Compared(what, ours, there, print_seconds(there))


def count_steps(arm: Arm, epochs: int) -> int:
    samples = int(arm.trial.options.get("samples", published.SAMPLES))
    return epochs * samples // arm.trial.global_batch


def _describe_invalid(fixed: Outcome | None) -> Iterator[str]:
    """What happened to data that are wider than the model."""
    failed = [arm for arm in (fixed.arms.values() if fixed else ()) if not arm.is_measured and arm.failure]
    for status in dict.fromkeys(arm.failure.status for arm in failed if arm.failure):
        alike = [arm for arm in failed if arm.failure and arm.failure.status is status]
        reasons = dict.fromkeys(arm.failure.reason for arm in alike if arm.failure)
        yield (
            f"With d_model unchanged, {', '.join(arm.label for arm in alike)}: {status.words} ({'; '.join(reasons)};"
            f" published: {published.UNEQUAL_WORDS!r})."
        )


def make_p7(size: Size) -> Row:
    parts: dict[str, Study] = {
        f"length{length}": Dtypes(
            dtypes=("float32", "float16", "bfloat16"),
            ranks=choose(size, small=1, full=published.NUM_RANKS),
            batch_per_rank=published.DTYPE_BATCH,
            job=make_training_job(size, {"tgt_length": length} | choose(size, small=SHALLOW, full={})),
            sampling=make_sampling(size, rounds=3, steps=8, phase_steps=0),
        )
        for length in LENGTHS
    }
    return Row(
        id="P7",
        title="Data types",
        parts=parts,
        conclude=partial(answer_p7, size),
        num_tables=0,
        names={f"length{length}": f"target length {length}" for length in LENGTHS},
        accounts_memory=True,
    )


def answer_p7(size: Size, outcomes: Outcomes) -> Answer:
    times: list[Compared] = []
    epochs: list[Compared] = []
    memory: list[Compared] = []
    sentences: list[str] = []
    slow: dict[str, None] = {}
    for length in LENGTHS:
        outcome = outcomes.get(f"length{length}")
        reference = find_arm(outcome, dtype=REFERENCE)
        seconds = dict(zip(published.DTYPES, published.DTYPE_SECONDS[length], strict=True))
        held = dict(zip(published.DTYPES, published.DTYPE_MEMORY_BYTES[length], strict=True))
        words = []
        for arm in list_arms(outcome):
            what = f"length {length}, {arm.label}"
            is_alike = arm is reference or arm.trial.shape.autocast  # the published weights stayed float32
            there, there_bytes = (found.get(arm.trial.dtype) if is_alike else None for found in (seconds, held))
            if seconds.get(arm.trial.dtype) is not None:
                ours = scale(arm.step, count_steps(arm, published.DTYPE_EPOCHS))
                epochs.append(Compared(what, ours, there, print_seconds(there) if there else ""))
            printed = print_gigabytes(there_bytes) if there_bytes else ""
            memory.append(Compared(what, read_memory(arm), there_bytes, printed))
            ratio = None if arm is reference else divide_steps(arm, reference)
            if ratio is None:
                continue
            base = seconds[REFERENCE]
            times.append(Compared(what, ratio, there / base if there and base else None))
            words.append(f"{arm.label} {say_judged(ratio)}, {say_verdict(ratio)}")
            if judge(ratio) is Verdict.SLOWER and is_cpu(arm):
                slow[arm.trial.dtype] = None
        if words:
            sentences.append(f"Step over float32 at target length {length}: {'; '.join(words)}.")
    unclear = "published: whole training runs, one each; with autocast, by their memory (see the checks)"
    held_by = {length: measure_dtypes(outcomes.get(f"length{length}")) for length in LENGTHS}
    lost = set(find_lost(outcomes))
    learning = [line for line in times if line.published is not None and line.what not in lost]
    first = next((line for line in learning if "bfloat16" in line.what), next(iter(learning), None))
    return Answer(
        main=Main("ratio", f"step over {REFERENCE}, {first.what}", *first[1:]) if first else None,
        tables=keep_tables(
            make_beside_table("bytes", memory, title="Peak memory", size=size, notes=(ACCOUNTED,)),
            make_beside_table("ratio", times, title="Time over float32", size=size, notes=(unclear,)),
            make_beside_table("seconds", epochs, title=f"{published.DTYPE_EPOCHS} epochs, from steps", size=size),
        ),
        sentences=(
            *sentences,
            *((f"{' and '.join(slow)} {'are' if len(slow) > 1 else 'is'} {NO_HALF}.",) if slow else ()),
            *describe_lost(outcomes),
        ),
        questions=pair_questions("polaris", "P7", answer_memory(held_by, list(describe_lost(outcomes)))),
    )


def say_judged(ratio: Estimate) -> str:
    """A ratio before its verdict: with both ends where ±, the larger side, would seem to include 1."""
    is_resolved = judge(ratio) in (Verdict.FASTER, Verdict.SLOWER)
    seems_open = abs(ratio.value - 1) <= (ratio.half_width or 0.0)
    return format_interval("ratio", ratio) if is_resolved and seems_open else say("ratio", ratio)


def is_cpu(arm: Arm) -> bool:
    return arm.trial.device == "cpu"


def measure_dtypes(outcome: Outcome | None) -> dict[str, int]:
    """The accounted peak of every data type, by its label."""
    return {arm.label: held for arm in list_arms(outcome) if (held := read_memory(arm)) is not None}


def find_lost(outcomes: Outcomes) -> dict[str, tuple[int, str]]:
    """Length and data type of the runs whose loss is not finite, by their line."""
    return {
        f"length {length}, {arm.label}": (length, arm.label)
        for length in LENGTHS
        for arm in list_arms(outcomes.get(f"length{length}"))
        if any(not math.isfinite(loss) for result in arm.completed for loss in result.losses().values())
    }


def describe_lost(outcomes: Outcomes) -> Iterator[str]:
    """Which data types lose the loss: less memory is worth nothing if nothing is learnt."""
    lost: dict[str, list[int]] = {}
    for length, label in find_lost(outcomes).values():
        lost.setdefault(label, []).append(length)
    for label, lengths in lost.items():
        yield (
            f"With {label} the loss becomes NaN or infinite at target length {', '.join(map(str, lengths))}: its times"
            " and bytes are those of a training run that learns nothing."
        )


def answer_memory(held_by: Mapping[int, Mapping[str, int]], lost: Sequence[str] = ()) -> dict[str, str]:
    """Whether bfloat16 holds less than float32: cast and autocast, at every length."""
    saved: dict[str, list[tuple[int, float]]] = {}
    for length, held in held_by.items():
        for label, num_bytes in held.items():
            if label.startswith("bfloat16") and held.get(REFERENCE):
                saved.setdefault(label, []).append((length, 1 - num_bytes / held[REFERENCE]))
    if not saved:
        return {}
    is_always = all(share > 0 for shares in saved.values() for _, share in shares)
    listed = "; ".join(
        f"{label} {', '.join(f'{say_saved(share)} at length {length}' for length, share in shares)}"
        for label, shares in saved.items()
    )
    return {
        "memory": f"{'Yes' if is_always else 'Not in every case'}. What torch's allocator holds at its peak, against"
        f" {REFERENCE}: {listed}."
        f"{''.join(f' {sentence}' for sentence in lost)}"
        " A cast stores parameters, gradients, moments and activations in half the bytes, and saves less than half of"
        " the peak where other buffers keep their size; autocast keeps parameters, gradients and"
        " moments in float32, halves the activations of matrix products, and holds 16-bit copies of the weights: it"
        " saves only where activations outweigh those copies."
    }


def say_saved(share: float) -> str:
    """`38 % less`."""
    return f"{abs(100 * share):.0f} % {'less' if share >= 0 else 'more'}"


POLARIS = Recipe(
    name="polaris",
    title="DDP on a supercomputer",
    assignment="two reports of a homework on Polaris: ranks, links, I/O, data types",
    stand_in="a transformer of width 64 instead of 512, on one machine",
    make_rows=make_rows,
    make_checks=make_checks,
)
