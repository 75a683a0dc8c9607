"""Every event of a job on one clock, packed for a page that draws them.

A counter keeps the events of a rank. Ranks are then put on one clock (`merged.py`) and events into rows: one per stream
or thread and depth of nesting. Events of a row do not overlap, so their numbers are small: the gap to the end of the
event before, the duration, the name, the kind. They are stored column by column, byte by byte (all lowest bytes first),
which deflate packs to a few bytes an event.

A page holds at most `MOST_EVENTS`. Of longer traces the shortest events are left out, and the page says which.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.job_trace import JobTrace
from scalelab.trace.kinds import Kind
from scalelab.trace.merged import align_times
from scalelab.trace.rank_trace import RankTrace, Tables
from scalelab.trace.windows import Records, Steps, Window, choose_records, join_records

MOST_EVENTS = 4_000_000
DEEPEST = 255
"""Rows of one thread; what is nested deeper is left out."""
DRAWN = (
    Kind.COMPUTE,
    Kind.COMMUNICATION,
    Kind.COPY,
    Kind.OPERATOR,
    Kind.ENCLOSING,
    Kind.WAITING,
    Kind.LAUNCH,
    Kind.RUNTIME,
    Kind.ANNOTATION,
    Kind.MODULE,
    Kind.SOURCE,
)
KIND_NAMES = {
    Kind.COMPUTE: "compute",
    Kind.COMMUNICATION: "communication",
    Kind.COPY: "copies",
    Kind.OPERATOR: "operator",
    Kind.ENCLOSING: "operator",
    Kind.WAITING: "operator",
    Kind.LAUNCH: "launch",
    Kind.RUNTIME: "runtime",
    Kind.ANNOTATION: "annotation",
    Kind.MODULE: "module",
    Kind.SOURCE: "source",
}
SHOWN_KINDS = tuple(dict.fromkeys(KIND_NAMES.values()))
LARGEST = 2**31 - 1
"""A gap or duration from here on, in nanoseconds, stands in the list of long ones."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RankEvents:
    """The events of one rank, in order of their start."""

    records: Records
    num_dropped: int = 0
    longest_dropped_ns: int = 0


class EventCounter:
    """Keeps the events of a trace; beyond `most` of them, the longest."""

    def __init__(self, tables: Tables, steps: Steps = None, most: int = MOST_EVENTS) -> None:
        self._known_steps, self._steps, self._most = tables.steps, steps, most
        self._is_drawn = np.zeros(256, dtype=np.bool_)
        self._is_drawn[[int(kind) for kind in DRAWN]] = True
        self._parts: list[Records] = []
        self._num_kept = self._num_dropped = self._longest_dropped = 0

    def take(self, window: Window) -> None:
        records = window.records
        is_chosen = self._is_drawn[records["kind"]] & choose_records(records, self._known_steps, self._steps)
        self._parts.append(records.compress(is_chosen))
        self._num_kept += len(self._parts[-1])
        if self._num_kept > 2 * self._most:
            self._drop()

    def _drop(self) -> None:
        records = join_records(self._parts)
        lengths = records["end"] - records["start"]
        limit = int(np.partition(lengths, -self._most)[-self._most])
        is_kept = lengths > limit
        self._num_dropped += int(len(records) - is_kept.sum())
        self._longest_dropped = max(self._longest_dropped, limit)
        self._parts = [records.compress(is_kept)]
        self._num_kept = len(self._parts[0])

    def finish(self) -> RankEvents:
        if self._num_kept > self._most:
            self._drop()
        return RankEvents(
            records=join_records(self._parts), num_dropped=self._num_dropped, longest_dropped_ns=self._longest_dropped
        )


@dataclass
class PackedTimeline:
    """What a page needs to draw a job: a description in words and small numbers, and columns of many numbers."""

    about: dict[str, Any]
    columns: dict[str, NDArray[Any]]

    def pack(self) -> bytes:
        """The columns one after the other; those of whole numbers with equal bytes together."""
        parts = []
        self.about["columns"] = []
        for name, column in self.columns.items():
            raw = np.ascontiguousarray(column)
            is_split = raw.dtype.kind in "iu" and raw.dtype.itemsize > 1
            if is_split:
                raw = raw.view(np.uint8).reshape(-1, column.dtype.itemsize).T
            parts.append(raw.tobytes())
            kind = f"{column.dtype.kind}{column.dtype.itemsize}"
            self.about["columns"].append({"name": name, "type": kind, "length": len(column)})
        return b"".join(parts)


def pack_job(job: JobTrace, events: Mapping[int, RankEvents]) -> PackedTimeline:
    """The events of all ranks, by rank, with their collectives, on one clock that begins at 0."""
    clocks = job.clocks
    origins = _find_origins(job, events)
    names, lanes, rows = _Names(), list[dict[str, Any]](), _Rows()
    ranks, first_lanes = list[dict[str, Any]](), dict[int, int]()
    for rank, trace in job.by_rank.items():
        first_lanes[rank] = len(lanes)
        kept = events[rank].records
        first = len(lanes)
        lanes += [_describe_lane(rank, trace, number) for number in range(len(trace.tables.lanes))]
        origin = origins[rank]
        times = align_times(trace, clocks.get(rank), kept["start"]) - origin
        rows.add(kept, times, first, names.number(trace.tables.names))
        ranks.append(
            {
                "rank": rank,
                "host": trace.header.host_name,
                "steps": [
                    [
                        step.number,
                        *(align_times(trace, clocks.get(rank), np.array([step.start, step.end])) - origin).tolist(),
                    ]
                    for step in trace.tables.steps
                ],
                "lanes": [first, len(lanes)],
            }
        )
    columns = rows.finish()
    columns |= _pack_collectives(job, origins, first_lanes, names)
    about = {
        "ranks": ranks,
        "lanes": lanes,
        "kinds": list(SHOWN_KINDS),
        "names": names.texts,
        "numEvents": rows.num_events,
        "numDropped": sum(one.num_dropped for one in events.values()) + rows.num_too_deep,
        "longestDropped": max((one.longest_dropped_ns for one in events.values()), default=0),
        "clockError": job.matching.uncertainty_ns if job.matching is not None else None,
        "numClocks": len({clock.reference for clock in clocks.values()}) or 1,
    }
    return PackedTimeline(about=about, columns=columns)


def _find_origins(job: JobTrace, events: Mapping[int, RankEvents]) -> dict[int, int]:
    """When the first event of every set of ranks with one clock begins."""
    clocks = job.clocks
    firsts: dict[int, int] = {}
    sets = {rank: clocks[rank].reference if rank in clocks else rank for rank in job.by_rank}
    for rank, trace in job.by_rank.items():
        if len(events[rank].records):
            begin = int(align_times(trace, clocks.get(rank), events[rank].records["start"][:1])[0])
            firsts[sets[rank]] = min(begin, firsts.get(sets[rank], begin))
    return {rank: firsts.get(one, 0) for rank, one in sets.items()}


def _describe_lane(rank: int, trace: RankTrace, number: int) -> dict[str, Any]:
    lane = trace.tables.lanes[number]
    has_several = len(trace.tables.list_devices()) > 1
    device = f"device {lane.process} · " if has_several else ""
    name = f"{device}stream {lane.thread}" if lane.is_device else f"thread {lane.thread}"
    return {"rank": rank, "name": name, "isDevice": lane.is_device}


@dataclass
class _Names:
    """The names of all ranks, each once."""

    texts: list[str] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def number(self, names: Sequence[str]) -> Numbers:
        """The number of each of a rank's names."""
        found = []
        for name in names:
            found.append(self._numbers.setdefault(name, len(self.texts)))
            if found[-1] == len(self.texts):
                self.texts.append(name)
        return np.array(found, dtype=np.int64)


@dataclass
class _Rows:
    """Rows of events that do not overlap."""

    parts: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    """Lane, depth and number of events."""
    num_events: int = 0
    num_too_deep: int = 0

    def add(self, records: Records, times: Numbers, first_lane: int, names: Numbers) -> None:
        """The events of one rank."""
        length = records["end"] - records["start"]
        kinds = np.zeros(256, dtype=np.uint8)
        for kind, name in KIND_NAMES.items():
            kinds[kind] = SHOWN_KINDS.index(name)
        for lane in sorted(set(records["lane"].tolist())):
            chosen = np.flatnonzero(records["lane"] == lane)
            chosen = chosen[np.lexsort((-length[chosen], times[chosen]))]
            for depth, row in enumerate(split_by_depth(times[chosen], times[chosen] + length[chosen])):
                if depth >= DEEPEST:
                    self.num_too_deep += len(row)
                    continue
                place = chosen[row]
                self._append(times[place], length[place], names[records["name"][place]], kinds[records["kind"][place]])
                self.rows.append((first_lane + lane, depth, len(place)))

    def _append(self, start: Numbers, length: Numbers, name: Numbers, kind: NDArray[np.uint8]) -> None:
        before = np.concatenate([[0], (start + length)[:-1]])
        self.parts.append({"gap": start - before, "duration": length, "name": name, "kind": kind})
        self.num_events += len(start)

    def finish(self) -> dict[str, NDArray[Any]]:
        """Numbers that do not fit 31 bits stand apart, in order."""
        joined = {
            name: np.concatenate([part[name] for part in self.parts]) if self.parts else np.empty(0, dtype=np.int64)
            for name in ("gap", "duration", "name", "kind")
        }
        found: dict[str, NDArray[Any]] = {}
        for name in ("gap", "duration"):
            is_long = np.abs(joined[name]) >= LARGEST
            found[name] = np.where(is_long, LARGEST, joined[name]).astype(np.int32)
            found[f"long_{name}"] = joined[name][is_long].astype(np.float64)
        found["name"], found["kind"] = joined["name"].astype(np.uint32), joined["kind"].astype(np.uint8)
        table = np.array(self.rows, dtype=np.uint32).reshape(-1, 3)
        return found | {f"row_{name}": table[:, place].copy() for place, name in enumerate(("lane", "depth", "count"))}


def split_by_depth(start: Numbers, end: Numbers) -> Iterator[NDArray[np.intp]]:
    """The places of what lies in nothing else, then of what lies in these only, and so on.

    Events are in order of their start, the longer first. Within a depth none overlaps another: what overlaps its
    predecessor without lying in it moves down too.
    """
    rest = np.arange(len(start))
    while len(rest):
        starts, ends = start[rest].tolist(), end[rest].tolist()
        outer, place = [], 0
        while place < len(starts):
            outer.append(place)
            place = bisect_left(starts, ends[place], place + 1)
        yield rest[outer]
        rest = np.delete(rest, outer)


def _pack_collectives(
    job: JobTrace, origins: Mapping[int, int], first_lanes: Mapping[int, int], names: _Names
) -> dict[str, NDArray[Any]]:
    """Every collective of every rank, by lane and start; those of several ranks share a number."""
    matching = job.matching
    matched: dict[tuple[int, int], tuple[int, float, float]] = {}
    number = 0
    for group in matching.groups if matching is not None else ():
        waiting, transfer = group.waiting_ns, group.transfer_ns
        for row in range(len(group)):
            for column, rank in enumerate(group.ranks):
                where = (rank, int(group.places[row, column]))
                matched[where] = (number, float(waiting[row, column]), float(transfer[row]))
            number += 1
    found = []
    for rank, trace in job.by_rank.items():
        clock = matching.clocks.get(rank) if matching is not None else None
        starts = align_times(trace, clock, trace.collectives.start_ns) - origins[rank]
        for place, one in enumerate(trace.collectives):
            if one.stream < 0:
                continue
            kind, group_name = names.number([one.kind, one.group]).tolist()
            size = float(one.payload_bytes) if one.payload_bytes is not None else np.nan
            together, waiting_ns, transfer_ns = matched.get((rank, place), (-1, np.nan, np.nan))
            lane = first_lanes[rank] + one.stream
            length = float(one.end_ns - one.start_ns)
            found.append(
                (lane, float(starts[place]), length, kind, size, group_name, together, waiting_ns, transfer_ns)
            )
    found.sort(key=lambda one: one[:2])
    types = ("u4", "f8", "f8", "u4", "f8", "u4", "i4", "f8", "f8")
    fields = ("lane", "start", "duration", "kind", "bytes", "group", "match", "waiting", "transfer")
    columns = list(zip(*found, strict=True)) or [() for _ in fields]
    return {
        f"collective_{name}": np.array(column, dtype=kind)
        for name, kind, column in zip(fields, types, columns, strict=True)
    }
