"""A trace in windows of time that follow each other without gap: what a rank did in each.

A window ends where a step begins or ends, and where the records at hand end, so that nothing has to be remembered but
the events that still run. Whatever is additive over time may be added up over windows, exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from scalelab.trace.spool import RECORD, Records

Steps = frozenset[int] | None
"""The steps that are counted; None: the whole trace."""


@dataclass(frozen=True)
class Step:
    """A step of the profiler."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class Window:
    """A stretch [start, end) of the trace, in nanoseconds."""

    start: int
    end: int
    step: int | None
    """The number of the step that it belongs to; None: it lies between steps."""
    records: Records
    """Events that begin in it, in order."""
    carried: Records
    """Events that began before and still run when it begins."""

    @property
    def all_records(self) -> Records:
        return np.concatenate([self.carried, self.records])


def is_chosen(window: Window, steps: Steps) -> bool:
    """Whether what begins in a window counts."""
    return steps is None or window.step in steps


def arrange_steps(steps: Iterable[Step]) -> list[Step]:
    """One span per number (on several streams of a device there are several), in order, none reaching into the next."""
    spans: dict[int, Step] = {}
    for step in steps:
        known = spans.get(step.number, step)
        spans[step.number] = Step(step.number, min(known.start, step.start), max(known.end, step.end))
    ordered = sorted(spans.values(), key=lambda step: (step.start, step.end))
    limits = [step.start for step in ordered[1:]] + [step.end for step in ordered[-1:]]
    return [Step(step.number, step.start, min(step.end, limit)) for step, limit in zip(ordered, limits, strict=True)]


def cut_windows(blocks: Iterable[Records], steps: Sequence[Step], low: int, high: int) -> Iterator[Window]:
    """The windows of [low, high], which all records lie in, from blocks of records in order of their start."""
    borders = deque(sorted({edge for step in steps for edge in (step.start, step.end) if low < edge < high}))
    pending = carried = np.empty(0, dtype=RECORD)
    begin = low
    for block in blocks:
        pending = np.concatenate([pending, block])
        if not len(pending):
            continue
        reach = int(pending["start"][-1])
        while begin < reach:
            # Records that begin at the very end may have equals in the next block: they wait for it.
            edge = borders.popleft() if borders and borders[0] <= reach else reach
            count = int(np.searchsorted(pending["start"], edge, side="left"))
            window = Window(begin, edge, _find_step(steps, begin), pending[:count], carried)
            pending, carried, begin = pending[count:], _still_running(window), edge
            yield window
    for edge in borders:
        window = Window(begin, edge, _find_step(steps, begin), pending, carried)
        pending, carried, begin = pending[:0], _still_running(window), edge
        yield window
    yield Window(begin, high, _find_step(steps, begin), pending, carried)


def _find_step(steps: Sequence[Step], time: int) -> int | None:
    """The step that a window belongs to which begins then."""
    index = bisect_right(steps, time, key=lambda step: step.start) - 1
    return steps[index].number if index >= 0 and time < steps[index].end else None


def _still_running(window: Window) -> Records:
    records = window.all_records
    return records[records["end"] > window.end]
