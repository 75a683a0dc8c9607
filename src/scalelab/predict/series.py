"""A scaling series: what somebody measured on several numbers of ranks, in one unit.

Every table of scaling, of throughputs or of times, of the same job or of one that grows with its ranks, says the same
thing after one division: how much longer a rank needs for a sample than it did at the smallest size,

    stretch(n) = (n / X(n)) / (n₁ / X(n₁))          X  throughput, or 1 / time of the same job

which is 1 / efficiency. 1 is perfect scaling; a law of scaling is a law of this number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scalelab.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ScalingSeries:
    """Throughput by number of ranks."""

    label: str
    throughput: Mapping[int, float]
    """Samples, tokens or jobs per second, of all ranks together."""
    is_time: bool = False
    """Whether the table gave the time of a fixed job: its throughput is 1 / time."""
    unit: str = ""
    """The column's own name."""

    def __post_init__(self) -> None:
        for ranks, value in self.throughput.items():
            if ranks < 1:
                raise UsageError(f"{self.label}: {ranks} ranks cannot be: use whole numbers from 1")
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{self.label}: {value:g} on {ranks} ranks is no throughput: it must be above 0")

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.throughput))

    @property
    def stretch(self) -> dict[int, float]:
        """By number of ranks, over the smallest."""
        first = self.ranks[0]
        base = first / self.throughput[first]
        return {ranks: ranks / self.throughput[ranks] / base for ranks in self.ranks}

    def keep_smallest(self, count: int) -> ScalingSeries:
        """The series as it was known when only so many sizes had been run."""
        kept = {ranks: self.throughput[ranks] for ranks in self.ranks[:count]}
        return ScalingSeries(label=self.label, throughput=kept, is_time=self.is_time, unit=self.unit)

    def throughput_at(self, ranks: int, stretch: float) -> float:
        """The throughput that a stretch stands for."""
        first = self.ranks[0]
        return self.throughput[first] / first * ranks / stretch
