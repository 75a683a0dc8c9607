"""Spreads, one more measurement, and launches for a precision."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scalelab.analysis.quality import MOST_LAUNCHES, count_launches, estimate_spread, predict_one_more


def draw(rng: np.random.Generator, count: int, spread: float = 0.05) -> list[float]:
    return [float(number) for number in np.exp(rng.normal(0, spread, count))]


def test_a_spread_is_that_of_the_numbers_and_one_burst_does_not_decide_it() -> None:
    values = draw(np.random.default_rng(0), 400)
    spread = estimate_spread(values)
    assert spread is not None
    assert spread.value == pytest.approx(0.05, rel=0.15)
    hit = estimate_spread([*values[:-1], 100.0])
    assert hit is not None
    assert hit.value == pytest.approx(spread.value, rel=0.02)


def test_the_interval_of_a_spread_covers_the_truth() -> None:
    rng = np.random.default_rng(1)
    found = [estimate_spread(draw(rng, 12)) for _ in range(300)]
    hits = sum((s.low or 0) <= 0.05 <= (s.high or 0) for s in found if s is not None)
    assert 270 <= hits <= 299


def test_one_number_has_no_spread() -> None:
    assert estimate_spread([1.0]) is None
    assert predict_one_more([2.0]).low is None
    assert predict_one_more([2.0]).value == pytest.approx(2.0)


def test_one_more_falls_within_its_limits_in_95_of_100_cases() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(400):
        *known, further = draw(rng, 9)
        limits = predict_one_more(known)
        hits += (limits.low or 0) <= further <= (limits.high or 0)
    assert 365 <= hits <= 395


def test_ten_times_the_precision_takes_about_a_hundred_times_the_launches() -> None:
    coarse, fine = count_launches(0.5, 0.1), count_launches(0.5, 0.01)
    assert coarse is not None
    assert fine is not None
    assert fine / coarse == pytest.approx(100, rel=0.15)


def test_the_number_of_launches_is_the_smallest_that_is_enough() -> None:
    assert count_launches(0.0, 0.01) == 2
    # Student's t with 4 degrees of freedom is 2.776: five launches of this spread just reach 5 %.
    just_enough = math.log(1.05) * math.sqrt(5) / 2.7764451
    assert count_launches(just_enough * 0.999, 0.05) == 5
    assert count_launches(just_enough * 1.001, 0.05) == 6


def test_a_machine_that_cannot_be_measured_on_has_no_number() -> None:
    assert count_launches(10.0, 0.01) is None
    assert MOST_LAUNCHES == 10_000
