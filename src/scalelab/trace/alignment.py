"""Two lists that are the same but for what one of them lacks: which entries belong together.

The shortest list of insertions and deletions that makes one from the other is found by the algorithm of Myers, "An
O(ND) Difference Algorithm and Its Variations", Algorithmica 1 (1986): quick where little differs, and given up where
more than `MOST_DIFFERENCES` do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

MOST_DIFFERENCES = 1000

Pairs = list[tuple[int, int]]


def align_lists(left: Sequence[Hashable], right: Sequence[Hashable]) -> Pairs:
    """Places in both that hold equal entries, in order; nothing where the lists differ too much.

    Where several answers are as good, entries are paired as early as possible.
    """
    reached = _search(left, right)
    if reached is None:
        return []
    pairs: Pairs = []
    x, y = len(left), len(right)
    for num_differences in range(len(reached) - 1, -1, -1):
        diagonal = x - y
        if num_differences:
            before = reached[num_differences - 1]
            came_down = _comes_down(before, diagonal, num_differences)
            previous = diagonal + 1 if came_down else diagonal - 1
            start_x = before[previous] if came_down else before[previous] + 1
        else:
            previous, start_x = 0, 0
        while x > start_x:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        if num_differences:
            x = before[previous]
            y = x - previous
    return pairs[::-1]


def _comes_down(reached: dict[int, int], diagonal: int, num_differences: int) -> bool:
    """Whether the furthest way to a diagonal skips an entry of the right list, not of the left one."""
    if diagonal == -num_differences:
        return True
    return diagonal != num_differences and reached[diagonal - 1] < reached[diagonal + 1]


def _search(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[dict[int, int]] | None:
    """How far along each diagonal one gets with 0, 1, 2 … differences, until the end of both lists."""
    reached: list[dict[int, int]] = []
    for num_differences in range(min(len(left) + len(right), MOST_DIFFERENCES) + 1):
        found: dict[int, int] = {}
        for diagonal in range(-num_differences, num_differences + 1, 2):
            if not num_differences:
                x = 0
            elif _comes_down(reached[-1], diagonal, num_differences):
                x = reached[-1][diagonal + 1]
            else:
                x = reached[-1][diagonal - 1] + 1
            while x < len(left) and x - diagonal < len(right) and left[x] == right[x - diagonal]:
                x += 1
            found[diagonal] = x
            if x >= len(left) and x - diagonal >= len(right):
                reached.append(found)
                return reached
        reached.append(found)
    return None


def align_from_end(left: Sequence[Hashable], right: Sequence[Hashable]) -> Pairs:
    """The same, with entries paired as late as possible where several answers are as good."""
    pairs = align_lists(left[::-1], right[::-1])
    return [(len(left) - 1 - i, len(right) - 1 - j) for i, j in reversed(pairs)]
