"""P2's cross-check: what every source says of every rank, held against the hosts that the ranks ran on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from scalelab.launch.ranks.mpi import BY_MPI, guess_local_rank
from scalelab.launch.ranks.placement import format_mask
from scalelab.recipes.evidence import find_completed
from scalelab.recipes.polaris import published
from scalelab.recipes.recipe import Outcomes
from scalelab.records.launchers import LauncherName
from scalelab.records.observations import RankReport, RankSource
from scalelab.records.trial import Status, TrialResult
from scalelab.report.document import Table
from scalelab.report.tables import count_column, make_table, text_column

LAUNCHERS: tuple[LauncherName, ...] = ("torchrun", "mpi", "slurm", "pbs")
BY_REMAINDER = f"MPI rank % {published.NUM_DEVICES}"


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
