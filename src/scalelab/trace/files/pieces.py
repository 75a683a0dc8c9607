"""The text of a trace file in pieces, each a list of events, in memory that does not grow with the file.

The boundary between two events is guessed from the text near the end of a piece: `}`, a comma, `{`. A guess inside an
event leaves at least two brackets or a quotation mark open; only one bracket is added, so decoding fails and a wrong
cut is never accepted. If the last guesses are wrong, as in events that hold lists of objects, the piece is scanned
bracket by bracket from its start, which is a known boundary. All of this is linear in the length of the file.

A file that is not JSON, or is truncated, raises `TraceUnreadable` with the file, the byte and what to do.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar, cast

import msgspec

from scalelab.errors import TraceUnreadable
from scalelab.trace.files.events import Header, read_header

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
            if buffer.startswith(b"SQLite format 3"):
                raise self.error("it is a database of Nsight Systems: --hta and --merged need files of torch.profiler")
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
        for guess in _guess_breaks(buffer):
            text = b"".join((b"[", memoryview(buffer)[:guess], b"]"))
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


def _guess_breaks(buffer: bytes) -> list[int]:
    """Where events may end, the last first. (Two looks, because most events are short and patterns are slow.)"""
    for reach in (PIECE_BYTES // 128, PIECE_BYTES // 8):
        found = [match.start() + 1 for match in BREAK.finditer(buffer, max(0, len(buffer) - reach))]
        if len(found) >= MOST_GUESSES:
            break
    return found[: -MOST_GUESSES - 1 : -1]


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
