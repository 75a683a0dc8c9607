"""P1, P5 and P10: one rank, the profiler, the compiler."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from scalelab.analysis.stats import judge
from scalelab.recipes import polaris_published as published
from scalelab.recipes.evidence import (
    Compared,
    divide_steps,
    find_arm,
    keep_tables,
    list_arms,
    make_beside_table,
    quote,
    say,
    sum_training,
)
from scalelab.recipes.polaris_jobs import SHALLOW, make_job, make_training, print_seconds
from scalelab.recipes.recipe import Finding, Outcomes, Row, Size
from scalelab.recipes.sizes import choose, make_sampling
from scalelab.report.document import Table
from scalelab.studies.compile import Compile


def make_p1(size: Size) -> Row:
    return Row(
        id="P1",
        title="Single device",
        parts={"train": make_training(size, ranks=1, full_epochs=published.SINGLE_EPOCHS)},
        conclude=partial(find_p1, size),
        num_tables=0,
    )


def find_p1(size: Size, outcomes: Outcomes) -> Finding:
    total = sum_training(outcomes.get("train"))
    arm = find_arm(outcomes.get("train"))
    if total is None or arm is None:
        return Finding()
    (result,) = arm.completed
    num_steps = len(result.losses())
    table = make_beside_table(
        "seconds",
        [Compared("all steps", total, published.SINGLE_SECONDS, print_seconds(published.SINGLE_SECONDS))],
        title="Without a process group",
        size=size,
        notes=(f"{num_steps} steps here, {published.SINGLE_STEPS} published",),
    )
    answer = (
        f"{num_steps} steps of batch {arm.trial.global_batch} took {say('seconds', total)} without a process group,"
        f" {say('seconds', arm.step)} each (published:"
        f" {say('seconds', published.SINGLE_SECONDS / published.SINGLE_STEPS)})."
    )
    return Finding(tables=keep_tables(table), answers=(answer,))


def make_p5(size: Size) -> Row:
    epochs = published.SINGLE_EPOCHS
    return Row(
        id="P5",
        title="Profiler",
        parts={
            "plain": make_training(size, ranks=1, full_epochs=epochs),
            "profiled": make_training(size, ranks=1, full_epochs=epochs, profile_active=2),
        },
        conclude=partial(find_p5, size),
        num_tables=0,
    )


def find_p5(size: Size, outcomes: Outcomes) -> Finding:
    plain, profiled = (sum_training(outcomes.get(key)) for key in ("plain", "profiled"))
    if plain is None or profiled is None:
        return Finding()
    table = make_beside_table(
        "ratio",
        [Compared("with the profiler", profiled / plain, published.PROFILED_SECONDS / published.SINGLE_SECONDS)],
        title="Time of the training, over that without the profiler",
        size=size,
        notes=("one launch of each: no interval",),
    )
    answers = (
        f"With 1 step of waiting, 1 of warm-up and 2 recorded, the training took {say('seconds', profiled)} against"
        f" {say('seconds', plain)} without, {say('ratio', profiled / plain)} times as long; it pays for the profiler in"
        " a few steps, so the factor depends on how many there are.",
        f"The Chrome trace has the published name, {published.PROFILE_NAME}-<rank>-of-<ranks>.json, in"
        f" {published.PROFILE_NAME}_<n>nodes_E<epochs>_R<ranks>_<timestamp> under trials/p5.profiled.train-r1/trace of"
        " this run, with the key averages beside it as text.",
    )
    return Finding(tables=keep_tables(table), answers=answers)


def make_p10(size: Size) -> Row:
    parts = {
        f"ranks{ranks}": Compile(
            ranks=ranks,
            batch_per_rank=published.BATCH_PER_RANK,
            job=make_job(size, choose(size, small=SHALLOW, full={})),
            sampling=make_sampling(size, rounds=3, phase_steps=0),
        )
        for ranks in choose(size, small=(1,), full=(1, published.NUM_RANKS))
    }
    return Row(
        id="P10",
        title="torch.compile",
        parts=parts,
        conclude=find_p10,
        reason=choose(size, small=f"in small on 1 rank only, in full on {published.NUM_RANKS} as well", full=""),
        num_tables=0,
    )


def find_p10(outcomes: Outcomes) -> Finding:
    answers: list[str] = []
    tables: list[Table] = []
    for key, outcome in outcomes.items():
        eager, compiled = (
            next((arm for arm in list_arms(outcome) if arm.trial.shape.compile is on), None) for on in (False, True)
        )
        ratio = divide_steps(compiled, eager)
        if ratio is not None and compiled is not None:
            ranks = compiled.trial.num_ranks
            answers.append(
                f"On {ranks} rank{'s'[: ranks > 1]} a compiled step takes {say('ratio', ratio)} times as long as an"
                f" eager one: {judge(ratio)}."
            )
        answers += quote(outcome)[1:2]
        if outcome.document is not None:
            tables.append(replace(outcome.document.tables[0], title=f"Compilation ({key})"))
    return Finding(tables=tuple(tables), answers=tuple(answers))
