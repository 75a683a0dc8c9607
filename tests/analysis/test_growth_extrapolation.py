"""The published extrapolation of GPT-2 small to a trillion parameters, and the rule itself."""

from __future__ import annotations

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.growth import extrapolate_training, from_rounded, infer_throughput

SMALL = 124_439_808
TARGET = {"target_parameters": 1e12, "target_tokens": 1e13}
PUBLISHED_RATE, PUBLISHED_DAYS = 32_582.4, 28_545_911


def test_rate_and_years_are_the_published_ones_to_the_digit() -> None:
    found = extrapolate_training(Estimate(value=PUBLISHED_RATE), SMALL, **TARGET)
    assert f"{found.tokens_per_second.value:.3f}" == "4.055"
    assert f"{found.years.value:,.1f}" == "78,208.0"


def test_days_have_more_digits_than_the_published_rate_and_lie_within_its_rounding() -> None:
    found = extrapolate_training(from_rounded(PUBLISHED_RATE, 1), SMALL, **TARGET)
    assert f"{found.days.value:,.0f}" == "28,545,907"
    assert found.days.low is not None
    assert found.days.high is not None
    assert found.days.low < PUBLISHED_DAYS < found.days.high


def test_one_unrounded_rate_gives_every_published_digit() -> None:
    rate = infer_throughput(PUBLISHED_DAYS, SMALL, **TARGET)
    found = extrapolate_training(Estimate(value=rate), SMALL, **TARGET)
    assert f"{rate:,.1f}" == "32,582.4"
    assert f"{found.tokens_per_second.value:.3f}" == "4.055"
    assert f"{found.days.value:,.0f}" == "28,545,911"
    assert f"{found.years.value:,.1f}" == "78,208.0"


def test_the_same_model_keeps_its_throughput() -> None:
    found = extrapolate_training(Estimate(value=10.0), 100, target_parameters=100, target_tokens=864_000 * 365)
    assert found.tokens_per_second.value == 10.0
    assert found.days.value == pytest.approx(365)
    assert found.years.value == pytest.approx(1)


def test_a_faster_limit_means_fewer_days() -> None:
    found = extrapolate_training(Estimate(value=10.0, low=8.0, high=12.5), 1, target_parameters=1, target_tokens=86_400)
    assert (found.days.low, found.days.high) == (pytest.approx(0.08), pytest.approx(0.125))
