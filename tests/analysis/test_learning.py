"""Differences in accuracy: paired by seed, and judged."""

from __future__ import annotations

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.learning import SMALLEST_CHANGE, AccuracyChange, estimate_change, judge_change


def test_what_seeds_share_cancels() -> None:
    reference = {0: 0.5, 1: 0.7, 2: 0.9}
    change = estimate_change({seed: value - 0.1 for seed, value in reference.items()}, reference)
    assert change is not None
    assert change.value == pytest.approx(-0.1)
    assert change.low == pytest.approx(-0.1)
    assert change.high == pytest.approx(-0.1)


def test_only_seeds_that_both_have_are_compared() -> None:
    change = estimate_change({1: 0.8, 2: 0.1}, {0: 0.2, 1: 0.6})
    assert change == Estimate(value=pytest.approx(0.2))
    assert estimate_change({1: 0.8}, {2: 0.8}) is None


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (-0.10, -0.12, -0.08, AccuracyChange.LOST),
        (0.10, 0.08, 0.12, AccuracyChange.GAINED),
        (0.001, -0.004, 0.006, AccuracyChange.NO_DIFFERENCE),
        (-0.003, -0.004, -0.002, AccuracyChange.NO_DIFFERENCE),
        (-0.02, -0.10, 0.06, AccuracyChange.UNRESOLVED),
        (-0.5, None, None, AccuracyChange.UNRESOLVED),
        (-0.5, -0.6, None, AccuracyChange.UNRESOLVED),
        (0.5, None, 0.6, AccuracyChange.UNRESOLVED),
        (-0.1, -0.2, 0.0, AccuracyChange.UNRESOLVED),
        (0.1, 0.0, 0.2, AccuracyChange.UNRESOLVED),
        (0.0, -0.01, 0.009, AccuracyChange.UNRESOLVED),
        (0.0, -0.009, 0.01, AccuracyChange.UNRESOLVED),
        (0.0, -0.009, 0.009, AccuracyChange.NO_DIFFERENCE),
    ],
)
def test_verdicts(value: float, low: float | None, high: float | None, verdict: AccuracyChange) -> None:
    assert judge_change(Estimate(value=value, low=low, high=high)) is verdict


def test_the_smallest_change_counts_in_both_directions() -> None:
    gained = Estimate(value=SMALLEST_CHANGE, low=SMALLEST_CHANGE / 2, high=1.0)
    lost = Estimate(value=-SMALLEST_CHANGE, low=-1.0, high=-SMALLEST_CHANGE / 2)
    assert (judge_change(gained), judge_change(lost)) == (AccuracyChange.GAINED, AccuracyChange.LOST)
