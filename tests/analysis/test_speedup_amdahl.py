"""Amdahl's and Gustafson's laws: exact data give exact fractions, noisy data give intervals that cover."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import fit_amdahl, fit_gustafson
from tests.analysis.noise import simulate_sizes

SIZES = (1, 2, 4, 8)


def time_amdahl(serial: float) -> Callable[[int], float]:
    return lambda num_ranks: serial + (1 - serial) / num_ranks


def time_gustafson(serial: float) -> Callable[[int], float]:
    return lambda num_ranks: num_ranks / (num_ranks - serial * (num_ranks - 1))


def repeat(law: Callable[[int], float], sizes: tuple[int, ...] = SIZES) -> dict[int, list[list[float]]]:
    return {size: [[law(size)] * 5] * 3 for size in sizes}


def covers(estimate: Estimate, truth: float) -> bool:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low - 1e-9 <= truth <= estimate.high + 1e-9


def test_perfect_scaling_has_no_serial_part() -> None:
    fit = fit_amdahl(repeat(time_amdahl(0.0)))
    assert fit is not None
    assert fit.serial_fraction.value == pytest.approx(0.0, abs=1e-9)
    assert fit.predict_speedup(16).value == pytest.approx(16.0)


def test_no_scaling_is_all_serial() -> None:
    fit = fit_amdahl(repeat(time_amdahl(1.0)))
    assert fit is not None
    assert fit.serial_fraction.value == pytest.approx(1.0)
    assert fit.predict_speedup(16).value == pytest.approx(1.0)


@given(st.floats(0, 1), st.sampled_from([(1, 2), (2, 4), (1, 2, 4), (1, 3, 8, 16)]))
@settings(deadline=None)
def test_an_exact_law_is_recovered_from_any_sizes(serial: float, sizes: tuple[int, ...]) -> None:
    strong, weak = (
        fit_amdahl(repeat(time_amdahl(serial), sizes)),
        fit_gustafson(repeat(time_gustafson(serial), sizes)),
    )
    for fit in (strong, weak):
        assert fit is not None
        ends = (fit.serial_fraction.low, fit.serial_fraction.value, fit.serial_fraction.high)
        assert ends == pytest.approx((serial, serial, serial), abs=1e-6), "every round says the same"
        assert fit.one_rank_seconds == pytest.approx(1.0)
        assert fit.residual_ratio == pytest.approx(0.0, abs=1e-6)
        assert fit.largest_ranks == sizes[-1]


def test_the_interval_of_a_weak_fit_is_that_of_fits_to_single_rounds() -> None:
    rounds = (0.1, 0.2, 0.3)
    fit = fit_gustafson({ranks: [[time_gustafson(serial)(ranks)] for serial in rounds] for ranks in (1, 2, 4)})
    assert fit is not None
    half_width = 4.303 * np.std(rounds, ddof=1) / math.sqrt(3)  # Student's t of two degrees of freedom
    assert fit.serial_fraction.high == pytest.approx(0.2021 + half_width, abs=1e-3)


def test_better_than_perfect_is_reported_as_no_serial_part() -> None:
    fit = fit_amdahl({1: [[1.0], [1.02]], 2: [[0.4], [0.4]]})
    assert fit is not None
    assert fit.serial_fraction.value == 0.0
    assert fit.residual_ratio > 0.05


def test_one_size_is_too_few() -> None:
    assert fit_amdahl({1: [[1.0]]}) is None
    assert fit_gustafson({1: [[1.0]], 2: [[]]}) is None


def test_one_round_gives_no_interval() -> None:
    fit = fit_amdahl({1: [[1.0]], 2: [[0.6]]})
    assert fit is not None
    assert fit.serial_fraction.value == pytest.approx(0.2)
    assert fit.serial_fraction.low is None
    assert fit.predict_speedup(4).low is None


def test_the_unit_of_time_does_not_matter() -> None:
    times = simulate_sizes(np.random.default_rng(0), time_amdahl(0.2), SIZES)
    scaled = {size: [[1000 * t for t in steps] for steps in rounds] for size, rounds in times.items()}
    fit, scaled_fit = fit_amdahl(times), fit_amdahl(scaled)
    assert fit is not None
    assert scaled_fit is not None
    assert scaled_fit.serial_fraction.value == pytest.approx(fit.serial_fraction.value)
    assert scaled_fit.one_rank_seconds == pytest.approx(1000 * fit.one_rank_seconds)


def test_more_ranks_are_predicted_to_be_faster_but_never_beyond_the_limit() -> None:
    fit = fit_amdahl(repeat(time_amdahl(0.1)))
    assert fit is not None
    speedups = [fit.predict_speedup(size).value for size in (1, 2, 4, 64, 10**6)]
    assert speedups == sorted(speedups)
    assert speedups[0] == pytest.approx(1.0)
    assert speedups[-1] == pytest.approx(10.0, rel=1e-3)


def test_gustafsons_speedup_grows_without_limit() -> None:
    fit = fit_gustafson(repeat(time_gustafson(0.1)))
    assert fit is not None
    assert fit.predict_speedup(1).value == pytest.approx(1.0)
    assert fit.predict_speedup(1001).value == pytest.approx(901.0)


@pytest.mark.slow
def test_a_known_serial_fraction_is_covered() -> None:
    """Each to ±2.5 points, two standard errors of 300, and all together to ±1.1."""
    rng = np.random.default_rng(0)
    shares = {}
    for serial, sizes in itertools.product([0.02, 0.1, 0.3], [(1, 2), (1, 2, 4)]):
        fits = [fit_amdahl(simulate_sizes(rng, time_amdahl(serial), sizes)) for _ in range(300)]
        shares[serial, sizes] = np.mean([fit is not None and covers(fit.serial_fraction, serial) for fit in fits])
    assert [case for case, share in shares.items() if not 0.92 <= share <= 0.98] == []
    assert 0.935 <= np.mean(list(shares.values())) <= 0.965


@pytest.mark.slow
def test_no_serial_part_is_covered_too() -> None:
    rng = np.random.default_rng(0)
    fits = [fit_amdahl(simulate_sizes(rng, time_amdahl(0.0), (1, 2, 4))) for _ in range(300)]
    assert np.mean([fit is not None and covers(fit.serial_fraction, 0.0) for fit in fits]) >= 0.94


@pytest.mark.slow
def test_a_known_scaled_speedup_is_covered() -> None:
    rng = np.random.default_rng(0)
    fits = [fit_gustafson(simulate_sizes(rng, time_gustafson(0.2), (1, 2, 4))) for _ in range(400)]
    covered = [fit is not None and covers(fit.serial_fraction, 0.2) for fit in fits]
    assert 0.92 <= np.mean(covered) <= 0.98


def test_steps_that_grow_with_ranks_are_all_serial_and_no_more() -> None:
    """Of 1 s and 1.2 s the line has a = 1.4 and b = −0.4."""
    fit = fit_amdahl({1: [[1.0]], 2: [[1.2]]})
    assert fit is not None
    assert fit.serial_fraction.value == 1.0


def test_one_rank_takes_its_own_time_in_the_weak_law_too() -> None:
    fit = fit_gustafson({ranks: [[4 * time_gustafson(0.2)(ranks)]] for ranks in SIZES})
    assert fit is not None
    assert fit.one_rank_seconds == pytest.approx(4.0)
    assert fit.serial_fraction.value == pytest.approx(0.2)
    assert fit.predict_speedup(4).value == pytest.approx(4 - 0.2 * 3)
