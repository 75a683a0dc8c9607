"""A trace in time order, in bounded memory, cut into consecutive windows.

Profilers write events thread by thread. They are sorted externally: pieces that fit in memory are sorted and written
to an unnamed temporary file, then merged block by block. A trace of fewer records than one piece never touches the
disk.

A window ends where a step begins or ends and where the records at hand end, so only the events that are still running
have to be remembered. Whatever is additive over time can be summed over windows, exactly. Steps of a device may overlap
(a copy for the next step runs while this one computes): a window then belongs to several.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from scalelab.errors import StorageFull

RECORD = np.dtype(
    [
        ("start", np.int64),
        ("end", np.int64),
        ("correlation", np.int64),
        ("name", np.int32),
        ("lane", np.int32),
        ("step", np.int32),
        ("work", np.int32),
        ("kind", np.uint8),
        ("on_device", np.bool_),
    ]
)
"""An event: times in nanoseconds, places of its name, lane, step and work (-1: unknown) in the tables of the rank.

The correlation of an operator is autograd's sequence number."""
NO_STEP = -1
Records = NDArray[np.void]

PIECE_RECORDS = 1 << 17


class Spool:
    """Takes records in any order, gives them back by their start."""

    def __init__(self, piece_records: int | None = None) -> None:
        self._piece_records = piece_records or PIECE_RECORDS
        self._pending: list[Records] = []
        self._num_pending = 0
        self._file: IO[bytes] | None = None
        self._pieces: list[tuple[int, int]] = []
        """Offset and number of records of every sorted piece in the file."""

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # what could not be written is not missed any more
                self._file.close()

    def add(self, records: Records) -> None:
        self._pending.append(records)
        self._num_pending += len(records)
        if self._num_pending >= self._piece_records:
            self._write_piece(self._take_pending())

    def in_order(self) -> Iterator[Records]:
        """All records in blocks: within a block and from block to block, no start is before the last one.

        May be repeated once all records are there: the blocks are the same.
        """
        if not self._pieces:
            self._pending = [self._take_pending()]
            yield self._pending[0]
            return
        if self._num_pending:
            self._write_piece(self._take_pending())
        block = max(256, 2 * self._piece_records // len(self._pieces))
        places = [list(piece) for piece in self._pieces]
        loaded = [np.empty(0, dtype=RECORD) for _ in places]
        while True:
            for index, (place, records) in enumerate(zip(places, loaded, strict=True)):
                if not len(records) and place[1]:
                    loaded[index] = self._load(place, block)
            # Beyond the first start that is not loaded yet of any piece, more may follow.
            bound = min((r["start"][-1] for r, place in zip(loaded, places, strict=True) if place[1]), default=None)
            ready = []
            for index, records in enumerate(loaded):
                cut = len(records) if bound is None else int(np.searchsorted(records["start"], bound, side="right"))
                ready.append(records[:cut])
                loaded[index] = records[cut:]
            if sum(map(len, ready)):
                yield sort_by_start(join_records(ready))
            if bound is None:
                return

    def _take_pending(self) -> Records:
        records = join_records(self._pending)
        self._pending, self._num_pending = [], 0
        return sort_by_start(records)

    def _write_piece(self, records: Records) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="scalelab-")  # noqa: SIM115  # closed by __exit__
            offset = self._file.seek(0, 2)
            self._file.write(records.view(np.uint8).data)
            self._file.flush()
        except OSError as error:
            raise StorageFull(
                f"cannot sort the trace in {tempfile.gettempdir()}: {error.strerror}: free space there, or set TMPDIR"
            ) from None
        self._pieces.append((offset, len(records)))

    def _load(self, place: list[int], block: int) -> Records:
        """The next records of a piece; `place` moves on."""
        assert self._file is not None
        count = min(block, place[1])
        self._file.seek(place[0])
        records = np.frombuffer(self._file.read(count * RECORD.itemsize), dtype=RECORD)
        place[0] += count * RECORD.itemsize
        place[1] -= count
        return records


def sort_by_start(records: Records) -> Records:
    """In order of their start. (Of records, numpy's `take` and `compress` are many times as fast as indexing.)"""
    return records.take(np.argsort(records["start"], kind="stable"))


def join_records(parts: Sequence[Records]) -> Records:
    """As `np.concatenate`, which copies records field by field."""
    if not parts:
        return np.empty(0, dtype=RECORD)
    raw = np.dtype((np.void, RECORD.itemsize))
    return np.concatenate([np.ascontiguousarray(part).view(raw) for part in parts]).view(RECORD)


Steps = frozenset[int] | None
"""The numbers of the steps that are counted; None: the whole trace."""


@dataclass(frozen=True)
class ProfilerStep:
    """A step of the profiler."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class Window:
    """A stretch [start, end) of the trace, in nanoseconds."""

    start: int
    end: int
    steps: tuple[int, ...]
    """The numbers of the steps that it belongs to; empty: it lies between steps."""
    records: Records
    """Events that begin in it, in order."""
    carried: Records
    """Events that began before and still run when it begins."""

    @cached_property
    def all_records(self) -> Records:
        return join_records([self.carried, self.records])


def choose_records(records: Records, known: Sequence[ProfilerStep], wanted: Steps) -> NDArray[np.bool_]:
    """Which records count, given the steps of the trace."""
    if wanted is None:
        return np.ones(len(records), dtype=np.bool_)
    return find_among(records["step"], [place for place, step in enumerate(known) if step.number in wanted])


def find_distinct(values: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
    """Every value once, in order. (`np.unique` loads numpy's masked arrays, which takes longer than a small trace.)"""
    ordered = np.sort(values)
    return ordered[find_edges(ordered)]


def find_edges(ordered: NDArray[np.integer[Any]]) -> NDArray[np.intp]:
    """Where a new value begins."""
    is_first = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return np.flatnonzero(is_first)


def find_among(
    values: NDArray[np.integer[Any]], chosen: Collection[int] | NDArray[np.integer[Any]]
) -> NDArray[np.bool_]:
    """Which of the values are among the chosen, which may be many."""
    given = chosen if isinstance(chosen, np.ndarray) else np.fromiter(chosen, dtype=np.int64, count=len(chosen))
    ordered = np.sort(given)
    if not len(ordered):
        return np.zeros(len(values), dtype=np.bool_)
    return np.asarray(ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values)


def place_in_steps(steps: Sequence[ProfilerStep], times: NDArray[np.int64]) -> NDArray[np.int32]:
    """The place of the step that each time lies in (the latest to begin, if several); `NO_STEP`: in none."""
    if not steps:
        return np.full(len(times), NO_STEP, dtype=np.int32)
    starts, ends = (np.array([getattr(step, name) for step in steps], dtype=np.int64) for name in ("start", "end"))
    found = np.searchsorted(starts, times, side="right") - 1
    return np.where((found >= 0) & (times < ends[found]), found, NO_STEP).astype(np.int32)


def arrange_steps(steps: Iterable[ProfilerStep]) -> list[ProfilerStep]:
    """One span per number (on several streams of a device there are several), in order, none reaching into the next."""
    spans: dict[int, ProfilerStep] = {}
    for step in steps:
        known = spans.get(step.number, step)
        spans[step.number] = ProfilerStep(step.number, min(known.start, step.start), max(known.end, step.end))
    ordered = sorted(spans.values(), key=lambda step: (step.start, step.end))
    limits = [step.start for step in ordered[1:]] + [step.end for step in ordered[-1:]]
    return [
        ProfilerStep(step.number, step.start, min(step.end, limit)) for step, limit in zip(ordered, limits, strict=True)
    ]


def cut_windows(blocks: Iterable[Records], steps: Sequence[ProfilerStep], low: int, high: int) -> Iterator[Window]:
    """The windows of [low, high], which all records lie in, from blocks of records in order of their start."""
    borders = deque(sorted({edge for step in steps for edge in (step.start, step.end) if low < edge < high}))
    open_at = _OpenSteps(steps)
    pending = carried = np.empty(0, dtype=RECORD)
    begin = low
    for block in blocks:
        pending = join_records([pending, block]) if len(pending) else block
        if not len(pending):
            continue
        reach = int(pending["start"][-1])
        while begin < reach:
            # Records that begin at the very end may have equals in the next block: they wait for it.
            edge = borders.popleft() if borders and borders[0] <= reach else reach
            count = int(np.searchsorted(pending["start"], edge, side="left"))
            window = Window(begin, edge, open_at(begin), pending[:count], carried)
            pending, carried, begin = pending[count:], _still_running(window), edge
            yield window
    for edge in borders:
        window = Window(begin, edge, open_at(begin), pending, carried)
        pending, carried, begin = pending[:0], _still_running(window), edge
        yield window
    yield Window(begin, high, open_at(begin), pending, carried)


class _OpenSteps:
    """The steps that are open at a time; steps are in order of their start."""

    def __init__(self, steps: Sequence[ProfilerStep]) -> None:
        self._steps = steps
        self._reach = np.maximum.accumulate([step.end for step in steps]) if steps else np.empty(0, dtype=np.int64)

    def __call__(self, time: int) -> tuple[int, ...]:
        found = []
        place = bisect_right(self._steps, time, key=lambda step: step.start) - 1
        while place >= 0 and self._reach[place] > time:
            if self._steps[place].end > time:
                found.append(self._steps[place].number)
            place -= 1
        return tuple(reversed(found))


ROUNDING_NS = 1_000
"""How far rounded times may be off."""
LONGEST_OVERLAP_NS = 100_000


def trim_overlaps(lanes: NDArray[np.int32], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ends of kernels, none beyond the start of the next on its stream, which runs them in order.

    Device clocks are converted and rounded, so the next may seem to begin a little early; or it really does, in the
    last tenth of a kernel that lets it. A kernel that begins earlier than that really runs beside the other.
    """
    order = np.lexsort((ends, starts, lanes))
    one, after = order[:-1], order[1:]
    most = np.clip((ends[one] - starts[one]) // 10, ROUNDING_NS, LONGEST_OVERLAP_NS)
    is_early = (lanes[one] == lanes[after]) & (ends[one] - starts[after] <= most) & (ends[one] <= ends[after])
    trimmed = ends.copy()
    trimmed[one] = np.where(is_early, np.minimum(ends[one], starts[after]), ends[one])
    return trimmed


def _still_running(window: Window) -> Records:
    records = window.all_records
    return records.compress(records["end"] > window.end)
