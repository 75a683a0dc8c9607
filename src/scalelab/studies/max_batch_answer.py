"""What the probes of a search for the largest batch say, from their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from scalelab.analysis.batch_search import MemoryLine, Probe, draw_line, find_largest
from scalelab.trial import Status, Trial, TrialResult

TELLING = (Status.COMPLETED, Status.OUT_OF_MEMORY, Status.CRASHED)


@dataclass(frozen=True, kw_only=True)
class BatchSearch:
    """The probes in the order in which they ran.

    One that crashed did not fit: libraries that do not check what they are given die so when memory ends. It is named,
    for it may have another reason. One that could not work, or took too long, is no probe and ends the search.
    """

    results: tuple[TrialResult, ...]

    @classmethod
    def from_results(cls, results: Sequence[TrialResult]) -> BatchSearch:
        return cls(results=tuple(results))

    @property
    def trial(self) -> Trial | None:
        return self.results[0].trial if self.results else None

    @cached_property
    def probes(self) -> tuple[Probe, ...]:
        return tuple(make_probe(result) for result in self.results if result.status in TELLING)

    @cached_property
    def broken(self) -> TrialResult | None:
        """The first that says nothing about memory, if there is one."""
        return next((result for result in self.results if result.status not in TELLING), None)

    @cached_property
    def crashed(self) -> TrialResult | None:
        return next((result for result in self.results if result.status is Status.CRASHED), None)

    @cached_property
    def limit_bytes(self) -> int | None:
        """What the rank with the least may take: as ranks found it, or else as they were told."""
        found = [rank.limit_bytes for result in self.results for rank in result.ranks]
        told = self.trial.memory_limit_bytes if self.trial else None
        return min((limit for limit in found if limit is not None), default=told)

    @cached_property
    def largest(self) -> int | None:
        """The largest batch that ran to completion on all ranks."""
        return find_largest(self.probes)

    @cached_property
    def smallest_failed(self) -> int | None:
        return min((probe.batch for probe in self.probes if not probe.fits), default=None)

    @property
    def is_confirmed(self) -> bool:
        """Whether one sample more has failed."""
        return self.largest is not None and self.smallest_failed == self.largest + 1

    @cached_property
    def peak_bytes(self) -> int | None:
        """Of the largest batch."""
        return next((probe.peak_bytes for probe in self.probes if probe.fits and probe.batch == self.largest), None)

    @cached_property
    def line(self) -> MemoryLine | None:
        return draw_line(self.probes)

    def predict(self, number: int) -> float | None:
        """What the line that was known before a probe said of it."""
        line = draw_line(self.probes[:number])
        return None if line is None else line.predict_bytes(self.probes[number].batch)


def make_probe(result: TrialResult) -> Probe:
    """A result as the search sees it: the peak is that of the rank that took most."""
    peaks = [rank.limited_bytes for rank in result.ranks if rank.limited_bytes is not None]
    fits = result.status is Status.COMPLETED
    return Probe(batch=result.trial.batch_per_rank, fits=fits, peak_bytes=max(peaks, default=None) if fits else None)
