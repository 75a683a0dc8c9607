"""A trace file as batches of events whose times are integer nanoseconds. See `pieces` for how memory stays bounded.

A double holds microseconds to the nanosecond up to 2⁴³ of them, 101 days; where a file counts from 1970, numbers are
decoded as decimals instead. An event whose fields are of the wrong kind is repaired, or left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from scalelab.trace.classify import Event, Header
from scalelab.trace.pieces import Pieces
from scalelab.trace.repair import OpenEvents, is_time, pair_events, repair_events

EXACT_MICROSECONDS = float(2**43)
"""Below, the nearest double of a time in microseconds is less than half a nanosecond off."""
LARGEST_NS = 3 * 10**18
"""95 years. The distance of any two ends of events then fits 64 bits."""


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

    def batches(self) -> Iterator[Batch]:
        """Every event that has a duration."""
        yield from self._pieces
        self.num_unusable += sum(map(len, self._open_events.values()))

    def _decode_batch(self, text: bytes) -> Batch:
        events, num_odd = self._decode_events(text)
        if not self._is_exact and _find_largest(events) >= EXACT_MICROSECONDS:
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
        if not {event.ph for event in events}.isdisjoint("BE"):
            self._may_be_decimal = True
            events = pair_events(events, self._open_events)
        complete = [event for event in events if event.ph == "X"]
        if self._may_be_decimal:
            complete = [event for event in complete if is_time(event.ts) and is_time(event.dur)]
            self.num_unusable += sum(event.ph == "X" for event in events) - len(complete)
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
        """Times as integer nanoseconds, and which of them can be had."""
        values = np.array(ticks, dtype=np.float64)
        with np.errstate(over="ignore"):
            is_usable = np.abs(values * self.ns_per_tick) < LARGEST_NS
        values[~is_usable] = 0.0
        whole = np.floor(values)
        found = whole.astype(np.int64) * self.ns_per_tick
        found += np.rint((values - whole) * self.ns_per_tick).astype(np.int64)
        if self._may_be_decimal:
            for index, tick in enumerate(ticks):
                if is_usable[index] and isinstance(tick, Decimal):
                    found[index] = round(tick * self.ns_per_tick)
        return found, is_usable


def _find_largest(events: list[Event]) -> float:
    """The latest time of a list, in the unit of the file."""
    return float(max(filter(None, [event.ts for event in events]), default=0.0))
