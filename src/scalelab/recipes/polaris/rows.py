"""The polaris recipe: DDP on a supercomputer, from two reports of one homework.

P1, P5 and P10: one rank, the profiler, the compiler. P3: dimensions. The other rows are in modules of their own.

The published times are of whole runs. Starting a profiler and writing its trace lies between steps, so a run is timed
from the start of its first step to the end of its last.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, estimate_location, judge
from scalelab.recipes.evidence import (
    ACCOUNTED,
    Compared,
    divide_steps,
    divide_trainings,
    find_arm,
    find_completed,
    keep_tables,
    list_arms,
    list_completed,
    make_beside_table,
    name_resident,
    quote,
    read_memory,
    say,
    say_wide,
    scale,
    sum_training,
)
from scalelab.recipes.feasibility import choose, choose_ranks, make_sampling
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.dtypes import make_p7
from scalelab.recipes.polaris.formats import make_p6
from scalelab.recipes.polaris.jobs import (
    SHALLOW,
    SMALL_WIDTH,
    count_steps,
    is_unequal,
    list_durations,
    make_p9,
    make_training,
    make_training_job,
    print_gigabytes,
    print_seconds,
    say_verdict,
)
from scalelab.recipes.polaris.links import make_p4
from scalelab.recipes.polaris.published import make_checks
from scalelab.recipes.polaris.ranks import make_p2
from scalelab.recipes.polaris.scale_up import make_p8
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Recipe, Row, Size, pair_questions
from scalelab.records.trial import Status, StepKind
from scalelab.report.document import Table
from scalelab.studies.compile import BREAK_EVEN, Compile
from scalelab.studies.dimensions import BASE, Dimensions
from scalelab.studies.shared.arms import Arm
from scalelab.units import format_count, format_quantity


def make_rows(size: Size) -> Sequence[Row]:
    makers = (make_p1, make_p2, make_p3, make_p4, make_p5, make_p6, make_p7, make_p8, make_p9, make_p10)
    return tuple(make(size) for make in makers)


def make_p1(size: Size) -> Row:
    train = make_training(size, ranks=1, full_epochs=published.SINGLE_EPOCHS)
    return Row(id="P1", title="Single device", parts={"train": train}, conclude=partial(answer_p1, size), num_tables=0)


def answer_p1(size: Size, outcomes: Outcomes) -> Answer:
    total = sum_training(outcomes.get("train"), list_durations)
    arm = find_arm(outcomes.get("train"))
    if total is None or arm is None:
        return Answer()
    num_steps = len(arm.completed[0].losses())
    samples = int(arm.trial.options.get("samples", published.SAMPLES))
    epochs = num_steps * arm.trial.global_batch // samples
    printed = print_seconds(published.SINGLE_SECONDS)
    done = format_count(epochs, "epoch")
    line = Compared(done, total, published.SINGLE_SECONDS, printed)
    sentence = (
        f"{done} took {say_wide('seconds', total)} without a process group (published: {printed} for"
        f" {published.SINGLE_EPOCHS} epochs)."
    )
    more = (
        f" With {samples} samples (published {published.SAMPLES}) in batches of {arm.trial.global_batch} that is"
        f" {say_wide('seconds', scale(total, 1 / num_steps))} per step in the mean"
    )
    if 0 < epochs != published.SINGLE_EPOCHS:
        all_epochs = scale(total, published.SINGLE_EPOCHS / epochs)
        more += f"; {published.SINGLE_EPOCHS} epochs would take {say_wide('seconds', all_epochs)}"
    return Answer(
        main=Main("seconds", f"{done} on one device", *line[1:]),
        tables=keep_tables(make_beside_table("seconds", [line], title="Without a process group", size=size)),
        sentences=(sentence,),
        questions=pair_questions("polaris", "P1", {"single": f"{sentence}{more}."}),
    )


def make_p5(size: Size) -> Row:
    epochs = published.SINGLE_EPOCHS
    return Row(
        id="P5",
        title="Profiler",
        parts={
            "plain": make_training(size, ranks=1, full_epochs=epochs),
            "profiled": make_training(size, ranks=1, full_epochs=epochs, profile_active=2),
        },
        conclude=partial(answer_p5, size),
        num_tables=0,
        shows=("profiled",),
    )


def answer_p5(size: Size, outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("profiled")
    sides = (outcome, outcomes.get("plain"))
    profiled, plain = (sum_training(side, list_durations) for side in sides)
    ratio = divide_trainings(*sides, list_durations)
    if plain is None or profiled is None or ratio is None:
        return Answer()
    there = (published.PROFILED_SECONDS, published.SINGLE_SECONDS)
    recorded = compare_recorded(outcome)
    line = Compared("with the profiler", ratio, there[0] / there[1])
    title = "Time of the whole run over that without the profiler"
    sentence = (
        f"The whole run took {say_wide('seconds', profiled)} with the profiler, {say_wide('seconds', plain)} without,"
        f" {say_wide('ratio', ratio)} times as long (published: {' / '.join(map(print_seconds, there))} ="
        f" {format_quantity('ratio', there[0] / there[1])})."
    )
    trace = (
        f"The trace is {published.PROFILE_NAME}_<n>nodes_E<epochs>_R<ranks>_<timestamp> in the directory of this run,"
        " named as published."
    )
    why = f"{locate_cost(*sides)} {trace}{describe_recorded(outcome, recorded)}"
    return Answer(
        main=Main(
            "ratio",
            "time with the profiler over without",
            ratio,
            there[0] / there[1],
            is_alike=size == "full",  # the cost is paid once, so the factor depends on the number of steps
        ),
        tables=keep_tables(make_beside_table("ratio", [line], title=title, size=size)),
        sentences=(sentence, trace),
        questions=pair_questions("polaris", "P5", {"profiler": f"{judge_profiler(ratio, recorded)}. {sentence}{why}"}),
    )


def judge_profiler(ratio: Estimate, recorded: Estimate | None = None) -> str:
    """Whether the whole time with the profiler over that without lies on one side of 1; else by the steps under it."""
    if ratio.low is None or ratio.high is None:
        return "One launch each does not show a cost"
    if ratio.low > 1 or ratio.high < 1:
        return "The profiler costs time" if ratio.low > 1 else "It was faster"
    is_slow = recorded is not None and recorded.is_above(1)
    if is_slow:
        return "A cost is visible in the steps under the profiler, not in the whole run"
    return "Unresolved: the interval of their ratio includes 1"


def locate_cost(profiled: Outcome | None, plain: Outcome | None) -> str:
    """How much longer the time between steps is: that of starting the profiler and writing the trace."""
    sums = (sum_between(profiled), sum_between(plain))
    if not all(sums):
        return ""
    more = statistics.median(sums[0]) - statistics.median(sums[1])
    if more <= 0:
        return ""
    return (
        f" Between steps it spends {format_quantity('seconds', more)} more, to start and to write the trace, once per"
        " recording: the factor shrinks with longer runs."
    )


def sum_between(outcome: Outcome | None) -> list[float]:
    """What a run takes besides its steps, by launch; of one rank, as steps of several may overlap."""
    durations = list_durations(outcome)
    return [
        durations[result.trial.round] - sum(sample.step_seconds for sample in result.samples)
        for result in (outcome.results if outcome else ())
        if result.trial.round in durations and result.trial.num_ranks == 1
    ]


def compare_recorded(outcome: Outcome | None) -> Estimate | None:
    """A step under the profiler over the median of the others of its launch, which other programs disturb alike."""
    ratios = []
    for result in list_completed(outcome):
        clean, recorded = (list(result.step_seconds(kind).values()) for kind in (StepKind.CLEAN, StepKind.PROFILED))
        if clean and recorded:
            ratios.append(statistics.fmean(recorded) / statistics.median(clean))
    return estimate_location(ratios) if ratios else None


def describe_recorded(outcome: Outcome | None, ratio: Estimate | None) -> str:
    result = find_completed(outcome)
    run = result.trial.training_run if result else None
    if ratio is None or run is None:
        return ""
    verdict = "slower" if judge(ratio) is Verdict.SLOWER else "not measurably slower"
    return (
        f" The {run.profile_warmup + run.profile_active} steps under the profiler ({run.profile_warmup} of warm-up,"
        f" {run.profile_active} recorded) are {verdict} than the others: {say_wide('ratio', ratio)} times their median."
    )


def make_p10(size: Size) -> Row:
    parts = {
        f"ranks{ranks}": Compile(
            ranks=ranks,
            batch_per_rank=published.BATCH_PER_RANK,
            job=make_training_job(size, choose(size, small=SHALLOW, full={}), timeout="1h"),  # to compile on busy cores
            sampling=make_sampling(size, rounds=3, phase_steps=0),
        )
        for ranks in choose(size, small=(1,), full=(1, published.NUM_RANKS))
    }
    return Row(
        id="P10",
        title="torch.compile",
        parts=parts,
        conclude=answer_p10,
        is_extra=True,
        reason=choose(size, small=f"1 rank only; full size adds {published.NUM_RANKS} ranks", full=""),
        num_tables=0,
    )


def answer_p10(outcomes: Outcomes) -> Answer:
    sentences: list[str] = []
    tables: list[Table] = []
    main: Main | None = None
    for outcome in outcomes.values():
        eager, compiled = (
            next((arm for arm in list_arms(outcome) if arm.trial.shape.compile is on), None) for on in (False, True)
        )
        ratio = divide_steps(compiled, eager)
        if ratio is not None and compiled is not None:
            ranks = format_count(compiled.trial.num_ranks, "rank")
            main = main or Main("ratio", f"compiled step over eager, {ranks}", ratio)
            sentences.append(
                f"On {ranks} a compiled step takes {say_wide('ratio', ratio)} times as long as an eager one:"
                f" {say_verdict(ratio)}."
            )
        sentences += quote(outcome, BREAK_EVEN.name)
        if outcome.document is not None:
            ranks = format_count(max((result.trial.num_ranks for result in outcome.results), default=1), "rank")
            first = name_resident(outcome.document.tables[0], outcome)
            tables.append(replace(first, title=f"Compilation, {ranks}"))
    return Answer(main=main, tables=tuple(tables), sentences=tuple(sentences))


def make_p3(size: Size) -> Row:
    base = choose(size, small=SMALL_WIDTH, full=published.FEATURES)
    samples = choose(size, small=512, full=published.SAMPLES)
    widths = ",".join(str(base * factor) for factor in choose(size, small=(2, 4), full=(2, 4, 8)))
    ranks = choose_ranks(size, published.NUM_RANKS)

    def vary(*dimensions: str, rounds: int = 5) -> Dimensions:
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
