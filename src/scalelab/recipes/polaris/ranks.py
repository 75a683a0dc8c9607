"""P2: who the ranks are, by every source there is here, and the same training on more of them.

Sources are the variables of whoever started the ranks, and under mpiexec MPI itself: its rank modulo the devices of a
node, and its splitting by shared memory. Each rank asks all of them. Who it really is follows from the names of hosts,
which no source has a say in, and every source is held against that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from scalelab.answers.train import Train
from scalelab.ranks.mpi import BY_MPI, guess_local_rank
from scalelab.ranks.topology import format_mask
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
from scalelab.recipes.feasibility import choose_ranks, make_sampling
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.jobs import make_training, make_training_job, print_seconds
from scalelab.recipes.recipe import Finding, Outcome, Outcomes, Row, Size
from scalelab.records.observations import Instrument, RankReport, RankSource
from scalelab.records.settings import LauncherName
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Cell, Column, Document, Table, make_row
from scalelab.studies.scaling.study import WeakScaling

LAUNCHERS: tuple[LauncherName, ...] = ("torchrun", "mpi", "slurm", "pbs")
BY_MPIEXEC: tuple[LauncherName, ...] = ("mpi", "pbs")
"""Those whose ranks are MPI's: srun and torchrun start processes that MPI may know nothing of."""
BY_REMAINDER = f"MPI rank % {published.NUM_DEVICES}"
DISCOVERY_STEPS = 2


def make_p2(size: Size) -> Row:
    ranks = choose_ranks(size, published.NUM_RANKS)
    scaling = WeakScaling(
        ranks=(1, ranks),
        batch_per_rank=published.BATCH_PER_RANK,
        job=make_training_job(size),
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


@dataclass(frozen=True, kw_only=True)
class Discovery(Train):
    """A training whose ranks find out who they are; under mpiexec they ask MPI itself too."""

    def plan(self) -> list[Trial]:
        asked: tuple[Instrument, ...] = ("mpi",) if self.job.launcher in BY_MPIEXEC else ()
        return [replace(trial, instruments=(*trial.instruments, *asked)) for trial in super().plan()]

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        """Without a warning where its launcher is not here: that is an answer."""
        document = super().conclude(results)
        is_absent = all(result.status is Status.NOT_RUN for result in results)
        return replace(document, cautions=()) if is_absent else document


def start_by(launcher: LauncherName, train: Train) -> Discovery:
    """A few steps of the same training, by another launcher: its ranks find out themselves who they are."""
    course = replace(train.course, epochs=None, steps=DISCOVERY_STEPS)
    job = replace(train.job, launcher=launcher)
    own = {field.name: getattr(train, field.name) for field in fields(train)}
    return Discovery(**(own | {"course": course, "job": job}))


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
    """Who every rank is by every source, and who cannot be asked here."""
    columns = (
        Column(key="launcher", header="started by", align="left"),
        Column(key="source", header="source", align="left"),
        Column(key="rank", header="rank", quantity="count"),
        Column(key="num_ranks", header="of", quantity="count"),
        Column(key="local_rank", header="local rank", quantity="count"),
        Column(key="host", header="host", align="left"),
        Column(key="mask", header="CPU mask"),
        Column(key="published_mask", header="published"),
        Column(key="verdict", header="verdict", align="left"),
    )
    rows: list[tuple[Cell, ...]] = []
    for name in ("train", *LAUNCHERS):
        outcome = outcomes.get(name)
        result = find_completed(outcome)
        if result is not None:
            rows += [_make_line(name, result, report, said) for report in _sort(result) for said in list_said(report)]
        elif name != "train" and outcome is not None and outcome.results:
            rows.append(make_row(name, *(7 * [None]), outcome.results[-1].status))
    return Table(title="Who the ranks are", columns=columns, rows=tuple(rows)) if rows else None


def list_said(report: RankReport) -> tuple[RankSource, ...]:
    """What every source said of a rank. MPI's rank modulo the devices is one too: what many programs take for it."""
    if not report.sources:
        return (RankSource(source="scalelab"),)
    by_mpi = [said for said in report.sources if said.source == BY_MPI and said.rank is not None]
    guessed = [
        replace(said, source=BY_REMAINDER, local_rank=guess_local_rank(said.rank, published.NUM_DEVICES))
        for said in by_mpi
        if said.rank is not None
    ]
    return (*report.sources, *guessed)


def find_difference(result: TrialResult, report: RankReport, said: RankSource) -> str | None:
    """What a source says otherwise than the ranks and hosts that there were; None: nothing."""
    local_rank = count_before(result, report)
    there = (("rank", report.rank, said.rank), ("of", result.trial.num_processes, said.num_ranks))
    compared = (*there, ("local rank", local_rank, said.local_rank))
    wrong = [(name, said_so, truth) for name, truth, said_so in compared if said_so not in (None, truth)]
    return ", ".join(f"{name} {said_so}, really {truth}" for name, said_so, truth in wrong) or None


def count_before(result: TrialResult, report: RankReport) -> int:
    """The local rank as it follows from the hosts of all ranks."""
    return sum(other.host == report.host and other.rank < report.rank for other in result.ranks)


def _sort(result: TrialResult) -> list[RankReport]:
    return sorted(result.ranks, key=lambda report: report.rank)


def _make_line(name: str, result: TrialResult, report: RankReport, said: RankSource) -> tuple[Cell, ...]:
    is_own = not report.sources
    difference = find_difference(result, report, said)
    verdict = Status.NOT_RUN if said.reason else f"differs: {difference}" if difference else "agrees"
    number = report.rank
    return make_row(
        "scalelab" if is_own and name == "train" else name,
        said.source,
        report.rank if is_own else said.rank,
        result.trial.num_processes if is_own else said.num_ranks,
        count_before(result, report) if is_own else said.local_rank,
        report.host or None,
        format_mask(report.cores) if report.cores else None,
        hex(published.MASKS[number]) if number < len(published.MASKS) else None,
        None if is_own else verdict,
    )


def describe_launchers(outcomes: Outcomes) -> Iterator[str]:
    """Whether ranks are the same by whatever launcher and source, and which launchers are not here."""
    found: dict[str, TrialResult] = {
        name: result for name in LAUNCHERS if (result := find_completed(outcomes.get(name)))
    }
    if found:
        yield f"{_compare_sources(found)}; {_compare_losses(found, find_completed(outcomes.get('train')))}."
    reasons: dict[str, list[str]] = {}
    for name, reason in _list_reasons(outcomes):
        reasons.setdefault(reason, []).append(name)
    if reasons:
        words = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
        yield f"Not run: {'; '.join(words)}."


def _list_reasons(outcomes: Outcomes) -> Iterator[tuple[str, str]]:
    """Every launcher and every source that could not be asked, once, with why."""
    for name in LAUNCHERS:
        outcome = outcomes.get(name)
        result = find_completed(outcome)
        if result is not None:
            said = (one for report in result.ranks for one in report.sources if one.reason)
            yield from dict.fromkeys((f"{one.source} by {name}", one.reason) for one in said)
        elif outcome is not None and outcome.results:
            yield name, outcome.results[-1].reason


def _compare_sources(found: Mapping[str, TrialResult]) -> str:
    """The verdict of the cross-check."""
    asked = [
        (name, report, said, find_difference(result, report, said))
        for name, result in found.items()
        for report in result.ranks
        for said in list_said(report)
        if report.sources and not said.reason
    ]
    sources = list(dict.fromkeys(said.source for _, _, said, _ in asked))
    wrong = [
        f"{said.source} says of rank {report.rank} by {name} {difference}"
        for name, report, said, difference in asked
        if difference
    ]
    ranks = f"By {', '.join(found)} every rank found its number itself"
    if not asked:
        return ranks
    if wrong:
        return f"{ranks}; of {len(sources)} sources some are wrong: {'; '.join(wrong)}"
    return f"{ranks}, and no two of {len(sources)} sources contradict each other ({', '.join(sources)})"


def _compare_losses(found: Mapping[str, TrialResult], own: TrialResult | None) -> str:
    losses = [list(result.losses().values()) for result in found.values()]
    first = list(own.losses().values())[: len(losses[0])] if own else losses[0]
    is_same = all(other == first for other in losses)
    return f"the first {len(losses[0])} losses are {'the same' if is_same else 'not the same'}"


def describe_ranks(outcome: Outcome | None) -> Iterator[str]:
    result = find_completed(outcome)
    if result is None or not result.ranks:
        return
    cores = [set(report.cores) for report in result.ranks]
    is_disjoint = sum(map(len, cores)) == len(set().union(*cores))
    hosts = len({report.host for report in result.ranks})
    how = "no core is shared" if is_disjoint and all(cores) else "cores are shared"
    yield f"{len(result.ranks)} ranks on {hosts} host{'s'[: hosts > 1]}, started by scalelab itself: {how}."
