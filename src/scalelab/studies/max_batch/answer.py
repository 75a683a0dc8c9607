"""The search for the largest batch: what the probes so far show."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from scalelab.analysis.batch_limits import (
    CURVATURE,
    FARTHEST,
    MemoryLine,
    Probe,
    draw_line,
    find_largest,
    is_close,
    predict_largest,
)
from scalelab.records.observations import MemoryReport
from scalelab.records.strategies import find_strategy
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.workloads.catalogue import BUILT_IN, make_options
from scalelab.workloads.workload import NUM_POOLED_BATCHES

MOST_FORECASTS = 6
NEAR = 0.05
"""A forecast so near the limit, as a share of it, is near enough."""
STANDING = ("parameters", "gradients", "optimizer")
"""What a step holds at any batch size."""
TELLING = (Status.COMPLETED, Status.OUT_OF_MEMORY, Status.CRASHED)
DEADLY = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
"""What kills a library that uses memory without asking whether it got any."""


@dataclass(frozen=True, kw_only=True)
class BatchSearch:
    """The probes in the order in which they ran.

    One that crashed did not fit: libraries that do not check their allocations die so when memory ends. Where the line
    through the probes that ran is at the limit there, and a signal killed it, that is the answer; otherwise a caution
    names it, for there may be another reason. One that was invalid, or took too long, is not a probe and ends the
    search, unless it asked for more samples than the data has: then that is the largest batch to try.
    """

    results: tuple[TrialResult, ...]
    forecasts: tuple[TrialResult, ...] = ()
    """What decided where to begin; they allocate nothing, so they are not probes."""
    beyond: tuple[TrialResult, ...] = ()
    """What asked for more samples than the data has."""

    @classmethod
    def from_results(cls, results: Sequence[TrialResult]) -> BatchSearch:
        within = [result for result in results if not find_data_end(result)]
        return cls(
            results=tuple(result for result in within if not result.trial.is_forecast),
            forecasts=tuple(result for result in within if result.trial.is_forecast),
            beyond=tuple(result for result in results if find_data_end(result)),
        )

    @property
    def trial(self) -> Trial | None:
        return next((result.trial for result in (*self.results, *self.forecasts, *self.beyond)), None)

    @property
    def data_end(self) -> int | None:
        """The largest batch per rank that the data fills; None: no larger one was asked for."""
        return min((find_data_end(result) or 0 for result in self.beyond), default=None)

    def bound(self, most: int | None) -> int | None:
        """The largest batch to try, by a flag and by the data; None: only memory ends the search."""
        return min((end for end in (most, self.data_end) if end is not None), default=None)

    @cached_property
    def probes(self) -> tuple[Probe, ...]:
        return tuple(make_probe(result) for result in self.results if result.status in TELLING)

    @cached_property
    def foreseen(self) -> list[Probe]:
        """The forecasts, nearest to the limit first."""
        known = [
            Probe(batch=result.trial.batch_per_rank, fits=True, peak_bytes=add_waiting(result.trial, rank.memory))
            for result in self.forecasts
            for rank in result.ranks
            if rank.memory is not None
        ]
        return sorted(known, key=lambda probe: abs((probe.peak_bytes or 0) - (self.limit_bytes or 0)))

    @cached_property
    def forecast(self) -> MemoryLine | None:
        """The line through the two forecasts nearest to the limit; None without forecasts."""
        return draw_line(self.foreseen[:2])

    def choose_forecast(self, most: int | None = None) -> int | None:
        """The batch to forecast next: the maximum by the forecasts so far, until one of them is near the limit.

        A small batch may peak elsewhere in the step than a large one, so a line through two small ones is not enough.
        """
        if self.probes or self.forecast is None or not self.limit_bytes or len(self.forecasts) >= MOST_FORECASTS:
            return None
        peak = self.foreseen[0].peak_bytes or 0
        batch = predict_largest(self.forecast, self.limit_bytes)
        if batch is None or batch < 1 or abs(peak / self.limit_bytes - 1) < NEAR:
            return None
        further = min(batch, FARTHEST * max(one.batch for one in self.foreseen), most or batch)
        return None if further in [one.trial.batch_per_rank for one in self.forecasts] else further

    def choose_smallest_forecast(self) -> int | None:
        """One sample, where not even that ran: its forecast shows what is there without activations."""
        known = [one.trial.batch_per_rank for one in self.forecasts]
        return 1 if self.smallest_failed == 1 and self.forecast is not None and 1 not in known else None

    @cached_property
    def standing_bytes(self) -> dict[str, int]:
        """Weights, gradients and optimizer state of a rank by the forecasts, the most of each; empty without one.

        Gradients of all weights are rarely there at the peak: as many as there are weights, at most.
        """
        reports = [rank.memory for one in self.forecasts for rank in one.ranks if rank.memory is not None]
        found = {name: max((one.by_category.get(name, 0) for one in reports), default=0) for name in STANDING}
        found["gradients"] = max(found["gradients"], found["parameters"])
        return {name: size for name, size in found.items() if size}

    @cached_property
    def uneven(self) -> TrialResult | None:
        """The largest probe whose batches differed in shape, so that its memory depends on which of them it drew."""
        found = [one for one in self.results if any((rank.num_batch_shapes or 1) > 1 for rank in one.ranks)]
        return max(found, key=lambda one: one.trial.batch_per_rank, default=None)

    def is_near(self, tolerance: float) -> bool:
        """Whether the search ended within its tolerance."""
        return is_close(self.probes, self.limit_bytes, tolerance)

    @cached_property
    def broken(self) -> TrialResult | None:
        """The first result that says nothing about memory: a batch that smaller ones cannot stand for.

        Where no batch can be forecast, the search begins without; but a larger one than those that could is refused
        for itself, for example because the data has no more samples.
        """
        refused = (one for one in self.forecasts if one.status is Status.INVALID and self.foreseen)
        unclear = (one for one in self.results if one.status not in TELLING)
        return next(itertools.chain(unclear, refused), None)

    @cached_property
    def crashed(self) -> TrialResult | None:
        """The first probe that crashed for a reason that may not be memory."""
        crashed = (result for result in self.results if result.status is Status.CRASHED)
        return next((result for result in crashed if not self.is_at_limit(result)), None)

    def is_at_limit(self, result: TrialResult) -> bool:
        """Whether a signal killed a probe where memory ends, by the line through those that ran."""
        line, limit = draw_line(self.probes), self.limit_bytes
        if line is None or limit is None or result.status is not Status.CRASHED or find_signal(result) is None:
            return False
        return line.predict_bytes(result.trial.batch_per_rank) > (1 - CURVATURE) * limit

    @cached_property
    def limit_bytes(self) -> int | None:
        """The limit of the rank with the least: as ranks found it, otherwise as it was set."""
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
    def headroom_bytes(self) -> int | None:
        """What the largest batch leaves of the limit."""
        return None if self.limit_bytes is None or self.peak_bytes is None else self.limit_bytes - self.peak_bytes

    @property
    def owner(self) -> str:
        """What the limit applies to: the replicas of dp share a process."""
        return "process" if self.trial is not None and find_strategy(self.trial.strategy).has_replicas else "rank"

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
        """What the line known before a probe predicted for it."""
        line = draw_line(self.probes[:number])
        return None if line is None else line.predict_bytes(self.probes[number].batch)


def add_waiting(trial: Trial, memory: MemoryReport) -> int:
    """The forecast peak, plus the random batches that wait for their turn on a CPU."""
    if trial.device != "cpu" or trial.workload not in BUILT_IN:
        return memory.peak_bytes
    is_random = getattr(make_options(trial.workload, trial.options), "data", "synthetic") == "synthetic"
    waiting = (NUM_POOLED_BATCHES - 1) * memory.by_category.get("batch", 0)
    return memory.peak_bytes + (waiting if is_random and trial.workload != "transformer" else 0)


def make_probe(result: TrialResult) -> Probe:
    """A result as the search sees it: the peak is the highest of any rank."""
    peaks = [rank.limited_bytes for rank in result.ranks if rank.limited_bytes is not None]
    fits = result.status is Status.COMPLETED
    return Probe(batch=result.trial.batch_per_rank, fits=fits, peak_bytes=max(peaks, default=None) if fits else None)


def find_data_end(result: TrialResult) -> int | None:
    """The largest batch that the data fills, where a trial asked for more; None: it did not, or not one is there."""
    return min((rank.most_samples for rank in result.ranks if rank.most_samples), default=None)


def find_signal(result: TrialResult) -> signal.Signals | None:
    """The signal that killed a rank as it kills a library without memory; None: none of those."""
    codes = [rank.exit_code for rank in result.ranks]
    return next((one for one in DEADLY if -one in codes or 128 + one in codes), None)
