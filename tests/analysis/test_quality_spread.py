"""Variation and quantiles of steps whose distribution is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scalelab.analysis.quality import estimate_quantile, estimate_variation, find_resolution, predict_one_more


def test_equal_steps_do_not_vary() -> None:
    found = estimate_variation([[2.0] * 10] * 4)
    assert found is not None
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_a_launch_that_is_slower_as_a_whole_is_no_variation_of_its_steps() -> None:
    found = estimate_variation([[1.0] * 10, [3.0] * 10])
    assert found is not None
    assert found.value == 0.0


def test_variation_is_the_standard_deviation_over_the_mean() -> None:
    rng = np.random.default_rng(0)
    rounds = [list(10 + rng.standard_normal(400)) for _ in range(12)]
    found = estimate_variation(rounds)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.1 < found.high


def test_an_interval_of_variation_does_not_go_below_nothing() -> None:
    found = estimate_variation([[1.0, 1.0], [1.0, 2.0]])
    assert found is not None
    assert found.low == 0.0


def test_single_steps_have_no_variation_to_speak_of() -> None:
    assert estimate_variation([[1.0], []]) is None
    assert estimate_quantile([[], []], 0.95) is None


def test_a_quantile_lies_where_that_share_of_all_steps_does() -> None:
    rounds = [[float(step) for step in range(101)] for _ in range(3)]
    found = estimate_quantile(rounds, 0.95)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((95.0, 95.0, 95.0))


def test_one_more_of_two_numbers_and_of_one() -> None:
    found = predict_one_more([1.0, math.e**2])
    arm = 12.7062047 * math.sqrt(2) * math.sqrt(1.5)
    assert found.value == pytest.approx(math.e)
    assert found.low is not None
    assert math.log(found.low) == pytest.approx(1 - arm, rel=1e-6)
    alone = predict_one_more([3.0])
    assert (alone.value, alone.low, alone.high) == (pytest.approx(3.0), None, None)


def test_the_resolution_is_the_standard_error_times_both_quantiles() -> None:
    above, below = [[1.0], [1.2], [1.1]], [[2.0], [2.0], [2.0]]
    logs = [math.log(one[0]) for one in above]
    mean = sum(logs) / 3
    deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / 2)
    expected = math.expm1((4.3026527 + 1.0606602) * deviation / math.sqrt(3))
    assert find_resolution(above, below) == pytest.approx(expected, rel=1e-6)
    assert find_resolution([[1.0]], [[2.0]]) is None
