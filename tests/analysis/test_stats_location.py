"""The centre of a few numbers: exact tables, known small cases, and invariances."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.analysis.rounds import MOST_LISTED, find_position, select_averages, tabulate_signed_rank
from scalelab.analysis.stats import TAIL, estimate_location, find_t_quantile

VALUES = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=15)


def test_nothing_has_no_centre() -> None:
    with pytest.raises(ValueError, match="no values"):
        estimate_location([])


def test_one_number_has_no_interval() -> None:
    estimate = estimate_location([3.0])
    assert (estimate.value, estimate.low, estimate.high) == (3.0, None, None)


def test_equal_numbers_have_an_interval_of_no_width() -> None:
    estimate = estimate_location([2.0] * 8)
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 2.0, 2.0)


def test_three_numbers_have_students_interval() -> None:
    estimate = estimate_location([1.0, 2.0, 3.0])
    assert estimate.value == 2.0
    assert estimate.half_width == pytest.approx(4.3027 / np.sqrt(3), rel=1e-4)


def test_students_quantile_is_the_tabulated_one() -> None:
    assert find_t_quantile(7) == pytest.approx(2.3646, abs=1e-4)


def test_the_signed_rank_table_is_what_counting_all_signs_gives() -> None:
    choices = itertools.product((0, 1), repeat=6)
    sums = [sum(rank * chosen for rank, chosen in enumerate(choice, start=1)) for choice in choices]
    counted = [np.mean([total <= limit for total in sums]) for limit in range(22)]
    assert tabulate_signed_rank(6) == pytest.approx(counted)


def test_eight_numbers_have_limits_between_the_published_ranks() -> None:
    """The two-sided 5 % test with n = 8 has the critical value 3: the limits lie past the fourth average."""
    assert 3 <= find_position(8, TAIL) < 4


@pytest.mark.parametrize("digits", [0, 1, 12])
def test_the_averages_of_many_numbers_are_those_of_all_pairs(digits: int) -> None:
    data = np.random.default_rng(digits).normal(size=MOST_LISTED + 90).round(digits)
    first, second = np.triu_indices(len(data))
    listed = np.sort((data[first] + data[second]) / 2)
    ranks = [0, 1, 777, len(listed) // 2, len(listed) - 778, len(listed) - 1]
    assert select_averages(data, ranks) == pytest.approx([float(listed[rank]) for rank in ranks], abs=1e-12)


def test_the_limits_of_many_numbers_are_those_of_the_table() -> None:
    table = tabulate_signed_rank(MOST_LISTED + 1)
    exact = float(np.interp(TAIL, table, np.arange(len(table))))
    middle = (len(table) - 1) / 2
    assert middle - find_position(MOST_LISTED + 1, TAIL) == pytest.approx(middle - exact, rel=2e-3)


def test_one_wild_number_hardly_moves_the_centre() -> None:
    calm = [0.01 * index for index in range(8)]
    moved = estimate_location([*calm[:-1], 100.0]).value - estimate_location(calm).value
    assert abs(moved) < 0.02


@given(VALUES)
@settings(deadline=None)
def test_the_interval_holds_the_value(values: list[float]) -> None:
    estimate = estimate_location(values)
    assert estimate.low is not None
    assert estimate.high is not None
    assert estimate.low <= estimate.value <= estimate.high


@given(VALUES, st.floats(-10, 10), st.floats(0.1, 10))
@settings(deadline=None)
def test_shifting_and_stretching_the_numbers_does_the_same_to_the_estimate(
    values: list[float], shift: float, stretch: float
) -> None:
    estimate = estimate_location(values)
    changed = estimate_location([shift + stretch * value for value in values])
    assert estimate.low is not None
    assert estimate.high is not None
    expected = [shift + stretch * end for end in (estimate.low, estimate.value, estimate.high)]
    assert [changed.low, changed.value, changed.high] == pytest.approx(expected, abs=1e-6)


@given(VALUES)
@settings(deadline=None)
def test_the_order_of_the_numbers_does_not_matter(values: list[float]) -> None:
    assert estimate_location(values[::-1]).value == pytest.approx(estimate_location(values).value, abs=1e-9)
