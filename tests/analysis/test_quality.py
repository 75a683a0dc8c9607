"""Outliers, drift and noise: found where they are, and not where they are not."""

from __future__ import annotations

import numpy as np
import pytest

from scalelab.analysis.quality import (
    Outlier,
    _test_order,
    find_disturbed,
    find_drift,
    find_outliers,
    find_trend,
    measure_noise,
)
from tests.analysis.noise import simulate_rounds

STEADY = [1.0, 1.01, 0.99, 1.02, 0.98] * 4


def test_a_spike_is_an_outlier_with_its_place_and_size() -> None:
    assert find_outliers([STEADY, [*STEADY, 3.0], []]) == [Outlier(round=1, step=20, ratio=3.0)]


def test_a_step_under_half_as_long_again_is_no_outlier() -> None:
    assert find_outliers([[*STEADY, 1.4]]) == []


def test_a_long_step_of_a_noisy_launch_is_no_outlier() -> None:
    assert find_outliers([[1.0, 2.0, 3.0, 4.0, 5.0]]) == []


def test_spikes_do_not_hide_each_other() -> None:
    assert len(find_outliers([[*STEADY, 3.0, 3.0, 3.0, 100.0]])) == 4


def test_a_disturbed_round_is_found_by_its_number_and_rounds_without_steps_keep_theirs() -> None:
    rounds = [[1.0, 1.0], [], [2.0, 2.2], [1.0, 1.1], [1.0, 1.0]]
    assert find_disturbed(rounds) == {3: pytest.approx(2.1 / 1.025)}
    assert find_disturbed([]) == find_disturbed([[]]) == {}
    assert find_disturbed([[1.0], [1.4], [1.0]]) == {}


def test_constant_times_have_no_noise() -> None:
    noise = measure_noise([[1.0] * 5] * 3)
    assert (noise.within_ratio, noise.between_ratio) == (0.0, 0.0)


def test_one_launch_says_nothing_about_launches() -> None:
    assert measure_noise([STEADY]).between_ratio is None


def test_one_step_says_nothing_about_steps() -> None:
    assert measure_noise([[1.0], [2.0]]).within_ratio is None


def test_noise_is_measured_within_and_between_launches() -> None:
    rounds = simulate_rounds(np.random.default_rng(0), 1.0, 400, 50, within=0.05, between=0.1, spike_share=0.0)
    noise = measure_noise(rounds)
    assert noise.within_ratio == pytest.approx(0.05, rel=0.1)
    assert noise.between_ratio == pytest.approx(0.1, rel=0.1)


def test_a_steady_rise_over_the_rounds_is_a_drift() -> None:
    drift = find_drift([[1.0 + 0.02 * index] * 5 for index in range(8)])
    assert drift is not None
    assert drift.change_over_rounds == pytest.approx(0.14 / 1.07)
    assert drift.change_within_launches is None


def test_a_steady_fall_within_launches_is_a_drift() -> None:
    drift = find_drift([[2.0 - 0.05 * step for step in range(20)]] * 8)
    assert drift is not None
    assert drift.change_over_rounds is None
    assert drift.change_within_launches == pytest.approx(-0.95 / 1.525)


def test_a_trend_of_two_percent_is_not_worth_a_warning() -> None:
    assert find_drift([[1.0 + 0.02 * index / 7] * 5 for index in range(8)]) is None


def test_four_rounds_are_too_few_for_a_trend() -> None:
    assert find_drift([[1.0 + index] for index in range(4)]) is None


def test_constant_times_do_not_drift() -> None:
    assert find_drift([[1.0] * 10] * 10) is None


def test_noise_alone_is_rarely_called_a_drift() -> None:
    rng = np.random.default_rng(0)
    assert np.mean([find_drift(simulate_rounds(rng, 1.0)) is not None for _ in range(1000)]) <= 0.04


def test_a_drift_of_fifteen_percent_is_seen_through_the_noise() -> None:
    rng = np.random.default_rng(0)
    slope = np.linspace(0, 0.15, 12)
    assert np.mean([find_drift(simulate_rounds(rng, 1.0, drift=slope)) is not None for _ in range(300)]) >= 0.9


@pytest.mark.parametrize("num_values", [5, 12, 33, 34, 80])
def test_a_trend_is_tested_as_by_kendalls_tau(num_values: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    for seed in range(4):
        values = np.random.default_rng(seed).normal(10.0, 1.0, num_values) + np.linspace(0.0, seed, num_values)
        for some in (values, np.round(values)):  # the second has ties
            rises = int(sum(np.sign(some[place + 1 :] - some[place]).sum() for place in range(num_values)))
            ties = np.unique(some, return_counts=True)[1].tolist()
            expected = stats.kendalltau(np.arange(num_values), some).pvalue
            assert _test_order(rises, ties) == pytest.approx(expected, rel=1e-9)


def test_the_slope_of_a_trend_is_the_median_of_all_slopes() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(1).normal(10.0, 0.2, 40) + np.linspace(0.0, 3.0, 40)
    slope = stats.theilslopes(values, np.arange(40)).slope
    assert find_trend(values) == pytest.approx(slope * 39 / np.median(values))
