"""P1, P5 and P10: one rank, the profiler, the compiler.

The published times are of whole runs. Starting a profiler and writing its trace lies between steps, so a run is timed
from the start of its first step to the end of its last.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, estimate_location, judge
from scalelab.recipes.evidence import (
    Compared,
    divide_steps,
    divide_trainings,
    find_arm,
    find_completed,
    keep_tables,
    list_arms,
    make_beside_table,
    name_resident,
    quote,
    say_wide,
    scale,
    sum_training,
)
from scalelab.recipes.feasibility import choose, make_sampling
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.jobs import (
    SHALLOW,
    list_durations,
    make_training,
    make_training_job,
    print_seconds,
    say_verdict,
)
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Row, Size, pair_questions
from scalelab.records.trial import Status, StepKind
from scalelab.report.document import Table
from scalelab.studies.compile import BREAK_EVEN, Compile
from scalelab.units import format_count, format_quantity


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
    is_slow = recorded is not None and recorded.low is not None and recorded.low > 1
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
    for result in (result for result in (outcome.results if outcome else ()) if result.status is Status.COMPLETED):
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
