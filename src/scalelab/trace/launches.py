"""From the call that launches a kernel to the kernel: matching, delays and queues.

A launch and its kernel share a correlation number. Only launches whose kernel has not begun are kept; one that never
gets a kernel, such as a failed call, is dropped after `MOST_PENDING` later ones. A graph is launched by one call and
runs many kernels: it counts once, with its first kernel. The delay is the time from the start of the call to the start
of the kernel. Clocks of host and device differ: a kernel that seems to begin before its launch has a delay of 0.

Delays are kept in a histogram of fixed size whose bins are 1/64 of their power of two wide: a quantile is at most 0.8 %
off, and exact below 128 ns. The idea is HdrHistogram's (Gil Tene).

A stream runs kernels in launch order. For the k-th kernel, launched at L(k) and started at S(k):

    queue length at launch k    k minus the number of kernels started by L(k); the maximum is among these
    mean over time              the sum of all S(k) − L(k), over the time from the first launch to the start of the last
                                kernel (Little's law)
    time at the limit n         the sum over k of max(0, S(k−n+1) − max(S(k−n), L(k)))

so only the last n starts have to be remembered. A driver takes about 1024 launches and then blocks the host. Launches
of several threads on one stream may be out of order; the later one then counts for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.kinds import Kind
from scalelab.trace.rank_trace import Lane
from scalelab.trace.windows import Records, find_distinct

BITS = 6
"""A power of two is cut into 2^BITS bins."""
EXACT_BELOW = 2 << BITS
NUM_BINS = EXACT_BELOW + (63 - BITS) * (1 << BITS)


class DelayHistogram:
    """Counts times that are not negative, in nanoseconds."""

    def __init__(self) -> None:
        self._count = np.zeros(NUM_BINS, dtype=np.int64)

    @property
    def count(self) -> int:
        return int(self._count.sum())

    def add(self, times: NDArray[np.int64]) -> None:
        np.add.at(self._count, find_bins(times), 1)

    def find_quantile(self, share: float) -> float | None:
        """The time that `share` of all do not exceed, to within half a bin; None: there are none."""
        return find_quantile(self._count, share)


def find_quantile(count: NDArray[np.int64], share: float) -> float | None:
    """The time that `share` of those counted in bins do not exceed."""
    if not count.any():
        return None
    reached = np.cumsum(count)
    index = int(np.searchsorted(reached, max(1.0, share * reached[-1])))
    if index < EXACT_BELOW:
        return float(index)
    shift, place = divmod(index, 1 << BITS)
    low = ((1 << BITS) + place) << (shift - 1)
    return low + ((1 << (shift - 1)) - 1) / 2


def find_bins(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bin of every time."""
    # A double has the leading bit of an integer below 2^53 right, and those above only tell ages of the universe apart.
    exponent = np.frexp(times.astype(np.float64))[1].astype(np.int64)
    shift = np.maximum(exponent - 1 - BITS, 0)
    return (shift << BITS) + (times >> shift)


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
        calls = records.compress((records["kind"] == Kind.LAUNCH) & (records["correlation"] > 0))
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
        forget_oldest(self._pending, MOST_PENDING)
        forget_oldest(self._begun, MOST_GRAPHS)
        columns = np.array(found, dtype=np.int64).reshape(-1, 3)
        return Matches(columns[:, 0], columns[:, 1], columns[:, 2], np.array(is_first, dtype=np.bool_))


def forget_oldest(launches: dict[int, Any], most: int) -> None:
    for correlation in list(islice(launches, max(0, len(launches) - most))):
        del launches[correlation]


@dataclass(frozen=True, kw_only=True)
class LaunchTimes:
    """All calls of one name whose kernel is in the trace."""

    name: str
    count: int
    num_kernels: int
    """What they started: a graph has many kernels."""
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
    num_kernels: int = 0
    call: int = 0
    num_short: int = 0
    num_long: int = 0
    num_late: int = 0
    delays: DelayHistogram = field(default_factory=DelayHistogram)


class LaunchTally:
    """Adds launches up by the name of their call."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._found: dict[int, _Calls] = {}

    def add(self, kernels: Records, matches: Matches, is_counted: NDArray[np.bool_]) -> None:
        names = matches.name[is_counted]
        counts = np.bincount(names[names != NO_LAUNCH])
        for number in np.flatnonzero(counts).tolist():
            self._found.setdefault(number, _Calls()).num_kernels += int(counts[number])
        is_first = matches.is_first & is_counted
        delay = np.maximum(kernels["start"][is_first] - matches.start[is_first], 0)
        length = kernels["end"][is_first] - kernels["start"][is_first]
        call, name = (matches.end - matches.start)[is_first], matches.name[is_first]
        for number in find_distinct(name):
            calls, is_own = self._found.setdefault(int(number), _Calls()), name == number
            calls.count += int(is_own.sum())
            calls.call += int(call[is_own].sum())
            calls.num_short += int((length < call)[is_own].sum())
            calls.num_long += int((call > LONG_CALL_NS)[is_own].sum())
            calls.num_late += int((delay > LONG_DELAY_NS)[is_own].sum())
            calls.delays.add(delay[is_own])

    def finish(self) -> Sequence[LaunchTimes]:
        """Those that started most kernels first."""
        found = [
            LaunchTimes(
                name=self._names[number],
                count=calls.count,
                num_kernels=calls.num_kernels,
                call_ns=calls.call,
                median_delay_ns=calls.delays.find_quantile(0.5) or 0.0,
                p95_delay_ns=calls.delays.find_quantile(0.95) or 0.0,
                num_short_kernels=calls.num_short,
                num_long_calls=calls.num_long,
                num_late_kernels=calls.num_late,
            )
            for number, calls in self._found.items()
            if calls.count
        ]
        return sorted(found, key=lambda times: (-times.num_kernels, times.name))


LIMIT = 1024
"""Launches that a driver takes before the host has to wait."""
REMEMBERED = 4 * LIMIT
"""No queue is counted as longer than this."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The launches that waited for one stream."""

    lane: Lane
    num_launches: int
    longest: int
    mean: float
    """Over time, from the first launch to the last start of a kernel."""
    span_ns: int
    at_limit_ns: int
    """How long it was `LIMIT` or longer."""


@dataclass
class _StreamState:
    """The queue of one stream so far."""

    first_launch: int
    starts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Of the last kernels."""
    last_launch: int = 0
    num_launches: int = 0
    longest: int = 0
    waited: int = 0
    at_limit: int = 0


class QueueTally:
    """Follows the queue of every stream."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._streams: dict[int, _StreamState] = {}

    def add(self, lane: int, launched: NDArray[np.int64], started: NDArray[np.int64]) -> None:
        """Kernels of one stream, in order, with their launches."""
        if not len(started):
            return
        stream = self._streams.get(lane)
        if stream is None:
            stream = self._streams[lane] = _StreamState(first_launch=int(launched[0]), last_launch=int(launched[0]))
        launched = np.minimum(launched, started)  # clocks may differ
        launched = np.maximum(np.maximum.accumulate(launched), stream.last_launch)
        known = len(stream.starts)
        starts = np.concatenate([stream.starts, started])
        number = np.arange(known, len(starts))
        waiting = number + 1 - np.searchsorted(starts, launched, side="right")
        stream.longest = max(stream.longest, int(waiting.max()))
        stream.waited += int((started - launched).clip(min=0).sum())
        stream.at_limit += _measure_limit(starts, launched, number)
        stream.num_launches += len(started)
        stream.last_launch = int(launched[-1])
        stream.starts = starts[-REMEMBERED:]

    def finish(self) -> Sequence[Queue]:
        """The longest queue first."""
        found = []
        for number, stream in self._streams.items():
            span = int(stream.starts[-1]) - stream.first_launch
            found.append(
                Queue(
                    lane=self._lanes[number],
                    num_launches=stream.num_launches,
                    longest=stream.longest,
                    mean=stream.waited / span if span > 0 else 0.0,
                    span_ns=max(0, span),
                    at_limit_ns=stream.at_limit,
                )
            )
        return sorted(found, key=lambda queue: (-queue.longest, -queue.num_launches))


def _measure_limit(starts: NDArray[np.int64], launched: NDArray[np.int64], number: NDArray[np.int64]) -> int:
    """How long the kernels with these numbers kept the queue at its limit."""
    has_history = number >= LIMIT - 1
    number, launched = number[has_history], launched[has_history]
    leaves = starts[number - LIMIT + 1]
    arrives = np.where(number >= LIMIT, starts[number - LIMIT], launched)
    return int((leaves - np.maximum(arrives, launched)).clip(min=0).sum())
