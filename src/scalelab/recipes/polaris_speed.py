"""P1, P2, P5 and P10: one rank, more ranks, the profiler, the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from scalelab.analysis.stats import judge
from scalelab.recipes import polaris_published as published
from scalelab.recipes.evidence import (
    Compared,
    divide_steps,
    find_arm,
    find_completed,
    keep_tables,
    list_arms,
    make_beside_table,
    quote,
    say,
    scale,
    sum_training,
)
from scalelab.recipes.polaris_jobs import SHALLOW, make_job, make_training, print_seconds
from scalelab.recipes.recipe import Finding, Outcome, Outcomes, Row, Size
from scalelab.recipes.sizes import choose, choose_ranks, make_sampling
from scalelab.report.document import Column, Table, make_row
from scalelab.studies.compile import Compile
from scalelab.studies.weak_scaling import WeakScaling


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


def make_p2(size: Size) -> Row:
    ranks = choose_ranks(size, published.NUM_RANKS)
    scaling = WeakScaling(
        ranks=(1, ranks),
        batch_per_rank=published.BATCH_PER_RANK,
        job=make_job(size),
        sampling=make_sampling(size, comm_free=True),
    )
    return Row(
        id="P2",
        title="Rank discovery, and the same training on more ranks",
        parts={"train": make_training(size, ranks=ranks, full_epochs=published.SINGLE_EPOCHS), "scaling": scaling},
        conclude=partial(find_p2, size),
        reason="ranks are those of the local launcher; discovery under MPI, PALS and Slurm, and whether they agree,"
        " comes with the cluster launchers",
    )


def find_p2(size: Size, outcomes: Outcomes) -> Finding:
    scaling = outcomes.get("scaling")
    plain = find_arm(scaling, strategy="single")
    spread = max(
        (arm for arm in list_arms(scaling) if arm.trial.num_ranks > 1),
        key=lambda arm: arm.trial.num_ranks,
        default=None,
    )
    table, answers = None, []
    if plain is not None and spread is not None:
        ranks = spread.trial.num_ranks
        speedup = scale(divide_steps(plain, spread), ranks)
        efficiency = scale(speedup, 1 / ranks)
        is_same = ranks == published.NUM_RANKS
        table = make_beside_table(
            "share",
            [
                *(() if is_same else (Compared(f"{ranks} ranks", efficiency, None),)),
                *(
                    Compared(
                        f"report {name}, {published.NUM_RANKS} ranks",
                        efficiency if is_same else None,
                        _find_efficiency(seconds),
                    )
                    for name, seconds in published.RANKS_SECONDS.items()
                ),
            ],
            title="The same epochs on more ranks: speedup over ranks",
            size=size,
        )
        answers.append(
            f"{ranks} ranks go through an epoch {say('ratio', speedup)} times as fast as one device, an efficiency of"
            f" {say('share', efficiency)}; published: {_list_speedups()} on {published.NUM_RANKS}."
        )
    answers += describe_ranks(outcomes.get("train"))
    total = sum_training(outcomes.get("train"))
    seconds_table = make_beside_table(
        "seconds",
        [
            Compared(f"all steps, report {name}", total, there, print_seconds(there))
            for name, there in published.RANKS_SECONDS.items()
        ],
        title="The training on more ranks",
        size=size,
        notes=(f"published: on {published.NUM_RANKS} ranks",),
    )
    return Finding(
        tables=keep_tables(table, seconds_table, make_rank_table(outcomes.get("train"))), answers=tuple(answers)
    )


def _find_efficiency(seconds: float) -> float:
    return published.SINGLE_SECONDS / seconds / published.NUM_RANKS


def _list_speedups() -> str:
    found = [published.SINGLE_SECONDS / seconds for seconds in published.RANKS_SECONDS.values()]
    return " and ".join(say("ratio", speedup) for speedup in found)


def make_rank_table(outcome: Outcome | None) -> Table | None:
    """Who every rank is, as it says itself."""
    result = find_completed(outcome)
    if result is None or not result.ranks:
        return None
    columns = (
        Column(key="rank", header="rank", quantity="count"),
        Column(key="num_ranks", header="of", quantity="count"),
        Column(key="local_rank", header="local rank", quantity="count"),
        Column(key="host", header="host", align="left"),
        Column(key="mask", header="CPU mask"),
        Column(key="published_mask", header="published"),
    )
    rows = []
    for number, report in enumerate(sorted(result.ranks, key=lambda report: report.rank)):
        local = sum(other.host == report.host and other.rank < report.rank for other in result.ranks)
        expected = hex(published.MASKS[number]) if number < len(published.MASKS) else None
        rows.append(
            make_row(report.rank, result.trial.num_ranks, local, report.host or None, make_mask(report.cores), expected)
        )
    return Table(title="Who the ranks are", columns=columns, rows=tuple(rows))


def make_mask(cores: tuple[int, ...]) -> str | None:
    """One bit per core that a rank may use; None where it may use all."""
    return hex(sum(1 << core for core in cores)) if cores else None


def describe_ranks(outcome: Outcome | None) -> Iterator[str]:
    result = find_completed(outcome)
    if result is None or not result.ranks:
        return
    cores = [set(report.cores) for report in result.ranks]
    is_disjoint = sum(map(len, cores)) == len(set().union(*cores))
    hosts = len({report.host for report in result.ranks})
    how = "no core is shared" if is_disjoint and all(cores) else "cores are shared"
    yield f"{len(result.ranks)} ranks on {hosts} host{'s'[: hosts > 1]}, numbered by the launcher itself: {how}."


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
        reason=f"the Chrome trace has the published name, {published.PROFILE_NAME}-<rank>-of-<ranks>.json, in"
        f" {published.PROFILE_NAME}_<n>nodes_E<epochs>_R<ranks>_<timestamp> under trials/p5.profiled.train-r1/trace of"
        " this run, with the key averages beside it as text",
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
