"""Two lists that differ by a few entries."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelab.trace import alignment
from scalelab.trace.alignment import align_from_end, align_lists

LISTS = st.lists(st.sampled_from("abc"), max_size=12)


def find_longest(left: list[str], right: list[str]) -> int:
    """The length of the longest common list, by the textbook's table."""
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, one in enumerate(left):
        for j, other in enumerate(right):
            table[i + 1][j + 1] = table[i][j] + 1 if one == other else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@pytest.mark.parametrize("align", [align_lists, align_from_end])
@given(left=LISTS, right=LISTS)
def test_pairs_are_equal_in_order_and_as_many_as_there_can_be(align: object, left: list[str], right: list[str]) -> None:
    assert callable(align)
    pairs = align(left, right)
    assert all(left[i] == right[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in pairwise(pairs))
    assert len(pairs) == find_longest(left, right)


def test_equal_lists_are_paired_one_by_one() -> None:
    assert align_lists("abc", "abc") == [(0, 0), (1, 1), (2, 2)]


def test_what_is_missing_is_taken_from_the_end_or_from_the_beginning() -> None:
    assert align_lists("aaa", "aa") == [(0, 0), (1, 1)]
    assert align_from_end("aaa", "aa") == [(1, 0), (2, 1)]


def test_lists_that_differ_too_much_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "MOST_DIFFERENCES", 3)
    assert align_lists("abc", "xyz") == []
    assert align_lists("abcd", "bcde") == [(1, 0), (2, 1), (3, 2)]
