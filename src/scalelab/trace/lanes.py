"""Lane by lane: the gaps of streams and threads, the launches of kernels, and the queues between both.

A lane is a stream of a device or a thread of the host. Kernels are matched with their launches once, for all three.
Where a trace knows no device, the lanes are the threads that train; those that run collectives have no gaps to explain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from scalelab.trace.breakdown import select_busy
from scalelab.trace.classify import Kind
from scalelab.trace.idle import GapPair, IdleTally, LaneIdle, PairTally
from scalelab.trace.launches import NO_LAUNCH, LaunchMatcher, LaunchTally, LaunchTimes, Queue, QueueTally
from scalelab.trace.rank import Tables
from scalelab.trace.windows import Steps, Window, is_chosen


@dataclass(frozen=True, kw_only=True)
class LaneTimes:
    """What is known of a rank's lanes."""

    idle: Sequence[LaneIdle]
    pairs: Sequence[GapPair]
    launches: Sequence[LaunchTimes]
    """Empty where there is no device, or no launch of its kernels in the trace."""
    queues: Sequence[Queue]


class LaneCounter:
    """Goes through every lane in order."""

    def __init__(self, tables: Tables, steps: Steps = None) -> None:
        self._has_device = tables.has_device
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
        records = records[np.lexsort((-records["end"], records["start"], records["lane"]))]
        if not self._has_device:
            self._unwanted.update(np.unique(records["lane"][records["kind"] == Kind.COMMUNICATION]).tolist())
        is_counted = is_chosen(window, self._steps)
        launched = np.full(len(records), NO_LAUNCH, dtype=np.int64)
        is_first = np.zeros(len(records), dtype=np.bool_)
        if self._has_device:
            matches = self._matcher.match(window.records, records)
            launched, is_first = matches.start, matches.is_first
            if is_counted:
                self._launches.add(records, matches)
        edges = [*np.flatnonzero(np.diff(records["lane"], prepend=-1)).tolist(), len(records)]
        for low, high in pairwise(edges):
            lane, own = int(records["lane"][low]), slice(low, high)
            self._idle.add(lane, records[own], launched[own], is_counted=is_counted)
            if is_counted:
                self._queues.add(lane, launched[own][is_first[own]], records["start"][own][is_first[own]])

    def finish(self) -> LaneTimes:
        return LaneTimes(
            idle=self._idle.finish(self._unwanted),
            pairs=self._pairs.finish(self._unwanted),
            launches=self._launches.finish(),
            queues=self._queues.finish(),
        )
