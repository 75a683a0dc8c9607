"""A step as a straight line in its batch: exact where it is one, confined where it cannot be."""

from __future__ import annotations

import math

import pytest

from scalelab.analysis.batch_limits import fit_saturation

BATCHES = (4, 8, 16, 32)


def play(fixed: float, slope: float, batches: tuple[int, ...] = BATCHES) -> dict[int, list[list[float]]]:
    return {batch: [[fixed + slope * batch] * 5 for _ in range(4)] for batch in batches}


def test_a_straight_line_is_found_exactly() -> None:
    fit = fit_saturation(play(0.010, 0.001))
    assert fit is not None
    assert fit.fixed_seconds.value == pytest.approx(0.010)
    assert fit.sample_seconds.value == pytest.approx(0.001)
    assert fit.half_batch is not None
    assert fit.half_batch.value == pytest.approx(10)
    assert fit.residual_ratio == pytest.approx(0, abs=1e-9)
    assert fit.predict_seconds(100) == pytest.approx(0.110)


def test_half_of_the_throughput_is_reached_at_the_half_batch_and_95_percent_at_19_of_it() -> None:
    fit = fit_saturation(play(0.010, 0.001))
    assert fit is not None
    assert fit.half_batch is not None
    assert fit.saturated_batch is not None
    assert fit.most_samples_per_second is not None
    most = fit.most_samples_per_second.value
    for batch, share in ((fit.half_batch.value, 0.5), (fit.saturated_batch.value, 0.95)):
        assert batch / fit.predict_seconds(batch) / most == pytest.approx(share)


def test_a_step_that_does_not_depend_on_the_batch_has_no_half_batch() -> None:
    fit = fit_saturation(play(0.010, 0.0))
    assert fit is not None
    assert fit.sample_seconds.value == pytest.approx(0, abs=1e-12)
    assert fit.half_batch is None or fit.half_batch.value > 1e6


def test_a_step_in_proportion_to_the_batch_is_saturated_from_the_start() -> None:
    fit = fit_saturation(play(0.0, 0.001))
    assert fit is not None
    assert fit.half_batch is not None
    assert fit.half_batch.value == pytest.approx(0, abs=1e-6)
    assert fit.fixed_seconds.low is not None
    assert fit.fixed_seconds.low >= 0


def test_two_batches_determine_the_line_and_one_does_not() -> None:
    fit = fit_saturation(play(0.010, 0.001, (4, 8)))
    assert fit is not None
    assert fit.residual_ratio is None
    assert fit_saturation(play(0.010, 0.001, (4,))) is None
    assert fit_saturation({4: [[]], 8: [[0.1]]}) is None


def test_a_curve_leaves_a_residual() -> None:
    fit = fit_saturation({batch: [[0.001 * batch**1.5] * 3 for _ in range(3)] for batch in BATCHES})
    assert fit is not None
    assert fit.residual_ratio is not None
    assert fit.residual_ratio > 0.05


def test_a_sample_that_may_cost_nothing_has_a_throughput_without_an_upper_end() -> None:
    """Rounds that disagree whether a larger batch takes longer: the interval of its cost reaches down to 0."""
    fit = fit_saturation({1: [[0.010], [0.012], [0.009]], 2: [[0.011], [0.010], [0.012]]})
    assert fit is not None
    assert fit.sample_seconds.low == 0.0
    assert fit.most_samples_per_second is not None
    assert fit.most_samples_per_second.value == pytest.approx(1 / fit.sample_seconds.value)
    assert fit.most_samples_per_second.high is None


def test_rounds_that_differ_in_one_cost_leave_the_other_exact() -> None:
    """Fixed costs of 10, 11 and 12 ms: Student's t of two degrees of freedom times 1 ms over √3."""
    fit = fit_saturation({batch: [[0.010 + 0.001 * n + 0.001 * batch] for n in range(3)] for batch in (4, 8)})
    assert fit is not None
    assert fit.half_batch is not None
    arm = 4.302653 / math.sqrt(3)
    assert fit.fixed_seconds.half_width == pytest.approx(0.001 * arm, rel=1e-5)
    assert fit.sample_seconds.half_width == pytest.approx(0, abs=1e-9)
    assert fit.half_batch.half_width == pytest.approx(arm, rel=1e-5)
    assert fit.largest_batch == 8


def test_steps_that_get_shorter_with_the_batch_have_samples_for_nothing() -> None:
    fit = fit_saturation({4: [[0.012]], 8: [[0.010]]})
    assert fit is not None
    assert (fit.sample_seconds.value, fit.half_batch, fit.most_samples_per_second, fit.saturated_batch) == (
        0.0, None, None, None,
    )  # fmt: skip
