"""Where a training step ends in a script that we did not write: at an optimizer.

A script may have one optimizer, several that step together (Muon and AdamW), or several that take turns (the two of a
GAN, where the critic may step more often). A step ends with the optimizer that steps least often; among equals, with
the one that steps last. An optimizer inside another one (ZeRO, wrappers) does not count: only the outermost call does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

TAKEN_OVER = 4
"""Calls of an optimizer, without any of the others, that make another training."""
MOST_REMEMBERED = 256
"""Optimizer calls that the rule looks at; later ones only confirm it."""


def choose_last(counts: Mapping[Hashable, int]) -> Hashable:
    """The optimizer that ends a step, given how often each was called, in the order of their first calls.

    In a cycle that is half done those that have stepped already are one call ahead: they are not the rarest.
    """
    fewest = min(counts.values())
    return [one for one, number in counts.items() if number == fewest][-1]


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
        self._counts = Counter[Hashable]()
        self._num_alone = 0
        self._is_new = False
        self.last: Hashable | None = None

    def see(self, optimizer: Hashable) -> tuple[bool, bool]:
        """Whether this call ends a step, and whether the rule had to change because of it."""
        if len(self._calls) == MOST_REMEMBERED:
            return optimizer == self.last, False
        if not self._calls or optimizer != self._calls[-1]:
            self._num_alone, self._is_new = 0, optimizer not in self._counts
        self._num_alone += 1
        self._calls.append(optimizer)
        self._counts[optimizer] += 1
        chosen = choose_last(self._counts)
        is_other = self.last is not None and chosen != self.last
        self.last = chosen
        return optimizer == chosen, is_other

    @property
    def is_second_training(self) -> bool:
        """Whether an optimizer that was not there before has taken over: it alone made the last calls.

        Those that take turns come back within a few calls; a critic may step first, but then it steps on.
        """
        num_before = len(self._calls) - self._num_alone
        return self._is_new and min(self._num_alone, num_before) >= TAKEN_OVER

    @property
    def num_optimizers(self) -> int:
        return len(self._counts)

    @property
    def is_regular(self) -> bool:
        return self.last is None or is_regular(self._calls, self.last)
