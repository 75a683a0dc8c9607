"""One rank's trace, from its file to numbers: read once, sorted by time, counted window by window.

Counters define what is counted: each gets every window once and returns its result at the end. A new question is a new
counter, and the file is still read once.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.collection import CollectiveCollector
from scalelab.trace.collectives import CollectiveList
from scalelab.trace.files.events import NO_READINGS, Batch, Header, Readings, TimedEvent
from scalelab.trace.files.reader import find_rank, open_trace
from scalelab.trace.kinds import (
    DEVICE_CATEGORIES,
    MOST_NAMES,
    Classifier,
    Kind,
    read_step_number,
    requests_collective,
)
from scalelab.trace.linking import Links, StepBasis, link_host, link_records
from scalelab.trace.rank_time import Breakdown, BreakdownCounter
from scalelab.trace.windows import RECORD, ProfilerStep, Spool, Window, arrange_steps, cut_windows
from scalelab.trace.work import FORMULAS, Work, Works

ALWAYS_KEPT = (Kind.COMMUNICATION, Kind.STEP, Kind.DEVICE_STEP, Kind.REQUEST)
OTHER_NAMES = "(other names)"
DEVICE_BACKENDS = re.compile(r"nccl|rccl|hccl|xccl|cncl|mccl|^ccl", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A thread of the host, or a stream of a device."""

    process: str
    """The process, or the number of the device."""
    thread: str
    """The thread, or the stream."""
    is_device: bool


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the numbers in records stand for, and what is known before the first window."""

    names: Sequence[str]
    lanes: Sequence[Lane]
    has_device: bool
    low: int
    high: int
    """From the first to the last event of compute, communication or copies, in nanoseconds."""
    steps: Sequence[ProfilerStep]
    """Of the device, if there is one, else of the host (`linking.py`)."""
    step_basis: StepBasis
    unlinked_share: float
    """Of the device's events from the first step on: those whose launch is not recorded, which belong to no step."""
    host_steps: Sequence[ProfilerStep]
    """As the host marked them, which runs ahead of its device."""
    generic_names: frozenset[str] = frozenset()
    """Kernels that communicate by a generic rule: a word in their name, or what launched them."""

    works: Sequence[Work] = ()
    """Of operators whose shapes and types say how many operations they take."""
    missing_device: str = ""
    """What shows that the job ran on a device whose work is not in the trace; empty: nothing does."""

    def list_devices(self) -> set[str]:
        """The devices that ran something."""
        return {lane.process for lane in self.lanes if lane.is_device}


class Counter(Protocol):
    """Counts something over the windows of a trace."""

    def take(self, window: Window) -> None: ...

    def finish(self) -> Any: ...


MakeCounter = Callable[[Tables], Counter]


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank's trace says."""

    path: Path
    rank: int | None
    num_ranks: int | None
    header: Header
    tables: Tables
    num_events: int
    num_unusable: int
    num_bytes: int
    breakdown: Breakdown
    collectives: CollectiveList
    memory: Readings = field(default_factory=lambda: NO_READINGS)
    """Of the device, where it was recorded."""
    counted: Sequence[Any]
    """The results of the further counters, in their order."""


class _Entry(NamedTuple):
    """What a category and a name say of an event."""

    kind: int
    name: int
    on_device: bool
    has_work: bool
    """Operators with a formula of their work."""
    is_kept: bool
    """Steps, collectives and requests for them: they are few, and kept whole."""


KIND, NAME, ON_DEVICE, HAS_WORK, IS_KEPT, LANE = range(NUM_COLUMNS := 6)


@dataclass
class _Collector:
    """Turns events into records, and keeps what the records have no room for."""

    classify: Classifier
    collectives: CollectiveCollector = field(default_factory=CollectiveCollector)
    names: list[str] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    host_steps: list[ProfilerStep] = field(default_factory=list)
    device_steps: list[ProfilerStep] = field(default_factory=list)
    works: Works | None = field(default_factory=Works)
    """None: nothing asks for the work of operators."""
    num_events: int = 0
    has_foreign_tasks: bool = False
    """Whether the trace has tasks of a device that we cannot read."""
    _entries: dict[tuple[str, str], _Entry] = field(default_factory=dict)
    _places: dict[tuple[str, str, int | str, int | str], int] = field(default_factory=dict)
    """Numbers of category, name, process and thread: one look-up says all that records need of them."""
    _rows: array[int] = field(default_factory=lambda: array("i"))
    """The entry and lane of every place."""
    _name_ids: dict[str, int] = field(default_factory=dict)
    _lane_ids: dict[tuple[int | str, int | str, bool], int] = field(default_factory=dict)

    def make_records(self, batch: Batch) -> np.ndarray[Any, np.dtype[np.void]]:
        """The records of a batch that are counted."""
        events = batch.events
        self.num_events += len(events)
        rows = self._find_rows(events)
        kinds = rows[:, KIND]
        self._keep(batch, rows, np.flatnonzero(rows[:, IS_KEPT]))
        kept = np.flatnonzero((kinds != Kind.OTHER) & (kinds != Kind.REQUEST))
        chosen = events
        if len(kept) < len(events):
            rows, chosen = rows[kept], [events[index] for index in kept.tolist()]
        records = np.zeros(len(kept), dtype=RECORD)
        records["start"], records["end"] = batch.start_ns[kept], batch.end_ns[kept]
        for name, column in (("kind", KIND), ("on_device", ON_DEVICE), ("name", NAME), ("lane", LANE)):
            records[name] = rows[:, column]
        args = [event.args for event in chosen]
        numbers = [a.correlation if a.correlation >= 0 else a.sequence_number for a in args]
        records["correlation"] = np.fromiter(numbers, dtype=np.int64, count=len(numbers))
        records["work"] = -1
        if self.works is not None:
            for place in np.flatnonzero(rows[:, HAS_WORK]).tolist():
                records["work"][place] = self.works.number(chosen[place].name, args[place])
        return records

    def _find_rows(self, events: Sequence[TimedEvent]) -> NDArray[np.int32]:
        """Entry and lane of every event."""
        known = self._places
        numbers = [known.get((e.cat, e.name, e.pid, e.tid), -1) for e in events]
        places = np.fromiter(numbers, dtype=np.int64, count=len(numbers))
        new = {index: self._make_row(events[index]) for index in np.flatnonzero(places < 0).tolist()}
        if not len(self._rows):
            return np.empty((0, NUM_COLUMNS), dtype=np.int32)
        rows = np.frombuffer(self._rows, dtype=np.int32).reshape(-1, NUM_COLUMNS).take(places, axis=0)
        for index, row in new.items():
            rows[index] = row
        return rows

    def _make_row(self, event: TimedEvent) -> tuple[int, ...]:
        self.has_foreign_tasks = self.has_foreign_tasks or bool(event.args.task_type)
        entry = self._find_entry(event.cat, event.name)
        is_seen = entry.is_kept or entry.kind not in (Kind.OTHER, Kind.REQUEST)
        lane = self._find_lane(event.pid, event.tid, entry.on_device) if is_seen else 0
        row = (*entry, lane)
        key = (event.cat, event.name, event.pid, event.tid)
        if len(self._places) < 2 * MOST_NAMES and key not in self._places:
            self._places[key] = len(self._places)
            self._rows.extend(row)
        return row

    def _keep(self, batch: Batch, rows: NDArray[np.int32], kept: NDArray[np.intp]) -> None:
        columns = (kept, rows[kept, KIND], rows[kept, LANE], batch.start_ns[kept], batch.end_ns[kept])
        for index, kind, lane, start, end in zip(*(column.tolist() for column in columns), strict=True):
            event = batch.events[index]
            if kind in (Kind.STEP, Kind.DEVICE_STEP):
                steps = self.host_steps if kind == Kind.STEP else self.device_steps
                if len(steps) < MOST_NAMES:
                    steps.append(ProfilerStep(read_step_number(event.name), start, end))
            else:
                self.collectives.take(event, start, end, lane, is_run=kind == Kind.COMMUNICATION)

    def _find_entry(self, category: str, name: str) -> _Entry:
        """What is known of a category and name; names beyond the limit share one per kind."""
        key = (category, name)
        found = self._entries.get(key)
        if found is not None:
            return found
        kind, on_device = self.classify(category, name), category.lower() in DEVICE_CATEGORIES
        if len(self._entries) >= 2 * MOST_NAMES:
            key = (f"{kind} {on_device}", OTHER_NAMES)
        if key not in self._entries:
            kept = key[1] if len(self._name_ids) < MOST_NAMES else OTHER_NAMES
            number = self._name_ids.setdefault(kept, len(self.names))
            if number == len(self.names):
                self.names.append(kept)
            is_kept = kind in ALWAYS_KEPT or requests_collective(kind, name)
            self._entries[key] = _Entry(kind, number, on_device, key[1] in FORMULAS, is_kept)
        return self._entries[key]

    @property
    def has_runtime(self) -> bool:
        """Whether the host called the library of a device."""
        calls = (Kind.LAUNCH, Kind.RUNTIME, Kind.REQUEST)
        return any(entry.kind in calls for entry in self._entries.values())

    def _find_lane(self, process: int | str, thread: int | str, is_device: bool) -> int:
        key = (process, thread, is_device)
        if key not in self._lane_ids:
            self._lane_ids[key] = len(self.lanes)
            self.lanes.append(Lane(process=str(process), thread=str(thread), is_device=is_device))
        return self._lane_ids[key]


def read_rank(
    path: Path,
    *,
    ns_per_tick: int = 1000,
    communication: Sequence[str] = (),
    compute: Sequence[str] = (),
    counters: Sequence[MakeCounter] = (),
    counts_work: bool = True,
) -> RankTrace:
    """Read one file and count. Raises `TraceUnreadable` if it is not a trace.

    `counts_work`: whether to read from shapes what operators compute, which some counters need.
    """
    file = open_trace(path, ns_per_tick)
    collector = _Collector(Classifier(communication, compute), works=Works() if counts_work else None)
    spans = _Spans()
    with Spool() as spool:
        for batch in file.batches():
            records = collector.make_records(batch)
            spans.extend(records)
            spool.add(records)
        if file.header.merged_ranks:
            num_ranks = len(file.header.merged_ranks)
            raise file.error(
                f"it is a merged trace of {num_ranks} ranks, for Perfetto: give the files it was made from"
            )
        if file.num_unusable and not collector.num_events:
            what = f"none of its {file.num_unusable} events has a usable time and duration"
            raise file.error(f"{what}: if it counts nanoseconds, pass --time-unit ns")
        links = _link(collector, spool, has_device=spans.has_device)
        tables = _make_tables(collector, spans, links, file.header)
        breakdown, counted = _count(
            tables, counters, cut_windows(links.tag(spool.in_order()), tables.steps, *spans.all)
        )
    distributed = file.header.distributed
    return RankTrace(
        path=path,
        rank=find_rank(path, file.header),
        num_ranks=distributed.world_size if distributed else None,
        header=file.header,
        tables=tables,
        num_events=collector.num_events,
        num_unusable=file.num_unusable,
        num_bytes=file.num_bytes,
        breakdown=breakdown,
        collectives=collector.collectives.finish(file.header, links, tables.host_steps),
        memory=file.memory,
        counted=counted,
    )


def _count(tables: Tables, counters: Sequence[MakeCounter], windows: Iterable[Window]) -> tuple[Breakdown, list[Any]]:
    """What the counters found; what they remember for it is let go before the collectives need room."""
    breakdown = BreakdownCounter(tables.low, tables.high, tables.has_device)
    further = [make(tables) for make in counters]
    for window in windows:
        for counter in (breakdown, *further):
            counter.take(window)
    return breakdown.finish(), [counter.finish() for counter in further]


def _link(collector: _Collector, spool: Spool, *, has_device: bool) -> Links:
    if not has_device:
        return link_host(collector.host_steps)
    found = collector.collectives
    links = link_records(
        spool.in_order(),
        collector.host_steps,
        collector.device_steps,
        found.list_correlations(),
        found.list_annotations(),
        lambda name: collector.classify.is_compute(collector.names[name]),
    )
    found.take_unnamed(links.unnamed, collector.names)
    return links


def _find_missing_device(header: Header, collector: _Collector) -> str:
    """What a trace without kernels says of the device that the job ran on."""
    if collector.has_foreign_tasks:
        return "tasks of an accelerator in its own format"
    if header.device_properties:
        return str(header.device_properties[0].get("name") or "a device in the header")
    backend = header.distributed.backend if header.distributed else ""
    if DEVICE_BACKENDS.search(backend):
        return f"backend {backend}"
    return "calls of its library on the host" if collector.has_runtime else ""


def _make_tables(collector: _Collector, spans: _Spans, links: Links, header: Header) -> Tables:
    low, high = spans.busy
    return Tables(
        names=collector.names,
        lanes=collector.lanes,
        has_device=spans.has_device,
        low=low,
        high=high,
        steps=links.steps,
        step_basis=links.basis,
        missing_device="" if spans.has_device else _find_missing_device(header, collector),
        unlinked_share=links.unlinked_share,
        works=collector.works.found if collector.works is not None else (),
        host_steps=arrange_steps(collector.host_steps or collector.device_steps),
        generic_names=frozenset(collector.classify.generic_names)
        | {collector.names[one.name] for one in links.unnamed},
    )


@dataclass
class _Spans:
    """The first start and the last end: of everything, and of what keeps a device or a host busy."""

    _all: list[int] = field(default_factory=list)
    _device: list[int] = field(default_factory=list)
    _host: list[int] = field(default_factory=list)

    def extend(self, records: np.ndarray[Any, np.dtype[np.void]]) -> None:
        kind, on_device = records["kind"], records["on_device"]
        is_device = on_device & (kind <= Kind.COPY)
        is_host = ~on_device & ((kind == Kind.OPERATOR) | (kind == Kind.COMMUNICATION))
        is_any = np.ones(len(records), dtype=np.bool_)
        for span, is_part in ((self._all, is_any), (self._device, is_device), (self._host, is_host)):
            if is_part.any():
                span[:] = [
                    min([*span[:1], int(records["start"][is_part].min())]),
                    max([*span[1:], int(records["end"][is_part].max())]),
                ]

    @property
    def has_device(self) -> bool:
        return bool(self._device)

    @property
    def all(self) -> tuple[int, int]:
        return (self._all[0], self._all[1]) if self._all else (0, 0)

    @property
    def busy(self) -> tuple[int, int]:
        span = self._device or self._host
        return (span[0], span[1]) if span else (0, 0)
