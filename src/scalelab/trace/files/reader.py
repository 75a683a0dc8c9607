"""Trace files: where they are, whose they are, and their events in batches with integer nanoseconds.

Memory does not grow with a file.

A double holds microseconds to the nanosecond up to 2⁴³ of them (101 days), and whole ones up to 2⁵³. Beyond, as in
files that count fractions since 1970, numbers are decoded as decimals instead. Events with malformed fields are
repaired, or left out and counted. As long as all events are as Kineto writes them, they are decoded without these
precautions, and those of no duration (arrows, metadata) without their fields: that takes half the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from scalelab.errors import TraceUnreadable, UsageError
from scalelab.trace.files.events import (
    MOST_READINGS,
    NO_READINGS,
    SKIPPED,
    Batch,
    CompleteEvent,
    Event,
    Header,
    Instant,
    OpenEvents,
    Readings,
    TimedEvent,
    convert_plain_times,
    convert_times,
    is_time,
    needs_decimals,
    pair_events,
    read_memory,
    repair_events,
)
from scalelab.trace.files.pieces import Pieces
from scalelab.units import REST_HIDDEN, list_some

if TYPE_CHECKING:
    from scalelab.trace.files.nsys import NsysFile

DATABASE = b"SQLite format 3\0"
SUFFIXES = (".json", ".json.gz", ".sqlite")
MARKS = ("trial.json", "run.json")
"""A directory that holds one of these is that of a trial or a run: none of the files beside it is a trace."""
BELOW = ("*", "trace/*", "*/trace", "*/trace/*", "trials/*/trace", "trials/*/trace/*")
"""Where the traces of a recording, a trial or a run may lie."""
RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)|(?:^|[-_.])(\d+)-of-\d+", re.IGNORECASE)


class ExactEvent(Event, gc=False):
    """An event whose times are decimals."""

    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = None  # type: ignore[assignment]


_decode_plainly = msgspec.json.Decoder(list[Union[CompleteEvent, Instant, *SKIPPED]]).decode  # type: ignore[valid-type]
_decode = msgspec.json.Decoder(list[Event]).decode
_decode_one = msgspec.json.Decoder(Event).decode
_decode_exactly = msgspec.json.Decoder(list[ExactEvent]).decode
_decode_one_exactly = msgspec.json.Decoder(ExactEvent).decode


class TraceFile:
    """One trace file. `batches` may be gone through once; the header is complete only afterwards."""

    def __init__(self, path: Path, ns_per_tick: int = 1000) -> None:
        self.ns_per_tick = ns_per_tick
        """The unit of the file's times: 1000 is microseconds, 1 nanoseconds."""
        self.num_unusable = 0
        """Events that were left out: no time, no end, a negative duration, fields of the wrong kind."""
        self._memory: list[Readings] = []
        self._num_readings = 0
        self._pieces = Pieces(path, self._decode_batch)
        self._is_plain = True
        """Whether all events so far are of a known phase, complete in themselves, with times that a double holds."""
        self._is_exact = False
        """Whether times are decoded as decimals."""
        self._may_be_decimal = False
        self._open_events: OpenEvents = {}

    @property
    def header(self) -> Header:
        return self._pieces.header

    @property
    def num_bytes(self) -> int:
        """Read so far, uncompressed."""
        return self._pieces.num_bytes

    @property
    def memory(self) -> Readings:
        """Of devices, as far as it was read; nothing after the first `MOST_READINGS`."""
        return np.concatenate([NO_READINGS, *self._memory])

    def error(self, what: str) -> TraceUnreadable:
        return self._pieces.error(what)

    def batches(self) -> Iterator[Batch]:
        """Every event that has a duration."""
        yield from self._pieces
        self.num_unusable += sum(map(len, self._open_events.values()))

    def _decode_batch(self, text: bytes) -> Batch:
        if self._is_plain:
            found = self._decode_plain_batch(text)
            if found is not None:
                return found
            self._is_plain = False
        events, num_odd = self._decode_events(text)
        if not self._is_exact and needs_decimals([event.ts for event in events if event.ts is not None]):
            self._is_exact = self._may_be_decimal = True
            events, num_odd = self._decode_events(text)
        self.num_unusable += num_odd
        return self._make_batch(events)

    def _decode_plain_batch(self, text: bytes) -> Batch | None:
        """Events as Kineto writes them; None: some are not."""
        try:
            found = _decode_plainly(text)
        except msgspec.ValidationError:
            return None
        events = [event for event in found if type(event) is CompleteEvent]
        start = convert_plain_times([event.ts for event in events], self.ns_per_tick)
        length = convert_plain_times([event.dur for event in events], self.ns_per_tick)
        if start is None or length is None:
            return None
        if len(events) < len(found) and self._num_readings < MOST_READINGS:
            self._memory.append(read_memory((one for one in found if type(one) is Instant), self._to_ns))
            self._num_readings += len(self._memory[-1])
        is_usable = start[1] & length[1] & (length[0] >= 0)
        return self._make_usable(events, start[0], length[0], is_usable)

    def _make_usable(
        self,
        events: Sequence[TimedEvent],
        start: NDArray[np.int64],
        length: NDArray[np.int64],
        is_usable: NDArray[np.bool_],
    ) -> Batch:
        """A batch of the usable events; others are counted."""
        if not is_usable.all():
            self.num_unusable += len(events) - int(is_usable.sum())
            events = [event for event, is_kept in zip(events, is_usable.tolist(), strict=True) if is_kept]
            start, length = start[is_usable], length[is_usable]
        return Batch(events, start, start + length)

    def _decode_events(self, text: bytes) -> tuple[list[Event], int]:
        """Events of a whole list, one by one where a field has the wrong kind; and how many made no sense."""
        try:
            return (list[Event](_decode_exactly(text)) if self._is_exact else _decode(text)), 0
        except msgspec.ValidationError:
            self._may_be_decimal = True
            return repair_events(text, _decode_one_exactly if self._is_exact else _decode_one)

    def _make_batch(self, events: list[Event]) -> Batch:
        complete = [event for event in events if event.ph == "X"]
        if len(complete) < len(events):
            others = [event for event in events if event.ph != "X"]
            if not {event.ph for event in others}.isdisjoint("BE"):
                self._may_be_decimal = True
                complete = [event for event in pair_events(events, self._open_events) if event.ph == "X"]
            if self._num_readings < MOST_READINGS:
                self._memory.append(read_memory((one for one in others if one.ph == "i"), self._to_ns))
                self._num_readings += len(self._memory[-1])
        num_complete = len(complete)
        if self._may_be_decimal:
            complete = [event for event in complete if is_time(event.ts) and is_time(event.dur)]
            self.num_unusable += num_complete - len(complete)
        kept = [e for e in complete if e.dur is not None and e.ts is not None and e.dur >= 0]
        start, is_start_usable = self._to_ns([e.ts for e in kept])
        length, is_length_usable = self._to_ns([e.dur for e in kept])
        self.num_unusable += len(complete) - len(kept)
        return self._make_usable(kept, start, length, is_start_usable & is_length_usable)

    def _to_ns(self, ticks: list[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return convert_times(ticks, self.ns_per_tick, may_be_decimal=self._may_be_decimal)


def open_trace(path: Path, ns_per_tick: int = 1000) -> TraceFile | NsysFile:
    """A file of torch's profiler, or an export of Nsight Systems, whatever its name."""
    if not is_export(path):
        return TraceFile(path, ns_per_tick)
    from scalelab.trace.files.nsys import NsysFile

    return NsysFile(path)


def is_export(path: Path) -> bool:
    """Whether a file is a database, as Nsight Systems exports it."""
    try:
        with path.open("rb") as file:
            return file.read(len(DATABASE)) == DATABASE
    except OSError:
        return False


def find_trace_files(paths: Sequence[Path]) -> list[Path]:
    """The trace files that paths lead to: files themselves, and of a directory those in it or in its `trace`.

    The directory of a trial is such a directory, and that of a run where one trial has traces. Raises `UsageError`
    where there is nothing, or where a directory holds several recordings.
    """
    if not paths:
        raise UsageError("give a trace file or a directory of them")
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += _search(path)
        elif path.exists():
            found.append(path)
        else:
            raise UsageError(f"{path} does not exist: give a trace file or a directory of them")
    return list(dict.fromkeys(found))


def _search(directory: Path) -> list[Path]:
    """The traces of one recording: beside each other in it, in its `trace`, or in the one place below that has some."""
    for place in (directory, directory / "trace"):
        found = _list_traces(place)
        if found:
            return found
    below = {place for pattern in BELOW for place in directory.glob(pattern)}
    places = [place for place in sorted(below) if _list_traces(place)]
    if len(places) == 1:
        return _list_traces(places[0])
    if places:
        names = [str(place.relative_to(directory)).removesuffix("/trace") for place in places]
        listed = list_some(names, 6, REST_HIDDEN)
        raise UsageError(
            f"{directory} has traces of {len(places)} recordings ({listed}): give one, such as {directory / names[-1]}"
        )
    raise UsageError(
        f"{directory} has no trace (*.json, *.json.gz, *.sqlite): give the directory that torch.profiler wrote to;"
        " studies record traces with --profile-steps 3"
    )


def _list_traces(directory: Path) -> list[Path]:
    if any((directory / mark).exists() for mark in MARKS):
        return []
    return sorted((file for file in directory.glob("*") if _is_trace(file)), key=_read_digits)


def _is_trace(file: Path) -> bool:
    return file.is_file() and file.name.endswith(SUFFIXES)


def _read_digits(file: Path) -> tuple[list[int], str]:
    """So that rank10 comes after rank9."""
    return [int(digits) for digits in re.findall(r"\d+", file.name)][:4], file.name


def number_ranks(files: Sequence[tuple[Path, int | None]]) -> list[int]:
    """Every file's rank; those that do not say theirs follow the others in their order. Two of a rank are refused."""
    known: dict[int, Path] = {}
    for path, rank in files:
        if rank in known:
            raise TraceUnreadable(f"{known[rank]} and {path} are both of rank {rank}: give the files of one recording")
        if rank is not None:
            known[rank] = path
    unknown = count(max(known, default=-1) + 1)
    return [rank if rank is not None else next(unknown) for _, rank in files]


def peek_rank(path: Path) -> int | None:
    """The rank of a file by its beginning; None: unknown."""
    file = open_trace(path)
    next(iter(file.batches()), None)
    return find_rank(path, file.header)


def find_rank(path: Path, header: Header) -> int | None:
    """The rank by the header, or else by the name of the file."""
    if header.distributed is not None and header.distributed.rank is not None:
        return header.distributed.rank
    match = RANK_IN_NAME.search(path.name)
    return int(match.group(1) or match.group(2)) if match else None
