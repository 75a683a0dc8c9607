"""Exponents: exact powers are found exactly, sums of powers lie between, noise is covered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelab.analysis.growth import find_exponent, fit_power, from_rounded


@given(st.floats(-3, 3), st.floats(1e-6, 1e6), st.sets(st.integers(1, 4096), min_size=2, max_size=5))
def test_an_exact_power_is_found(exponent: float, level: float, sizes: set[int]) -> None:
    fit = fit_power({size: [[level * size**exponent] * 3] * 2 for size in sizes})
    assert fit is not None
    assert fit.exponent.value == pytest.approx(exponent, abs=1e-6)
    assert (fit.smallest, fit.largest) == (min(sizes), max(sizes))


def test_a_sum_of_powers_has_an_exponent_between_them() -> None:
    assert 1 < find_exponent([1, 2, 4, 8], [size + size**2 for size in (1, 2, 4, 8)]) < 2


def test_two_sizes_leave_no_residual_and_three_do() -> None:
    two = fit_power({1: [[1.0]], 2: [[3.0]]})
    three = fit_power({1: [[1.0]], 2: [[3.0]], 4: [[4.0]]})
    assert two is not None
    assert two.residual_ratio is None
    assert three is not None
    assert three.residual_ratio is not None
    assert three.residual_ratio > 0.1


def test_a_machine_that_slows_down_half_way_moves_no_exponent() -> None:
    speed = [1.0, 1.0, 1.0, 1.5, 1.5, 1.5]
    fit = fit_power({size: [[size**2 * slow] for slow in speed] for size in (2, 4, 8)})
    assert fit is not None
    assert fit.exponent.value == pytest.approx(2.0)
    assert fit.exponent.half_width == pytest.approx(0.0, abs=1e-9)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        noisy = {size: [[size**1.5 * float(np.exp(rng.normal(0, 0.05)))] for _ in range(8)] for size in (2, 4, 8)}
        fit = fit_power(noisy)
        assert fit is not None
        assert fit.exponent.low is not None
        assert fit.exponent.high is not None
        hits += fit.exponent.low <= 1.5 <= fit.exponent.high
    assert 180 <= hits <= 199


def test_fewer_than_two_sizes_have_no_exponent() -> None:
    assert fit_power({}) is None
    assert fit_power({4: [[1.0]]}) is None
    assert fit_power({4: [[1.0]], 8: [[]]}) is None
    assert fit_power({4: [[1.0]], 0: [[1.0]]}) is None


def test_sizes_that_share_no_round_have_an_exponent_without_an_interval() -> None:
    fit = fit_power({1: [[1.0], []], 2: [[], [2.0]]})
    assert fit is not None
    assert fit.exponent.value == pytest.approx(1.0)
    assert fit.exponent.low is None


def test_the_residual_is_that_of_the_line_through_the_logs() -> None:
    """Of 1, 3 and 4 at 1, 2 and 4 the line doubles with the size, and its middle is their geometric mean."""
    fit = fit_power({1: [[1.0]], 2: [[3.0]], 4: [[4.0]]})
    assert fit is not None
    middle = 12 ** (1 / 3)
    assert fit.exponent.value == pytest.approx(1.0)
    errors = (middle / 2 - 1, middle / 3 - 1, 2 * middle / 4 - 1)
    assert fit.residual_ratio == pytest.approx((sum(error**2 for error in errors) / 3) ** 0.5)


@pytest.mark.parametrize(("decimals", "half"), [(0, 0.5), (1, 0.05), (3, 0.0005)])
def test_a_rounded_number_may_have_been_half_a_digit_off(decimals: int, half: float) -> None:
    found = from_rounded(2.5, decimals)
    assert (found.low, found.value, found.high) == (pytest.approx(2.5 - half), 2.5, pytest.approx(2.5 + half))
