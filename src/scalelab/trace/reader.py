"""A trace file as batches of events with integer nanoseconds, in memory that does not grow with the file.

A file is read in pieces, each a list of events of its own. The boundary between two events is guessed from the text
near the end of a piece: `}`, a comma, `{`. A guess inside an event leaves at least two brackets or a quotation mark
open; only one bracket is added, so decoding fails and a wrong cut is never accepted. If the last guesses are wrong, as
in events that hold lists of objects, the piece is scanned bracket by bracket from its start, which is a known boundary.
All of this is linear in the length of the file.

A double holds microseconds to the nanosecond up to 2⁴³ of them (101 days), and whole ones up to 2⁵³. Beyond, as in
files that count fractions since 1970, numbers are decoded as decimals instead. Events with malformed fields are
repaired, or left out and counted. A file that is not JSON, or is truncated, raises `TraceUnreadable` with the file, the
byte and what to do.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from scalelab.errors import TraceUnreadable
from scalelab.trace.events import (
    MOST_READINGS,
    NO_READINGS,
    Event,
    Header,
    OpenEvents,
    Readings,
    convert_times,
    is_time,
    needs_decimals,
    pair_events,
    read_header,
    read_memory,
    repair_events,
)

PIECE_BYTES = 1 << 19
LARGEST_EVENT_BYTES = 1 << 26  # no event, and no header, may be longer
MOST_GUESSES = 4  # cuts, before the piece is gone through
MOST_BLANKS = 1000  # between the name of the list and its bracket
MOST_HEADERS = 64
"""How often `"traceEvents": [` may stand in the header without being the list of events."""
BREAK = re.compile(rb"\}\s*,\s*\{")
EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
TOKEN = re.compile(rb'"(?:[^"\\]+|\\.)*"?|[\[\]{},]', re.DOTALL)
BYTE = re.compile(r"\(byte (\d+)\)")
NO_TEXT = re.compile("[\udc80-\udcff]")

T = TypeVar("T")


class Pieces(Generic[T]):
    """One trace file. Iterating gives what `decode` makes of its events, list by list; it may be done once."""

    def __init__(self, path: Path, decode: Callable[[bytes], T]) -> None:
        self.path = path
        self.decode = decode
        """Takes a JSON list of events as text; raises `msgspec.DecodeError` where it is none."""
        self.header = Header()
        """Complete only after the last list."""
        self.num_bytes = 0

    def __iter__(self) -> Iterator[T]:
        with _open(self.path) as stream:
            pieces = self._read(stream)
            buffer, is_object = self._find_events(pieces)
            wanted = PIECE_BYTES
            for piece in pieces:
                if len(buffer) >= wanted:
                    cut, is_end = self._cut(buffer)
                    if cut is None:
                        wanted = 2 * len(buffer)
                    else:
                        yield cut[0]
                        buffer, wanted = cut[1], PIECE_BYTES
                    if is_end:
                        self._read_tail(buffer + piece, pieces, is_object)
                        return
                if len(buffer) > LARGEST_EVENT_BYTES:
                    raise self.error(
                        f"an event before byte {self.num_bytes:,} is longer than {LARGEST_EVENT_BYTES:,} bytes"
                    )
                buffer += piece
            yield self._decode_last(buffer, is_object)

    def _read(self, stream: BinaryIO) -> Iterator[bytes]:
        while True:
            try:
                piece = stream.read(PIECE_BYTES)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                where = f"after {self.num_bytes:,} bytes"
                raise self.error(f"compressed data truncated or damaged {where} ({error}): copy it again") from None
            except OSError as error:
                raise self.error(error.strerror or str(error)) from None
            if not piece:
                return
            self.num_bytes += len(piece)
            yield piece

    def _find_events(self, pieces: Iterator[bytes]) -> tuple[bytes, bool]:
        """What follows the bracket that opens the list of events, and whether it stands inside an object."""
        buffer, searched, num_tried = b"", 0, 0
        for piece in pieces:
            buffer = (buffer + piece).lstrip(b"\xef\xbb\xbf \t\r\n")
            if buffer.startswith(b"["):
                return buffer[1:], False
            if buffer and not buffer.startswith(b"{"):
                break
            for match in EVENTS.finditer(buffer, searched):
                try:
                    self._take_header(buffer[: match.start()] + b'"traceEvents":[]}')
                    return buffer[match.end() :], True
                except msgspec.DecodeError:
                    num_tried += 1  # inside a text or a list
                if num_tried > MOST_HEADERS:
                    break
                searched = match.end()
            searched = max(searched, len(buffer) - MOST_BLANKS)
            if len(buffer) > LARGEST_EVENT_BYTES or num_tried > MOST_HEADERS:
                break
        if not buffer:
            raise self.error("it is empty")
        raise self.error('not a trace: it has no "traceEvents" list; give files of torch.profiler')

    def _take_header(self, text: bytes) -> None:
        """Take from an object what the header does not know yet."""
        try:
            found = read_header(replace_no_text(text))
        except RecursionError:
            raise self._nested() from None
        for name in Header.__struct_fields__:
            setattr(self.header, name, getattr(self.header, name) or getattr(found, name))

    def _cut(self, buffer: bytes) -> tuple[tuple[T, bytes] | None, bool]:
        """The events of as much as can be decoded and the rest, if any can; and whether the list ended in it."""
        breaks = [found.start() + 1 for found in BREAK.finditer(buffer, max(0, len(buffer) - PIECE_BYTES // 8))]
        for guess in reversed(breaks[-MOST_GUESSES:]):
            text = b"[" + buffer[:guess] + b"]"
            try:
                return (self._decode(text), buffer[buffer.index(b",", guess) + 1 :]), False
            except msgspec.DecodeError as error:
                place = _find_place(error)
                if place is None or place == len(text) - 1:
                    continue  # cut inside an event
                if "trailing characters" not in str(error):
                    raise self._malformed(error, len(buffer) - place + 1) from None
                close = text.rindex(b"]", 0, place) + 1
                return (self._decode_surely(text[:close]), buffer[close - 1 :]), True
        cut, is_end = find_cut(buffer)
        if cut is None:
            return None, False
        return (self._decode_surely(b"[" + buffer[:cut] + b"]"), buffer[cut + 1 :]), is_end

    def _decode_last(self, buffer: bytes, is_object: bool) -> T:
        """The end of the file: the last events, the closing bracket, and what stands behind it."""
        text = b"[" + buffer
        try:
            events = self._decode(text)
        except msgspec.DecodeError as error:
            place = _find_place(error)
            if place is None and is_object:
                raise self._truncated() from None
            if place is None:  # Chrome lets a bare list stay open
                return self._decode_unclosed(text)
            if "trailing characters" not in str(error):
                raise self._malformed(error, len(text) - place) from None
            close = text.rindex(b"]", 0, place) + 1
            events, buffer = self._decode_surely(text[:close]), text[close:]
        else:
            buffer = b""
        self._decode_tail(buffer, is_object)
        return events

    def _decode_unclosed(self, text: bytes) -> T:
        try:
            return self._decode(text.rstrip().removesuffix(b",") + b"]")
        except msgspec.DecodeError:
            raise self._truncated() from None

    def _read_tail(self, tail: bytes, pieces: Iterator[bytes], is_object: bool) -> None:
        for piece in pieces:
            tail += piece
            if len(tail) > LARGEST_EVENT_BYTES:
                raise self.error(f"what follows its events is longer than {LARGEST_EVENT_BYTES:,} bytes")
        self._decode_tail(tail, is_object)

    def _decode_tail(self, tail: bytes, is_object: bool) -> None:
        """What stands behind the events belongs to the header, or is nothing."""
        tail = tail.strip()
        if not is_object and tail:
            raise self.error(f"{len(tail):,} unexpected bytes after its list of events")
        if not is_object:
            return
        text = b"{" + tail.removeprefix(b",")
        try:
            self._take_header(text)
        except msgspec.DecodeError as error:
            place = _find_place(error)
            raise (self._truncated() if place is None else self._malformed(error, len(text) - place)) from None

    def _decode(self, text: bytes) -> T:
        try:
            return self.decode(text)
        except UnicodeDecodeError:
            return self.decode(replace_no_text(text))
        except RecursionError:
            raise self._nested() from None

    def _decode_surely(self, text: bytes) -> T:
        """Of a list whose end is known."""
        try:
            return self._decode(text)
        except msgspec.DecodeError as error:
            raise self._malformed(error, len(text) - (_find_place(error) or len(text))) from None

    def _nested(self) -> TraceUnreadable:
        return self.error(f"its lists are nested too deeply before byte {self.num_bytes:,}")

    def _truncated(self) -> TraceUnreadable:
        return self.error(f"truncated after {self.num_bytes:,} bytes: record or copy it again")

    def _malformed(self, error: msgspec.DecodeError, bytes_from_end: int) -> TraceUnreadable:
        what = BYTE.sub("", str(error)).removeprefix("JSON is malformed: ").strip()
        place = max(0, self.num_bytes - bytes_from_end)
        return self.error(f"not valid JSON ({what} at about byte {place:,}): record or copy it again")

    def error(self, what: str) -> TraceUnreadable:
        return TraceUnreadable(f"cannot read {self.path}: {what}")


def find_cut(text: bytes) -> tuple[int | None, bool]:
    """Where the last comma between two values of a list stands, None: nowhere; or its closing bracket, and True."""
    depth, cut = 0, None
    for match in TOKEN.finditer(text):
        token = text[match.start()]
        if token == ord(","):
            cut = cut if depth else match.start()
        elif token in b"{[":
            depth += 1
        elif token in b"}]":
            depth -= 1
            if depth < 0:
                # A brace that closes nothing stays in the text, where decoding finds it.
                return match.start() + (token == ord("}")), True
    return cut, False


def replace_no_text(text: bytes) -> bytes:
    """Names of kernels are not always UTF-8; the result is, and of the same length."""
    try:
        text.decode()
        return text
    except UnicodeDecodeError:
        return NO_TEXT.sub("?", text.decode("utf-8", "surrogateescape")).encode()


def _find_place(error: msgspec.DecodeError) -> int | None:
    """Where decoding stopped; None: at the end of the text, which is too short."""
    match = BYTE.search(str(error))
    if match is None:
        return None
    is_behind = "trailing characters" in str(error)  # those are counted from one
    return int(match.group(1)) - is_behind


def _open(path: Path) -> BinaryIO:
    """The file, decompressed where it is compressed, whatever its name."""
    try:
        with path.open("rb") as file:
            is_compressed = file.read(2) == b"\x1f\x8b"
        return cast(BinaryIO, gzip.open(path, "rb")) if is_compressed else path.open("rb")
    except OSError as error:
        raise TraceUnreadable(f"cannot read {path}: {error.strerror or error}") from None


class ExactEvent(Event, gc=False):
    """An event whose times are decimals."""

    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = None  # type: ignore[assignment]


_decode = msgspec.json.Decoder(list[Event]).decode
_decode_one = msgspec.json.Decoder(Event).decode
_decode_exactly = msgspec.json.Decoder(list[ExactEvent]).decode
_decode_one_exactly = msgspec.json.Decoder(ExactEvent).decode


@dataclass(frozen=True)
class Batch:
    """Events that have a duration, in the order of the file, with their times in nanoseconds."""

    events: list[Event]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]


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
        events, num_odd = self._decode_events(text)
        if not self._is_exact and needs_decimals(events):
            self._is_exact = self._may_be_decimal = True
            events, num_odd = self._decode_events(text)
        self.num_unusable += num_odd
        return self._make_batch(events)

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
                self._memory.append(read_memory(others, self._to_ns))
                self._num_readings += len(self._memory[-1])
        num_complete = len(complete)
        if self._may_be_decimal:
            complete = [event for event in complete if is_time(event.ts) and is_time(event.dur)]
            self.num_unusable += num_complete - len(complete)
        kept = [e for e in complete if e.dur is not None and e.ts is not None and e.dur >= 0]
        start, is_start_usable = self._to_ns([e.ts for e in kept])
        length, is_length_usable = self._to_ns([e.dur for e in kept])
        is_usable = is_start_usable & is_length_usable
        if not is_usable.all():
            kept = [event for event, is_kept in zip(kept, is_usable, strict=True) if is_kept]
            start, length = start[is_usable], length[is_usable]
        self.num_unusable += len(complete) - len(kept)
        return Batch(kept, start, start + length)

    def _to_ns(self, ticks: list[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return convert_times(ticks, self.ns_per_tick, may_be_decimal=self._may_be_decimal)
