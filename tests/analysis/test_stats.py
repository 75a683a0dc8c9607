"""Medians, ratios, differences and verdicts: what must be true of them without any simulation."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import (
    Verdict,
    _widen,
    estimate_difference,
    estimate_median,
    estimate_over_rounds,
    estimate_ratio,
    judge,
)

TIMES = st.floats(1e-3, 1e3)
ROUNDS = st.lists(st.lists(TIMES, min_size=1, max_size=12), min_size=1, max_size=8)
STAIRS = [[float(step + launch) for step in range(1, 6)] for launch in range(8)]


def ends(estimate: Estimate) -> tuple[float, float, float]:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.value, estimate.high


def test_the_median_is_that_of_all_steps() -> None:
    assert estimate_median([[1.0, 2.0, 9.0], [3.0, 4.0]]).value == 3.0


def test_a_constant_time_is_known_exactly() -> None:
    assert ends(estimate_median([[2.0] * 20] * 8)) == (2.0, 2.0, 2.0)


def test_identical_rounds_still_have_an_interval() -> None:
    low, value, high = ends(estimate_median([[float(step) for step in range(1, 21)]] * 8))
    assert low < value < high


def test_no_steps_have_no_median() -> None:
    with pytest.raises(ValueError, match="no steps"):
        estimate_median([[], []])


def test_a_short_single_launch_has_no_interval() -> None:
    assert estimate_median([[1.0, 2.0, 3.0]]).low is None


def test_a_long_single_launch_has_an_interval() -> None:
    low, value, high = ends(estimate_median([[1.0, 1.1, 1.2, 1.05, 1.15] * 6]))
    assert low < value < high


def test_a_round_that_gave_nothing_changes_nothing() -> None:
    assert estimate_median([*STAIRS, []]) == estimate_median(STAIRS)


@given(ROUNDS)
@settings(deadline=None)
def test_the_interval_of_a_median_holds_it(rounds: list[list[float]]) -> None:
    estimate = estimate_median(rounds)
    if estimate.low is not None:
        low, value, high = ends(estimate)
        assert low <= value <= high


@given(ROUNDS, st.sampled_from([0.25, 2.0, 1024.0]))
@settings(deadline=None)
def test_a_change_of_unit_changes_a_median_and_its_interval_alike(rounds: list[list[float]], unit: float) -> None:
    estimate, changed = (
        estimate_median(rounds),
        estimate_median([[unit * t for t in part] for part in rounds]),
    )
    assert changed.value == pytest.approx(unit * estimate.value)
    if estimate.low is not None:
        assert ends(changed) == pytest.approx([unit * end for end in ends(estimate)])


@given(ROUNDS)
@settings(deadline=None)
def test_a_configuration_takes_as_long_as_itself(rounds: list[list[float]]) -> None:
    ratio = estimate_ratio(rounds, rounds)
    assert ratio.value == 1.0
    if len(rounds) > 1:
        assert ends(ratio) == (1.0, 1.0, 1.0)


@given(ROUNDS, st.floats(0.1, 10))
@settings(deadline=None)
def test_a_known_factor_is_found_whatever_the_machine_did(rounds: list[list[float]], factor: float) -> None:
    ratio = estimate_ratio([[factor * time for time in part] for part in rounds], rounds)
    assert ratio.value == pytest.approx(factor)


@given(ROUNDS, ROUNDS)
@settings(deadline=None)
def test_the_ratio_turned_round_is_the_reciprocal(left: list[list[float]], right: list[list[float]]) -> None:
    forth, back = estimate_ratio(left, right), estimate_ratio(right, left)
    assert back.value == pytest.approx(1 / forth.value)
    if forth.low is not None:
        assert ends(back) == pytest.approx([1 / end for end in reversed(ends(forth))], rel=1e-6)


def test_a_machine_that_slows_down_half_way_moves_no_ratio() -> None:
    weather = [1.0] * 4 + [1.3] * 4
    slow = [[1.5 * factor] * 5 for factor in weather]
    fast = [[1.0 * factor] * 5 for factor in weather]
    assert ends(estimate_ratio(slow, fast)) == pytest.approx((1.5, 1.5, 1.5))


def test_a_failed_round_is_left_out_of_the_pairs() -> None:
    assert ends(estimate_ratio([[2.0], [], [4.0]], [[1.0], [5.0], [2.0]])) == pytest.approx((2.0, 2.0, 2.0))


def test_series_of_unequal_length_are_compared_by_welch() -> None:
    low, value, high = ends(estimate_ratio([[2.0], [2.2], [2.1]], [[1.0], [1.1]]))
    assert low < value < high
    assert value == pytest.approx(2.0, rel=0.05)


def test_constant_series_of_unequal_length_have_an_exact_ratio() -> None:
    assert ends(estimate_ratio([[2.0]] * 3, [[1.0]] * 2)) == pytest.approx((2.0, 2.0, 2.0))


def test_two_single_launches_have_a_ratio_without_interval() -> None:
    ratio = estimate_ratio([[2.0] * 30], [[1.0] * 30])
    assert ratio.value == pytest.approx(2.0)
    assert ratio.low is None


def test_the_difference_is_taken_round_by_round() -> None:
    rounds = [[1.0], [1.4], [1.1]]
    later = [[seconds + 0.5 for seconds in part] for part in rounds]
    assert ends(estimate_difference(later, rounds)) == pytest.approx((0.5, 0.5, 0.5))


def test_unpaired_differences_have_an_interval_too() -> None:
    low, value, high = ends(estimate_difference([[2.0], [2.2], [2.1]], [[1.0], [1.1]]))
    assert low < value < high


def test_a_derived_number_keeps_its_value_and_borrows_the_spread() -> None:
    low, value, high = ends(estimate_over_rounds(10.0, [1.0, 2.0, 3.0]))
    assert value == 10.0
    assert high - value == pytest.approx(value - low)


def test_one_round_gives_a_derived_number_no_interval() -> None:
    assert estimate_over_rounds(10.0, [1.0]).low is None


@pytest.mark.parametrize(
    ("low", "value", "high", "verdict"),
    [
        (1.01, 1.05, 1.09, Verdict.SLOWER),
        (0.90, 0.95, 0.99, Verdict.FASTER),
        (1.001, 1.01, 1.019, Verdict.NO_DIFFERENCE),
        (0.98, 1.0, 1.02, Verdict.NO_DIFFERENCE),
        (0.94, 1.0, 1.06, Verdict.UNRESOLVED),
        (0.99, 1.04, 1.09, Verdict.UNRESOLVED),
        (1.001, 1.015, 1.06, Verdict.UNRESOLVED),
    ],
)
def test_a_verdict_needs_both_certainty_and_size(low: float, value: float, high: float, verdict: Verdict) -> None:
    assert judge(Estimate(value=value, low=low, high=high)) is verdict


def test_a_ratio_without_interval_is_unresolved() -> None:
    assert judge(Estimate(value=2.0)) is Verdict.UNRESOLVED


@given(st.floats(0.5, 2), st.floats(0, 0.5), st.floats(0, 0.5))
@settings(deadline=None)
def test_slower_turned_round_is_faster_outside_the_border_region(value: float, below: float, above: float) -> None:
    ratio = Estimate(value=value, low=value * math.exp(-below), high=value * math.exp(above))
    opposite = {Verdict.SLOWER: Verdict.FASTER, Verdict.FASTER: Verdict.SLOWER}
    if abs(math.log(value)) > 0.03 and judge(ratio) in opposite:
        assert judge(ratio.map(lambda end: 1 / end)) is opposite[judge(ratio)]


def test_half_of_an_interval_is_no_interval() -> None:
    assert Estimate(value=1.0, low=0.5).half_width is Estimate(value=1.0, high=1.5).half_width is None
    assert Estimate(value=1.0, low=0.5, high=1.25).half_width == 0.5
    assert judge(Estimate(value=2.0, low=1.9)) == judge(Estimate(value=0.5, high=0.6)) == Verdict.UNRESOLVED


def test_arms_widen_on_the_log_scale() -> None:
    assert _widen(Estimate(value=2.0, low=1.0, high=8.0), 2.0) == Estimate(value=2.0, low=0.5, high=32.0)
    assert _widen(Estimate(value=2.0, low=0.0, high=8.0), 2.0) == Estimate(value=2.0, low=0.0, high=8.0)


def test_two_rounds_have_an_interval_and_one_has_none() -> None:
    assert estimate_over_rounds(5.0, [4.0]) == Estimate(value=5.0)
    both = estimate_over_rounds(5.0, [3.0, 4.0])
    assert both.low is not None
    assert both.high is not None
    assert both.high - 5.0 == pytest.approx(5.0 - both.low)
    assert both.low < 5.0
