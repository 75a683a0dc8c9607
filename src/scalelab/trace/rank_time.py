"""Where the time of a rank went: compute, communication, copies, idle.

On a device, compute is the union of its computing kernels, whatever their stream, communication that of its
communication kernels. Where a trace knows no device, compute is the union of operators on the host's threads
(those that only call others or wait do not count) and communication that of the collectives that its threads run.
Operators inside a collective on the same thread, such as gloo's own copies, are part of it, not compute beside it; and
an operator does not compute while it waits for one (DTensor waits inside the operator that first needs the result).

    span = compute + exposed + copy + idle
    communication = exposed + overlapped

with exposed: communication while nothing is computed; copy: memory copies with neither beside them. All of it is
exact, in integer nanoseconds: each part is a difference of measures of unions. A rank's span reaches from the first to
the last of these events. A step's span reaches, on a device, from the start of the first kernel that the host launched
in it to the end of the last (`linking.py`), else from the step's mark to its end; its parts are those of all that ran
in that span.

Sets of half-open intervals [start, end) of integer nanoseconds, as two arrays. All results are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.kinds import Kind
from scalelab.trace.windows import Records, Window, find_among, find_distinct

Times = NDArray[np.int64]


def merge(start: Times, end: Times) -> tuple[Times, Times]:
    """The union as disjoint intervals in order; those that touch become one, empty ones vanish."""
    is_kept = end > start
    start, end = start[is_kept], end[is_kept]
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    is_first = np.empty(len(start), dtype=bool)
    is_first[0] = True
    np.greater(start[1:], reach[:-1], out=is_first[1:])
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(start)) - 1
    return start[first], reach[last]


def measure(start: Times, end: Times) -> int:
    """The length of the union."""
    start, end = merge(start, end)
    return int((end - start).sum())


def clip(start: Times, end: Times, low: int, high: int) -> tuple[Times, Times]:
    """What lies within [low, high)."""
    start, end = np.clip(start, low, high), np.clip(end, low, high)
    return start, end


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A span of time in parts, in nanoseconds."""

    span_ns: int = 0
    compute_ns: int = 0
    overlapped_ns: int = 0
    exposed_ns: int = 0
    copy_ns: int = 0
    idle_ns: int = 0

    @property
    def communication_ns(self) -> int:
        return self.overlapped_ns + self.exposed_ns

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            span_ns=self.span_ns + other.span_ns,
            compute_ns=self.compute_ns + other.compute_ns,
            overlapped_ns=self.overlapped_ns + other.overlapped_ns,
            exposed_ns=self.exposed_ns + other.exposed_ns,
            copy_ns=self.copy_ns + other.copy_ns,
            idle_ns=self.idle_ns + other.idle_ns,
        )


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The parts of a rank's whole span, and of every step."""

    whole: Parts
    by_step: Mapping[int, Parts]


@dataclass
class BreakdownCounter:
    """Adds the parts of windows up."""

    low: int
    high: int
    """The rank's span."""
    has_device: bool
    _whole: Parts = field(default_factory=Parts)
    _by_step: dict[int, Parts] = field(default_factory=dict)

    def take(self, window: Window) -> None:
        records = select_work(window.all_records, has_device=self.has_device)
        low, high = max(window.start, self.low), min(window.end, self.high)
        if low < high:
            self._whole += measure_parts(records, low, high)
        if window.steps:
            parts = measure_parts(records, window.start, window.end)
            for step in window.steps:
                self._by_step[step] = self._by_step.get(step, Parts()) + parts

    def finish(self) -> Breakdown:
        return Breakdown(whole=self._whole, by_step=dict(sorted(self._by_step.items())))


def select_work(records: Records, *, has_device: bool) -> Records:
    """The same as `select_busy`, of the host without what is part of a collective or waits for one."""
    busy = select_busy(records, has_device=has_device)
    if has_device:
        return busy
    busy = busy.compress(~find_parts_of_collectives(busy))
    return cut_waits(busy, records.compress(records["kind"] == Kind.WAITING))


def cut_waits(busy: Records, waits: Records) -> Records:
    """Operators in pieces: without the time in which their own thread waits."""
    parts, waits = [busy], waits.compress(waits["end"] > waits["start"])
    for lane in find_distinct(waits["lane"]).tolist():
        start, end = merge(*(waits[side][waits["lane"] == lane] for side in ("start", "end")))
        is_own = (parts[0]["lane"] == lane) & (parts[0]["kind"] == Kind.OPERATOR)
        own, parts[0] = parts[0].compress(is_own), parts[0].compress(~is_own)
        first = np.searchsorted(end, own["start"], side="right")
        count = np.maximum(np.searchsorted(start, own["end"], side="left") - first, 0)
        pieces = np.repeat(own, count + 1)
        place = np.arange(len(pieces)) - np.repeat(np.cumsum(count + 1) - count - 1, count + 1)
        wait = np.repeat(first, count + 1) + place
        pieces["start"] = np.where(place == 0, pieces["start"], end[wait - 1])
        is_last = place == np.repeat(count, count + 1)
        pieces["end"] = np.where(is_last, pieces["end"], start[np.minimum(wait, len(start) - 1)])
        parts.append(pieces.compress(pieces["end"] > pieces["start"]))
    return np.concatenate(parts)


def select_busy(records: Records, *, has_device: bool) -> Records:
    """The records that are compute, communication or copies of what is looked at: devices, or else the host."""
    kind = records["kind"]
    if has_device:
        is_busy = records["on_device"] & (kind <= Kind.COPY)
    else:
        is_busy = (kind == Kind.OPERATOR) | (kind == Kind.COMMUNICATION)
    return records.compress(is_busy)


def find_parts_of_collectives(records: Records) -> NDArray[np.bool_]:
    """Which operators lie within a collective that their own thread runs."""
    is_part = np.zeros(len(records), dtype=np.bool_)
    threads = find_distinct(records["lane"][records["kind"] == Kind.COMMUNICATION])
    own = np.flatnonzero(find_among(records["lane"], threads))
    is_outer, start, end = records["kind"][own] == Kind.COMMUNICATION, records["start"][own], records["end"][own]
    order = np.lexsort((-end, ~is_outer, start, records["lane"][own]))
    # Ends and threads by their places in order, so that the latest end of a thread so far is the highest number so far.
    thread = np.searchsorted(threads, records["lane"][own]) * (len(own) + 1)
    place = thread + np.searchsorted(np.sort(end), end) + 1
    reach = np.maximum.accumulate(np.where(is_outer, place, thread)[order])
    is_part[own[order]] = (place[order] <= reach) & ~is_outer[order]
    return is_part


def measure_parts(records: Records, low: int, high: int) -> Parts:
    """The parts of [low, high)."""
    start, end = clip(records["start"], records["end"], low, high)
    kind = records["kind"]
    is_compute = (kind == Kind.COMPUTE) | (kind == Kind.OPERATOR)
    is_work = is_compute | (kind == Kind.COMMUNICATION)
    compute = measure(start[is_compute], end[is_compute])
    communication = measure(start[kind == Kind.COMMUNICATION], end[kind == Kind.COMMUNICATION])
    work = measure(start[is_work], end[is_work])
    busy = measure(start, end)
    return Parts(
        span_ns=high - low,
        compute_ns=compute,
        overlapped_ns=compute + communication - work,
        exposed_ns=work - compute,
        copy_ns=busy - work,
        idle_ns=high - low - busy,
    )
