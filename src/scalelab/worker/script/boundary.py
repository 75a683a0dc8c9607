"""Where a training step ends in a script that we did not write: at an optimizer.

A script may have one optimizer, several that step together (Muon and AdamW), or several that take turns (the two of a
GAN, where the critic may step more often). A step ends with the optimizer that steps least often; among equals, with
the one that steps last. An optimizer inside another one (ZeRO, wrappers) does not count: only the outermost call does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

MOST_REMEMBERED = 256
"""Optimizer calls that the rule looks at; later ones only confirm it."""


def choose_last(calls: Sequence[Hashable]) -> Hashable:
    """The optimizer that ends a step, given the optimizers in the order of their calls so far.

    In a cycle that is half done those that have stepped already are one call ahead: they are not the rarest.
    """
    counts = Counter(calls)
    fewest = min(counts.values())
    return [one for one in dict.fromkeys(calls) if counts[one] == fewest][-1]


def is_regular(calls: Sequence[Hashable], last: Hashable) -> bool:
    """Whether every step so far consists of the same optimizer calls."""
    cycles: list[tuple[Hashable, ...]] = []
    current: list[Hashable] = []
    for one in calls:
        current.append(one)
        if one == last:
            cycles.append(tuple(current))
            current = []
    return len(set(cycles)) <= 1


class StepRule:
    """Learns from optimizer calls which of them end a step."""

    def __init__(self) -> None:
        self._calls: list[Hashable] = []
        self.last: Hashable | None = None

    def see(self, optimizer: Hashable) -> tuple[bool, bool]:
        """Whether this call ends a step, and whether the rule had to change because of it."""
        if len(self._calls) < MOST_REMEMBERED:
            self._calls.append(optimizer)
            chosen = choose_last(self._calls)
            is_other = self.last is not None and chosen != self.last
            self.last = chosen
            return optimizer == chosen, is_other
        return optimizer == self.last, False

    @property
    def num_optimizers(self) -> int:
        return len(set(self._calls))

    @property
    def is_regular(self) -> bool:
        return self.last is None or is_regular(self._calls, self.last)
