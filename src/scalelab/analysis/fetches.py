"""The batches of stored sets, launch by launch: what their tables, their words and their warnings start from.

A pass with several epochs is two things: the first, in which the reader begins, and the others, in which it has what it
keeps. The time of a batch is that of the others where there are any. An epoch takes what its slowest rank takes; one
that was cut short is scaled up by the samples that it is short of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.link import group_rounds
from scalelab.analysis.stats import Rounds, estimate_location, estimate_median
from scalelab.records.observations import Fetch, ReadingReport
from scalelab.records.tasks import Dataset, Pass, Read
from scalelab.records.trial import Status, Trial, TrialResult


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """All rounds of one pass. A round that gave nothing is empty and keeps its place."""

    fetch: Rounds
    """Seconds of every batch on every rank, after the first epoch where there are more."""
    copy: Rounds
    epochs: Rounds
    """Seconds of a whole epoch, fetching and copying, likewise; one number per round."""
    first_epochs: Rounds
    """The same of the very first epoch."""
    is_whole: bool
    """Whether every epoch of every rank went through all its samples."""

    @property
    def fetch_seconds(self) -> Estimate:
        return estimate_median(self.fetch)

    @property
    def copy_seconds(self) -> Estimate:
        return estimate_median(self.copy)

    @property
    def epoch_seconds(self) -> Estimate:
        return estimate_location([seconds for launch in self.epochs for seconds in launch])

    @property
    def first_epoch_seconds(self) -> Estimate:
        return estimate_location([seconds for launch in self.first_epochs for seconds in launch])

    @property
    def late_seconds(self) -> Estimate:
        """What one batch in twenty takes longer than: the centre of the launches' quantiles."""
        return estimate_location([float(np.quantile(launch, 0.95)) for launch in self.fetch if len(launch)])

    @property
    def slowest_seconds(self) -> float:
        return max(seconds for launch in self.fetch for seconds in launch)


@dataclass(frozen=True, kw_only=True)
class FetchSeries:
    """All rounds of one way to read one set."""

    trial: Trial
    """The first round's; the others differ only in the round."""
    results: tuple[TrialResult, ...]
    passes: Mapping[str, PassTimes]
    """By the name of the pass, those that gave something."""

    @property
    def label(self) -> str:
        return self.trial.label or self.trial.configuration

    @property
    def dataset(self) -> Dataset:
        assert self.trial.dataset is not None
        return self.trial.dataset

    @property
    def is_measured(self) -> bool:
        return bool(self.passes)

    @property
    def failure(self) -> TrialResult | None:
        """The first round that did not complete, if there is one."""
        return next((result for result in self.results if result.status is not Status.COMPLETED), None)

    @property
    def main(self) -> PassTimes | None:
        """Shuffled and warm, by whole batches where the reader knows such: what training does."""
        access = "item" if self.dataset.mode == "naive" else "batch"
        return self.passes.get(Pass(access=access).name)  # type: ignore[arg-type]

    @property
    def memcpy(self) -> PassTimes | None:
        return self.passes.get(Pass(cache="memcpy").name)

    @cached_property
    def reports(self) -> tuple[ReadingReport, ...]:
        """What all ranks of all launches say of the set; rank 0 first."""
        found = (rank.reading for result in self.results for rank in sorted(result.ranks, key=lambda one: one.rank))
        return tuple(report for report in found if report is not None)

    @property
    def num_samples(self) -> int:
        return self.reports[0].num_samples if self.reports else self.dataset.num_samples

    @property
    def sample_bytes(self) -> int:
        return self.reports[0].sample_bytes if self.reports else self.dataset.sample_bytes

    @property
    def write_seconds(self) -> Estimate | None:
        return _centre(report.write_seconds for report in self.reports)

    @property
    def open_seconds(self) -> Estimate | None:
        """Of an opening while the file is in memory: the slowest rank's median of every launch."""
        return _centre(_find_opening(result, "open_seconds") for result in self.results)

    @property
    def cold_open_seconds(self) -> Estimate | None:
        return _centre(_find_opening(result, "cold_open_seconds") for result in self.results)

    @property
    def file_bytes(self) -> int | None:
        return max((report.file_bytes for report in self.reports if report.file_bytes is not None), default=None)

    @property
    def private_bytes(self) -> int | None:
        """The most that reading added to any rank's own memory."""
        return max((report.private_bytes for report in self.reports if report.private_bytes is not None), default=None)

    @property
    def peak_bytes(self) -> int | None:
        """The same of all that was resident, mapped files included."""
        ranks = [rank for result in self.results for rank in result.ranks]
        grown = [
            rank.peak_memory_bytes - rank.start_memory_bytes
            for rank in ranks
            if rank.peak_memory_bytes is not None and rank.start_memory_bytes is not None
        ]
        return max(0, *grown) if grown else None

    @property
    def resident_share(self) -> float | None:
        """The largest part of the file that the kernel would not forget; None: it was not asked."""
        return max((share for report in self.reports for share in report.resident_shares), default=None)

    @property
    def amplification(self) -> float | None:
        return max((found for report in self.reports if (found := report.amplification) is not None), default=None)

    @property
    def shuffle(self) -> str:
        """How training would shuffle the set, in words, if by blocks."""
        return next((report.shuffle for report in self.reports if report.shuffle), "")

    @property
    def chunks(self) -> str:
        return next((report.chunks for report in self.reports if report.chunks), "")


def _centre(values: Iterable[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    return estimate_location(known) if known else None


def _find_opening(result: TrialResult, name: str) -> float | None:
    times = [getattr(rank.reading, name) for rank in result.ranks if rank.reading is not None]
    return max((float(np.median(found)) for found in times if found), default=None)


def group_fetches(results: Sequence[TrialResult]) -> dict[str, FetchSeries]:
    """One series per configuration that reads alone, in the order in which they first ran; others are left out."""
    grouped, last_round = group_rounds(results, Read)
    return {name: _make_series(found, last_round) for name, found in grouped.items()}


def _make_series(results: list[TrialResult], last_round: int) -> FetchSeries:
    trial = results[0].trial
    assert isinstance(trial.task, Read)
    found = {one.name: _make_times(one, results, last_round) for one in trial.task.passes}
    return FetchSeries(
        trial=trial,
        results=tuple(results),
        passes={name: times for name, times in found.items() if any(len(launch) for launch in times.fetch)},
    )


def _make_times(one: Pass, results: Sequence[TrialResult], last_round: int) -> PassTimes:
    fetch: list[list[float]] = [[] for _ in range(last_round)]
    copy: list[list[float]] = [[] for _ in range(last_round)]
    epochs: list[list[float]] = [[] for _ in range(last_round)]
    first_epochs: list[list[float]] = [[] for _ in range(last_round)]
    is_whole = True
    for result in results:
        lines = [line for line in result.fetches if (line.order, line.access, line.cache) == one.key]
        if {line.rank for line in lines} != set(range(result.trial.num_ranks)):
            continue
        later = [line for line in lines if line.epoch > 0] or lines
        place = result.trial.round - 1
        fetch[place] = [line.fetch_seconds for line in later]
        copy[place] = [line.copy_seconds for line in later]
        epochs[place] = [_add_up(result, later)]
        first_epochs[place] = [_add_up(result, [line for line in lines if line.epoch == 0])]
        is_whole = is_whole and _count_epochs(lines) * _count_samples(result) <= sum(one.num_samples for one in lines)
    return PassTimes(fetch=fetch, copy=copy, epochs=epochs, first_epochs=first_epochs, is_whole=is_whole)


def _count_epochs(lines: Sequence[Fetch]) -> int:
    return len({line.epoch for line in lines})


def _count_samples(result: TrialResult) -> int:
    """Of an epoch, on all ranks together."""
    known = [rank.reading.num_samples for rank in result.ranks if rank.reading is not None]
    assert result.trial.dataset is not None
    return known[0] if known else result.trial.dataset.num_samples


def _add_up(result: TrialResult, lines: Sequence[Fetch]) -> float:
    """The seconds of one epoch on the slowest rank; of what was cut short, by its share of the samples."""
    share = _count_samples(result) / result.trial.num_ranks
    found = []
    for rank in range(result.trial.num_ranks):
        own = [line for line in lines if line.rank == rank]
        if own:
            seconds = sum(line.fetch_seconds + line.copy_seconds for line in own)
            found.append(seconds * share / sum(line.num_samples for line in own))
    return max(found)
