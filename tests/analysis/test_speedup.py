"""Speedup, efficiency, Karp–Flatt and the cost of communication."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import (
    communication_by_ablation,
    communication_by_subtraction,
    estimate_centre,
    estimate_scaled_speedup,
    estimate_speedup,
    karp_flatt,
    scale_exposed,
)
from tests.analysis.noise import simulate_pair

ONE = [[1.0, 1.1, 1.2], [1.1, 1.2, 1.3], [0.9, 1.0, 1.1]]
HALF = [[seconds / 2 for seconds in steps] for steps in ONE]


def test_half_the_time_is_twice_the_speed() -> None:
    assert estimate_speedup(ONE, HALF).value == pytest.approx(2.0)


def test_the_same_time_for_eight_times_the_work_is_eight_times_the_speed() -> None:
    assert estimate_scaled_speedup(ONE, ONE, 8).value == pytest.approx(8.0)


def test_perfect_scaling_has_no_serial_part() -> None:
    serial = karp_flatt(Estimate(value=4.0, low=3.9, high=4.1), 4)
    assert serial is not None
    assert serial.value == pytest.approx(0.0)


def test_no_speedup_at_all_is_all_serial() -> None:
    serial = karp_flatt(Estimate(value=1.0), 4)
    assert serial is not None
    assert serial.value == pytest.approx(1.0)


def test_one_rank_has_no_serial_fraction() -> None:
    assert karp_flatt(Estimate(value=1.0), 1) is None


@given(st.integers(2, 64), st.floats(0, 1))
@settings(deadline=None)
def test_karp_flatt_is_the_inverse_of_amdahl(num_ranks: int, serial: float) -> None:
    speedup = 1 / (serial + (1 - serial) / num_ranks)
    found = karp_flatt(Estimate(value=speedup), num_ranks)
    assert found is not None
    assert found.value == pytest.approx(serial, abs=1e-9)


@given(st.integers(2, 64), st.floats(0.5, 10), st.floats(1.01, 2))
@settings(deadline=None)
def test_a_higher_speedup_means_a_lower_serial_fraction(num_ranks: int, speedup: float, more: float) -> None:
    serial = karp_flatt(Estimate(value=speedup, low=speedup / more, high=speedup * more), num_ranks)
    assert serial is not None
    assert serial.low is not None
    assert serial.high is not None
    assert serial.low < serial.value < serial.high


def test_perfect_scaling_leaves_no_communication() -> None:
    assert communication_by_subtraction(ONE, HALF, 2).value == pytest.approx(0.0)
    assert communication_by_subtraction(ONE, ONE, 2, is_weak=True).value == pytest.approx(0.0)


def test_what_is_added_to_the_ideal_is_communication() -> None:
    slower = [[seconds + 0.1 for seconds in steps] for steps in HALF]
    found = communication_by_subtraction(ONE, slower, 2)
    assert (found.low, found.value, found.high) == pytest.approx((0.1, 0.1, 0.1))


def test_leaving_out_nothing_saves_nothing() -> None:
    exposed = communication_by_ablation(ONE, ONE)
    assert exposed.seconds.value == 0.0
    assert exposed.share.value == 0.0


def test_what_ablation_saves_is_exposed() -> None:
    exposed = communication_by_ablation(ONE, HALF)
    assert exposed.share.value == pytest.approx(0.5)
    assert exposed.seconds.value == pytest.approx(0.55, rel=0.01)


@pytest.mark.slow
def test_communication_is_covered_under_noise() -> None:
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(700):
        clean, comm_free = simulate_pair(rng, 1 / 0.9)
        exposed = communication_by_ablation(clean, comm_free)
        lost = communication_by_subtraction(comm_free, clean, 2)
        for estimate, truth in ((exposed.share, 0.1), (exposed.seconds, 1 / 0.9 - 1), (lost, 1 / 0.9 - 0.5)):
            assert estimate.low is not None
            assert estimate.high is not None
            covered.append(estimate.low <= truth <= estimate.high)
    assert 0.93 <= np.mean(covered) <= 0.97


def test_a_scaled_speedup_and_an_exposed_share_have_the_ends_of_their_ratio() -> None:
    ratio = estimate_speedup(ONE, HALF[::-1])
    scaled = estimate_scaled_speedup(ONE, HALF[::-1], 3)
    assert (ratio.low, ratio.high) != (None, None)
    assert (scaled.low, scaled.value, scaled.high) == pytest.approx(
        tuple(3 * end for end in (ratio.low or 0, ratio.value, ratio.high or 0))
    )
    assert scale_exposed(ONE, HALF, 6.0).value == pytest.approx(3.0)
    assert estimate_centre([[2.0, 2.0, 9.0], [8.0]]).value == pytest.approx(4.0)


def test_a_step_of_two_parts_in_eight_that_stay_is_the_serial_fraction_of_karp_and_flatt() -> None:
    """On two ranks 1.6 times as fast: (0.625 − 0.5) / 0.5."""
    serial = karp_flatt(Estimate(value=1.6), 2)
    assert serial is not None
    assert serial.value == pytest.approx(0.25)
