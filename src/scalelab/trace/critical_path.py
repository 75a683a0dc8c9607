"""What decides a step: the chain of host calls, kernels and collectives that it cannot be shorter than.

A step is a graph of moments. A moment comes when the last of the moments that it waits for has come, plus what lies
between:

    host call     follows the call before it, after the host's own time
    kernel        follows its launch by the usual latency, and the kernel before it on its stream; if it begins within
                  `NEAR_NS` of the end of a kernel on another stream, and later than both, it waited for that one
    collective    of matched ranks: all kernels have begun, then the transfer
    synchronize   the host waits for the last kernel that ended before the call returned

If the host is ahead (the first kernel was queued behind the step before), the step begins with its first kernel, and
what the host did before costs nothing. What all this does not explain stays as a delay of the moment ("other wait"), so
the recorded times come out exactly. The critical path is the chain of last moments back from the end of the step; its
pieces add up to the step. "What if" sets pieces to zero and times the graph anew; unexplained delays stay.
Threads of the host that launch are taken
as one: forward, backward and optimizer alternate. Nothing else changes: kernels that then have the device for
themselves do not run faster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.kinds import Kind
from scalelab.trace.matching import LARGEST_BASE_NS, Matching
from scalelab.trace.rank_trace import RankTrace, Tables
from scalelab.trace.windows import RECORD, Records, Steps, Window, find_among, find_distinct

MOST_RECORDS = 100_000
"""A step with more kernels and calls of the host, over all ranks, is left out."""
NEAR_NS = 20_000
LONGEST_LATENCY_NS = 100_000
"""A kernel that begins later after its launch waited for something else."""
_WAITS = re.compile(r"Synchronize")

Times = NDArray[np.int64]


class StepPiece(StrEnum):
    """What lies between two moments."""

    COMPUTE = "compute"
    TRANSFER = "communication"
    COPY = "copies"
    HOST = "host"
    LAUNCH = "launch latency"
    OTHER = "other wait"
    ORDER = "order"
    """Nothing: one comes after the other."""


_PIECES: dict[int, StepPiece] = {
    Kind.COMPUTE: StepPiece.COMPUTE,
    Kind.COMMUNICATION: StepPiece.TRANSFER,
    Kind.COPY: StepPiece.COPY,
}


class Edge(NamedTuple):
    """One moment comes after another."""

    source: int
    target: int
    nanoseconds: int
    piece: StepPiece = StepPiece.ORDER
    name: str = ""


@dataclass
class Graph:
    """Moments, what they wait for, and when they came."""

    times: list[int] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def add(self, time: int) -> int:
        """A moment; the first is the begin of everything."""
        self.times.append(time)
        return len(self.times) - 1

    def join(
        self, source: int, target: int, nanoseconds: int, piece: StepPiece = StepPiece.ORDER, name: str = ""
    ) -> None:
        self.edges.append(Edge(source, target, nanoseconds, piece, name))

    def order(self) -> list[int] | None:
        """Moments so that each comes after all that it waits for; None: they wait for each other in a circle."""
        waiting = [0] * len(self.times)
        following: list[list[int]] = [[] for _ in self.times]
        for edge in self.edges:
            waiting[edge.target] += 1
            following[edge.source].append(edge.target)
        ready = [moment for moment, count in enumerate(waiting) if not count]
        for moment in ready:
            for after in following[moment]:
                waiting[after] -= 1
                if not waiting[after]:
                    ready.append(after)
        return ready if len(ready) == len(self.times) else None


@dataclass(frozen=True)
class PathPiece:
    """A stretch of the critical path."""

    piece: StepPiece
    name: str
    nanoseconds: int


class StepTiming:
    """A graph in order, with the delays that its edges do not explain."""

    def __init__(self, graph: Graph) -> None:
        order = graph.order()
        if order is None:
            raise ValueError("moments wait for each other in a circle")
        self.graph = graph
        self._order = order
        self._incoming: list[list[tuple[int, int]]] = [[] for _ in graph.times]
        """Of every moment: sources and numbers of edges."""
        for number, edge in enumerate(graph.edges):
            self._incoming[edge[1]].append((edge[0], number))
        times, costs = graph.times, [edge.nanoseconds for edge in graph.edges]
        self.delays = [
            time - max([times[source] + costs[number] for source, number in edges], default=time)
            for time, edges in zip(times, self._incoming, strict=True)
        ]

    def retime(self, is_free: Callable[[Edge], bool] = lambda _: False) -> list[int]:
        """When every moment comes if some edges take no time."""
        found, delays, incoming = list(self.graph.times), self.delays, self._incoming
        costs = [0 if is_free(edge) else edge.nanoseconds for edge in self.graph.edges]
        for moment in self._order:
            edges = incoming[moment]
            if edges:
                found[moment] = max([found[source] + costs[number] for source, number in edges]) + delays[moment]
        return found

    @property
    def span_ns(self) -> int:
        return max(self.graph.times) - self.graph.times[0]

    def measure_without(self, is_free: Callable[[Edge], bool]) -> int:
        """How long everything would take."""
        return max(self.retime(is_free)) - self.graph.times[0]

    def walk(self) -> list[PathPiece]:
        """The critical path from its end back to the first moment; its pieces add up to the span."""
        times, edges = self.graph.times, self.graph.edges
        moment = max(range(len(times)), key=lambda place: times[place])
        found = []
        while self._incoming[moment]:
            _, place = max((times[s] + edges[number].nanoseconds, -number) for s, number in self._incoming[moment])
            edge = edges[-place]
            if self.delays[moment]:
                found.append(PathPiece(StepPiece.OTHER, "", self.delays[moment]))
            if edge.nanoseconds:
                found.append(PathPiece(edge.piece, edge.name, edge.nanoseconds))
            moment = edge.source
        if times[moment] != times[0]:
            found.append(PathPiece(StepPiece.OTHER, "", times[moment] - times[0]))
        return found


@dataclass(frozen=True, kw_only=True)
class StepRecords:
    """The kernels of one step, and the calls of the host in it."""

    step: int | None
    names: Sequence[str]
    kernels: Records
    calls: Records
    is_whole: bool = True
    """False: there were too many."""


class CriticalCounter:
    """Keeps the middle one of the steps that are shown; without steps, everything."""

    def __init__(self, tables: Tables, steps: Steps = None) -> None:
        known = [place for place, step in enumerate(tables.steps) if steps is None or step.number in steps]
        self._place = known[len(known) // 2] if known else None
        self._number = tables.steps[self._place].number if self._place is not None else None
        marks = [step for step in tables.host_steps if step.number == self._number]
        self._mark = marks[0] if marks else None
        self._names, self._has_device = tables.names, tables.has_device
        self._kept: list[Records] = []
        self._num_kept = 0

    def take(self, window: Window) -> None:
        if not self._has_device or self._num_kept > MOST_RECORDS:
            return
        records = window.records
        is_kernel = records["on_device"] & (records["kind"] <= Kind.COPY)
        is_call = ~records["on_device"] & find_among(records["kind"], (Kind.LAUNCH, Kind.RUNTIME))
        if self._place is not None:
            is_kernel &= records["step"] == self._place
        if self._mark is not None:
            is_call &= (records["start"] >= self._mark.start) & (records["start"] < self._mark.end)
        kept = records[is_kernel | is_call]
        if len(kept):
            self._kept.append(kept)
            self._num_kept += len(kept)

    def finish(self) -> StepRecords:
        found = np.concatenate(self._kept) if self._kept else np.empty(0, dtype=RECORD)
        is_whole = self._num_kept <= MOST_RECORDS
        kept = found if is_whole else found[:0]
        on_device = kept["on_device"].astype(bool)
        return StepRecords(
            step=self._number, names=self._names, kernels=kept[on_device], calls=kept[~on_device], is_whole=is_whole
        )


@dataclass
class _RankMoments:
    """The moments of one rank's kernels."""

    begin: list[int]
    end: list[int]
    places: dict[tuple[int, int], int]
    """Kernels by their recorded begin and end."""


def build_graph(
    ranks: Mapping[int, RankTrace], steps: Mapping[int, StepRecords], matching: Matching | None = None
) -> Graph:
    """The graph of a step on all ranks that it is known of, on one clock."""
    graph = Graph()
    clocked = {}
    for rank, step in steps.items():
        clock = matching.clocks.get(rank) if matching is not None else None
        base = ranks[rank].header.base_ns if abs(ranks[rank].header.base_ns) < LARGEST_BASE_NS else 0
        times = [records[side] + base for records in (step.kernels, step.calls) for side in ("start", "end")]
        clocked[rank] = _begin_with_device(step, [clock.correct(one) for one in times] if clock is not None else times)
    firsts = [int(one.min()) for times in clocked.values() for one in (times[0], times[2]) if len(one)]
    root = graph.add(min(firsts, default=0))
    hosts = {rank: f"host of rank {rank}" if len(steps) > 1 else "" for rank in steps}
    moments = {rank: _add_rank(graph, root, step, hosts[rank], *clocked[rank]) for rank, step in steps.items()}
    joined = _join_collectives(graph, ranks, moments, matching)
    for rank, own in moments.items():
        kernels, names = steps[rank].kernels, steps[rank].names
        columns = (own.begin, own.end, kernels["kind"].tolist(), kernels["name"].tolist())
        for begin, end, kind, name in zip(*columns, strict=True):
            if end not in joined:
                graph.join(begin, end, graph.times[end] - graph.times[begin], _PIECES[kind], names[name])
    return graph


def _begin_with_device(step: StepRecords, times: list[Times]) -> list[Times]:
    """Begins and ends of kernels and calls; if the host is ahead, its calls count from the first kernel on."""
    starts, ends, call_starts, call_ends = times
    if len(starts):
        first = int(starts.argmin())
        launches = call_starts[step.calls["correlation"] == step.kernels["correlation"][first]]
        if len(launches) and int(starts[first]) - int(launches.min()) > LONGEST_LATENCY_NS:
            call_starts, call_ends = (np.maximum(one, starts[first]) for one in (call_starts, call_ends))
    return [starts, ends, call_starts, call_ends]


def _add_rank(
    graph: Graph, root: int, step: StepRecords, host: str, starts: Times, ends: Times, call_starts: Times,
    call_ends: Times,
) -> _RankMoments:  # fmt: skip
    numbers = step.kernels["correlation"]
    begin = [graph.add(time) for time in starts.tolist()]
    end = [graph.add(time) for time in ends.tolist()]
    launched = _add_calls(graph, root, step, host, call_starts, call_ends, ends, end)
    delays = [graph.times[begin[place]] - graph.times[launched[number]]
              for place, number in enumerate(numbers.tolist()) if number in launched]  # fmt: skip
    usual = min(max(0, sorted(delays)[int(0.05 * (len(delays) - 1))]), LONGEST_LATENCY_NS) if delays else 0
    order = np.lexsort((ends, starts)).tolist()
    last: dict[int, int] = {}
    ended = np.sort(ends)
    by_end = np.argsort(ends, kind="stable")
    befores = np.searchsorted(ended, starts, side="right") - 1
    nearest = by_end[np.maximum(befores, 0)]
    columns = (starts, befores, nearest, starts[nearest], ends[nearest], step.kernels["lane"], numbers)
    rows, end_times = list(zip(*(column.tolist() for column in columns), strict=True)), ends.tolist()
    for place in order:
        moment, (time, before, other, other_start, near, lane, number) = begin[place], rows[place]
        known = []
        if lane in last and end_times[last[lane]] <= time:
            graph.join(end[last[lane]], moment, 0)
            known.append(end_times[last[lane]])
        if number in launched:
            latency = min(usual, max(0, time - graph.times[launched[number]]))
            graph.join(launched[number], moment, latency, StepPiece.LAUNCH)
            known.append(graph.times[launched[number]] + latency)
        is_near = before >= 0 and other_start < time and time - near <= NEAR_NS
        if is_near and near > max(known, default=graph.times[root]):
            graph.join(end[other], moment, 0)
            known.append(near)
        if not known:
            graph.join(root, moment, time - graph.times[root], StepPiece.OTHER)
        last[lane] = place
    keys = zip(step.kernels["start"].tolist(), step.kernels["end"].tolist(), strict=True)
    return _RankMoments(begin, end, {key: place for place, key in enumerate(keys)})


def _add_calls(
    graph: Graph, root: int, step: StepRecords, host: str, starts: Times, ends: Times, kernel_ends: Times,
    moments: Sequence[int],
) -> dict[int, int]:  # fmt: skip
    """The calls of the host one after the other; the moments of launches by correlation number."""
    launched: dict[int, int] = {}
    before, time = root, graph.times[root]
    order = np.argsort(kernel_ends, kind="stable")
    ended = kernel_ends[order]
    by_start = np.argsort(starts, kind="stable")
    waits = {number for number in find_distinct(step.calls["name"]).tolist() if _WAITS.search(step.names[number])}
    columns = (starts, ends, step.calls["correlation"], step.calls["name"])
    for start, stop, number, name in zip(*(column[by_start].tolist() for column in columns), strict=True):
        moment = graph.add(start)
        graph.join(before, moment, start - time, StepPiece.HOST, host)
        launched[number] = moment
        before, time = moment, start
        if name in waits:
            latest = int(np.searchsorted(ended, stop, side="right")) - 1
            if latest >= 0 and int(ended[latest]) > start:
                done = graph.add(stop)
                graph.join(moment, done, 0)
                graph.join(moments[int(order[latest])], done, stop - int(ended[latest]), StepPiece.HOST, host)
                before, time = done, stop
    return launched


def _join_collectives(
    graph: Graph, ranks: Mapping[int, RankTrace], moments: Mapping[int, _RankMoments], matching: Matching | None
) -> set[int]:
    """One moment in which all ranks have come to a collective; the ends that follow from it."""
    joined: set[int] = set()
    for group in matching.groups if matching is not None else ():
        if len(group.ranks) < 2 or not all(rank in moments for rank in group.ranks):
            continue
        spans = {rank: (ranks[rank].collectives.start_ns, ranks[rank].collectives.end_ns) for rank in group.ranks}
        for kind, row in zip(group.kinds, group.places.tolist(), strict=True):
            keys = [(rank, (int(spans[rank][0][place]), int(spans[rank][1][place])))
                    for rank, place in zip(group.ranks, row, strict=True)]  # fmt: skip
            own = [(moments[rank], moments[rank].places[key]) for rank, key in keys if key in moments[rank].places]
            if len(own) < len(keys):
                continue
            begins = [one.begin[place] for one, place in own]
            meeting = graph.add(max(graph.times[begin] for begin in begins))
            for begin in begins:
                graph.join(begin, meeting, 0)
            for one, place in own:
                end = one.end[place]
                graph.join(meeting, end, max(0, graph.times[end] - graph.times[meeting]), StepPiece.TRANSFER, kind)
                joined.add(end)
    return joined
