"""From the call that launches a kernel to the kernel: which belong together, and how long it took.

A launch and its kernel carry the same correlation number. Of launches, only those whose kernel has not begun are kept;
one that never gets a kernel, such as a failed call, is forgotten after `MOST_PENDING` later ones. A graph is launched
by one call and runs many kernels: it is counted once, with its first kernel.

A delay is the time from the beginning of the call to the beginning of the kernel. Clocks of host and device differ; a
kernel that seems to begin before its launch has a delay of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.classify import Kind
from scalelab.trace.histogram import Histogram
from scalelab.trace.spool import Records

NO_LAUNCH = -1
MOST_PENDING = 1 << 16
MOST_GRAPHS = 1 << 12
"""Launches of graphs that are remembered after their first kernel."""
LONG_CALL_NS = 50_000
"""A call that takes longer is counted as long."""
LONG_DELAY_NS = 100_000
"""A kernel that begins later than this after its launch is counted as late."""

Launch = tuple[int, int, int]
"""Start, end and name of a call."""


@dataclass(frozen=True)
class Matches:
    """The launch of every kernel; `NO_LAUNCH` in all arrays where there is none."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    name: NDArray[np.int64]
    is_first: NDArray[np.bool_]
    """Whether the kernel is the first of its launch: a graph has many."""


class LaunchMatcher:
    """Remembers launches until their kernel begins."""

    def __init__(self, names: Sequence[str]) -> None:
        self._graphs = frozenset(number for number, name in enumerate(names) if "GraphLaunch" in name)
        self._pending: dict[int, Launch] = {}
        self._begun: dict[int, Launch] = {}
        """Launches of graphs whose first kernel has begun."""

    def match(self, records: Records, kernels: Records) -> Matches:
        """The launches of kernels, once those among the records have been remembered."""
        calls = records[(records["kind"] == Kind.LAUNCH) & (records["correlation"] > 0)]
        launches = zip(calls["start"].tolist(), calls["end"].tolist(), calls["name"].tolist(), strict=True)
        self._pending.update(zip(calls["correlation"].tolist(), launches, strict=True))
        nothing = (NO_LAUNCH, NO_LAUNCH, NO_LAUNCH)
        found, is_first = [], []
        for correlation in kernels["correlation"].tolist():
            launch = self._pending.pop(correlation, None)
            is_first.append(launch is not None)
            if launch is None:
                launch = self._begun.get(correlation, nothing)
            elif launch[2] in self._graphs:
                self._begun[correlation] = launch
            found.append(launch)
        _forget_oldest(self._pending, MOST_PENDING)
        _forget_oldest(self._begun, MOST_GRAPHS)
        columns = np.array(found, dtype=np.int64).reshape(-1, 3)
        return Matches(columns[:, 0], columns[:, 1], columns[:, 2], np.array(is_first, dtype=np.bool_))


def _forget_oldest(launches: dict[int, Launch], most: int) -> None:
    if len(launches) > most:
        for correlation in list(launches)[: len(launches) - most]:
            del launches[correlation]


@dataclass(frozen=True, kw_only=True)
class LaunchTimes:
    """All calls of one name whose kernel is in the trace."""

    name: str
    count: int
    call_ns: int
    """The time of the calls together."""
    median_delay_ns: float
    p95_delay_ns: float
    num_short_kernels: int
    """Kernels that took less time than the call that launched them."""
    num_long_calls: int
    num_late_kernels: int


@dataclass
class _Calls:
    """The calls of one name so far."""

    count: int = 0
    call: int = 0
    num_short: int = 0
    num_long: int = 0
    num_late: int = 0
    delays: Histogram = field(default_factory=Histogram)


class LaunchTally:
    """Adds launches up by the name of their call."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._found: dict[int, _Calls] = {}

    def add(self, kernels: Records, matches: Matches) -> None:
        is_first = matches.is_first
        delay = np.maximum(kernels["start"][is_first] - matches.start[is_first], 0)
        length = kernels["end"][is_first] - kernels["start"][is_first]
        call, name = (matches.end - matches.start)[is_first], matches.name[is_first]
        for number in np.unique(name):
            calls, is_own = self._found.setdefault(int(number), _Calls()), name == number
            calls.count += int(is_own.sum())
            calls.call += int(call[is_own].sum())
            calls.num_short += int((length < call)[is_own].sum())
            calls.num_long += int((call > LONG_CALL_NS)[is_own].sum())
            calls.num_late += int((delay > LONG_DELAY_NS)[is_own].sum())
            calls.delays.add(delay[is_own])

    def finish(self) -> Sequence[LaunchTimes]:
        """The most frequent first."""
        found = [
            LaunchTimes(
                name=self._names[number],
                count=calls.count,
                call_ns=calls.call,
                median_delay_ns=calls.delays.find_quantile(0.5) or 0.0,
                p95_delay_ns=calls.delays.find_quantile(0.95) or 0.0,
                num_short_kernels=calls.num_short,
                num_long_calls=calls.num_long,
                num_late_kernels=calls.num_late,
            )
            for number, calls in self._found.items()
        ]
        return sorted(found, key=lambda times: (-times.count, times.name))
