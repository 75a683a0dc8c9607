"""The gradient noise scale: exact where the expectations are given, covered by its interval where they are drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.learning import (
    GradientSquares,
    NoiseScale,
    _divide_means,
    _estimate_mean,
    estimate_noise_scale,
    predict_samples_ratio,
    predict_updates_ratio,
)


def expect_squares(gradient: float, trace: float, small: int, large: int) -> GradientSquares:
    """What the squared norms are on average."""
    return GradientSquares(gradient + trace / small, gradient + trace / large)


def draw_squares(
    rng: np.random.Generator, num_steps: int, small: int, large: int, mean: float = 0.2, spread: float = 2.0
) -> list[GradientSquares]:
    """Gradients of samples are normal in 25 dimensions, with the same mean and deviation in each of them."""
    passes = mean + spread / np.sqrt(small) * rng.standard_normal((num_steps, large // small, 25))
    first, whole = passes[:, 0], passes.mean(axis=1)
    return [GradientSquares(float(a @ a), float(b @ b)) for a, b in zip(first, whole, strict=True)]


@pytest.mark.parametrize(("small", "large"), [(1, 2), (8, 32), (7, 512)])
def test_expected_squares_give_the_noise_scale_exactly(small: int, large: int) -> None:
    found = estimate_noise_scale([[expect_squares(0.5, 40.0, small, large)] * 20], small, large)
    assert found is not None
    assert found.gradient_square.value == pytest.approx(0.5)
    assert found.noise_trace.value == pytest.approx(40.0)
    assert found.batch is not None
    assert found.batch.value == pytest.approx(80.0)
    assert found.batch.low == pytest.approx(80.0)
    assert found.batch.high == pytest.approx(80.0)


def estimate_drawn(seed: int, num_trainings: int, num_steps: int) -> NoiseScale:
    rng = np.random.default_rng(seed)
    found = estimate_noise_scale([draw_squares(rng, num_steps, 8, 32) for _ in range(num_trainings)], 8, 32)
    assert found is not None
    return found


@pytest.mark.parametrize("num_trainings", [1, 3, 8])
def test_a_known_covariance_is_recovered(num_trainings: int) -> None:
    """tr(Σ) = 100 and |G|² = 1: the noise scale is 100 samples."""
    found = estimate_drawn(0, num_trainings, 2000)
    assert found.noise_trace.value == pytest.approx(100, rel=0.1)
    assert found.gradient_square.value == pytest.approx(1, rel=0.2)
    assert found.batch is not None
    assert found.batch.value == pytest.approx(100, rel=0.2)


@pytest.mark.parametrize(("num_trainings", "num_steps"), [(1, 200), (3, 70), (8, 25)])
def test_the_interval_covers_the_truth_as_often_as_it_says(num_trainings: int, num_steps: int) -> None:
    batches = [estimate_drawn(seed, num_trainings, num_steps).batch for seed in range(200)]
    ends = [(batch.low, batch.high) for batch in batches if batch is not None and batch.high is not None]
    assert len(ends) > 170
    covered = sum(low <= 100 <= high for low, high in ends if low is not None)
    assert 0.91 <= covered / len(ends) <= 0.99


def test_noise_without_a_gradient_rarely_has_a_noise_scale_with_an_end() -> None:
    """One interval in forty lies above 0 where |G|² is 0."""
    num_ended = 0
    for seed in range(100):
        found = estimate_noise_scale([draw_squares(np.random.default_rng(seed), 100, 8, 32, mean=0.0)], 8, 32)
        assert found is not None
        num_ended += found.batch is not None and found.batch.high is not None
    assert num_ended <= 8


def test_a_gradient_without_noise_has_a_noise_scale_of_nothing() -> None:
    found = estimate_noise_scale([[GradientSquares(2.0, 2.0)] * 10], 1, 4)
    assert found is not None
    assert found.batch == Estimate(value=0.0, low=0.0, high=0.0)


def test_one_step_has_a_value_and_no_interval() -> None:
    found = estimate_noise_scale([[expect_squares(1.0, 8.0, 2, 4)]], 2, 4)
    assert found is not None
    assert found.batch == Estimate(value=pytest.approx(8.0))
    assert found.noise_trace.low is None


def test_without_steps_there_is_nothing_and_equal_sizes_are_refused() -> None:
    assert estimate_noise_scale([], 8, 32) is None
    assert estimate_noise_scale([[], []], 8, 32) is None
    with pytest.raises(ValueError, match="small_batch must be < large_batch"):
        estimate_noise_scale([[GradientSquares(1.0, 1.0)]], 8, 8)


def test_at_the_noise_scale_a_batch_needs_twice_the_fewest_samples_and_updates() -> None:
    scale = Estimate(value=64.0, low=32.0, high=128.0)
    samples = predict_samples_ratio(scale, 512, 64)
    assert samples.value == pytest.approx((64 + 512) / 128)
    updates = predict_updates_ratio(scale, 512, 64)
    assert updates.value == pytest.approx(samples.value * 64 / 512)
    assert samples.low is not None
    assert samples.high is not None
    assert samples.low < samples.value < samples.high


def test_below_the_noise_scale_larger_batches_are_free_and_above_they_save_nothing() -> None:
    assert predict_samples_ratio(Estimate(value=1e9), 512, 32).value == pytest.approx(1, rel=1e-5)
    assert predict_updates_ratio(Estimate(value=1e9), 512, 32).value == pytest.approx(1 / 16, rel=1e-5)
    assert predict_updates_ratio(Estimate(value=1e-3), 512, 32).value == pytest.approx(1, rel=1e-3)


def test_noise_that_seems_to_be_negative_is_none() -> None:
    """The squared norm of the large batch's gradient may by chance be the larger one, and no batch is below 0."""
    steps = [GradientSquares(1.0, 1.5 + 0.01 * (step % 3)) for step in range(30)]
    found = estimate_noise_scale([steps], 8, 32)
    assert found is not None
    assert found.batch is not None
    assert (found.batch.value, found.batch.low, found.batch.high) == (0.0, 0.0, 0.0)
    assert predict_samples_ratio(found.batch, 32, 8).value == pytest.approx(4)


def test_a_mean_has_students_interval() -> None:
    """Of 1, 2, 3: s/√n = 1/√3, and t of two degrees of freedom at 97.5 % is 4.302653."""
    found = _estimate_mean(np.array([1.0, 2.0, 3.0]))
    assert (found.value, found.low, found.high) == (
        2.0,
        pytest.approx(2 - 4.302653 / np.sqrt(3), rel=1e-6),
        pytest.approx(2 + 4.302653 / np.sqrt(3), rel=1e-6),
    )
    assert _estimate_mean(np.array([5.0])) == Estimate(value=5.0)


def test_a_mean_has_an_interval_from_two_values_on() -> None:
    assert _estimate_mean(np.array([3.0])) == Estimate(value=3.0)
    two = _estimate_mean(np.array([3.0, 5.0]))
    arm = stats.t.ppf(0.975, 1) * math.sqrt(2) / math.sqrt(2)
    assert (two.value, two.low, two.high) == (4.0, pytest.approx(4 - arm), pytest.approx(4 + arm))


def test_a_ratio_of_means_has_the_ends_at_which_the_difference_may_be_nothing() -> None:
    """Fieller (1954): the interval of above − ρ·below has 0 at its end for both."""
    above, below = np.array([10.0, 12.0, 11.0, 14.0]), np.array([5.0, 5.5, 4.5, 6.0])
    found = _divide_means(above, below)
    assert found is not None
    assert found.value == above.mean() / below.mean()
    for ratio in (found.low, found.high):
        assert ratio is not None
        rest = above - ratio * below
        assert abs(rest.mean()) == pytest.approx(stats.t.ppf(0.975, 3) * rest.std(ddof=1) / 2)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high


@pytest.mark.parametrize(
    ("levels", "num_steps", "arm"),
    [
        ((1.0, 2.0), 5, 12.706205 / 2),  # one training: blocks of five steps
        ((1.0,), 9, None),
        ((1.0, 2.0, 3.0, 4.0, 5.0, 6.0), 10, 2.570582 * math.sqrt(3.5 / 6)),  # six trainings are the blocks
        ((1.0, 2.0, 3.0, 4.0, 5.0), 10, 2.262157 * math.sqrt(20 / 9 / 10)),  # of five, ten blocks of steps
    ],
)
def test_six_trainings_are_the_blocks_of_the_interval_and_of_fewer_five_steps_each(
    levels: tuple[float, ...], num_steps: int, arm: float | None
) -> None:
    """Without noise: the squared norm of the gradient is the level of the steps."""
    runs = [[GradientSquares(level, level)] * num_steps for level in levels]
    found = estimate_noise_scale([runs[0] + runs[1]] if len(levels) == 2 else runs, 1, 2)
    assert found is not None
    assert found.gradient_square.value == pytest.approx(sum(levels) / len(levels))
    assert found.gradient_square.half_width == (None if arm is None else pytest.approx(arm, rel=1e-5))


def test_a_gradient_of_nothing_on_average_has_no_noise_scale_and_a_doubtful_one_no_end() -> None:
    assert _divide_means(np.array([1.0, 1.0]), np.array([1.0, -1.0])) is None
    doubtful = _divide_means(np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    assert doubtful == Estimate(value=1.0)
    with pytest.raises(ValueError, match="small_batch must be < large_batch, got 0 and 8"):
        estimate_noise_scale([[GradientSquares(1.0, 1.0)]], 0, 8)
