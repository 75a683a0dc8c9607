"""The traces of a job as one file for Perfetto or chrome://tracing: one process per rank, on one clock.

Every event is copied as it is, but for its time (on the clock of the reference, `alignment.py`), its process (the rank)
and its thread (numbered within the rank). In every matched collective, arrows lead from the last rank to those that
waited for it. Files are read again piece by piece, so memory does not grow with them.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from scalelab.records.files import replacing, storage_errors
from scalelab.trace.alignment import Clock
from scalelab.trace.files.events import LARGEST_NS, LARGEST_TIME
from scalelab.trace.files.pieces import Pieces
from scalelab.trace.job_trace import JobTrace
from scalelab.trace.matching import LARGEST_BASE_NS, MatchedGroup
from scalelab.trace.rank_trace import RankTrace

Fields = dict[str, msgspec.Raw]
Times = NDArray[np.int64]
MARGIN_NS = 1_000_000_000
"""What the host did before its device began lies within this, or has times below 0."""
MOST_ARROWS = 32
"""Of one collective: ranks are chosen evenly from more."""
SPAN_OF_IDS = 2**32
"""Arrows of a rank have numbers within this, so that those of all ranks differ."""
FLAG = "--merged"
FLOWS = ("s", "t", "f")
DROPPED = ("process_name", "process_labels", "process_sort_index")
"""Of the processes of a rank, which become one."""

_decode_fields = msgspec.json.Decoder(list[Fields]).decode
_encode = msgspec.json.encode


@dataclass
class _Rank:
    """One rank's way into the merged file."""

    rank: int
    trace: RankTrace
    clock: Clock | None
    origin_ns: int
    ns_per_tick: int
    num_dropped: int = 0
    _threads: dict[tuple[str, str], int] = field(default_factory=dict)

    def number_thread(self, process: str, thread: str) -> int:
        return self._threads.setdefault((process, thread), len(self._threads) + 1)

    def align(self, times: Times) -> Times:
        """Times of the file, in nanoseconds, on the clock of the merged one."""
        return align_times(self.trace, self.clock, times) - self.origin_ns

    def list_events(self) -> Iterator[bytes]:
        host = f" on {self.trace.header.host_name}" if self.trace.header.host_name else ""
        for name, args in (
            ("process_name", {"name": f"rank {self.rank}{host}"}),
            ("process_sort_index", {"sort_index": self.rank}),
        ):
            yield _encode({"ph": "M", "name": name, "pid": self.rank, "tid": 0, "args": args})
        for events in Pieces(self.trace.path, _decode_fields):
            yield from self._move(events)

    def _move(self, events: Sequence[Fields]) -> Iterator[bytes]:
        kept = [event for event in events if _read(event, "name") not in DROPPED]
        starts = [self._read_ns(event, "ts") for event in kept]
        lengths = [self._read_ns(event, "dur") for event in kept]
        low = np.array([one or 0 for one in starts], dtype=np.int64)
        high = low + np.array([one or 0 for one in lengths], dtype=np.int64)
        pairs = zip(self.align(low).tolist(), self.align(high).tolist(), strict=True)
        for event, start, length, (begin, end) in zip(kept, starts, lengths, pairs, strict=True):
            is_metadata = _read(event, "ph") == "M"
            if start is None and not is_metadata:
                self.num_dropped += 1
                continue
            yield self._write(event, None if start is None else begin, None if length is None else end - begin)

    def _write(self, event: Fields, start: int | None, length: int | None) -> bytes:
        process, thread = (str(_read(event, name)) for name in ("pid", "tid"))
        moved: dict[str, Any] = {**event, "pid": self.rank, "tid": self.number_thread(process, thread)}
        if start is not None:
            moved["ts"] = write_us(start)
        if length is not None:
            moved["dur"] = write_us(length)
        if "id" in event and _read(event, "ph") in FLOWS:
            moved["id"] = self.rank * SPAN_OF_IDS + _number(_read(event, "id"))
        return _encode(moved)

    def _read_ns(self, event: Fields, name: str) -> int | None:
        text = _read(event, name, is_text=True)
        if text is None:
            return None
        with suppress(InvalidOperation):
            time = Decimal(text)
            if time.is_finite() and abs(time) < LARGEST_TIME and abs(time * self.ns_per_tick) < LARGEST_NS:
                return round(time * self.ns_per_tick)
        return None


def align_times(trace: RankTrace, clock: Clock | None, times: Times) -> Times:
    """Times of a rank's file, in nanoseconds, on the clock of the reference."""
    base = trace.header.base_ns
    shifted = times + (base if abs(base) < LARGEST_BASE_NS else 0)
    return shifted if clock is None else clock.correct(shifted)


def _read(event: Fields, name: str, *, is_text: bool = False) -> Any:
    raw = event.get(name)
    if raw is None:
        return None
    if is_text:
        return bytes(raw).decode().strip('"')
    return msgspec.json.decode(raw)


def _number(id_: Any) -> int:
    return id_ if isinstance(id_, int) and 0 <= id_ < SPAN_OF_IDS else zlib.crc32(str(id_).encode())


def write_us(nanoseconds: int) -> msgspec.Raw:
    """Microseconds with three decimals, exactly."""
    sign, rest = ("-", -nanoseconds) if nanoseconds < 0 else ("", nanoseconds)
    return msgspec.Raw(f"{sign}{rest // 1000}.{rest % 1000:03d}".encode())


def write_merged(job: JobTrace, path: Path, *, ns_per_tick: int = 1000) -> int:
    """Write the merged file, compressed if its name ends with .gz; the number of events left out for want of a time."""
    clocks = job.clocks
    ranks = {rank: _Rank(rank, trace, clocks.get(rank), 0, ns_per_tick) for rank, trace in job.by_rank.items()}
    origin = min(int(one.align(np.array([one.trace.tables.low]))[0]) for one in ranks.values()) - MARGIN_NS
    for one in ranks.values():
        one.origin_ns = origin
    header = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": 0, "mergedRanks": list(ranks)}
    is_compressed = path.name.endswith(".gz")
    with storage_errors(path, FLAG), replacing(path) as scratch, _open(scratch, is_compressed=is_compressed) as file:
        file.write(_encode(header)[:-1] + b',"traceEvents":[\n')
        for number, text in enumerate(_list_all(job, ranks)):
            file.write((b",\n" if number else b"") + text)
        file.write(b"\n]}\n")
    return sum(one.num_dropped for one in ranks.values())


def _open(path: Path, *, is_compressed: bool) -> IO[bytes]:
    return gzip.open(path, "wb", compresslevel=3) if is_compressed else path.open("wb")  # type: ignore[return-value]


def _list_all(job: JobTrace, ranks: Mapping[int, _Rank]) -> Iterator[bytes]:
    for one in ranks.values():
        yield from one.list_events()
    number = 0
    for group in job.matching.groups if job.matching is not None else ():
        for row in range(len(group)):
            for arrow in _list_arrows(group, row, ranks):
                number += 1
                for end in arrow:
                    yield _encode({**end, "id": number, "cat": "collective", "name": group.kinds[row]})


def _list_arrows(group: MatchedGroup, row: int, ranks: Mapping[int, _Rank]) -> Iterator[tuple[dict[str, Any], ...]]:
    """From the last rank to those that were waiting when it came."""
    last = int(group.start_ns[row].argmax())
    came = int(group.start_ns[row, last])
    waiting = [c for c in range(len(group.ranks)) if c != last and int(group.end_ns[row, c]) > came + 1]
    for column in waiting[:: max(1, -(-len(waiting) // MOST_ARROWS))]:
        yield (
            {"ph": "s", **_place(group, row, last, ranks), "ts": write_us(came - ranks[group.ranks[last]].origin_ns)},
            {
                "ph": "f",
                "bp": "e",
                **_place(group, row, column, ranks),
                "ts": write_us(came + 1 - ranks[group.ranks[column]].origin_ns),
            },
        )


def _place(group: MatchedGroup, row: int, column: int, ranks: Mapping[int, _Rank]) -> dict[str, int]:
    one = ranks[group.ranks[column]]
    lane = one.trace.tables.lanes[one.trace.collectives[int(group.places[row, column])].stream]
    return {"pid": one.rank, "tid": one.number_thread(lane.process, lane.thread)}
