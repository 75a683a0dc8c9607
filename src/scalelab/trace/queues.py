"""How many launched kernels wait for their turn on a stream, over time.

A stream runs its kernels in the order in which they were launched. So of the k-th kernel of a stream, launched at L(k)
and begun at S(k):

    length when k is launched   k minus the number of kernels that had begun by L(k); the longest is among these
    mean over time              the sum of all S(k) − L(k), over the time from the first launch to the start of the last
                                kernel (Little's law)
    time at the limit n         the sum over k of max(0, S(k−n+1) − max(S(k−n), L(k)))

and the last n starts are all that has to be remembered. A driver takes about 1024 launches and then lets the host wait.
Where several threads launch on one stream their launches may be out of order; the later one then counts for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.rank import Lane

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
