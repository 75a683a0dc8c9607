"""The time of a device by the definitions of HolisticTraceAnalysis (on PyPI: `traceinsight`), to compare with it.

    kernel time = from the first kernel's start to the last one's end
    idle = kernel time − union of all kernels
    compute = union of compute kernels; non-compute = kernel time − compute − idle
    overlap = |compute ∩ communication| / union of communication

It differs from our own breakdown in that

- a kernel is whatever has a stream, copies and waits included; its type goes by its name alone;
- where any start has a fraction, starts are rounded up and ends down to whole microseconds. What begins and ends within
  the same one then lasts −1 µs, and counts so where it stands alone;
- of a trace of two or more profiler steps, kernels count whose launch begins before the last step does (the latest of
  its annotations, those of devices included), once for each launch that has their number;
- among kernels of the same microsecond, the order of an unstable sort decides. We sort the same numbers with the same
  call, so the order is the same.

For that, this mode keeps 25 bytes per kernel and 16 per launch; our own does not grow with the file. Every file is
taken by itself: it counts the steps of all ranks together, which only differs where ranks recorded other steps. Not
covered: MTIA devices, durations below zero, steps that all have a stream and a correlation, synchronizing events that
have no correlation, and columns of whole numbers so small that its sums overflow (no event without a duration).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from scalelab.trace.files.events import Event, Integer, repair_events
from scalelab.trace.files.pieces import Pieces

Column = NDArray[np.float64]
OTHER, COMPUTE, COMMUNICATION = range(3)
STEP = re.compile(r"ProfilerStep#\d")
SYNCHRONISING = ("Event Sync", "Context Sync")
"""These happen on the device, whatever their stream."""
COMMUNICATION_BEGINS = ("nccl", "hip", "hccl")
NO_COMPUTE_BEGINS = (
    "Stream Wait Event",
    "runFunction",
    "job_exe",
    "packet",
    "pe_exe",
    "cpum_exe_subgraph",
    "collective_subgraph_execution",
)
NO_COMPUTE_HOLDS = ("Memcpy", "Memset", "dma", "Sync")
WIDE = 2**31
LARGEST_TIME = 2**60
HOST = -2
"""In place of a correlation: an event that has a stream but no correlation counts as one of the host."""


@dataclass(frozen=True, kw_only=True)
class HtaBreakdown:
    """One rank's device time, in microseconds."""

    kernel_us: float = 0.0
    """From the first kernel's start to the last one's end: the denominator of the shares."""
    idle_us: float = 0.0
    compute_us: float = 0.0
    non_compute_us: float = 0.0
    overlap: float | None = None
    """The share of the union of communication that overlaps with compute; None: no communication."""
    num_kernels: int = 0
    num_dropped: int = 0
    """Kernels of the last step, and those whose launch is not in the trace."""


class _Arguments(msgspec.Struct, gc=False):
    stream: Integer = -1
    correlation: Integer = -1


class _Row(msgspec.Struct, gc=False):
    name: str = ""
    cat: str | None = None
    ts: Integer | float | None = None
    dur: float | None = None
    args: _Arguments = msgspec.field(default_factory=_Arguments)


Rows = Sequence[_Row | Event]
_decode = msgspec.json.Decoder(list[_Row]).decode
_decode_one = msgspec.json.Decoder(Event).decode


def read_hta(path: Path) -> HtaBreakdown:
    """Read one rank's file. Raises `TraceUnreadable` if it is not a trace."""
    table = _Table()
    for rows in Pieces(path, _decode_rows):
        table.take(rows)
    return table.finish()


def _decode_rows(text: bytes) -> Rows:
    try:
        return _decode(text)
    except msgspec.ValidationError:
        return repair_events(text, _decode_one)[0]


def find_type(name: str) -> int:
    """The type of a kernel of that name."""
    line = name.split("\n", 1)[0]
    if name.startswith(COMMUNICATION_BEGINS) or "ncclKernel" in line:
        return COMMUNICATION
    if name.startswith(NO_COMPUTE_BEGINS) or any(word in line for word in NO_COMPUTE_HOLDS):
        return OTHER
    return OTHER if name.startswith("cuda") and "LaunchKernel" in line else COMPUTE


@dataclass(frozen=True)
class _Kernels:
    """Columns of kernels, in one order."""

    start: Column
    end: Column
    type: NDArray[np.uint8]
    sort_type: np.dtype[Any]
    """Of the numbers that are sorted: another one may leave equal ones in another order."""

    def pick(self, which: NDArray[Any]) -> _Kernels:
        return replace(self, start=self.start[which], end=self.end[which], type=self.type[which])

    def merge(self) -> tuple[Column, Column, NDArray[np.intp]]:
        """Starts and ends of the groups that touch each other, and the order by start."""
        order = self.start.astype(self.sort_type).argsort(kind="quicksort")
        start, end = self.start[order], self.end[order]
        is_first = np.ones(len(start), dtype=np.bool_)
        np.greater(start[1:], np.maximum.accumulate(end)[:-1], out=is_first[1:])
        first = np.flatnonzero(is_first)
        return start[first], np.maximum.reduceat(end, first) if len(first) else end, order


@dataclass
class _Table:
    """The columns that matter, in the order of the file."""

    is_fractional: bool = False
    has_missing: bool = False
    """Whether an event has no time; their column is then one of doubles."""
    lowest: float = 0.0
    highest: float = 0.0
    last_step: float = -np.inf
    step_names: set[str] = field(default_factory=set)
    kernels: list[Column] = field(default_factory=list)
    """Starts and lengths."""
    numbers: list[NDArray[np.int64]] = field(default_factory=list)
    """Their correlations, or `HOST`."""
    types: list[NDArray[np.uint8]] = field(default_factory=list)
    launches: list[tuple[Column, NDArray[np.int64]]] = field(default_factory=list)
    """Starts and correlations."""
    _known_types: dict[str, int] = field(default_factory=dict)

    def take(self, rows: Rows) -> None:
        kinds = set(map(type, [row.ts for row in rows]))
        self.is_fractional = self.is_fractional or bool(kinds - {int})
        self.has_missing = self.has_missing or type(None) in kinds
        if self.highest < WIDE:
            self._take_range(rows)
        chosen = [row for row in rows if row.args.correlation >= 0 or row.args.stream != -1 or row.name[:4] == "Prof"]
        chosen = [row for row in chosen if _is_counted(row)]
        self._take_kernels([row for row in chosen if row.args.stream != -1])
        self._take_hosts([row for row in chosen if not _is_on_device(row)])

    def _take_range(self, rows: Rows) -> None:
        starts = [row.ts for row in rows if _is_counted(row) and row.ts is not None]
        self.lowest = min([self.lowest, *starts])
        self.highest = max([self.highest, *starts])

    def _take_kernels(self, rows: Rows) -> None:
        known = self._known_types
        for name in {row.name for row in rows} - known.keys():
            known[name] = find_type(name)
        self.kernels.append(np.array([[row.ts for row in rows], [row.dur for row in rows]], dtype=np.float64))
        self.types.append(np.array([known[row.name] for row in rows], dtype=np.uint8))
        numbers = [row.args.correlation if _is_on_device(row) else HOST for row in rows]
        self.numbers.append(np.array(numbers, dtype=np.int64))

    def _take_hosts(self, rows: Rows) -> None:
        for row in rows:
            if STEP.match(row.name):
                self.step_names.add(row.name)
                self.last_step = max(self.last_step, row.ts or 0)
        launches = [row for row in rows if row.args.correlation >= 0]
        start = np.array([row.ts for row in launches], dtype=np.float64)
        self.launches.append((start, np.array([row.args.correlation for row in launches], dtype=np.int64)))

    def finish(self) -> HtaBreakdown:
        start, length = np.concatenate([np.empty((2, 0)), *self.kernels], axis=1)
        first = start.min(initial=np.inf)
        if self.is_fractional:
            start, end = np.ceil(start), np.floor(start + length)
        else:
            end = start - first + length + first
        kernels = _Kernels(start, end, np.concatenate([np.empty(0, np.uint8), *self.types]), self._find_sort_type())
        if len(self.step_names) > 1:
            kernels = kernels.pick(self._find_kept(start))
        return _measure(kernels, len(start))

    def _find_sort_type(self) -> np.dtype[Any]:
        """pandas keeps a column of integers in the narrowest kind that holds them."""
        if self.has_missing:
            return np.dtype(np.float64)
        for width in (np.int8, np.int16, np.int32):
            if np.iinfo(width).min <= self.lowest and np.ceil(self.highest) <= np.iinfo(width).max:
                return np.dtype(width)
        return np.dtype(np.int64)

    def _find_kept(self, start: Column) -> NDArray[np.intp]:
        """The kernels launched before the last step, as often as they were, then what the host has on streams."""
        last_step = np.ceil(self.last_step) if self.is_fractional else self.last_step
        launched = [n[(np.ceil(s) if self.is_fractional else s) < last_step] for s, n in self.launches]
        names, counts = np.unique(np.concatenate([np.empty(0, np.int64), *launched]), return_counts=True)
        number = np.concatenate(self.numbers)
        place = np.minimum(np.searchsorted(names, number), max(0, len(names) - 1))
        times = np.zeros(len(number), dtype=np.intp)
        if len(names):
            times = np.where(names[place] == number, counts[place], 0)
        times[number == -1] = 1  # synchronizing, without a launch to look for
        index = np.arange(len(number))
        return np.concatenate([np.repeat(index, times), index[(number == HOST) & (start < last_step)]])


def _measure(kernels: _Kernels, num_found: int) -> HtaBreakdown:
    num_kernels = len(kernels.start)
    if not num_kernels:
        return HtaBreakdown(num_dropped=num_found)
    start, end, order = kernels.merge()
    span, run = float(end[-1] - start[0]), float((end - start).sum())
    compute_start, compute_end, _ = kernels.pick(order[kernels.type[order] == COMPUTE]).merge()
    compute = float((compute_end - compute_start).sum())
    return HtaBreakdown(
        kernel_us=span,
        idle_us=span - run,
        compute_us=compute,
        non_compute_us=run - compute,
        overlap=_measure_overlap(kernels),
        num_kernels=num_kernels,
        num_dropped=max(0, num_found - num_kernels),
    )


def _measure_overlap(kernels: _Kernels) -> float | None:
    """The share of communication's union during which compute runs too."""
    compute_start, compute_end, _ = kernels.pick(kernels.type == COMPUTE).merge()
    start, end, _ = kernels.pick(kernels.type == COMMUNICATION).merge()
    total = float((end - start).sum())
    if not total:
        return None
    times = np.concatenate([start, end, compute_start, compute_end])
    changes = np.repeat([1, -1, 2, -2], [len(start), len(end), len(compute_start), len(compute_end)])
    order = times.argsort(kind="stable")
    is_both = np.cumsum(changes[order])[:-1] == 3
    return float(np.diff(times[order])[is_both].sum()) / total


def _is_on_device(row: _Row | Event) -> bool:
    return row.args.correlation >= 0 <= row.args.stream or row.name in SYNCHRONISING


def _is_counted(row: _Row | Event) -> bool:
    if row.dur is None or row.ts is None or row.cat is None or row.cat == "Trace":
        return False
    return abs(row.ts) < LARGEST_TIME and row.dur < LARGEST_TIME
