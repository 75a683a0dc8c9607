"""P2: who the ranks are, under every launcher there is here, and the same training on more of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from scalelab.ranks.mpi import guess_local_rank
from scalelab.ranks.topology import format_mask
from scalelab.recipes import polaris_published as published
from scalelab.recipes.evidence import (
    Compared,
    divide_steps,
    find_arm,
    find_completed,
    keep_tables,
    list_arms,
    make_beside_table,
    say,
    scale,
    sum_training,
)
from scalelab.recipes.polaris_jobs import make_job, make_training, print_seconds
from scalelab.recipes.recipe import Finding, Outcome, Outcomes, Row, Size
from scalelab.recipes.sizes import choose_ranks, make_sampling
from scalelab.report.document import Cell, Column, Table, make_row
from scalelab.settings import LauncherName
from scalelab.studies.train import Train
from scalelab.studies.weak_scaling import WeakScaling
from scalelab.trial import TrialResult

LAUNCHERS: tuple[LauncherName, ...] = ("torchrun", "mpi", "slurm", "pbs")
DISCOVERY_STEPS = 2


def make_p2(size: Size) -> Row:
    ranks = choose_ranks(size, published.NUM_RANKS)
    scaling = WeakScaling(
        ranks=(1, ranks),
        batch_per_rank=published.BATCH_PER_RANK,
        job=make_job(size),
        sampling=make_sampling(size, comm_free=True),
    )
    train = make_training(size, ranks=ranks, full_epochs=published.SINGLE_EPOCHS)
    return Row(
        id="P2",
        title="Rank discovery, and the same training on more ranks",
        parts={"train": train, "scaling": scaling, **{name: start_by(name, train) for name in LAUNCHERS}},
        conclude=partial(find_p2, size),
        num_tables=0,
    )


def start_by(launcher: LauncherName, train: Train) -> Train:
    """A few steps of the same training, by another launcher: its ranks find out themselves who they are."""
    return replace(
        train,
        course=replace(train.course, epochs=None, steps=DISCOVERY_STEPS),
        job=replace(train.job, launcher=launcher),
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
    answers += describe_launchers(outcomes)
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
    return Finding(tables=keep_tables(table, seconds_table, make_rank_table(outcomes)), answers=tuple(answers))


def _find_efficiency(seconds: float) -> float:
    return published.SINGLE_SECONDS / seconds / published.NUM_RANKS


def _list_speedups() -> str:
    found = [published.SINGLE_SECONDS / seconds for seconds in published.RANKS_SECONDS.values()]
    return " and ".join(say("ratio", speedup) for speedup in found)


def make_rank_table(outcomes: Outcomes) -> Table | None:
    """Who every rank is, as it found out itself, by launcher."""
    columns = (
        Column(key="launcher", header="launcher", align="left"),
        Column(key="rank", header="rank", quantity="count"),
        Column(key="num_ranks", header="of", quantity="count"),
        Column(key="local_rank", header="local rank", quantity="count"),
        Column(key="guess", header=f"rank % {published.NUM_DEVICES}", quantity="count"),
        Column(key="host", header="host", align="left"),
        Column(key="mask", header="CPU mask"),
        Column(key="published_mask", header="published"),
        Column(key="agreeing", header="agrees with", align="left"),
    )
    rows = [row for name in ("train", *LAUNCHERS) for row in _list_ranks(find_completed(outcomes.get(name)))]
    return Table(title="Who the ranks are", columns=columns, rows=tuple(rows)) if rows else None


def _list_ranks(result: TrialResult | None) -> Iterator[tuple[Cell, ...]]:
    for number, report in enumerate(sorted(result.ranks, key=lambda report: report.rank) if result else ()):
        assert result is not None
        local = sum(other.host == report.host and other.rank < report.rank for other in result.ranks)
        yield make_row(
            report.launcher or result.trial.launcher,
            report.rank,
            result.trial.num_ranks,
            local if report.local_rank is None else report.local_rank,
            guess_local_rank(report.rank, published.NUM_DEVICES),
            report.host or None,
            format_mask(report.cores) if report.cores else None,
            hex(published.MASKS[number]) if number < len(published.MASKS) else None,
            ", ".join(report.agreeing) or None,
        )


def describe_launchers(outcomes: Outcomes) -> Iterator[str]:
    """Whether ranks are the same by whatever launcher."""
    found = {name: result for name in LAUNCHERS if (result := find_completed(outcomes.get(name)))}
    if not found:
        return
    named = [
        next((report.launcher for report in result.ranks if report.launcher), name) for name, result in found.items()
    ]
    losses = [list(result.losses().values()) for result in found.values()]
    own = find_completed(outcomes.get("train"))
    first = list(own.losses().values())[: len(losses[0])] if own else losses[0]
    is_same = all(other == first for other in losses)
    yield (
        f"By {', '.join(named)} every rank found its number itself, and no two sources contradict each other; the first"
        f" {len(losses[0])} losses are {'the same' if is_same else 'not the same'}."
    )


def describe_ranks(outcome: Outcome | None) -> Iterator[str]:
    result = find_completed(outcome)
    if result is None or not result.ranks:
        return
    cores = [set(report.cores) for report in result.ranks]
    is_disjoint = sum(map(len, cores)) == len(set().union(*cores))
    hosts = len({report.host for report in result.ranks})
    how = "no core is shared" if is_disjoint and all(cores) else "cores are shared"
    yield f"{len(result.ranks)} ranks on {hosts} host{'s'[: hosts > 1]}, started by scalelab itself: {how}."
