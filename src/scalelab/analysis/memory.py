"""Where the bytes of a training step go: a list of allocations and releases, replayed and sorted into categories.

Two things write such a list: torch's profiler, which sees every call of the allocator in a real step, and a step on
fake tensors, which allocates nothing. Both are accounted by the same rules, so that a forecast and a measurement can be
compared category by category:

    parameters    the model's own, as far as this rank holds them
    gradients     what `parameter.grad` holds when backward has ended
    optimizer     its state, such as Adam's two moments
    activations   made in forward and kept until backward
    output        the model's output, and what the loss keeps of it (the logits of a language model)
    buckets       for communication: DDP's buckets; FSDP's gathered units and the pieces it sends
    batch         this step's samples
    buffers       such as the running statistics of batch norm
    temporary     everything else that lives within the step: gradients of activations, what an operation needs while it
                  runs, activations that are computed again
    rest          alive before the step began and none of these

What is not freed when a phase ends, and what `named` says lies at an address then, decides. The peak is the highest sum
over the whole step; the categories are what was alive at that moment, so they add up to it exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "output",
    "buckets",
    "batch",
    "buffers",
    "temporary",
    "rest",
)
BEGIN = "begin"
"""The mark with which the step that is accounted begins; what comes before only fills the memory."""
KEPT_OF = {"input": "batch", "model": "activations", "forward": "output"}
"""What is still alive when a phase ends, by the phase that it was allocated in; `model` ends where the loss begins."""


class MemoryEvent(NamedTuple):
    """One call of the allocator."""

    seconds: float
    num_bytes: int
    """Above 0: allocated; below: released."""
    address: int
    is_exchange: bool = False
    """Whether the strategy asked for it, to gather or to send."""


@dataclass(frozen=True, kw_only=True)
class PhaseMark:
    """The end of a phase: how many events came before it, and what lies at known addresses then."""

    phase: str
    position: int
    named: Mapping[int, str] = field(default_factory=dict)
    """Categories by address."""


class MemoryPoint(NamedTuple):
    """A line of the timeline."""

    seconds: float
    alive_bytes: int
    """After this call."""
    num_bytes: int
    category: str
    phase: str


@dataclass(frozen=True, kw_only=True)
class MemoryAccount:
    """A step's memory."""

    peak_bytes: int
    peak_phase: str
    """The phase in which the peak is reached; empty: nothing was allocated."""
    current_bytes: int
    """Alive when the step has ended."""
    by_category: dict[str, int]
    """At the peak; they add up to it."""
    phase_peaks: dict[str, int]
    """The highest point of every phase."""
    timeline: list[MemoryPoint]


@dataclass(kw_only=True)
class _Piece:
    """One allocation, from its first to its last event."""

    num_bytes: int
    address: int
    first: int
    last: int | None = None
    is_exchange: bool = False
    category: str = ""


def account_step(
    events: Sequence[MemoryEvent], marks: Sequence[PhaseMark], standing: Mapping[str, int]
) -> MemoryAccount:
    """The account of the step behind the mark `begin`; `standing` are bytes that were there before any event."""
    pieces, calls = _follow(events)
    start = next((mark.position for mark in marks if mark.phase == BEGIN), 0)
    for piece in pieces:
        piece.category = _sort_piece(piece, marks, start)
    alive = dict.fromkeys(CATEGORIES, 0) | dict(standing)
    total = sum(alive.values())
    peak, peak_phase, at_peak = 0, "", dict(alive)
    phase_peaks: dict[str, int] = {}
    timeline: list[MemoryPoint] = []
    for number, piece, num_bytes in calls:
        alive[piece.category] += num_bytes
        total += num_bytes
        phase = _find_phase(number, marks)
        if number >= start:
            phase_peaks[phase] = max(phase_peaks.get(phase, 0), total)
            timeline.append(MemoryPoint(events[number].seconds, total, num_bytes, piece.category, phase))
        if number >= start and total > peak:
            peak, peak_phase, at_peak = total, phase, dict(alive)
    return MemoryAccount(
        peak_bytes=peak or total,
        peak_phase=peak_phase,
        current_bytes=total,
        by_category=_drop_empty(at_peak if peak else alive),
        phase_peaks=phase_peaks,
        timeline=timeline,
    )


def find_alive(events: Sequence[MemoryEvent]) -> set[int]:
    """The addresses that events have made and not released."""
    last = {event.address: event.num_bytes for event in events}
    return {address for address, num_bytes in last.items() if num_bytes > 0}


def _drop_empty(sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size}


def _follow(events: Sequence[MemoryEvent]) -> tuple[list[_Piece], list[tuple[int, _Piece, int]]]:
    """The pieces that were allocated, and every change of them by the number of its event.

    A release of something that was there before is not seen by every source, so it is left out. An address that is
    given out again was released unobserved.
    """
    pieces: list[_Piece] = []
    calls: list[tuple[int, _Piece, int]] = []
    living: dict[int, _Piece] = {}
    for number, event in enumerate(events):
        old = living.pop(event.address, None)
        if old is not None:
            old.last = number
            calls.append((number, old, -old.num_bytes))
        if event.num_bytes > 0:
            piece = _Piece(
                num_bytes=event.num_bytes, address=event.address, first=number, is_exchange=event.is_exchange
            )
            living[event.address] = piece
            pieces.append(piece)
            calls.append((number, piece, piece.num_bytes))
    return pieces, calls


def _sort_piece(piece: _Piece, marks: Sequence[PhaseMark], start: int) -> str:
    """The category of an allocation: by its name at any mark, by who asked for it, or by what outlived its phase."""
    survived = [mark for mark in marks if piece.first < mark.position and _is_alive_at(piece, mark.position)]
    for mark in survived:
        if piece.address in mark.named:
            return mark.named[piece.address]
    if piece.is_exchange:
        return "buckets"
    end = next((mark for mark in marks if mark.position > piece.first), None)
    if piece.first < start and (piece.last is None or piece.last >= start):
        return "rest"
    if end is None or end not in survived:
        return "temporary"
    return KEPT_OF.get(end.phase, "temporary")


def _is_alive_at(piece: _Piece, position: int) -> bool:
    return piece.last is None or piece.last >= position


def _find_phase(number: int, marks: Sequence[PhaseMark]) -> str:
    """The phase that an event belongs to; the model and its loss are both forward, what follows is the last one's."""
    phase = next((mark.phase for mark in marks if mark.position > number), marks[-1].phase if marks else "")
    return "forward" if phase == "model" else phase


def estimate_states(parameter_bytes: int, optimizer_bytes: int) -> int:
    """Parameters, gradients of the same size, and the optimizer: 4P + 4P + 8P for Adam in float32.

    The count that is often taken for the whole (Rajbhandari et al. 2020, "ZeRO", section 3.1): no activation, no
    output, no buffer and nothing temporary is in it.
    """
    return 2 * parameter_bytes + optimizer_bytes
