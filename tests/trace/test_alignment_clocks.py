"""Clocks that are ahead, behind, or run at another speed."""

from __future__ import annotations

import numpy as np
import pytest

from scalelab.trace.alignment import Clock, Times, find_slope, measure_spread, set_clock

YEARS_NS = 1_790_000_000_000_000_000
"""Times count from 1970."""


def make_ends(num: int = 50, period_ns: int = 10_000_000) -> Times:
    return YEARS_NS + period_ns * np.arange(num, dtype=np.int64)


def test_a_constant_difference_is_found_to_the_nanosecond() -> None:
    ends = make_ends()
    clock = set_clock(1, 0, ends + 3_000_000_017, ends, is_same_host=False)
    assert (clock.offset_ns, clock.drift, clock.uncertainty_ns, clock.num_collectives) == (3_000_000_017, 0.0, 0, 50)
    assert np.array_equal(clock.correct(ends + 3_000_000_017), ends)


def test_even_where_one_clock_counts_from_1970_and_the_other_from_0() -> None:
    ends = make_ends(20)
    clock = set_clock(1, 0, ends, ends - YEARS_NS, is_same_host=False)
    assert clock.offset_ns == YEARS_NS


def test_single_ends_that_are_far_off_do_not_move_it() -> None:
    ends = make_ends(21)
    late = ends.copy()
    late[::5] += 7_000_000
    assert set_clock(1, 0, late + 1000, ends, is_same_host=False).offset_ns == 1000


def test_a_clock_that_runs_faster_is_put_back_at_every_time() -> None:
    ends = make_ends()
    elapsed = ends - ends[0]
    fast = ends + 5_000_000 + np.rint(4e-5 * elapsed).astype(np.int64)
    clock = set_clock(1, 0, fast, ends, is_same_host=False)
    assert clock.drift == pytest.approx(4e-5, rel=1e-3)
    assert np.abs(clock.correct(fast) - ends).max() <= 10
    assert clock.uncertainty_ns <= 10


def test_noise_is_no_drift_and_becomes_the_uncertainty() -> None:
    rng = np.random.default_rng(1)
    ends = make_ends(200)
    noise = np.rint(rng.normal(0, 10_000, 200)).astype(np.int64)
    clock = set_clock(1, 0, ends + noise, ends, is_same_host=False)
    assert clock.drift == 0
    assert clock.uncertainty_ns == pytest.approx(20_000, rel=0.3)


def test_of_a_few_the_largest_difference_is_the_uncertainty() -> None:
    ends = make_ends(3)
    clock = set_clock(1, 0, ends + np.array([0, 100, 5000]), ends, is_same_host=False)
    assert (clock.offset_ns, clock.uncertainty_ns) == (100, 4900)


def test_ranks_of_one_host_have_one_clock_unless_they_clearly_do_not() -> None:
    ends = make_ends(3)
    close = ends + np.array([10, 20, 500])
    assert set_clock(1, 0, close, ends, is_same_host=True).offset_ns == 0
    assert set_clock(1, 0, close, ends, is_same_host=False).offset_ns == 20
    assert set_clock(1, 0, ends + 9_000_000, ends, is_same_host=True).offset_ns == 9_000_000


def test_the_reference_is_left_alone() -> None:
    ends = make_ends()
    assert np.array_equal(Clock(rank=0, reference=0).correct(ends), ends)


def test_points_at_one_time_have_no_slope() -> None:
    assert find_slope(np.zeros(10), np.arange(10.0)) == 0.0


def test_the_spread_of_normal_noise_is_its_standard_deviation() -> None:
    rng = np.random.default_rng(2)
    assert measure_spread(rng.normal(5, 3, 10_000)) == pytest.approx(3, rel=0.05)


def test_a_single_collective_does_not_move_the_clock_that_ranks_of_a_host_share() -> None:
    ends = make_ends(1)
    assert set_clock(1, 0, ends + 9_000_000, ends, is_same_host=True).offset_ns == 0
    assert set_clock(1, 0, ends + 9_000_000, ends, is_same_host=False).offset_ns == 9_000_000
