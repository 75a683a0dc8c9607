"""Which operator asked for what a thread of the host ran.

gloo and MPI run collectives on threads of their own. An annotation says when a thread ran which algorithm; the
operator on the thread that trains says what was asked for, which may be something else: gloo runs a reduce-scatter as
an all-reduce of the whole tensor. The threads take calls in their order, so that the k-th call and the k-th annotation
that begins belong together. Where there are more of one than of the other, as when a trace begins between the two,
an annotation gets the last call before it that is still free and agrees in size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from scalelab.trace.sizes import MessageSize

RUN_AS = {"reduce_scatter": "all_reduce"}
"""What gloo runs instead of a collective that it does not have."""
MOST_LOOKS = 64
"""How many calls before an annotation are looked at."""


class Call(NamedTuple):
    """An operator that asked for a collective."""

    kind: str
    start_ns: int
    size: MessageSize


class Ran(NamedTuple):
    """What a thread ran."""

    kind: str
    start_ns: int
    size: MessageSize


def assign_calls(ran: Sequence[Ran], calls: Sequence[Call]) -> list[Call | None]:
    """For everything that ran, in order of its start, the call behind it; None: there is none."""
    kinds = {run.kind for run in ran}
    found: list[Call | None] = [None] * len(ran)
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


def _assign_alike(runs: Sequence[Ran], calls: Sequence[Call]) -> list[Call | None]:
    """The calls of one kind of run."""
    if len(runs) == len(calls):
        pairs = list(zip(runs, calls, strict=True))
        if all(call.start_ns <= run.start_ns and _may_agree(run, call) for run, call in pairs):
            return list(calls)
    starts = [call.start_ns for call in calls]
    is_free = [True] * len(calls)
    found: list[Call | None] = []
    for run in runs:
        last = bisect_right(starts, run.start_ns) - 1
        near = range(last, max(-1, last - MOST_LOOKS), -1)
        place = next((place for place in near if is_free[place] and _may_agree(run, calls[place])), None)
        found.append(None if place is None else calls[place])
        if place is not None:
            is_free[place] = False
    return found


def _may_agree(run: Ran, call: Call) -> bool:
    """Whether the sizes may be those of one message; an unknown one may be any."""
    known = (run.size.num_elements, call.size.num_elements)
    return None in known or run.size.is_piece != call.size.is_piece or known[0] == known[1]
