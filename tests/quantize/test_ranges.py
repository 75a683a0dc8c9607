"""Ranges that each way of choosing must find where the answer is known."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from scalelab.quantize.calibrate import Method, choose_range, measure_error
from scalelab.quantize.histogram import Bins, ValueHistogram, count_values

METHODS = get_args(Method)


def draw_normal(num: int = 20_000, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def choose(values: torch.Tensor, method: Method) -> tuple[float, float]:
    return choose_range(count_values(values), method)


def measure_noise(values: torch.Tensor, limit: float) -> float:
    step = limit / 127
    rounded = (values.double() / step).round().clamp(-127, 127) * step
    return float(((values.double() - rounded) ** 2).mean())


def test_minmax_is_all_that_was_seen_and_zero() -> None:
    values = torch.tensor([0.25, 2.0, 0.5])
    assert choose(values, "minmax") == (0.0, 2.0)
    assert choose(-values, "minmax") == (-2.0, 2.0)
    assert choose(values - 0.5, "minmax") == (-1.5, 1.5)


@pytest.mark.parametrize("method", METHODS)
def test_no_way_goes_beyond_what_was_seen_and_all_have_zero_inside(method: Method) -> None:
    for values in (draw_normal(), draw_normal().relu(), draw_normal().abs() + 3):
        low, high = choose(values, method)
        assert low <= 0 < high <= float(values.abs().max())
        assert -low == high or low == 0


def test_sigma_is_mean_and_deviations() -> None:
    low, high = choose(draw_normal(), "sigma")
    assert -low == high == pytest.approx(3, rel=0.02)
    low, high = choose(draw_normal() * 0.1 + 3, "sigma")
    assert (low, high) == (0.0, pytest.approx(3.3, rel=0.01))
    low, high = choose(draw_normal() * 0.1 - 3, "sigma")
    assert -low == high == pytest.approx(3.3, rel=0.01)


@pytest.mark.parametrize("has_negatives", [True, False])
def test_percentile_clips_one_in_ten_thousand(has_negatives: bool) -> None:
    values = draw_normal(1_000_000) if has_negatives else draw_normal(1_000_000).abs()
    _, high = choose(values, "percentile")
    assert float((values.abs() > high).double().mean()) == pytest.approx(1e-4, abs=2e-5)


def test_mse_is_as_good_as_trying_every_range() -> None:
    values = draw_normal(20_000)
    values[0] = 30.0
    limits = np.linspace(1, 30, 300)
    best = min(measure_noise(values, limit) for limit in limits)
    _, chosen = choose(values, "mse")
    assert measure_noise(values, chosen) <= 1.01 * best
    assert measure_noise(values, chosen) < 0.95 * measure_noise(values, 30.0)


@pytest.mark.parametrize("is_positive", [False, True])
def test_entropy_clips_an_outlier_and_keeps_an_even_distribution(is_positive: bool) -> None:
    values = draw_normal()
    values[0] = 100.0
    if is_positive:
        values = values.relu()
    assert choose(values, "entropy")[1] < 30
    even = torch.linspace(0 if is_positive else -1, 1, 100_000)
    assert choose(even, "entropy")[1] > 0.95


def test_zeros_do_not_move_what_entropy_chooses() -> None:
    values = draw_normal().abs()
    assert choose(values, "entropy") == choose(torch.cat([values, torch.zeros(10**6)]), "entropy")


@pytest.mark.parametrize("method", METHODS)
def test_constants_have_a_range_too(method: Method) -> None:
    assert choose(torch.full((9,), 0.5), method)[1] == pytest.approx(0.5, rel=0.1)
    assert choose(torch.zeros(9), method) == (0.0, 0.0)


def test_a_range_of_nothing_counted_is_zero() -> None:
    assert choose_range(ValueHistogram(least=0.0, largest=0.0), "minmax") == (0.0, 0.0)


@pytest.mark.parametrize("chosen", [(-5.0, 250.0), (0.0, 255.0), (-127.0, 127.0)])
def test_the_error_of_a_range_is_that_of_255_steps_and_of_127_if_it_is_symmetric(chosen: tuple[float, float]) -> None:
    def measure(*values: float) -> float:
        found = np.array(values)
        return measure_error(Bins(lows=found, highs=found, counts=np.full(len(values), 3.0)), chosen)

    low, high = chosen
    assert measure(low, 0.0, 17.0, 100.0, high) == pytest.approx(0, abs=1e-20), "every whole number is on the grid"
    assert measure(17.25) == pytest.approx(3 * 0.25**2)
    assert measure(low - 2, high + 4) == pytest.approx(3 * (4 + 16))
