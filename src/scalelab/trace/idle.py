"""Why a device stream was idle, and between which kernels.

A gap is the time between the end of everything that a stream has run so far and its next kernel. Its reason, by the
rules of HolisticTraceAnalysis:

    host wait      the next kernel was launched after the previous one had ended: the host was late
    kernel wait    it was launched before, and the gap is short: the device switches kernels
    other          the rest: waiting for another stream or an event, or a launch that is not in the trace

Short is what the device needs to switch: up to `SHORT` times the lower quartile of the gaps before kernels launched in
time, at least the 30 ns of HolisticTraceAnalysis and at most 10 µs. Shorter gaps than 30 ns are not in the quartile:
some devices (MI300) end a kernel when the next begins. On real devices the quartile is 1 to 3 µs.

They add up to the idle time of the stream, between its first kernel and its last, in integer nanoseconds. Without a
device, gaps are those between the operators of a host thread and have no reason.

A lane is a device stream or a host thread. Kernels are matched with their launches once, for gaps, launches and
queues. Without a device, the lanes are the training threads; threads that run collectives are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.kinds import Kind
from scalelab.trace.launches import (
    NO_LAUNCH,
    NUM_BINS,
    LaunchMatcher,
    LaunchTally,
    LaunchTimes,
    Queue,
    QueueTally,
    find_bins,
    find_quantile,
)
from scalelab.trace.rank_time import select_busy
from scalelab.trace.rank_trace import Lane, Tables
from scalelab.trace.windows import Records, Steps, Window, choose_records, find_distinct, find_edges

MOST_PAIRS = 100_000
"""Distinct pairs at any time; beyond that, the less costly half is dropped."""


@dataclass(frozen=True, kw_only=True)
class GapPair:
    """All gaps between two names that followed each other on a lane."""

    lane: Lane
    before: str
    after: str
    count: int
    total_ns: int


class PairTally:
    """Adds gaps up by pairs of names."""

    def __init__(self, tables: Tables) -> None:
        self._names = tables.names
        self._lanes = tables.lanes
        self._found: dict[tuple[int, int], tuple[int, int]] = {}
        """Count and total by lane and pair."""

    def add(self, lane: int, before: NDArray[np.int32], after: NDArray[np.int32], gap: NDArray[np.int64]) -> None:
        keys = before.astype(np.int64) * len(self._names) + after
        order = np.argsort(keys, kind="stable")
        first = find_edges(keys[order])
        total = np.add.reduceat(gap[order], first) if len(first) else gap[:0]
        counts = np.diff(first, append=len(keys))
        for key, count, time in zip(keys[order][first].tolist(), counts.tolist(), total.tolist(), strict=True):
            known = self._found.get((lane, key), (0, 0))
            self._found[lane, key] = (known[0] + count, known[1] + time)
        if len(self._found) > MOST_PAIRS:
            self._found = dict(self._order()[: MOST_PAIRS // 2])

    def _order(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        return sorted(self._found.items(), key=lambda item: (-item[1][1], item[0]))

    def finish(self, unwanted: Set[int] = frozenset()) -> Sequence[GapPair]:
        """The most costly first, but for those of unwanted lanes."""
        found = []
        for (lane, key), (count, total) in self._order():
            before, after = (self._names[number] for number in divmod(key, len(self._names)))
            if lane not in unwanted:
                pair = GapPair(lane=self._lanes[lane], before=before, after=after, count=count, total_ns=total)
                found.append(pair)
        return found


SHORT = 3
"""A gap below this many times the usual one is the device's own way from one kernel to the next."""
SHORTEST_SWITCH_NS, LONGEST_SWITCH_NS = 30, 10_000


@dataclass
class _Gaps:
    """Gaps before kernels that were launched in time: counts and sums in the bins of `launches.py`."""

    count: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, dtype=np.int64))
    total: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, dtype=np.int64))

    def add(self, gaps: NDArray[np.int64]) -> None:
        bins = find_bins(gaps)
        np.add.at(self.count, bins, 1)
        np.add.at(self.total, bins, gaps)


def find_switch_limit(counts: Iterable[NDArray[np.int64]]) -> int:
    """The longest gap that is the device's own, from the gaps of all its streams."""
    count = sum(counts, start=np.zeros(NUM_BINS, dtype=np.int64))
    count[: int(find_bins(np.array([SHORTEST_SWITCH_NS]))[0])] = 0
    usual = find_quantile(count, 0.25) or 0.0
    return round(min(max(SHORT * usual, SHORTEST_SWITCH_NS), LONGEST_SWITCH_NS))


@dataclass(frozen=True, kw_only=True)
class LaneIdle:
    """What a stream, or a thread of the host, did not run."""

    lane: Lane
    num_events: int
    busy_ns: int
    """The union of what it ran."""
    host_wait_ns: int
    kernel_wait_ns: int
    other_ns: int

    @property
    def idle_ns(self) -> int:
        return self.host_wait_ns + self.kernel_wait_ns + self.other_ns

    @property
    def span_ns(self) -> int:
        return self.busy_ns + self.idle_ns


@dataclass
class _LaneState:
    """What is known of a lane so far."""

    reach: int
    """Until when all that it ran has ended."""
    last_name: int
    num_events: int = 0
    busy: int = 0
    host_wait: int = 0
    other: int = 0
    """Gaps whose launch is not known."""
    gaps: _Gaps = field(default_factory=_Gaps)


class IdleTally:
    """Finds the gaps of every lane. A gap counts where it ends, whole."""

    def __init__(self, tables: Tables, pairs: PairTally) -> None:
        self._lanes = tables.lanes
        self._pairs = pairs
        self._found: dict[int, _LaneState] = {}

    def add(self, lane: int, records: Records, launched: NDArray[np.int64], is_counted: NDArray[np.bool_]) -> None:
        """The next events of one lane, in order, with the start of their launches."""
        start, end, names = records["start"], records["end"], records["name"]
        state = self._found.get(lane)
        if state is None:
            state = self._found[lane] = _LaneState(reach=int(start[0]), last_name=int(names[0]))
        reach = np.maximum(np.maximum.accumulate(end), state.reach)
        before = np.concatenate([[state.reach], reach[:-1]])
        if is_counted.any():
            gap = start - before
            is_gap = (gap > 0) & is_counted
            state.num_events += int(is_counted.sum())
            state.busy += int((reach - np.maximum(start, before))[is_counted].clip(min=0).sum())
            _sort_gaps(state, gap[is_gap], before[is_gap], launched[is_gap])
            previous = _name_previous(state.last_name, names, end >= before)
            self._pairs.add(lane, previous[is_gap], names[is_gap], gap[is_gap])
        state.last_name = int(_name_previous(state.last_name, np.append(names, 0), np.append(end >= before, False))[-1])
        state.reach = int(reach[-1])

    def find_limit(self) -> int:
        """The longest gap that counts as kernel wait."""
        return find_switch_limit(state.gaps.count for state in self._found.values())

    def finish(self, unwanted: Set[int] = frozenset()) -> Sequence[LaneIdle]:
        """The busiest lane first, without unwanted ones."""
        short = int(find_bins(np.array([self.find_limit()]))[0])
        found = [
            LaneIdle(
                lane=self._lanes[number],
                num_events=state.num_events,
                busy_ns=state.busy,
                host_wait_ns=state.host_wait,
                kernel_wait_ns=int(state.gaps.total[:short].sum()),
                other_ns=state.other + int(state.gaps.total[short:].sum()),
            )
            for number, state in self._found.items()
            if state.num_events and number not in unwanted
        ]
        return sorted(found, key=lambda lane: -lane.busy_ns)


def _sort_gaps(
    state: _LaneState, gap: NDArray[np.int64], before: NDArray[np.int64], launched: NDArray[np.int64]
) -> None:
    is_known = launched != NO_LAUNCH
    is_host_wait = is_known & (launched > before)
    state.host_wait += int(gap[is_host_wait].sum())
    state.other += int(gap[~is_known].sum())
    state.gaps.add(gap[is_known & ~is_host_wait])


def _name_previous(first: int, names: NDArray[np.int32], is_last: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each event, the name of the one before it that ended last."""
    latest = np.maximum.accumulate(np.where(is_last, np.arange(1, len(names) + 1), 0))
    named: NDArray[np.int64] = np.concatenate([[first], names])[np.concatenate([[0], latest[:-1]])]
    return named


@dataclass(frozen=True, kw_only=True)
class LaneTimes:
    """What is known of a rank's lanes."""

    idle: Sequence[LaneIdle]
    kernel_wait_limit_ns: int
    """The longest gap that counts as kernel wait."""
    pairs: Sequence[GapPair]
    launches: Sequence[LaunchTimes]
    """Empty where there is no device, or no launch of its kernels in the trace."""
    queues: Sequence[Queue]


class LaneCounter:
    """Goes through every lane in order."""

    def __init__(self, tables: Tables, steps: Steps = None) -> None:
        self._has_device = tables.has_device
        self._known_steps = tables.steps
        self._steps = steps
        self._matcher = LaunchMatcher(tables.names)
        self._pairs = PairTally(tables)
        self._idle = IdleTally(tables, self._pairs)
        self._launches = LaunchTally(tables.names)
        self._queues = QueueTally(tables.lanes)
        self._unwanted: set[int] = set()
        """Threads of the host that run collectives."""

    def take(self, window: Window) -> None:
        records = select_busy(window.records, has_device=self._has_device)
        records = records.take(np.lexsort((-records["end"], records["start"], records["lane"])))
        if not self._has_device:
            self._unwanted.update(find_distinct(records["lane"][records["kind"] == Kind.COMMUNICATION]).tolist())
        is_counted = choose_records(records, self._known_steps, self._steps)
        launched = np.full(len(records), NO_LAUNCH, dtype=np.int64)
        is_first = np.zeros(len(records), dtype=np.bool_)
        if self._has_device:
            matches = self._matcher.match(window.records, records)
            launched, is_first = matches.start, matches.is_first
            self._launches.add(records, matches, is_counted)
        edges = [*np.flatnonzero(np.diff(records["lane"], prepend=-1)).tolist(), len(records)]
        for low, high in pairwise(edges):
            lane, own = int(records["lane"][low]), slice(low, high)
            self._idle.add(lane, records[own], launched[own], is_counted[own])
            is_launched = is_first[own] & is_counted[own]
            self._queues.add(lane, launched[own][is_launched], records["start"][own][is_launched])

    def finish(self) -> LaneTimes:
        return LaneTimes(
            idle=self._idle.finish(self._unwanted),
            kernel_wait_limit_ns=self._idle.find_limit(),
            pairs=self._pairs.finish(self._unwanted),
            launches=self._launches.finish(),
            queues=self._queues.finish(),
        )
