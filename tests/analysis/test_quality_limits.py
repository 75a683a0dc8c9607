"""Warm-up, outliers, drift and resolution on both sides of every limit, by numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from scalelab.analysis.quality import (
    Outlier,
    Warmup,
    _test_order,
    count_launches,
    estimate_quantile,
    estimate_spread,
    estimate_variation,
    find_disturbed,
    find_drift,
    find_outliers,
    find_resolution,
    find_trend,
    find_warmup,
    measure_noise,
    predict_one_more,
)
from scalelab.analysis.rounds import find_widening
from scalelab.analysis.stats import find_t_quantile

T_OF_ONE = 12.7062
"""The 97.5 % quantile of Student's t with one degree of freedom; its 80 % quantile is 1.3764."""


@pytest.mark.parametrize(
    ("steps", "num_steps"),
    [
        ([1.09, *[1.0] * 11], 0),
        ([1.1, *[1.0] * 11], 0),
        ([3.0, 1.0], 1),
        ([1.11, *[1.0] * 11], 1),  # a tenth above the steady median
        ([1.44, 1, 1, 1, 1, 1, 0.8, 1, 1.2], 0),
        ([1.45, 1, 1, 1, 1, 1, 0.8, 1, 1.2], 1),  # 1 + 1.5 · 1.4826 · 0.2 of the last third
        ([2, 1, 2, 2, *[1.0] * 12], 1),  # a quick step costs two slow ones: no more is won back
        ([2, 1, 2, 2, 2, *[1.0] * 12], 5),
    ],
)
def test_the_slow_beginning_is_as_long_as_it_pays(steps: list[float], num_steps: int) -> None:
    assert find_warmup([steps]).num_steps == num_steps


def test_a_launch_is_settled_if_half_of_it_came_after_the_beginning() -> None:
    assert find_warmup([[2.0] * 6 + [1.0] * 6]) == Warmup(num_steps=6, is_settled=True)
    assert find_warmup([[2.0] * 7 + [1.0] * 5]) == Warmup(num_steps=7, is_settled=False)


@pytest.mark.parametrize(
    ("steady", "below", "above"), [([1.0] * 6, 1.5, 1.51), ([0.8, 0.8, 0.8, 1.0, 1.2, 1.2], 2.03, 2.04)]
)
def test_an_outlier_is_half_as_long_again_and_beyond_the_noise(steady: list[float], below: float, above: float) -> None:
    """Noise: 3.5 deviations of 1.4826 · 0.2 above the median of 1 are 2.038."""
    assert find_outliers([[*steady, below]]) == []
    assert find_outliers([[], [*steady, above]]) == [Outlier(round=1, step=6, ratio=above)]


def test_disturbed_rounds_have_their_numbers_where_others_are_empty() -> None:
    assert find_disturbed([[], [1.0], [1.0], [1.0, 1.0], [2.0]]) == {5: 2.0}
    assert find_disturbed([[], []]) == {}


def test_noise_is_the_spread_of_launches_with_two_steps_and_of_two_launches() -> None:
    noise = measure_noise([[0.8, 1.0, 1.2], [1.0], []])
    assert (noise.within_ratio, noise.between_ratio) == (pytest.approx(1.4826 * 0.2), 0.0)
    alone = measure_noise([[1.0]])
    assert (alone.within_ratio, alone.between_ratio) == (None, None)


@pytest.mark.parametrize(("change", "found"), [(0.029, None), (0.031, 0.031), (-0.031, -0.031)])
def test_a_trend_counts_from_three_percent_on(change: float, found: float | None) -> None:
    assert find_trend(1 + change * np.linspace(-0.5, 0.5, 11)) == (None if found is None else pytest.approx(found))


@pytest.mark.parametrize(
    ("values", "is_trend"), [((1, 2, 3, 4), False), ((1, 2, 3, 4, 5), True), ((2, 1, 3, 4, 5), False)]
)
def test_a_trend_is_one_that_two_of_a_hundred_orders_have(values: tuple[float, ...], is_trend: bool) -> None:
    """All of 5 in order, upwards or downwards, are 2 of 120 orders; all of 4 are 2 of 24; one pair off 10 of 120."""
    assert (find_trend(np.array(values, dtype=float)) is not None) is is_trend


def test_of_many_values_the_medians_of_500_neighbourhoods_have_the_trend() -> None:
    """1000 values from 1 to 2 in pairs: from the middle of the first pair to that of the last."""
    values = np.linspace(1.0, 2.0, 1000)
    assert find_trend(values) == pytest.approx((998 / 999) / 1.5)


@pytest.mark.parametrize(
    ("rises", "ties", "chance"),
    [
        (10, [1] * 5, 2 / 120),
        (-8, [1] * 5, 2 * (1 + 4) / 120),
        (0, [1] * 5, 1.0),
        (5, [2, 1, 1], math.erfc(5 / math.sqrt(2 * (4 * 3 * 13 - 2 * 1 * 9) / 18))),
        (100, [1] * 34, math.erfc(100 / math.sqrt(2 * 34 * 33 * 73 / 18))),
    ],
)
def test_orders_are_counted_or_taken_for_normal(rises: int, ties: list[int], chance: float) -> None:
    """Kendall's variance n (n − 1)(2n + 5) / 18, less the same of every tie."""
    assert _test_order(rises, ties) == pytest.approx(chance)


def test_orders_of_33_values_are_still_counted() -> None:
    assert _test_order(33 * 32 // 2, [1] * 33) == pytest.approx(2 / math.factorial(33))


def test_the_spread_of_three_has_the_interval_of_one_degree() -> None:
    """0.37 · 2 degrees of freedom are one at least; its χ² quantiles are 5.0239 and 0.00098207."""
    found = estimate_spread([1.0, math.exp(0.1), math.exp(-0.1)])
    assert found is not None
    assert found.value == pytest.approx(0.14826)
    assert (found.low, found.high) == pytest.approx(
        (0.14826 / math.sqrt(5.0239), 0.14826 / math.sqrt(0.00098207)), rel=1e-4
    )
    assert estimate_spread([1.0]) is None


def test_two_rounds_resolve_what_both_errors_of_students_t_allow() -> None:
    """Logs of 0 and 0.02 have a standard error of 0.01."""
    above = [[1.0], [math.exp(0.02)]]
    assert find_resolution(above, [[1.0], [1.0]]) == pytest.approx(math.expm1((T_OF_ONE + 1.3764) * 0.01), rel=1e-4)
    assert find_resolution([[1.0], [1.0]], [[1.0], [1.0]]) == 0.02  # nothing below counts as an effect
    assert find_resolution([[1.0]], [[1.0]]) is None


def test_one_more_number_falls_between_wider_limits_than_the_centre() -> None:
    found = predict_one_more([1.0, math.exp(0.2)])
    arm = T_OF_ONE * 0.2 / math.sqrt(2) * math.sqrt(1 + 1 / 2)
    assert found.value == pytest.approx(math.exp(0.1))
    assert (found.low, found.high) == pytest.approx((math.exp(0.1 - arm), math.exp(0.1 + arm)), rel=1e-4)
    assert predict_one_more([2.0]).low is None


def test_launches_suffice_when_students_t_over_their_root_does() -> None:
    """t / √n is 1.0495 for 6 launches (2.5706) and 0.9248 for 7 (2.4469); ln 1.01 over 0.01 is 0.995."""
    assert count_launches(0.01, 0.01) == 7
    assert count_launches(0.0, 0.01) == 2
    assert count_launches(1.0, 1e-4) is None


def test_variation_is_the_deviation_over_the_mean_of_launches_with_two_steps() -> None:
    found = estimate_variation([[1.0, 3.0], [5.0], []])
    assert found is not None
    assert (found.value, found.low) == (pytest.approx(math.sqrt(2) / 2), None)


def test_a_quantile_has_the_arms_of_its_launches() -> None:
    rounds = [[float(step + launch) for step in range(11)] for launch in range(3)]
    found = estimate_quantile(rounds, 0.9)
    assert found is not None
    assert found.value == pytest.approx(float(np.quantile(np.concatenate(rounds), 0.9)))
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


def test_a_spread_of_eleven_has_37_percent_of_ten_degrees() -> None:
    found = estimate_spread([math.exp(0.01 * number) for number in range(11)])
    assert found is not None
    deviation = 1.4826 * 0.03
    ends = [deviation * math.sqrt(3.7 / stats.chi2.ppf(share, 3.7)) for share in (0.975, 0.025)]
    assert (found.low, found.value, found.high) == pytest.approx((ends[0], deviation, ends[1]))


def test_rounds_that_surely_resemble_their_neighbours_resolve_less() -> None:
    logs = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    reach = stats.t.ppf(0.975, 8) + stats.t.ppf(0.8, 8)
    plain = reach * logs.std(ddof=1) / 3
    widening = find_widening(logs)
    assert widening > 1.2
    above, below = [[math.exp(log)] for log in logs], [[1.0]] * 9
    assert find_resolution(above, below) == pytest.approx(math.expm1(plain * widening))
    mixed = [above[place] for place in (4, 0, 7, 2, 8, 1, 6, 3, 5)]
    assert find_resolution(mixed, below) == pytest.approx(math.expm1(plain))


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0], [1.0] * 9])
def test_few_values_and_equal_ones_have_no_trend(values: list[float]) -> None:
    assert find_trend(np.array(values)) is None


def test_more_than_ten_thousand_launches_are_no_plan() -> None:
    """The spreads whose intervals come to 1 % with 10,000 launches and with one more."""
    wanted = math.log1p(0.01)
    for num, found in ((10_000, 10_000), (10_001, None)):
        spread = wanted * math.sqrt(num) / find_t_quantile(num - 1) * (1 - 1e-9)
        assert count_launches(spread, 0.01) == found


def test_a_trend_within_launches_is_that_of_their_own_medians() -> None:
    """Of a slow and a quick launch that rise by 5 % a step beside a steady one: 9 steps over the median of 1.225."""
    rise = [1 + 0.05 * step for step in range(10)]
    found = find_drift([[1.0] * 10, [10 * step for step in rise], [0.1 * step for step in rise]])
    assert found is not None
    assert found.change_over_rounds is None
    assert found.change_within_launches == pytest.approx(0.05 * 9 / 1.225)
