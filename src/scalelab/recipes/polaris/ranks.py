"""P2: rank discovery by every source available here, and the same training run on more ranks.

Sources are the environment variables of the launcher, and under mpiexec MPI itself: its rank modulo the devices of a
node, and its split by shared memory. Each rank asks all of them. The true local rank follows from the host names, which
no source sets, and every source is compared with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from scalelab.answers.train import TrainStudy
from scalelab.launch.ranks.mpi import BY_MPI, guess_local_rank
from scalelab.launch.ranks.placement import format_mask
from scalelab.recipes.evidence import (
    Compared,
    find_arm,
    find_completed,
    keep_tables,
    list_spread,
    make_beside_table,
    say_wide,
    scale,
    sum_training,
)
from scalelab.recipes.feasibility import make_sampling
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.jobs import list_durations, make_training, make_training_job
from scalelab.recipes.polaris.links import (
    bound_efficiency,
    compare_runs,
    compare_steps,
    compare_ways,
    find_efficiency,
    list_speedups,
    make_seconds_table,
)
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Row, Size, join_alike, pair_questions
from scalelab.records.launchers import LAUNCHERS as RECORDS
from scalelab.records.launchers import MPI, LauncherName
from scalelab.records.observations import Instrument, RankReport, RankSource
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Document, Table
from scalelab.report.tables import count_column, make_table, text_column
from scalelab.studies.scaling.study import WeakScaling
from scalelab.units import format_count, format_share

DISCOVERY_STEPS = 2
ONE_RUN = "neither method of the reports was run: scalelab started these ranks"
LAUNCHERS: tuple[LauncherName, ...] = ("torchrun", "mpi", "slurm", "pbs")
BY_REMAINDER = f"MPI rank % {published.NUM_DEVICES}"


def make_p2(size: Size) -> Row:
    ranks = published.NUM_RANKS
    scaling = WeakScaling(
        ranks=(1, ranks),
        batch_per_rank=published.BATCH_PER_RANK,
        job=make_training_job(size),
        sampling=make_sampling(size, comm_free=True),
    )
    train = make_training(size, ranks=ranks, full_epochs=published.SINGLE_EPOCHS)
    return Row(
        id="P2",
        title="Rank discovery and scaling",
        parts={"train": train, "scaling": scaling, **{name: start_by(name, train) for name in LAUNCHERS}},
        conclude=partial(answer_p2, size),
        num_tables=0,
        shows=("scaling",),
        cites={"single": "P1.train"},
    )


@dataclass(frozen=True, kw_only=True)
class Discovery(TrainStudy):
    """A training run whose ranks discover who they are; under mpiexec they ask MPI too."""

    def plan(self) -> list[Trial]:
        # srun and torchrun start processes that MPI may not know.
        asked: tuple[Instrument, ...] = ("mpi",) if RECORDS[self.job.launcher].starters == MPI else ()
        return [replace(trial, instruments=(*trial.instruments, *asked)) for trial in super().plan()]

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        """Without a warning where its launcher is not available: that is an answer."""
        document = super().conclude(results)
        is_absent = all(result.status is Status.NOT_RUN for result in results)
        return replace(document, cautions=()) if is_absent else document


def start_by(launcher: LauncherName, train: TrainStudy) -> Discovery:
    """A few steps of the same training run, by another launcher: its ranks discover who they are."""
    return Discovery(
        ranks=train.ranks,
        global_batch=train.global_batch,
        course=replace(train.course, epochs=None, steps=DISCOVERY_STEPS),
        job=replace(train.job, launcher=launcher),
    )


def answer_p2(size: Size, outcomes: Outcomes) -> Answer:
    one, train = outcomes.get("single"), find_arm(outcomes.get("train"))
    totals = [sum_training(outcome, list_durations) for outcome in (one, outcomes.get("train"))]
    whole = compare_runs(one, outcomes.get("train"))
    steps = compare_steps(outcomes.get("scaling"))
    efficiency = whole or steps
    published_shares = {name: find_efficiency(seconds) for name, seconds in published.RANKS_SECONDS.items()}
    arm = train if whole else next(iter(list_spread(outcomes.get("scaling"))[-1:]), None)
    main, sentences, detail = None, [], ""
    if efficiency is not None and arm is not None:
        ranks, bound = arm.trial.num_ranks, bound_efficiency(arm, efficiency)
        fewer = "" if ranks == published.NUM_RANKS else f"; published on {published.NUM_RANKS}"
        main = Main(
            "share",
            f"efficiency on {ranks} ranks{fewer}",
            efficiency,
            published_shares["A"],
            is_alike=not bound,
        )
        shares = " and ".join(format_share(share) for share in published_shares.values())
        sentences.append(
            f"{ranks} ranks are {say_wide('ratio', scale(efficiency, ranks))} times as fast as one device, efficiency"
            f" {say_wide('share', efficiency)} (published: {shares}){bound}."
        )
        ran = "The same epochs took" if whole else "A step of as many samples per rank is compared"
        took = f" {say_wide('seconds', totals[1])} against {say_wide('seconds', totals[0])}" if whole else ""
        detail = f" {ran}{took} (published: {list_speedups()}).{compare_ways(whole, steps)}"
    lines = [
        Compared("whole runs, one after the other", whole, None),
        Compared("steps, in turns", steps, None),
        *(
            Compared(f"published: {published.REPORTS[name]}, {published.NUM_RANKS} ranks", None, share)
            for name, share in published_shares.items()
        ),
    ]
    title = "Efficiency: speedup over ranks"
    table = make_beside_table("share", lines, title=title, size=size, notes=(ONE_RUN,))
    sentences += [*describe_ranks(outcomes.get("train")), *describe_launchers(outcomes)]
    answers = answer_discovery(outcomes) if sentences else {}
    return Answer(
        main=main,
        tables=keep_tables(make_rank_table(outcomes), table, make_seconds_table(size, *totals)),
        sentences=tuple(sentences),
        questions=pair_questions("polaris", "P2", answers | ({"speedup": f"{sentences[0]}{detail}"} if main else {})),
    )


class Said(NamedTuple):
    """What one source said of one rank; without a result, its launcher did not run."""

    launcher: str
    status: Status
    result: TrialResult | None = None
    report: RankReport = RankReport(rank=0)
    said: RankSource = RankSource(source="")

    @property
    def is_own(self) -> bool:
        """Whether scalelab itself set the rank: no source was asked."""
        return self.result is not None and not self.report.sources

    @property
    def verdict(self) -> str | None:
        if self.result is None or self.said.reason:
            return Status.NOT_RUN.words
        difference = find_difference(self.result, self.report, self.said)
        return None if self.is_own else f"differs: {difference}" if difference else "ranks agree"


def list_lines(outcomes: Outcomes) -> Iterator[Said]:
    """Every rank by every source, and launchers that did not run."""
    for name in ("train", *LAUNCHERS):
        outcome = outcomes.get(name)
        result = find_completed(outcome)
        if result is not None:
            for report in sorted(result.ranks, key=lambda report: report.rank):
                launcher = "scalelab" if name == "train" and not report.sources else name
                yield from (Said(launcher, result.status, result, report, said) for said in list_said(report))
        elif name != "train" and outcome is not None and outcome.results:
            yield Said(name, outcome.results[-1].status)


def make_rank_table(outcomes: Outcomes) -> Table | None:
    """Who every rank is by every source, and which launchers are not available."""
    lines = list(list_lines(outcomes))

    def read_rank(one: Said) -> int | None:
        return one.report.rank if one.is_own else one.said.rank

    def read_num_ranks(one: Said) -> int | None:
        return one.result.trial.num_processes if one.result and one.is_own else one.said.num_ranks

    def read_local_rank(one: Said) -> int | None:
        return count_before(one.result, one.report) if one.result and one.is_own else one.said.local_rank

    def read_published(one: Said) -> str | None:
        is_known = one.result is not None and one.report.rank < len(published.MASKS)
        return hex(published.MASKS[one.report.rank]) if is_known else None

    table = make_table(
        lines,
        text_column("launcher", "started by", lambda one: one.launcher),
        text_column("source", "source", lambda one: one.said.source or None),
        count_column("rank", "rank", read_rank),
        count_column("num_ranks", "of", read_num_ranks),
        count_column("local_rank", "local rank", read_local_rank),
        text_column("host", "host", lambda one: one.report.host or None),
        text_column(
            "mask", "CPU mask", lambda one: format_mask(one.report.cores) if one.report.cores else None, align="right"
        ),
        text_column("published_mask", "published", read_published, align="right"),
        text_column("verdict", "verdict", lambda one: one.verdict if one.result else one.status.words),
        title="Who the ranks are",
        notes=(
            "ranks agree: rank, number of ranks and local rank are those that follow from the hosts",
            "CPU mask: the cores that a rank may use here; published: those on another machine, not compared",
        ),
    )
    return table if lines else None


def list_said(report: RankReport) -> tuple[RankSource, ...]:
    """What every source said of a rank, and MPI's rank modulo the devices: what many programs use as local rank."""
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
    """Where a source contradicts the actual ranks and hosts; None: nowhere."""
    local_rank = count_before(result, report)
    there = (("rank", report.rank, said.rank), ("of", result.trial.num_processes, said.num_ranks))
    compared = (*there, ("local rank", local_rank, said.local_rank))
    wrong = [(name, said_so, truth) for name, truth, said_so in compared if said_so not in (None, truth)]
    return ", ".join(f"{name} {said_so}, actually {truth}" for name, said_so, truth in wrong) or None


def count_before(result: TrialResult, report: RankReport) -> int:
    """The true local rank, from the hosts of all ranks."""
    return sum(other.host == report.host and other.rank < report.rank for other in result.ranks)


def find_launched(outcomes: Outcomes) -> dict[str, TrialResult]:
    """A trial of every launcher that could start one."""
    return {name: result for name in LAUNCHERS if (result := find_completed(outcomes.get(name)))}


def answer_discovery(outcomes: Outcomes) -> dict[str, str]:
    """Whether ranks are what the reports say, how they are pinned, and MPI against PALS: by what ran here."""
    found = find_launched(outcomes)
    reports = [report for result in found.values() for report in result.ranks]
    asked = {said.source for report in reports for said in report.sources if not said.reason}
    by_mpi = "mpiexec did not run here, so neither was tested"
    if BY_MPI in asked:
        wrong = [name for name, result in found.items() if any(_list_wrong(result, BY_MPI))]
        by_mpi = f"Here MPI gave the true ranks {'everywhere' if not wrong else 'not under ' + ', '.join(wrong)}"
    pals = "PALS itself was asked" if any("PALS" in source for source in asked) else "no PALS variable was set"
    answers = {
        "mapping": f"{_judge_sources(found, asked)}. {_compare_sources(found)}.{_name_absent(outcomes)}"
        if found
        else "Not tested: no launcher ran.",
        "portable": "Yes, by what each needs: Get_rank and Split_type exist under every MPI, but need mpi4py built"
        " against the launcher's; the variables of PALS need no package, but exist only on systems with PALS."
        f" {compare_methods()} {by_mpi}; {pals}.",
    }
    by_launcher = "mpi" if find_completed(outcomes.get("mpi")) else "train"
    absent = () if by_launcher == "mpi" else ("Not tested: mpiexec did not run here.",)
    pinned = " ".join((*absent, *describe_ranks(outcomes.get(by_launcher))))
    return answers | ({"affinity": pinned} if pinned else {})


def compare_methods() -> str:
    """Split_type against rank % devices, where the latter is wrong."""
    uneven = [[0, 1, 2], [3, 4, 5, 6]]
    devices = ", ".join(map(str, published.take_remainders(uneven, published.NUM_DEVICES)[1]))
    return (
        "Only Split_type counts the ranks that share a node: RANK % device_count gives devices"
        f" {devices} on the second of two nodes with {len(uneven[0])} and {len(uneven[1])} ranks."
    )


def _judge_sources(found: Mapping[str, TrialResult], asked: Collection[str]) -> str:
    told = [(result, report) for result in found.values() for report in result.ranks if report.sources]
    if any(find_difference(*pair, said) for pair in told for said in list_said(pair[1]) if not said.reason):
        return "Not by every source"
    return "Yes" if BY_MPI in asked else "Not tested: the claim is about ranks from mpi4py, which did not run here"


def _name_absent(outcomes: Outcomes) -> str:
    """The launchers that did not run: nothing follows for them."""
    absent = [name for name in LAUNCHERS if name in outcomes and find_completed(outcomes.get(name)) is None]
    if not absent:
        return ""
    return f" These launchers did not run here: {', '.join(absent)}."


def _list_wrong(result: TrialResult, source: str) -> Iterator[str]:
    """Where one source contradicts the actual ranks."""
    for report in result.ranks:
        for said in report.sources:
            difference = None if said.source != source or said.reason else find_difference(result, report, said)
            if difference:
                yield difference


def describe_launchers(outcomes: Outcomes) -> Iterator[str]:
    """Whether ranks train alike under every launcher, and which launchers are not available."""
    found = find_launched(outcomes)
    if found:
        yield f"Under {', '.join(found)} {_compare_losses(found, find_completed(outcomes.get('train')))}."
    not_run = join_alike(_list_reasons(outcomes))
    if not_run:
        yield f"Not run: {not_run}."


def _list_reasons(outcomes: Outcomes) -> Iterator[tuple[str, str]]:
    """Every launcher and source that is not available, once, with the reason."""
    for name in LAUNCHERS:
        outcome = outcomes.get(name)
        result = find_completed(outcome)
        if result is not None:
            said = (one for report in result.ranks for one in report.sources if one.reason)
            yield from dict.fromkeys((f"{one.source} under {name}", one.reason) for one in said)
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
        f"{said.source} under {name} gives rank {report.rank} {difference}"
        for name, report, said, difference in asked
        if difference
    ]
    ranks = f"Under {', '.join(found)} every rank discovers its rank"
    if not asked:
        return ranks
    if wrong:
        return f"{ranks}, but of {len(sources)} sources some are wrong: {'; '.join(wrong)}"
    if len(sources) > 1:
        return f"{ranks}, and all {len(sources)} sources agree ({', '.join(sources)})"
    places = list(dict.fromkeys((said.rank, said.local_rank) for _, _, said, _ in asked))
    pairs = [", ".join(map(str, one)) for one in zip(*places, strict=True)]
    return f"{ranks}: global ranks {pairs[0]} are local ranks {pairs[1]}"


def _compare_losses(found: Mapping[str, TrialResult], own: TrialResult | None) -> str:
    losses = [list(result.losses().values()) for result in found.values()]
    first = list(own.losses().values())[: len(losses[0])] if own else losses[0]
    is_same = all(other == first for other in losses)
    than = " as those of the ranks that scalelab started" if own else ""
    return f"the first {len(losses[0])} losses are {'the same' if is_same else 'not the same'}{than}"


def describe_ranks(outcome: Outcome | None) -> Iterator[str]:
    result = find_completed(outcome)
    if result is None or not result.ranks:
        return
    places = [(report.host, core) for report in result.ranks for core in report.cores]
    hosts = {report.host for report in result.ranks}
    who = {"mpi": "mpiexec", "local": "scalelab"}.get(result.trial.launcher, str(result.trial.launcher))
    started = f"{who} started {format_count(len(result.ranks), 'rank')} on {format_count(len(hosts), 'host')}"
    if not all(report.cores for report in result.ranks):
        yield f"{started}; the cores that they may use are not known."
        return
    masks = ", ".join(format_mask(report.cores) for report in sorted(result.ranks, key=lambda report: report.rank))
    most = max(map(places.count, places))
    is_pinned = any(len(report.cores) < len(set(places)) for report in result.ranks)
    by = f", not {who}, which starts them unbound" if who != "scalelab" else ""
    pinned = f"scalelab pinned the ranks{by}" if is_pinned else "The ranks are not pinned"
    how = "no two ranks share a core, so contention for cores is prevented"
    if most > 1:
        how = f"up to {most} ranks share a core, so contention is not prevented"
    yield f"{pinned}. Their CPU masks are {masks}: {how}. {started}."
