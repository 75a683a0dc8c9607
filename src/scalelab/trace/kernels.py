"""What the streams of a device ran, by name: how often, how long in all, how long at most.

A kernel counts where it begins. The total is the sum of durations, whatever ran beside them on other streams, so it may
be longer than the span; a share of it says which kernels to look at, not how much faster the training would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalelab.trace.classify import Kind
from scalelab.trace.rank import Tables
from scalelab.trace.windows import Steps, Window, is_chosen

KINDS = {Kind.COMPUTE: "compute", Kind.COMMUNICATION: "communication", Kind.COPY: "copy"}


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """All runs of one kernel."""

    name: str
    kind: str
    """compute, communication or copy."""
    count: int
    total_ns: int
    longest_ns: int

    @property
    def mean_ns(self) -> float:
        return self.total_ns / self.count


class KernelCounter:
    """Adds kernels up by name."""

    def __init__(self, tables: Tables, steps: Steps = None) -> None:
        self._names = tables.names
        self._steps = steps
        size = len(KINDS) * len(tables.names)
        self._count = np.zeros(size, dtype=np.int64)
        self._total = np.zeros(size, dtype=np.int64)
        self._longest = np.zeros(size, dtype=np.int64)

    def take(self, window: Window) -> None:
        if not is_chosen(window, self._steps):
            return
        records = window.records[window.records["on_device"] & (window.records["kind"] <= Kind.COPY)]
        if not len(records):
            return
        keys = records["name"].astype(np.int64) * len(KINDS) + records["kind"]
        length = records["end"] - records["start"]
        np.add.at(self._count, keys, 1)
        np.add.at(self._total, keys, length)
        np.maximum.at(self._longest, keys, length)

    def finish(self) -> Sequence[KernelTime]:
        """The longest total first."""
        found = [
            KernelTime(
                name=self._names[key // len(KINDS)],
                kind=KINDS[Kind(key % len(KINDS))],
                count=int(self._count[key]),
                total_ns=int(self._total[key]),
                longest_ns=int(self._longest[key]),
            )
            for key in map(int, np.flatnonzero(self._count))
        ]
        return sorted(found, key=lambda kernel: (-kernel.total_ns, kernel.name))
