"""Two traces name by name: what one runs that the other does not, what takes longer, what runs more often.

Times and counts are per rank and step, where both traces have steps, so that traces of different lengths can be
compared. What runs between steps counts too: it is divided by the number of steps like the rest. Of operators the time
themselves is compared, so that a slow one does not make all those slow that call it; of kernels the duration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Change(StrEnum):
    """What became of a name from A to B."""

    ADDED = "added"
    REMOVED = "removed"
    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"


NOTABLE = 0.05
"""A change of its time by less than this share is none."""


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How often one name ran in a trace, and for how long."""

    name: str
    count: int
    total_ns: int


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of two traces: what ran on all its ranks."""

    amounts: Sequence[Amount]
    num_ranks: int
    num_steps: int | None
    """Of every rank; None: they have none, or not the same number."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One name in two traces, per rank, and per step where `is_per_step`."""

    name: str
    change: Change
    count_a: float
    count_b: float
    seconds_a: float
    seconds_b: float

    @property
    def more_seconds(self) -> float:
        """What B takes more than A."""
        return self.seconds_b - self.seconds_a


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All names of two traces."""

    differences: Sequence[Difference]
    """The largest change of time first."""
    is_per_step: bool
    """Whether numbers are per step; else they are of the whole traces."""

    def list_changed(self, *changes: Change) -> list[Difference]:
        return [difference for difference in self.differences if difference.change in changes]


def compare_operators(a: Side, b: Side) -> Comparison:
    """Hold two traces against each other."""
    is_per_step = bool(a.num_steps and b.num_steps)
    before, after = (_add_up(side.amounts) for side in (a, b))
    shares = [1 / max(1, side.num_ranks) / ((side.num_steps or 1) if is_per_step else 1) for side in (a, b)]
    differences = [
        _compare(name, before.get(name, (0, 0)), after.get(name, (0, 0)), shares)
        for name in dict.fromkeys([*before, *after])
    ]
    ordered = sorted(differences, key=lambda found: (-abs(found.more_seconds), found.name))
    return Comparison(differences=ordered, is_per_step=is_per_step)


def _add_up(amounts: Iterable[Amount]) -> dict[str, tuple[int, int]]:
    """Count and time by name, over all ranks."""
    found: dict[str, tuple[int, int]] = {}
    for amount in amounts:
        count, total = found.get(amount.name, (0, 0))
        found[amount.name] = (count + amount.count, total + amount.total_ns)
    return found


def _compare(name: str, before: tuple[int, int], after: tuple[int, int], shares: Sequence[float]) -> Difference:
    seconds_a, seconds_b = before[1] * shares[0] / 1e9, after[1] * shares[1] / 1e9
    if not before[0]:
        change = Change.ADDED
    elif not after[0]:
        change = Change.REMOVED
    elif abs(seconds_b - seconds_a) <= NOTABLE * max(seconds_a, seconds_b):
        change = Change.SAME
    else:
        change = Change.SLOWER if seconds_b > seconds_a else Change.FASTER
    return Difference(
        name=name,
        change=change,
        count_a=before[0] * shares[0],
        count_b=after[0] * shares[1],
        seconds_a=seconds_a,
        seconds_b=seconds_b,
    )
