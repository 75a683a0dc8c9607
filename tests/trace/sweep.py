"""The slow truth: what is busy at every stretch between two neighbouring edges, added up in whole nanoseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Span:
    """An event on a device or a host."""

    kind: str
    start: int
    end: int


def sweep(spans: Sequence[Span], low: int, high: int, is_wanted: Callable[[set[str]], bool]) -> int:
    """How long, within [low, high), the set of running kinds is a wanted one."""
    edges = {low, high, *(edge for span in spans for edge in (span.start, span.end) if low < edge < high)}
    ordered = sorted(edges)
    total = 0
    for begin, end in pairwise(ordered):
        running = {span.kind for span in spans if span.start <= begin and span.end >= end and span.end > span.start}
        if is_wanted(running):
            total += end - begin
    return total
