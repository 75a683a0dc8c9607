"""A trace file as batches of events, read piece by piece: memory does not grow with the file.

A piece of a few megabytes is cut between two events and decoded as a list of its own. Where one event ends and the
next begins is guessed from the text (`}`, a comma, `{`); a cut inside an event leaves a bracket or a quotation mark
open, so that decoding fails and an earlier cut is tried. A right cut is therefore never mistaken for a wrong one.

Times become integer nanoseconds. A double holds microseconds to the nanosecond up to 2⁴³ of them, 101 days; where a
file counts from 1970, numbers are decoded as decimals instead.

What is no JSON, or ends too early, is a `TraceUnreadable` that names the file, the byte and what to do. An event whose
fields are of the wrong kind is left out and counted.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from scalelab.errors import TraceUnreadable
from scalelab.trace.events import Event, Header
from scalelab.trace.repair import pair_events, repair_events

PIECE_BYTES = 1 << 21
LARGEST_EVENT_BYTES = 1 << 26
"""No event, and no header, may be longer."""
MOST_CUTS = 8
"""How many cuts are tried before more is read."""
EXACT_MICROSECONDS = float(2**43)
"""Below, the nearest double of a time in microseconds is less than half a nanosecond off."""
LARGEST_NS = 2**62
CUT = re.compile(rb"\}\s*,\s*\{")
BYTE = re.compile(r"\(byte (\d+)\)")


class ExactEvent(Event, gc=False):
    """An event whose times are decimals."""

    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = None  # type: ignore[assignment]


_decode = msgspec.json.Decoder(list[Event]).decode
_decode_exactly = msgspec.json.Decoder(list[ExactEvent]).decode
_decode_anything = msgspec.json.Decoder(list[Any], float_hook=Decimal).decode


@dataclass(frozen=True)
class Batch:
    """Events that have a duration, in the order of the file, with their times in nanoseconds."""

    events: list[Event]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]


@dataclass
class TraceFile:
    """One trace file. `batches` may be gone through once; the header is complete only afterwards."""

    path: Path
    ns_per_tick: int = 1000
    """The unit of the file's times: 1000 is microseconds, 1 nanoseconds."""
    header: Header = field(default_factory=Header)
    num_unusable: int = 0
    """Events that were left out: no time, a negative duration, fields of the wrong kind."""
    num_bytes: int = 0
    """Read so far, uncompressed."""
    _is_exact: bool = False
    """Whether times are decoded as decimals."""
    _open_events: dict[tuple[int | str, int | str], list[Event]] = field(default_factory=dict)

    def batches(self) -> Iterator[Batch]:
        """Every event that has a duration."""
        with _open(self.path) as stream:
            pieces = self._read_pieces(stream)
            buffer, is_object = self._find_events(pieces)
            yield from self._decode_pieces(buffer, pieces, is_object)

    def _read_pieces(self, stream: BinaryIO) -> Iterator[bytes]:
        while True:
            try:
                piece = stream.read(PIECE_BYTES)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                where = f"after {self.num_bytes:,} bytes"
                raise self._error(f"its compressed data end or break {where} ({error})") from None
            except OSError as error:
                raise self._error(f"it cannot be read ({error.strerror or error})") from None
            if not piece:
                return
            self.num_bytes += len(piece)
            yield piece

    def _find_events(self, pieces: Iterator[bytes]) -> tuple[bytes, bool]:
        """What follows the bracket that opens the list of events, and whether it stands inside an object."""
        buffer = b""
        for piece in pieces:
            buffer += piece
            text = buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
            if text.startswith(b"["):
                return text[1:], False
            if text and not text.startswith(b"{"):
                break
            for match in re.finditer(rb'"traceEvents"\s*:\s*\[', text):
                try:
                    self.header = msgspec.json.decode(text[: match.start()] + b'"traceEvents":[]}', type=Header)
                except msgspec.ValidationError:
                    self.num_unusable += 1  # a header of another kind: nothing depends on it
                except msgspec.DecodeError:
                    continue
                return text[match.end() :], True
            if len(buffer) > LARGEST_EVENT_BYTES:
                break
        if not buffer:
            raise self._error("it is empty")
        raise self._error('it is no trace: there is no list "traceEvents" in it')

    def _decode_pieces(self, buffer: bytes, pieces: Iterator[bytes], is_object: bool) -> Iterator[Batch]:
        enough = PIECE_BYTES
        for piece in pieces:
            if len(buffer) >= enough:
                events, buffer, is_end = self._cut(buffer)
                enough = PIECE_BYTES if events else 2 * len(buffer)
                if events:
                    yield self._make_batch(events)
                if is_end:
                    self._read_tail(buffer + piece, pieces, is_object)
                    return
            if len(buffer) > LARGEST_EVENT_BYTES:
                raise self._error(f"an event before byte {self.num_bytes:,} has no end within {LARGEST_EVENT_BYTES:,}")
            buffer += piece
        yield from self._decode_last(buffer, is_object)

    def _cut(self, buffer: bytes) -> tuple[list[Event], bytes, bool]:
        """The events of as much as can be decoded, the rest, and whether the list ended in it."""
        cuts = [match.start() + 1 for match in CUT.finditer(buffer, max(0, len(buffer) - PIECE_BYTES // 8))]
        if not cuts:
            cuts = [match.start() + 1 for match in CUT.finditer(buffer)]
        for cut in reversed(cuts[-MOST_CUTS:]):
            text = b"[" + buffer[:cut] + b"]"
            try:
                return self._decode_list(text), buffer[buffer.index(b",", cut) + 1 :], False
            except msgspec.DecodeError as error:
                place = _find_byte(error)
                if "trailing characters" in str(error) and place is not None:
                    close = text.rindex(b"]", 0, place) + 1
                    return self._decode_list(text[:close]), buffer[close - 1 :], True
                if place is not None and place < len(text) - 1:
                    raise self._malformed(error, len(buffer) - place + 1) from None
        return [], buffer, False

    def _decode_last(self, buffer: bytes, is_object: bool) -> Iterator[Batch]:
        """The end of the file: the last events, the closing bracket, and what stands behind it."""
        text = b"[" + buffer
        tail = b""
        try:
            events = self._decode_list(text)
            is_closed = True
        except msgspec.DecodeError as error:
            place = _find_byte(error)
            if "trailing characters" in str(error) and place is not None:
                close = text.rindex(b"]", 0, place) + 1
                events, tail, is_closed = self._decode_list(text[:close]), text[close:], True
            elif place is None and not is_object:
                events, is_closed = self._decode_unclosed(text), True  # Chrome lets a bare list stay open
            elif place is None:
                raise self._truncated() from None
            else:
                raise self._malformed(error, len(text) - place) from None
        if is_object and is_closed:
            self._decode_tail(tail)
        if events:
            yield self._make_batch(events)

    def _decode_unclosed(self, text: bytes) -> list[Event]:
        try:
            return self._decode_list(text.rstrip().rstrip(b",") + b"]")
        except msgspec.DecodeError:
            raise self._truncated() from None

    def _read_tail(self, tail: bytes, pieces: Iterator[bytes], is_object: bool) -> None:
        for piece in pieces:
            tail += piece
            if len(tail) > LARGEST_EVENT_BYTES:
                raise self._error(f"what follows its events is longer than {LARGEST_EVENT_BYTES:,} bytes")
        if is_object:
            self._decode_tail(tail)

    def _decode_tail(self, tail: bytes) -> None:
        """Take what stands behind the events for the header, unless it is there already."""
        rest = tail.lstrip()
        text = b"{" + rest.removeprefix(b",")
        try:
            found = msgspec.json.decode(text, type=Header)
        except msgspec.ValidationError:
            self.num_unusable += 1
            return
        except msgspec.DecodeError as error:
            place = _find_byte(error)
            if place is None:
                raise self._truncated() from None
            raise self._malformed(error, len(text) - place) from None
        if self.header.distributed is None:
            self.header.distributed = found.distributed
        self.header.base_ns = self.header.base_ns or found.base_ns

    def _decode_list(self, text: bytes) -> list[Event]:
        """Events of a whole list; field by field where one has the wrong kind."""
        try:
            if not self._is_exact:
                events = _decode(text)
                self._is_exact = max((event.ts or 0.0 for event in events), default=0.0) >= EXACT_MICROSECONDS
            return list[Event](_decode_exactly(text)) if self._is_exact else events
        except msgspec.ValidationError:
            events, num_unusable = repair_events(_decode_anything(text))
            self.num_unusable += num_unusable
            return events
        except RecursionError:
            raise self._error("its lists are nested without end") from None

    def _make_batch(self, events: list[Event]) -> Batch:
        if any(event.ph in ("B", "E") for event in events):
            events = pair_events(events, self._open_events)
        kept = [e for e in events if e.ph == "X" and e.ts is not None and e.dur is not None and e.dur >= 0]
        self.num_unusable += sum(e.ph == "X" for e in events) - len(kept)
        start, is_start_usable = self._to_ns([e.ts for e in kept])
        length, is_length_usable = self._to_ns([e.dur for e in kept])
        is_usable = is_start_usable & is_length_usable
        if not is_usable.all():
            self.num_unusable += int((~is_usable).sum())
            kept = [event for event, is_kept in zip(kept, is_usable, strict=True) if is_kept]
            start, length = start[is_usable], length[is_usable]
        return Batch(kept, start, start + length)

    def _to_ns(self, ticks: list[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Times as integer nanoseconds, and which of them can be had."""
        values = np.array(ticks, dtype=np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            is_usable = np.abs(values * self.ns_per_tick) < LARGEST_NS
        values[~is_usable] = 0.0
        if ticks and isinstance(ticks[0], Decimal):
            pairs = zip(ticks, is_usable, strict=True)
            exact = [round(tick * self.ns_per_tick) if is_kept else 0 for tick, is_kept in pairs]
            return np.array(exact, dtype=np.int64), is_usable
        whole = np.floor(values)
        found = whole.astype(np.int64) * self.ns_per_tick
        found += np.rint((values - whole) * self.ns_per_tick).astype(np.int64)
        return found, is_usable

    def _truncated(self) -> TraceUnreadable:
        return self._error(f"it ends too early, after {self.num_bytes:,} bytes: record or copy it again")

    def _malformed(self, error: msgspec.DecodeError, bytes_from_end: int) -> TraceUnreadable:
        what = BYTE.sub("", str(error)).removeprefix("JSON is malformed: ").strip()
        return self._error(f"it is no valid JSON ({what} at about byte {max(0, self.num_bytes - bytes_from_end):,})")

    def _error(self, what: str) -> TraceUnreadable:
        return TraceUnreadable(f"cannot read {self.path}: {what}")


def _find_byte(error: msgspec.DecodeError) -> int | None:
    """Where decoding stopped; None: at the end of the text, which is too short."""
    match = BYTE.search(str(error))
    return int(match.group(1)) if match else None


def _open(path: Path) -> BinaryIO:
    """The file, decompressed where it is compressed, whatever its name."""
    try:
        with path.open("rb") as file:
            is_compressed = file.read(2) == b"\x1f\x8b"
        return cast(BinaryIO, gzip.open(path, "rb")) if is_compressed else path.open("rb")
    except OSError as error:
        raise TraceUnreadable(f"cannot read {path}: {error.strerror or error}") from None
