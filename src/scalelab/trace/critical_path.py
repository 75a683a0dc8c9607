"""What decides a step: the chain of host calls, kernels and collectives that it cannot be shorter than.

A step is a graph of moments. A moment comes when the last of the moments that it waits for has come, plus what lies
between:

    host call     follows the call before it, after the host's own time
    kernel        follows its launch by the usual latency, and the kernel before it on its stream (`trim_overlaps`); if
                  it begins within `NEAR_NS` of the end of one on another stream, and later than both, it waited for it
    collective    of matched ranks: all kernels have begun, then the transfer
    synchronize   the host waits for the last kernel that ended before the call returned, or for its own copy
    slow launch   of over `LONGEST_LATENCY_NS`, whose kernel begins after it (it loaded the kernel): host time
    poll          the host calls nothing until the end of the kernel launched last, or its last tenth: it read memory
                  that this kernel writes (DeepEP's dispatch waits for the number of tokens so)

If the host is ahead (the first kernel was queued behind the step before), the step begins with its first kernel, and
what the host did before costs nothing. What all this does not explain stays as a delay of the moment ("other wait"), so
the recorded times come out exactly. The critical path is the chain of last moments back from the end of the step; its
pieces add up to the step. "What if" sets pieces to zero and times the graph anew; unexplained delays stay. Threads of
the host that launch are taken as one: forward, backward and optimizer alternate. Nothing else changes: kernels that
then have the device for themselves do not run faster.
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
from scalelab.trace.windows import Records, Steps, Window, find_among, find_distinct, join_records, trim_overlaps

MOST_RECORDS = 100_000
"""A step with more kernels and calls of the host, over all ranks, is left out."""
NEAR_NS = 20_000
LONGEST_LATENCY_NS = 100_000
"""A kernel that begins later after its launch waited for something else; a host that polls calls nothing for longer."""
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


_PIECES = dict[int, StepPiece](enumerate((StepPiece.COMPUTE, StepPiece.TRANSFER, StepPiece.COPY)))
"""By the kind of a kernel."""


class EdgeLabel(NamedTuple):
    """What lies between two moments."""

    piece: StepPiece = StepPiece.ORDER
    name: str = ""


@dataclass
class Graph:
    """Moments, when they came, and what they wait for: a column each of sources, targets, times and labels."""

    times: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    nanoseconds: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Of the labels."""
    labels: dict[EdgeLabel, int] = field(default_factory=lambda: {EdgeLabel(): 0})

    def add(self, time: int) -> int:
        """A moment; the first is the begin of everything."""
        return self.extend([time])[0]

    def extend(self, times: Sequence[int]) -> list[int]:
        """Several moments."""
        first = len(self.times)
        self.times += times
        return list(range(first, len(self.times)))

    def number(self, piece: StepPiece, name: str = "") -> int:
        """The number of a label."""
        return self.labels.setdefault(EdgeLabel(piece, name), len(self.labels))

    def join(self, source: int, target: int, nanoseconds: int, label: int = 0) -> None:
        """One moment comes after another."""
        self.sources.append(source)
        self.targets.append(target)
        self.nanoseconds.append(nanoseconds)
        self.numbers.append(label)

    def order(self) -> list[int] | None:
        """Moments so that each comes after all that it waits for; None: they wait for each other in a circle."""
        waiting = np.bincount(np.array(self.targets, dtype=np.int64), minlength=len(self.times)).tolist()
        by_source, first = _sort_edges(self.sources, len(self.times))
        targets = np.array(self.targets, dtype=np.int64)[by_source].tolist()
        ready = [moment for moment, count in enumerate(waiting) if not count]
        for moment in ready:
            for after in targets[first[moment] : first[moment + 1]]:
                waiting[after] -= 1
                if not waiting[after]:
                    ready.append(after)
        return ready if len(ready) == len(self.times) else None


def _sort_edges(moments: Sequence[int], num_moments: int) -> tuple[NDArray[np.intp], list[int]]:
    """The edges by one of their moments, and where those of every moment begin, and the last end."""
    column = np.array(moments, dtype=np.int64)
    order = np.argsort(column, kind="stable")
    first: list[int] = np.searchsorted(column[order], np.arange(num_moments + 1)).tolist()
    return order, first


class PathPiece(NamedTuple):
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
        by_target, self._first = _sort_edges(graph.targets, len(graph.times))
        columns = (graph.sources, graph.nanoseconds, graph.numbers)
        sources, self._costs, self._numbers = (np.array(one, dtype=np.int64)[by_target] for one in columns)
        self._sources: list[int] = sources.tolist()
        times = np.array(graph.times, dtype=np.int64)
        explained, is_target = times.copy(), np.diff(self._first) > 0
        if len(sources):
            firsts = np.array(self._first[:-1])[is_target]
            explained[is_target] = np.maximum.reduceat(times[sources] + self._costs, firsts)
        self.delays: list[int] = (times - explained).tolist()

    def retime(self, is_free: Callable[[EdgeLabel], bool] = lambda _: False) -> list[int]:
        """When every moment comes if some edges take no time."""
        free = np.array([is_free(label) for label in self.graph.labels], dtype=np.bool_)
        costs = np.where(free[self._numbers], 0, self._costs).tolist()
        found, delays, sources, first = list(self.graph.times), self.delays, self._sources, self._first
        for moment in self._order:
            low, high = first[moment], first[moment + 1]
            if low < high:
                latest = found[sources[low]] + costs[low]
                for edge in range(low + 1, high):
                    other = found[sources[edge]] + costs[edge]
                    if other > latest:  # this loop is most of the work
                        latest = other
                found[moment] = latest + delays[moment]
        return found

    @property
    def span_ns(self) -> int:
        return max(self.graph.times) - self.graph.times[0]

    def measure_without(self, is_free: Callable[[EdgeLabel], bool]) -> int:
        """How long everything would take."""
        return max(self.retime(is_free)) - self.graph.times[0]

    def walk(self) -> list[PathPiece]:
        """The critical path from its end back to the first moment; its pieces add up to the span."""
        times, sources, costs, first = self.graph.times, self._sources, self._costs.tolist(), self._first
        labels, numbers = list(self.graph.labels), self._numbers.tolist()
        moment = times.index(max(times))
        found = []
        while first[moment] < first[moment + 1]:
            edges = range(first[moment], first[moment + 1])
            edge = max(edges, key=lambda one: times[sources[one]] + costs[one]) if len(edges) > 1 else edges[0]
            if self.delays[moment]:
                found.append(PathPiece(StepPiece.OTHER, "", self.delays[moment]))
            if costs[edge]:
                label = labels[numbers[edge]]
                found.append(PathPiece(label.piece, label.name, costs[edge]))
            moment = sources[edge]
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
        self._kept.append(records.compress(is_kernel | is_call))
        self._num_kept += len(self._kept[-1])

    def finish(self) -> StepRecords:
        is_whole = self._num_kept <= MOST_RECORDS
        kept = join_records(self._kept if is_whole else [])
        on_device = kept["on_device"].astype(bool)
        kernels, calls = kept.compress(on_device), kept.compress(~on_device)
        return StepRecords(step=self._number, names=self._names, kernels=kernels, calls=calls, is_whole=is_whole)


@dataclass
class _RankMoments:
    """The moments of one rank's kernels."""

    begin: list[int]
    end: list[int]
    places: dict[tuple[int, int], int]  # by their recorded begin and end


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
        labels: dict[tuple[int, int], int] = {}
        columns = (own.begin, own.end, kernels["kind"].tolist(), kernels["name"].tolist())
        for begin, end, kind, name in zip(*columns, strict=True):
            if end not in joined:
                label = labels.get((kind, name))
                if label is None:
                    label = labels[kind, name] = graph.number(_PIECES[kind], names[name])
                graph.join(begin, end, graph.times[end] - graph.times[begin], label)
    return graph


def _begin_with_device(step: StepRecords, times: list[Times]) -> list[Times]:
    """Begins and ends of kernels and calls; if the host is ahead, its calls count from the first kernel on."""
    starts, ends, call_starts, call_ends = times
    ends = trim_overlaps(step.kernels["lane"], starts, ends)
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
    begin, end = graph.extend(starts.tolist()), graph.extend(ends.tolist())
    launched = _add_calls(graph, root, step, host, call_starts, call_ends, ends, begin, end)
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
    launch, unknown = graph.number(StepPiece.LAUNCH), graph.number(StepPiece.OTHER)
    first, times = graph.times[root], graph.times
    for place in order:
        moment, (time, before, other, other_start, near, lane, number) = begin[place], rows[place]
        known = None
        if lane in last and end_times[last[lane]] <= time:
            known = end_times[last[lane]]
            graph.join(end[last[lane]], moment, 0)
        if number in launched:
            called = times[launched[number]]
            latency = min(usual, max(0, time - called))
            graph.join(launched[number], moment, latency, launch)
            known = called + latency if known is None else max(known, called + latency)
        if before >= 0 and other_start < time and time - near <= NEAR_NS and near > (first if known is None else known):
            graph.join(end[other], moment, 0)
        elif known is None:
            graph.join(root, moment, time - first, unknown)
        last[lane] = place
    keys = zip(step.kernels["start"].tolist(), step.kernels["end"].tolist(), strict=True)
    return _RankMoments(begin, end, {key: place for place, key in enumerate(keys)})


def _add_calls(
    graph: Graph, root: int, step: StepRecords, host: str, starts: Times, ends: Times, kernel_ends: Times,
    begins: Sequence[int], moments: Sequence[int],
) -> dict[int, int]:  # fmt: skip
    """The calls of the host one after the other; the moments of launches by correlation number."""
    launched: dict[int, int] = {}
    before, time, label = root, graph.times[root], graph.number(StepPiece.HOST, host)
    order = np.argsort(kernel_ends, kind="stable")
    ended = kernel_ends[order]
    by_start = np.argsort(starts, kind="stable")
    waits = {number for number in find_distinct(step.calls["name"]).tolist() if _WAITS.search(step.names[number])}
    columns = [one[by_start].tolist() for one in (starts, ends, step.calls["correlation"], step.calls["name"])]
    next_starts = [*columns[0][1:], 1 << 62][: len(starts)]
    places = {number: place for place, number in enumerate(step.kernels["correlation"].tolist())}
    returned, last, copies = time, -1, set(np.flatnonzero(step.kernels["kind"] == Kind.COPY).tolist())
    for start, stop, number, name, following in zip(*columns, next_starts, strict=True):
        own = places.get(number, -1)
        if own >= 0 and start + LONGEST_LATENCY_NS < stop <= min(following, graph.times[begins[own]]):
            start = stop
        moment = graph.add(start)
        began, ended_at = (graph.times[one[last]] for one in (begins, moments)) if last >= 0 else (0, 0)
        early = min((ended_at - began) // 10, LONGEST_LATENCY_NS)
        if start - returned > LONGEST_LATENCY_NS and ended_at - early <= start <= ended_at + NEAR_NS and last >= 0:
            kernel = _PIECES[int(step.kernels["kind"][last])], step.names[step.kernels["name"][last]]
            graph.join(begins[last], moment, start - began, graph.number(*kernel))
            graph.join(before, moment, max(0, returned - time), label)
        else:
            graph.join(before, moment, start - time, label)
        launched[number] = moment
        last = own if own >= 0 else last
        before, time, returned = moment, start, max(returned, stop)
        latest = int(np.searchsorted(ended, stop, side="right")) - 1 if name in waits else -1
        awaited = int(order[latest]) if latest >= 0 else own if own in copies else -1
        if awaited >= 0 and start < int(kernel_ends[awaited]) <= stop:
            done = graph.add(stop)
            graph.join(moment, done, 0)
            graph.join(moments[awaited], done, stop - int(kernel_ends[awaited]), label)
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
            begins, label = [one.begin[place] for one, place in own], graph.number(StepPiece.TRANSFER, kind)
            meeting = graph.add(max(graph.times[begin] for begin in begins))
            for begin in begins:
                graph.join(begin, meeting, 0)
            for one, place in own:
                end = one.end[place]
                graph.join(meeting, end, max(0, graph.times[end] - graph.times[meeting]), label)
                joined.add(end)
    return joined
