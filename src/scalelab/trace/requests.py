"""What threads of the host asked for, and which collective is the answer.

A kernel answers the requests that were open on the thread of its launch. What a thread of the host ran (gloo, MPI)
answers a call: threads serve calls in order, so the k-th call and the k-th annotation belong together. If their numbers
differ, as when a trace begins between the two, an annotation gets the last free call before it that agrees in size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.collectives import CollectiveRow, CollectiveRows, MessageSize
from scalelab.trace.linking import HostCall, RequestSpans

RUN_AS = {"reduce_scatter": "all_reduce"}
"""What gloo runs instead of a collective that it does not have."""
MOST_LOOKS = 64
"""How many calls before an annotation are looked at."""


class CollectiveCall(NamedTuple):
    """An operator that asked for a collective."""

    kind: str
    start_ns: int
    size: MessageSize


class CollectiveRun(NamedTuple):
    """What a thread ran."""

    kind: str
    start_ns: int
    size: MessageSize


def assign_calls(ran: Sequence[CollectiveRun], calls: Sequence[CollectiveCall]) -> list[CollectiveCall | None]:
    """For everything that ran, in order of its start, the call behind it; None: there is none."""
    kinds = {run.kind for run in ran}
    found: list[CollectiveCall | None] = [None] * len(ran)
    for kind in kinds:
        places = [place for place, run in enumerate(ran) if run.kind == kind]
        asked = [call for call in calls if _name_run(call.kind, kinds) == kind]
        runs = [ran[place] for place in places]
        for place, call in zip(places, _assign_alike(runs, asked), strict=True):
            found[place] = call
    return found


def _name_run(kind: str, kinds: set[str]) -> str:
    """What a call is run as, given all that was run."""
    return kind if kind in kinds else RUN_AS.get(kind, kind)


def _assign_alike(runs: Sequence[CollectiveRun], calls: Sequence[CollectiveCall]) -> list[CollectiveCall | None]:
    """The calls of one kind of run."""
    if len(runs) == len(calls):
        pairs = list(zip(runs, calls, strict=True))
        if all(call.start_ns <= run.start_ns and _may_agree(run, call) for run, call in pairs):
            return list(calls)
    starts = [call.start_ns for call in calls]
    is_free = [True] * len(calls)
    found: list[CollectiveCall | None] = []
    for run in runs:
        last = bisect_right(starts, run.start_ns) - 1
        near = range(last, max(-1, last - MOST_LOOKS), -1)
        place = next((place for place in near if is_free[place] and _may_agree(run, calls[place])), None)
        found.append(None if place is None else calls[place])
        if place is not None:
            is_free[place] = False
    return found


def _may_agree(run: CollectiveRun, call: CollectiveCall) -> bool:
    """Whether the sizes may be those of one message; an unknown one may be any."""
    known = (run.size.num_elements, call.size.num_elements)
    return None in known or run.size.is_piece != call.size.is_piece or known[0] == known[1]


def find_spans(calls: CollectiveRows, chosen: NDArray[np.intp]) -> dict[int, RequestSpans]:
    """The chosen requests of every thread, in order of their start, the outer before the inner."""
    start, end, lane = (calls.column(name) for name in ("start_ns", "end_ns", "thread"))
    found = {}
    for number in np.unique(lane[chosen]):
        own = chosen[lane[chosen] == number]
        own = own[np.lexsort((-end[own], start[own]))]
        found[int(number)] = RequestSpans(start[own], end[own], own)
    return found


class Requests:
    """What threads of the host asked for, by thread and time."""

    def __init__(self, calls: CollectiveRows) -> None:
        self._calls = calls
        self._lanes = find_spans(calls, np.arange(len(calls)))

    def find_around(self, launch: HostCall) -> list[CollectiveRow]:
        """The requests that were open on the thread of a launch, the innermost first."""
        lane = self._lanes.get(launch.lane)
        if lane is None:
            return []
        last = int(np.searchsorted(lane.start, launch.start, side="right")) - 1
        near = (self._calls[int(lane.place[place])] for place in range(last, max(-1, last - MOST_LOOKS), -1))
        return [row for row in near if row.end_ns >= launch.start]


def drop_nested(rows: Sequence[CollectiveRow]) -> list[CollectiveRow]:
    """Without those inside another on the same thread; rows are in order of their start."""
    reach: dict[int, int] = {}
    kept = []
    for row in sorted(rows, key=lambda row: (row.start_ns, -row.end_ns)):
        if row.end_ns <= reach.get(row.thread, row.start_ns - 1):
            continue
        reach[row.thread] = max(row.end_ns, reach.get(row.thread, row.end_ns))
        kept.append(row)
    return kept


def find_around(operators: Sequence[CollectiveRow], record: CollectiveRow) -> CollectiveRow | None:
    """The last operator of the thread that began before the record and ends after it; operators are in order."""
    low, high = 0, len(operators)
    while low < high:
        middle = (low + high) // 2
        if operators[middle].start_ns <= record.start_ns:
            low = middle + 1
        else:
            high = middle
    found = operators[low - 1] if low else None
    return found if found is not None and found.end_ns >= record.end_ns else None
