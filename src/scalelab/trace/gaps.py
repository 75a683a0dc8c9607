"""The most costly gaps of every lane, by the names of what ran before and after."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.rank import Lane, Tables

MOST_PAIRS = 100_000
"""Pairs that are told apart at any time; beyond, the less costly half is forgotten."""


@dataclass(frozen=True, kw_only=True)
class GapPair:
    """All gaps between two names that followed each other on a lane."""

    lane: Lane
    before: str
    after: str
    count: int
    total_ns: int


class PairTally:
    """Adds gaps up by pairs of names."""

    def __init__(self, tables: Tables) -> None:
        self._names = tables.names
        self._lanes = tables.lanes
        self._found: dict[tuple[int, int], tuple[int, int]] = {}
        """Count and total by lane and pair."""

    def add(self, lane: int, before: NDArray[np.int32], after: NDArray[np.int32], gap: NDArray[np.int64]) -> None:
        keys, places = np.unique(before.astype(np.int64) * len(self._names) + after, return_inverse=True)
        total = np.zeros(len(keys), dtype=np.int64)
        np.add.at(total, places, gap)
        for key, count, time in zip(keys.tolist(), np.bincount(places).tolist(), total.tolist(), strict=True):
            known = self._found.get((lane, key), (0, 0))
            self._found[lane, key] = (known[0] + count, known[1] + time)
        if len(self._found) > MOST_PAIRS:
            self._found = dict(self._order()[: MOST_PAIRS // 2])

    def _order(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        return sorted(self._found.items(), key=lambda item: (-item[1][1], item[0]))

    def finish(self, unwanted: Set[int] = frozenset()) -> Sequence[GapPair]:
        """The most costly first, but for those of unwanted lanes."""
        found = []
        for (lane, key), (count, total) in self._order():
            before, after = (self._names[number] for number in divmod(key, len(self._names)))
            if lane not in unwanted:
                pair = GapPair(lane=self._lanes[lane], before=before, after=after, count=count, total_ns=total)
                found.append(pair)
        return found
