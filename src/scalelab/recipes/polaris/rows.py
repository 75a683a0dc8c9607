"""The polaris recipe: DDP on a supercomputer, from two reports of one homework.

P3: dimensions. The other rows are in modules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from scalelab.recipes.evidence import (
    ACCOUNTED,
    Compared,
    divide_steps,
    keep_tables,
    list_arms,
    make_beside_table,
    read_memory,
    say,
    say_wide,
    scale,
)
from scalelab.recipes.feasibility import choose, choose_ranks, make_sampling
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.device import make_p1, make_p5, make_p10
from scalelab.recipes.polaris.dtypes import make_p7
from scalelab.recipes.polaris.formats import make_p6
from scalelab.recipes.polaris.jobs import (
    SMALL_WIDTH,
    count_steps,
    is_unequal,
    make_p9,
    make_training_job,
    print_gigabytes,
    print_seconds,
)
from scalelab.recipes.polaris.links import make_p4
from scalelab.recipes.polaris.published import make_checks
from scalelab.recipes.polaris.ranks import make_p2
from scalelab.recipes.polaris.scale_up import make_p8
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Recipe, Row, Size, pair_questions
from scalelab.records.trial import Status
from scalelab.report.document import Table
from scalelab.studies.dimensions import BASE, Dimensions
from scalelab.studies.shared.arms import Arm


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
    baseline = ""
    if base is not None and base.is_measured:
        there = published.DIMENSIONS_MEMORY_BYTES
        memory = Compared("the baseline", read_memory(base), there, print_gigabytes(there))
        others = [Compared(arm.label, read_memory(arm), None) for arm in list_arms(matching) if arm is not base]
        epochs = _compare_baseline(base)
        main = Main("seconds", *epochs)
        tables = [
            make_beside_table("bytes", [memory, *others], title="Peak memory of a rank", size=size, notes=(ACCOUNTED,)),
            make_beside_table("seconds", [epochs], title="Baseline, by the median step", size=size),
        ]
        grown = [
            f"{say_wide('ratio', ratio)} with {arm.label}"
            for arm in list_arms(matching)
            if arm is not base and (ratio := divide_steps(arm, base)) is not None
        ]
        baseline = describe_baseline(epochs, memory)
        sentences.append(baseline)
        sentences.append(f"Step over the baseline: {', '.join(grown)}.")
        sentences += describe_width_memory(list_arms(matching))
    failed = list(_describe_invalid(outcomes.get("fixed")))
    sentences += failed
    return Answer(
        main=main,
        tables=keep_tables(*tables),
        sentences=tuple(sentences),
        questions=pair_questions(
            "polaris",
            "P3",
            (answer_widths(failed, matching) if failed else {}) | ({"baseline": baseline} if baseline else {}),
        ),
    )


def describe_baseline(epochs: Compared, memory: Compared) -> str:
    """Time and memory of the baseline, beside the published ones."""
    return (
        f"{published.DIMENSIONS_EPOCHS} epochs take {say_wide('seconds', epochs.ours)} and a rank's peak is"
        f" {say('bytes', memory.ours)} (published: {epochs.printed} and {memory.printed})."
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
    why = "every layer of nn.Transformer has width d_model and none maps features to it, so forward() refuses others"
    return {"d_model": f"Yes: {why}. {failed[0]}{ran} It is a shape error, not a lack of memory."}


def _compare_baseline(base: Arm) -> Compared:
    what = f"{published.DIMENSIONS_EPOCHS} epochs of the baseline"
    ours = scale(base.step, count_steps(base, published.DIMENSIONS_EPOCHS))
    there = published.DIMENSIONS_SECONDS
    return Compared(what, ours, there, print_seconds(there))


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


POLARIS = Recipe(
    name="polaris",
    title="DDP on a supercomputer",
    assignment="two reports of a homework on Polaris: ranks, links, I/O, data types",
    stand_in="a transformer of width 64 instead of 512, on one machine",
    make_rows=make_rows,
    make_checks=make_checks,
)
