from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.trace.rank_time import Times, clip, measure, merge

PAIRS = st.lists(st.tuples(st.integers(-20, 40), st.integers(0, 12)), max_size=25)


def make(pairs: list[tuple[int, int]]) -> tuple[Times, Times]:
    start = np.array([start for start, _ in pairs], dtype=np.int64)
    return start, start + np.array([length for _, length in pairs], dtype=np.int64)


def points(pairs: list[tuple[int, int]]) -> set[int]:
    """The unit stretches that are covered."""
    return {point for start, length in pairs for point in range(start, start + length)}


@given(PAIRS)
@settings(derandomize=True, deadline=None)
def test_a_union_measures_what_its_points_are(pairs: list[tuple[int, int]]) -> None:
    assert measure(*make(pairs)) == len(points(pairs))


@given(PAIRS)
@settings(derandomize=True, deadline=None)
def test_merged_intervals_are_apart_in_order_and_cover_the_same(pairs: list[tuple[int, int]]) -> None:
    start, end = merge(*make(pairs))
    assert (end > start).all()
    assert (start[1:] > end[:-1]).all()
    covered = zip(start.tolist(), (end - start).tolist(), strict=True)
    assert points(list(covered)) == points(pairs)


@given(PAIRS, st.integers(-25, 45), st.integers(0, 30))
@settings(derandomize=True, deadline=None)
def test_clipping_keeps_what_lies_within(pairs: list[tuple[int, int]], low: int, length: int) -> None:
    start, end = clip(*make(pairs), low, low + length)
    assert measure(start, end) == len(points(pairs) & set(range(low, low + length)))


def test_times_since_1970_lose_nothing() -> None:
    base = 1_712_345_678_901_234_567
    assert measure(*make([(base, 5), (base + 3, 5), (base + 9, 1)])) == 9


def test_nothing_measures_nothing() -> None:
    assert measure(*make([])) == 0
    assert measure(*make([(5, 0), (5, 0)])) == 0
