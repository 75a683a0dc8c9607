"""Centres, medians, ratios and differences against numbers worked out by hand or by the definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy import stats

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.rounds import find_widening
from scalelab.analysis.stats import (
    TAIL,
    JointRatio,
    Launches,
    Verdict,
    _compare_samples,
    _spread_logs,
    _widen,
    compare_together,
    estimate_difference,
    estimate_location,
    estimate_median,
    estimate_over_rounds,
    estimate_positive_over_rounds,
    estimate_ratio,
    estimate_run_ratio,
    find_medians,
    judge,
    judge_together,
    leave_logs,
    pair_medians,
)

T_1, T_2, T_4 = (float(stats.t.ppf(0.975, freedom)) for freedom in (1, 2, 4))


def ends(estimate: Estimate) -> tuple[float, float, float]:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.value, estimate.high


@pytest.mark.parametrize(
    ("num_values", "expected"),
    [
        (5, (5 - T_4 * math.sqrt(37.2 / 5), 5, 5 + T_4 * math.sqrt(37.2 / 5))),
        (6, (1 + 0.6 * 0.5, 8.5, 32 - 0.6 * 8)),
        (7, (2 + 0.1 * 0.5, (12 + 16) / 2, 40 - 0.1 * 4)),
    ],
)
def test_powers_of_two_have_the_centre_and_limits_of_their_walsh_averages(
    num_values: int, expected: tuple[float, float, float]
) -> None:
    """Of 1, 2, 4, …: 1.6 of 64 sums of ranks lie in a tail with six of them, 3.2 of 128 with seven; five have Student's
    interval."""
    assert ends(estimate_location([2.0**power for power in range(num_values)])) == pytest.approx(expected)


def test_a_tail_that_the_signed_rank_test_cannot_reach_has_students_interval() -> None:
    values = [2.0**power for power in range(6)]
    arm = stats.t.ppf(0.99, 5) * np.std(values, ddof=1) / math.sqrt(6)
    assert ends(estimate_location(values, 0.01)) == pytest.approx((8.5 - arm, 8.5, 8.5 + arm))
    assert ends(estimate_location(values, 1 / 64)) == pytest.approx((1.0, 8.5, 32.0)), "it just reaches this one"


def invert_shares(clusters: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Woodruff's limits by their definition."""
    steps = [step for part in clusters for step in part]
    centre, num = float(np.median(steps)), len(clusters)
    excess = [sum((step < centre) + 0.5 * (step == centre) - 0.5 for step in part) for part in clusters]
    error = math.sqrt(num / (num - 1) * sum(one**2 for one in excess)) / len(steps)
    logit = 4 * max(stats.t.ppf(0.975, num - 1) * error, 0.5 / math.sqrt(len(steps)))
    low, high = np.quantile(steps, [1 / (1 + math.exp(logit)), 1 / (1 + math.exp(-logit))], method="hazen")
    return float(low), centre, float(high)


def test_five_launches_have_woodruffs_limits() -> None:
    rounds = [[1.0 + 0.1 * step + 0.3 * (launch % 2) for step in range(9)] for launch in range(5)]
    found = estimate_median(rounds)
    expected = _widen(
        Estimate(**dict(zip(("low", "value", "high"), invert_shares(rounds), strict=True))),
        find_widening(np.log([np.median(steps) for steps in rounds])),
    )
    assert ends(found) == pytest.approx(ends(expected))
    assert ends(found)[0] < invert_shares(rounds)[0]


def test_launches_with_the_same_shares_have_one_binomial_error() -> None:
    rounds = [[float(step) for step in range(1, 21)]] * 8
    assert ends(estimate_median(rounds)) == pytest.approx(invert_shares(rounds))


@pytest.mark.parametrize(("num_steps", "num_batches"), [(10, 4), (30, 6), (33, 6), (100, 10)])
def test_a_single_launch_is_cut_into_four_to_ten_batches_of_five(num_steps: int, num_batches: int) -> None:
    steps = [1.0 + 0.01 * (7 * step % 11) + 0.02 * step for step in range(num_steps)]
    batches = [part.tolist() for part in np.array_split(np.array(steps), num_batches)]
    assert ends(estimate_median([steps])) == pytest.approx(invert_shares(batches))
    assert estimate_median([steps[:9]]).low is None


def test_up_to_four_launches_have_students_interval_of_their_logs() -> None:
    arm = T_1 * 0.3 / 2  # a standard deviation of 0.3 / √2, over √2
    rounds = [[1.0] * 3, [math.exp(0.3)] * 4]
    centre = math.exp(0.3)
    assert ends(estimate_median(rounds)) == pytest.approx((centre * math.exp(-arm), centre, centre * math.exp(arm)))
    four = [[math.exp(0.1 * launch)] * 4 for launch in range(4)]
    spread = float(np.std([0.0, 0.1, 0.2, 0.3], ddof=1)) / 2
    wide = float(stats.t.ppf(0.975, 3)) * spread
    assert estimate_median(four).high == pytest.approx(math.exp(0.15 + wide), rel=2e-3)


@pytest.mark.parametrize(("apart", "is_known"), [(0.36, True), (0.37, False)])
def test_ends_that_differ_by_more_than_a_hundred_say_nothing(apart: float, is_known: bool) -> None:
    """Of two launches the ends differ by exp(12.706 · d): d = 0.3624 is a factor of 100."""
    assert (estimate_median([[1.0], [math.exp(apart)]]).low is not None) is is_known
    logs = Estimate(value=0.0, low=-T_1 * apart / 2, high=T_1 * apart / 2)
    assert (leave_logs(logs).low is not None) is is_known


def test_times_of_nothing_have_no_logs() -> None:
    assert _spread_logs(np.array([1.0, 1.1]), 0.0) == Estimate(value=0.0)
    assert _spread_logs(np.array([0.0, 1.1]), 1.0) == Estimate(value=1.0)
    assert _spread_logs(np.array([0.4, 0.5]), 0.45).low is not None
    five = estimate_median([[-1.0, 0.0, 1.0]] * 5)
    assert ends(five) == pytest.approx(invert_shares([[-1.0, 0.0, 1.0]] * 5))
    assert _widen(Estimate(value=2.0), 3.0) == Estimate(value=2.0)


def test_an_unpaired_difference_has_welchs_interval() -> None:
    """Variances of 2 and 3 over 2 and 3 values, π/3 each: (2e)² / (e² + e²/2) = 8/3 degrees of freedom."""
    found = estimate_difference([[1.0], [3.0]], [[1.0], [1.0], [4.0]])
    arm = float(stats.t.ppf(0.975, 8 / 3)) * math.sqrt(2 * math.pi / 3)
    assert ends(found) == pytest.approx((0.25 - arm, 0.25, 0.25 + arm))
    assert estimate_difference([[1.0]], [[1.0], [1.0]]) == Estimate(value=0.0)


def test_errors_are_widened_and_shifts_of_whole_samples_added() -> None:
    left, right = np.array([1.0, 3.0]), np.array([1.0, 1.0, 4.0])
    errors = [math.pi / 3 * 4 + 0.25, math.pi / 3 * 2.25 + 0.25]
    freedom = sum(errors) ** 2 / (errors[0] ** 2 + errors[1] ** 2 / 2)
    found = _compare_samples(left, right, (2.0, 1.5), 0.5, 0.05)
    arm = float(stats.t.ppf(0.95, freedom)) * math.sqrt(sum(errors))
    assert ends(found) == pytest.approx((0.25 - arm, 0.25, 0.25 + arm))


def test_two_runs_have_a_spread_of_one_percent_each_and_half_of_it_beside_yardsticks() -> None:
    """Three constant rounds each: nothing but the assumed spread, with four degrees of freedom."""
    slow, fast = [[2.0]] * 3, [[1.0]] * 3
    for yardsticks, spread in ((None, 0.01), ((slow, slow), 0.005)):
        value = 2.0
        arm = T_4 * math.sqrt(2) * spread
        found = estimate_run_ratio(slow, fast, yardsticks)
        assert ends(found) == pytest.approx((value * math.exp(-arm), value, value * math.exp(arm)))


def test_only_runs_without_yardsticks_are_widened_for_their_wander() -> None:
    above, below = [[1.0], [1.1], [1.3]], [[1.0], [1.2], [1.1]]
    logs = [np.log([one[0] for one in rounds]) for rounds in (above, below)]
    for yardsticks, spread in ((None, 0.01), (([[1.0]] * 3, [[1.0]] * 3), 0.005)):
        factors = [1.0 if yardsticks else find_widening(sample) for sample in logs]
        expected = leave_logs(_compare_samples(logs[0], logs[1], factors, spread))
        assert ends(estimate_run_ratio(above, below, yardsticks)) == pytest.approx(ends(expected))
    assert min(find_widening(sample) for sample in logs) > 1.05


def test_a_ratio_is_widened_where_its_rounds_are_known_to_wander() -> None:
    above, below = [[1.0], [1.02], [1.05], [1.04]], [[1.0]] * 4
    plain = estimate_ratio(above, below)
    logs = np.log([one[0] for one in above])
    assert ends(plain) == pytest.approx(ends(leave_logs(estimate_location(logs))))
    wandering = estimate_ratio(above, below, is_wandering=True)
    assert ends(wandering) == pytest.approx(ends(_widen(plain, find_widening(logs))))
    assert ends(wandering)[0] < ends(plain)[0]


def test_a_derived_number_has_the_arms_of_its_rounds() -> None:
    arm = T_2 / math.sqrt(3)
    assert ends(estimate_over_rounds(10.0, [1.0, 2.0, 3.0])) == pytest.approx((10 - arm, 10, 10 + arm))
    logs = T_2 * 0.1 / math.sqrt(3)
    positive = estimate_positive_over_rounds(4.0, [1.0, math.exp(0.1), math.exp(0.2)])
    assert ends(positive) == pytest.approx((4 * math.exp(-logs), 4, 4 * math.exp(logs)))


def test_many_rounds_have_the_medians_of_few() -> None:
    alike = [[1.0, 2.0, 9.0], [3.0, 4.0, 8.0]] * 30
    assert find_medians(alike).tolist() == [2.0, 4.0] * 30
    assert find_medians([[1.0, 2.0, 9.0], [3.0, 5.0]] * 30).tolist() == [2.0, 4.0] * 30
    assert np.isnan(find_medians([[]] * 60)).all()
    assert find_medians(Launches(alike)).tolist() == [2.0, 4.0] * 30
    assert pair_medians([[[1.0]], [[1.0]], [[1.0], [2.0]]]).shape == (3, 0)


@pytest.mark.parametrize(
    ("low", "value", "high", "verdict"),
    [
        (1.0, 1.04, 1.08, Verdict.UNRESOLVED),
        (1.001, 1.02, 1.06, Verdict.SLOWER),
        (0.92, 0.96, 1.0, Verdict.UNRESOLVED),
        (0.94, 0.98, 0.999, Verdict.FASTER),
        (0.95, 1.0, 1.04, Verdict.UNRESOLVED),
        (0.96, 1.0, 1.05, Verdict.UNRESOLVED),
        (0.951, 1.0, 1.049, Verdict.NO_DIFFERENCE),
        (1.2, 1.3, 1.4, Verdict.SLOWER),
        (0.2, 0.3, 0.4, Verdict.FASTER),
    ],
)
def test_verdicts_at_their_limits(low: float, value: float, high: float, verdict: Verdict) -> None:
    assert judge(Estimate(value=value, low=low, high=high)) is verdict


@pytest.mark.parametrize(
    ("low", "high", "judged", "verdict"),
    [
        (1.1, 1.3, (0.9, 1.4), Verdict.UNRESOLVED),
        (1.1, 1.3, (1.05, 1.4), Verdict.SLOWER),
        (0.98, 1.04, (0.9, 1.2), Verdict.NO_DIFFERENCE),
        (1.0, 1.04, (0.9, 1.2), Verdict.NO_DIFFERENCE),
        (0.98, 1.0, (0.9, 1.2), Verdict.NO_DIFFERENCE),
        (0.96, 0.99, (0.9, 1.2), Verdict.UNRESOLVED),
    ],
)
def test_a_ratio_of_a_table_differs_only_if_its_wider_interval_does(
    low: float, high: float, judged: tuple[float, float], verdict: Verdict
) -> None:
    value = (low + high) / 2
    wide = Estimate(value=value, low=judged[0], high=judged[1])
    assert judge(JointRatio(value=value, low=low, high=high, judged=wide)) is verdict


def test_what_is_left_of_a_table_is_judged_once_more_among_itself() -> None:
    """`first` differs at a third of the tail, `second` at a half of it only, `third` never."""
    asked: list[tuple[str, float]] = []

    def make(name: str, most: float) -> Callable[[float], Estimate]:
        def estimate(tail: float) -> Estimate:
            asked.append((name, tail))
            return Estimate(value=1.2, low=1.1 if tail >= most else 0.9, high=1.3)

        return estimate

    widest = {"first": TAIL / 3, "second": TAIL / 2, "third": 1.0}
    joint = {name: make(name, most) for name, most in widest.items()}
    own = {name: make(f"own {name}", 0.0) for name in joint}
    found = judge_together(own, joint)
    assert list(found) == ["first", "second", "third"]
    assert [judge(ratio) for ratio in found.values()] == [Verdict.SLOWER, Verdict.SLOWER, Verdict.UNRESOLVED]
    assert asked == [
        *((name, TAIL / 3) for name in ("first", "second", "third")), ("own first", TAIL),
        *((name, TAIL / 2) for name in ("second", "third")), ("own second", TAIL),
        ("third", TAIL), ("own third", TAIL),
    ]  # fmt: skip


def test_a_table_whose_rows_wander_rests_on_widened_intervals() -> None:
    """Each row rises and falls by itself: neighbours resemble each other beyond what all rows share."""
    rows = [[[1 + 0.05 * math.sin(0.5 * place + row)] for place in range(16)] for row in range(4)]
    found = compare_together({str(row): (rows[row], rows[0]) for row in (1, 2, 3)})
    for row in (1, 2, 3):
        ratio = found[str(row)]
        assert isinstance(ratio, JointRatio)
        expected = estimate_ratio(rows[row], rows[0], TAIL / 3, is_wandering=True)
        assert ends(ratio.judged) == pytest.approx(ends(expected))
        assert ends(ratio) == pytest.approx(ends(estimate_ratio(rows[row], rows[0])))
    steady = [[[1 + 0.05 * ((7 * place * (row + 1) + row) % 5 - 2)] for place in range(7)] for row in range(2)]
    alone = compare_together({"one": (steady[1], steady[0])})["one"]
    assert isinstance(alone, JointRatio)
    assert ends(alone.judged) == pytest.approx(ends(estimate_ratio(steady[1], steady[0])))


def test_two_rounds_are_already_compared_round_by_round() -> None:
    assert ends(estimate_ratio([[2.0], [8.0]], [[1.0], [4.0]])) == pytest.approx((2.0, 2.0, 2.0))
    assert ends(estimate_difference([[1.5], [9.5]], [[1.0], [9.0]])) == (0.5, 0.5, 0.5)
