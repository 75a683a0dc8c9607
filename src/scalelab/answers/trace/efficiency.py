"""Tables of device time by what asked for it, and of how near products, collectives and memory come to the device.

Peaks are published numbers of the device that the trace names (`predict/devices.py`); without a known device, achieved
rates stand alone. The attainable rate of a product is the roofline: the peak, or the memory's bandwidth times its
operations per byte, if that is less (Williams, Waterman and Patterson, CACM 52, 2009).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from scalelab.analysis.traffic import KINDS, bus_factor
from scalelab.answers.trace.activity import draw_flames, make_asked_tables
from scalelab.answers.trace.tables import bandwidth_column, latency_column, note_more
from scalelab.answers.trace.view import NS, TraceView, divide
from scalelab.predict.devices import Accelerator, recognize_device
from scalelab.report.charts.plot import Axis, plot_lines
from scalelab.report.document import Chart, Section, Table
from scalelab.report.findings import DETAIL, Finding, FindingKind
from scalelab.report.tables import (
    bytes_column,
    count_column,
    make_table,
    rate_column,
    ratio_column,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.trace.attribution import BACKWARD, FORWARD, OPTIMIZER, UNATTRIBUTED, WorkTime
from scalelab.trace.files.events import LARGEST_INTEGER, Readings
from scalelab.trace.waiting import ALIASES
from scalelab.trace.windows import find_edges
from scalelab.units import format_bytes, format_quantity, format_share

LEAST_UNKNOWN = 0.005
PHASE_TIME = FindingKind(
    "phases", "Device time in forward, backward and optimizer", DETAIL, (FORWARD, BACKWARD, OPTIMIZER, UNATTRIBUTED)
)
UTILIZATION = FindingKind(
    "flop-utilization", "Operations of products and attention over the peak of the device", DETAIL,
    ("share", "operations_per_second", "known_share"),
)  # fmt: skip
PEAK_MEMORY = FindingKind("peak-memory", "The most memory that the allocator held", DETAIL, ("bytes", "rank"))

NUM_MOMENTS = 300
FEWEST_KNOWN = 0.05
"""Where less of the device time has a formula, its operations say nothing of the whole."""


@dataclass(frozen=True)
class Peaks:
    """The device of the traces; None: it has no known peaks."""

    device: Accelerator | None
    name: str


def find_peaks(view: TraceView) -> Peaks:
    """By the name and memory that the header gives."""
    for trace in view.job.ranks:
        for properties in trace.header.device_properties:
            name, memory = str(properties.get("name") or ""), properties.get("totalGlobalMem")
            return Peaks(recognize_device(name, memory if isinstance(memory, int) else 0), name)
    return Peaks(None, "")


class SizeRow(NamedTuple):
    """Collectives of one kind, group size and range of sizes."""

    kind: str
    group_size: int | None
    low_bytes: int
    times_ns: list[int]
    sizes: list[int]

    @property
    def bus_bandwidth(self) -> float | None:
        kind = ALIASES.get(self.kind, self.kind)
        if kind not in KINDS or self.group_size is None or not sum(self.times_ns):
            return None
        return sum(self.sizes) * bus_factor(kind, self.group_size) / (sum(self.times_ns) * NS)


def list_sizes(view: TraceView) -> list[SizeRow]:
    """Matched collectives with their transfer; without any, those of all ranks with their own time."""
    found: dict[tuple[str, int, int], SizeRow] = {}

    def add(kind: str, group_size: int | None, payload: int | None, time: int) -> None:
        if payload:
            low = 4 ** ((payload.bit_length() - 1) // 2)
            row = found.setdefault((kind, group_size or 0, low), SizeRow(kind, group_size, low, [], []))
            row.times_ns.append(time)
            row.sizes.append(payload)

    if view.matching is not None and view.matching.num_matched:
        for group in view.matching.groups:
            for kind, payload, time in zip(group.kinds, group.payload_bytes, group.transfer_ns.tolist(), strict=True):
                add(kind, group.group_size, payload, time)
    else:
        for one in view.list_collectives():
            add(one.kind, one.group_size, one.payload_bytes, one.end_ns - one.start_ns)
    return sorted(found.values(), key=lambda row: (row.kind, row.group_size or 0, row.low_bytes))


def make_sizes_table(view: TraceView, peaks: Peaks) -> Table | None:
    """Bandwidth by message size and group, beside the link of the device."""
    rows = list_sizes(view)
    if not rows:
        return None
    link = peaks.device.link_rate if peaks.device is not None else None
    per_node = peaks.device.per_node if peaks.device is not None else 0
    is_matched = view.matching is not None and bool(view.matching.num_matched)

    def divide_by_link(row: SizeRow) -> float | None:
        bus = row.bus_bandwidth
        is_inside = row.group_size is not None and row.group_size <= per_node
        return min(1.0, bus / link) if bus is not None and link and is_inside else None

    return make_table(
        rows,
        text_column("kind", "collective", lambda row: row.kind),
        count_column("group_size", "ranks", lambda row: row.group_size),
        bytes_column("from_bytes", "size from", lambda row: row.low_bytes),
        count_column("num_collectives", "count", lambda row: len(row.sizes)),
        latency_column("median", "median", lambda row: float(np.median(row.times_ns)) * NS),
        bandwidth_column("bus", "bus bandwidth", lambda row: row.bus_bandwidth),
        share_column("link_share", "bus / link", divide_by_link),
        title="Collectives by size",
        notes=(
            "size from: grouped with sizes up to four times as large; "
            + ("times are transfers, without waiting" if is_matched else "times include waiting for other ranks"),
            f"link: {format_quantity('bandwidth', link)} per direction inside a node ({peaks.device.name}, published)"
            if link and peaks.device is not None
            else f"link: no published number for {peaks.name or 'this device'}",
        ),
    )


def add_works(view: TraceView) -> list[WorkTime]:
    """The products of all ranks together, the most time first."""
    found: dict[Any, WorkTime] = {}
    for counted in view.counted.values():
        for one in counted.attribution.works:
            known = found.setdefault(one.work, WorkTime(one.work))
            known.count += one.count
            known.total_ns += one.total_ns
    return sorted(found.values(), key=lambda one: (-one.total_ns, one.work))


def find_roof(one: WorkTime, device: Accelerator | None) -> float | None:
    """The most operations per second that the device can do of this work."""
    if device is None or one.work.dtype not in device.peaks:
        return None
    return min(device.peaks[one.work.dtype], device.memory_rate * one.work.num_operations / one.work.num_bytes)


def find_rate(one: WorkTime) -> float | None:
    return one.count * one.work.num_operations / (one.total_ns * NS) if one.total_ns else None


def make_works_table(view: TraceView, peaks: Peaks) -> Table | None:
    """Achieved operations per second by operator and shape; None: no shapes."""
    works = add_works(view)
    if not works:
        return None
    shown = works[: view.top]
    whole = sum(counted.attribution.total_ns for counted in view.counted.values())

    def share_roof(one: WorkTime) -> float | None:
        rate, roof = find_rate(one), find_roof(one, peaks.device)
        return min(1.0, rate / roof) if rate and roof else None

    def name_bound(one: WorkTime) -> str | None:
        roof = find_roof(one, peaks.device)
        if roof is None or peaks.device is None:
            return None
        return "compute" if roof >= peaks.device.peaks[one.work.dtype] else "memory"

    return make_table(
        shown,
        text_column("operator", "operator", lambda one: one.work.operator),
        text_column("shape", "shapes", lambda one: one.work.shape),
        text_column("dtype", "dtype", lambda one: one.work.dtype),
        count_column("num_calls", "calls", lambda one: one.count),
        seconds_column("total_seconds", "device time", lambda one: one.total_ns * NS),
        share_column("device_share", "device time / all", lambda one: divide(one.total_ns, whole)),
        rate_column("operations_per_second", "FLOP/s", find_rate),
        ratio_column("intensity", "FLOP/byte", lambda one: one.work.num_operations / one.work.num_bytes),
        share_column("roof_share", "achieved / roofline", share_roof),
        text_column("bound", "bound", name_bound),
        title="Products, convolutions and attention",
        notes=(
            f"roofline: min(peak, memory bandwidth × FLOP/byte) of {peaks.device.name}, published, float32 without TF32"
            if peaks.device is not None
            else f"roofline: no published peak for {peaks.name or 'this device'}",
            *note_more(len(works), len(shown)),
        ),
    )


class ExchangeRow(NamedTuple):
    """The matched all-to-alls of one group."""

    name: str
    num_collectives: int
    sent: float | None
    received: float | None
    rank: int | None
    """The one that receives most, in total."""


def list_exchanges(view: TraceView) -> Iterator[ExchangeRow]:
    for group in view.matching.groups if view.matching is not None else ():
        rows = [row for row, kind in enumerate(group.kinds) if kind == "all_to_all"]
        if not rows:
            continue
        amounts = {}
        for side in ("payload_bytes", "received_bytes"):
            table = [
                [getattr(view.ranks[rank].collectives[int(group.places[row, column])], side) for row in rows]
                for column, rank in enumerate(group.ranks)
            ]
            known = np.array([[np.nan if one is None else one for one in ranks] for ranks in table], dtype=np.float64)
            amounts[side] = known[:, ~np.isnan(known).any(axis=0)]
        received = amounts["received_bytes"] if amounts["received_bytes"].size else amounts["payload_bytes"]
        totals = received.sum(axis=1)
        most = int(totals.argmax()) if received.size and totals.max() > totals.min() else None
        imbalances = [_measure_imbalance(one) for one in amounts.values()]
        rank = None if most is None else group.ranks[most]
        yield ExchangeRow(group.name or "unnamed", len(rows), imbalances[0], imbalances[1], rank)


def _measure_imbalance(amounts: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    """Over all exchanges, the largest amount of a rank over the mean of the ranks."""
    return float(amounts.max(axis=0).sum() / amounts.mean(axis=0).sum()) if amounts.size and amounts.sum() else None


def make_exchanges_table(view: TraceView) -> Table | None:
    """How unevenly all-to-alls are filled; None: none was matched."""
    rows = list(list_exchanges(view))
    if not rows:
        return None
    return make_table(
        rows,
        text_column("group", "group", lambda row: row.name),
        count_column("num_collectives", "matched", lambda row: row.num_collectives),
        ratio_column("sent_imbalance", "sent, max / mean", lambda row: row.sent),
        ratio_column("received_imbalance", "received, max / mean", lambda row: row.received),
        text_column("rank", "most bytes", lambda row: None if row.rank is None else f"rank {row.rank}"),
        title="All-to-all imbalance",
        notes=("max / mean over the ranks of a group, summed over its all-to-alls; 1.00 is balanced",),
    )


def draw_memory(view: TraceView) -> Chart | None:
    """What the allocators of the devices held over time."""
    rows: list[dict[str, Any]] = []
    for rank, trace in list(view.ranks.items())[:4]:
        thin = thin_memory(trace.memory)
        first = trace.memory[:, 0].min() if len(trace.memory) else 0
        for time, *held in thin.tolist():
            rows += [
                {"series": f"rank {rank} {what}", "seconds": (time - int(first)) * NS, "bytes": one}
                for what, one in zip(("allocated", "reserved"), held, strict=True)
            ]
    if not rows:
        return None
    return plot_lines(
        title="Memory of the device",
        x=Axis(field="seconds", title="time", quantity="seconds"),
        y=Axis(field="bytes", title="memory", quantity="bytes"),
        rows=(),
        guides=rows,
        caption="The largest of every stretch of time, as torch's allocator recorded it; at most four ranks.",
    )


def thin_memory(readings: Readings) -> Readings:
    """The largest of every stretch of time, in order."""
    if not len(readings):
        return readings
    since = np.minimum(readings[:, 0] - readings[:, 0].min(), LARGEST_INTEGER // NUM_MOMENTS)
    place = since * NUM_MOMENTS // max(1, int(since.max()))
    order = np.lexsort((readings[:, 2], readings[:, 0], -readings[:, 1], place))
    return readings[order[find_edges(place[order])]]


def make_memory_table(view: TraceView) -> Table | None:
    """The most memory of every rank."""
    peaks = [
        (rank, trace.memory[:, 0].min(), *trace.memory[trace.memory[:, 1].argmax()].tolist())
        for rank, trace in view.ranks.items()
        if len(trace.memory)
    ]
    if not peaks:
        return None
    return make_table(
        peaks,
        text_column("rank", "rank", lambda row: f"rank {row[0]}"),
        bytes_column("allocated_bytes", "peak allocated", lambda row: row[3]),
        bytes_column("reserved_bytes", "reserved then", lambda row: row[4]),
        seconds_column("at_seconds", "at", lambda row: (row[2] - int(row[1])) * NS),
        title="Memory of the device",
        notes=("at: since the first recorded allocation",),
    )


def make_efficiency_sections(view: TraceView) -> Iterator[Section]:
    """Everything of this page that the traces have."""
    if not view.has_device:
        return
    peaks = find_peaks(view)
    flames = draw_flames(view) if view.has_charts else None
    asked = tuple(make_asked_tables(view))
    if asked:
        yield Section(heading="Device time by what asked for it", tables=asked, charts=(flames,) if flames else ())
    tables = (
        make_works_table(view, peaks),
        make_sizes_table(view, peaks),
        make_exchanges_table(view),
        make_memory_table(view),
    )
    found = tuple(table for table in tables if table is not None and table.rows)
    memory = draw_memory(view) if view.has_charts else None
    if found:
        yield Section(heading="Efficiency", tables=found, charts=(memory,) if memory else ())


def summarise_efficiency(view: TraceView) -> Iterator[Finding]:
    """Phases, utilization and memory in a sentence each."""
    times = [one for counted in view.counted.values() for one in counted.attribution.times]
    whole = sum(one.total_ns for one in times)
    shares = {
        phase: sum(one.total_ns for one in times if one.asked.phase == phase) / whole if whole else 0.0
        for phase in (FORWARD, BACKWARD, OPTIMIZER, UNATTRIBUTED)
    }
    if shares[BACKWARD]:
        shown = [(phase, share) for phase, share in shares.items() if share or phase != UNATTRIBUTED]
        listed = ", ".join(f"{format_share(share)} {phase}" for phase, share in shown)
        outside = " (launched outside of any operator or module)" if shares[UNATTRIBUTED] else ""
        unknown = 1 - sum(shares.values())
        outside += f"; the launch of {format_share(unknown)} is not recorded" if unknown > LEAST_UNKNOWN else ""
        values: dict[str, Any] = dict(shares)
        yield PHASE_TIME("", f"Of the device time, {listed}{outside}.", **values)
    yield from _summarise_utilization(view, whole)
    peaks = {rank: int(trace.memory[:, 1].max()) for rank, trace in view.ranks.items() if len(trace.memory)}
    if peaks:
        rank = max(peaks, key=lambda one: peaks[one])
        text = f"The allocator held at most {format_bytes(peaks[rank])}{f' (rank {rank})' if len(peaks) > 1 else ''}."
        yield PEAK_MEMORY(f"rank {rank}", text, bytes=peaks[rank], rank=rank)


def _summarise_utilization(view: TraceView, whole: int) -> Iterator[Finding]:
    works = add_works(view)
    span = sum(view.find_parts(trace).span_ns for trace in view.timed_ranks.values()) * NS
    if not works or not span or not whole:
        return
    by_type: dict[str, float] = {}
    for one in works:
        by_type[one.work.dtype] = by_type.get(one.work.dtype, 0.0) + one.count * one.work.num_operations
    dtype = max(by_type, key=lambda name: by_type[name])
    rate = sum(by_type.values()) / span
    known = min(1.0, sum(one.total_ns for one in works) / whole)
    if known < FEWEST_KNOWN:
        return
    peaks = find_peaks(view)
    peak = peaks.device.peaks.get(dtype) if peaks.device is not None else None
    share = None if peak is None or rate > peak else rate / peak
    beside = (
        f", {format_share(share)} of the {dtype} peak of {peaks.device.name} (MFU, recomputation included)"
        if share is not None and peaks.device
        else ""
    )
    yield UTILIZATION(
        "",
        f"Products, convolutions and attention run at {format_quantity('rate', rate)}FLOP/s over the whole"
        f" span{beside}; they take {format_share(known)} of the device time.",
        share=share,
        operations_per_second=rate,
        known_share=known,
    )


def explain_unrecorded(view: TraceView) -> Iterator[str]:
    """What to record for the tables that are missing."""
    if not view.has_device:
        return
    found = [counted.attribution for counted in view.counted.values()]
    if not any(one.has_modules or one.has_sources for one in found):
        yield "Device time by module and source line: record with profile(with_stack=True)."
    if not any(one.has_shapes for one in found):
        yield "FLOP/s of products and attention: record with profile(record_shapes=True)."
    if not any(len(trace.memory) for trace in view.job.ranks):
        yield "Memory over time: record with profile(profile_memory=True)."
