"""From the calls of the host to what they started on the device: which step a kernel belongs to, and who asked for it.

The host runs ahead of its device, so the profiler's marks on the host do not say when the device works on a step, and
its marks on the device cover only part of a step's kernels. A kernel belongs to the step in which the host launched it:
kernel and launch share a correlation number. A step of a device then reaches from the start of its first kernel to the
end of its last. Kernels launched before the recording began belong to no step. If no kernel has a recorded launch,
steps fall back to the marks, and `Links.basis` says so.

The records of a trace are read in time order once before they are counted. At most `MOST_LAUNCHES` launches are
remembered; the kernels of earlier ones belong to no step.

A request is a collective that a thread of the host asked for. A kernel answers the requests that were open on the
thread of its launch. What a thread of the host ran (gloo, MPI) answers a call: threads serve calls in order, so the
k-th call and the k-th annotation belong together. If their numbers differ, as when a trace begins between the two, an
annotation gets the last free call before it that agrees in size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.collectives import CollectiveRow, CollectiveRows, MessageSize
from scalelab.trace.kinds import Kind
from scalelab.trace.windows import (
    NO_STEP,
    ProfilerStep,
    Records,
    arrange_steps,
    find_among,
    find_distinct,
    find_edges,
    join_records,
    place_in_steps,
)

MOST_LAUNCHES = 1 << 18
MOST_UNNAMED = 4
"""Kernels of one collective whose names do not say that they communicate."""

Integers = NDArray[np.int64]


class StepBasis(StrEnum):
    """What the steps of a trace rest on."""

    NONE = "none"
    """It has no steps."""
    HOST = "host"
    """Marks of the host, whose work is looked at: the trace has no device."""
    LAUNCHES = "launches"
    """The kernels that the host launched in each step."""
    DEVICE_MARKS = "device marks"
    """The profiler's marks on the device, for want of launches."""
    HOST_MARKS = "host marks"
    """The profiler's marks on the host, for want of launches."""


class HostCall(NamedTuple):
    """A call of the host that started something on a device."""

    start: int
    lane: int


@dataclass(frozen=True)
class RequestSpans:
    """The requests of one thread, in order of their start."""

    start: Integers
    end: Integers
    place: NDArray[np.intp]
    """Their places among all requests."""


class Unnamed(NamedTuple):
    """A kernel whose name does not say that it communicates, launched where a collective was announced."""

    start: int
    end: int
    name: int
    lane: int
    correlation: int


@dataclass(frozen=True, kw_only=True)
class Links:
    """What is known of a trace's steps and launches before its records are counted."""

    basis: StepBasis
    steps: Sequence[ProfilerStep]
    """Of what is looked at, in order of their start; those of a device may overlap."""
    launches: dict[int, HostCall] = field(default_factory=dict)
    """Of the wanted correlation numbers."""
    unlinked_share: float = 0.0
    """Of the device's events from the first step on: those whose launch is not recorded."""
    unnamed: Sequence[Unnamed] = ()
    """Kernels that communicate by what launched them."""
    _places: Sequence[NDArray[np.int32]] = ()
    """The step of every record, block by block; empty: the step that it begins in."""

    def tag(self, blocks: Iterable[Records]) -> Iterator[Records]:
        """The same records with their steps."""
        unnamed = [kernel.correlation for kernel in self.unnamed]
        for number, block in enumerate(blocks):
            block = join_records([block])
            is_linked = bool(self._places)
            block["step"] = self._places[number] if is_linked else place_in_steps(self.steps, block["start"])
            if unnamed:
                is_unnamed = (block["kind"] == Kind.COMPUTE) & find_among(block["correlation"], unnamed)
                block["kind"][is_unnamed] = Kind.COMMUNICATION
            yield block


@dataclass
class _Linker:
    """Follows launches through the records."""

    host_steps: Sequence[ProfilerStep]
    wanted: Integers
    requests: Mapping[int, RequestSpans]
    """Where threads announced collectives of kernels."""
    launches: dict[int, HostCall] = field(default_factory=dict)
    places: list[NDArray[np.int32]] = field(default_factory=list)
    num_linked: int = 0
    num_unlinked: int = 0
    _asked: dict[int, tuple[int, HostCall]] = field(default_factory=dict)
    """The request around a launch, by correlation number."""
    _answered: set[int] = field(default_factory=set)
    """Requests that launched a kernel which communicates by its name."""
    _unnamed: list[tuple[int, Unnamed]] = field(default_factory=list)
    _correlations: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    _steps: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    def __post_init__(self) -> None:
        self.first = np.full(len(self.host_steps), np.iinfo(np.int64).max)
        self.last = np.full(len(self.host_steps), np.iinfo(np.int64).min)

    def take(self, block: Records) -> None:
        kind = block["kind"]
        calls = block.compress(((kind == Kind.LAUNCH) | (kind == Kind.RUNTIME)) & (block["correlation"] > 0))
        self._remember(calls)
        places = np.full(len(block), NO_STEP, dtype=np.int32)
        is_work = block["on_device"] & (kind <= Kind.COPY)
        kernels = block.compress(is_work)
        found = np.searchsorted(self._correlations, kernels["correlation"])
        found = np.minimum(found, max(0, len(self._correlations) - 1))
        is_launched = np.zeros(len(kernels), dtype=np.bool_)
        if len(self._correlations):
            is_launched = self._correlations[found] == kernels["correlation"]
            own = np.where(is_launched, self._steps[found], NO_STEP)
            places[is_work] = own
            is_in_step = own != NO_STEP
            np.minimum.at(self.first, own[is_in_step], kernels["start"][is_in_step])
            np.maximum.at(self.last, own[is_in_step], kernels["end"][is_in_step])
        if is_launched.any():
            since = slice(0 if self.num_linked else int(is_launched.argmax()), None)
            self.num_unlinked += int((~is_launched[since]).sum())
            self.num_linked += int(is_launched.sum())
        elif self.num_linked:
            self.num_unlinked += len(kernels)
        self.places.append(places)
        self._follow_requests(kernels)

    def _follow_requests(self, kernels: Records) -> None:
        """Which requests have a kernel that communicates by its name, and which only others."""
        if not self._asked:
            return
        asked = kernels.compress(find_among(kernels["correlation"], self._asked))
        columns = [asked[name].tolist() for name in ("kind", *Unnamed._fields)]
        for kind, *fields in zip(*columns, strict=True):
            kernel = Unnamed(*fields)
            request, _ = self._asked[kernel.correlation]
            if kind == Kind.COMMUNICATION:
                self._answered.add(request)
            elif kind == Kind.COMPUTE:
                self._unnamed.append((request, kernel))

    def list_unnamed(self, is_compute: Callable[[int], bool]) -> list[Unnamed]:
        """Kernels of requests that have no other, and few of these; their launches are remembered.

        An annotation that stays open until the collective is over may enclose a whole forward pass.
        """
        found = []
        counts = Counter(request for request, _ in self._unnamed)
        for request, kernel in self._unnamed:
            is_few = counts[request] <= MOST_UNNAMED
            if is_few and request not in self._answered and not is_compute(kernel.name):
                self.launches[kernel.correlation] = self._asked[kernel.correlation][1]
                found.append(kernel)
        return found

    def _remember_requests(self, calls: Records) -> None:
        for lane, spans in self.requests.items():
            own = calls.compress(calls["lane"] == lane)
            last = np.searchsorted(spans.start, own["start"], side="right") - 1
            is_inside = (last >= 0) & (own["start"] <= spans.end[np.maximum(last, 0)])
            inside = own.compress(is_inside)
            columns = (spans.place[last[is_inside]], inside["correlation"], inside["start"])
            for place, correlation, start in zip(*(column.tolist() for column in columns), strict=True):
                self._asked[correlation] = place, HostCall(start, lane)

    def _remember(self, calls: Records) -> None:
        wanted = calls.compress(find_among(calls["correlation"], self.wanted))
        columns = (wanted[name].tolist() for name in ("correlation", "start", "lane"))
        for correlation, start, lane in zip(*columns, strict=True):
            self.launches[correlation] = HostCall(start, lane)
        self._remember_requests(calls.compress(calls["kind"] == Kind.LAUNCH))
        correlations = np.concatenate([self._correlations, calls["correlation"]])[::-1]
        steps = np.concatenate([self._steps, place_in_steps(self.host_steps, calls["start"])])[::-1]
        order = np.argsort(correlations, kind="stable")
        latest = order[find_edges(correlations[order])]
        self._correlations, self._steps = correlations[latest], steps[latest]
        if len(self._correlations) > MOST_LAUNCHES:
            # Numbers are given in order: the highest are the latest.
            self._correlations, self._steps = self._correlations[-MOST_LAUNCHES:], self._steps[-MOST_LAUNCHES:]

    def order_steps(self) -> tuple[list[ProfilerStep], NDArray[np.int32]]:
        """The steps of the device by their start, and where each of the host's went; those without a kernel are out."""
        used = np.flatnonzero(self.first <= self.last)
        used = used[np.lexsort((self.last[used], self.first[used]))]
        moved = np.full(len(self.host_steps) + 1, NO_STEP, dtype=np.int32)  # the last place is that of no step
        moved[used] = np.arange(len(used))
        steps = [
            ProfilerStep(self.host_steps[place].number, int(self.first[place]), int(self.last[place]))
            for place in used.tolist()
        ]
        return steps, moved


def link_records(
    blocks: Iterable[Records],
    host_steps: Sequence[ProfilerStep],
    device_steps: Sequence[ProfilerStep],
    wanted: Sequence[int],
    requests: Mapping[int, RequestSpans],
    is_compute: Callable[[int], bool],
) -> Links:
    """The steps of a device, and the launches of the wanted correlation numbers; `blocks` are in time order.

    `is_compute` says by the number of its name that a kernel does not communicate, whatever launched it.
    """
    arranged = arrange_steps(host_steps)
    linker = _Linker(arranged, np.array(sorted(set(wanted)), dtype=np.int64), requests)
    for block in blocks:
        linker.take(block)
    unnamed = linker.list_unnamed(is_compute)
    steps, moved = linker.order_steps()
    if steps:
        for places in linker.places:
            places[:] = moved[places]
        num_events = linker.num_linked + linker.num_unlinked
        return Links(
            basis=StepBasis.LAUNCHES,
            steps=steps,
            launches=linker.launches,
            unlinked_share=linker.num_unlinked / num_events,
            unnamed=unnamed,
            _places=linker.places,
        )
    marks = arrange_steps(device_steps) or arranged
    basis = StepBasis.DEVICE_MARKS if device_steps else StepBasis.HOST_MARKS if arranged else StepBasis.NONE
    return Links(basis=basis, steps=marks, launches=linker.launches, unnamed=unnamed)


def link_host(host_steps: Sequence[ProfilerStep]) -> Links:
    """The steps of a trace without a device."""
    steps = arrange_steps(host_steps)
    return Links(basis=StepBasis.HOST if steps else StepBasis.NONE, steps=steps)


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
    for number in find_distinct(lane[chosen]):
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
        last = int(np.searchsorted(lane.start, launch.start, side="right"))
        first = max(0, last - MOST_LOOKS)
        is_open = lane.end[first:last] >= launch.start
        return [self._calls[int(place)] for place in lane.place[first:last][is_open][::-1]]


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
