"""The promises of the intervals and verdicts, kept under the noise of a shared machine (`noise.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.verdicts import compare_in_turns
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.rounds import find_common_memory
from scalelab.analysis.stats import Verdict, compare_together, estimate_median, estimate_ratio, judge, pair_medians
from scalelab.studies.shared.study import Sampling
from tests.analysis.noise import find_true_median, simulate_drift, simulate_pair, simulate_rounds

pytestmark = pytest.mark.slow

NUM_REPLICATIONS = 600
"""The share of 95 % is then known to ±1.8 points, two standard errors; the bands are wider."""


def measure_coverage(simulate: Callable[[], Estimate], truth: float) -> float:
    covered = 0
    for _ in range(NUM_REPLICATIONS):
        estimate = simulate()
        assert estimate.low is not None
        assert estimate.high is not None
        covered += estimate.low <= truth <= estimate.high
    return covered / NUM_REPLICATIONS


@pytest.mark.parametrize(("num_rounds", "num_steps"), [(12, 20), (5, 30), (4, 30), (2, 30), (1, 30)])
def test_the_median_of_independent_skewed_steps_is_covered(num_rounds: int, num_steps: int) -> None:
    rng = np.random.default_rng(num_rounds)
    share = measure_coverage(
        lambda: estimate_median(simulate_rounds(rng, 1.0, num_rounds, num_steps, between=0.0)), truth=1.0
    )
    assert 0.93 <= share <= (0.97 if num_rounds < 5 else 1.0)


@pytest.mark.parametrize(("num_rounds", "num_steps"), [(12, 20), (5, 30), (3, 30)])
@pytest.mark.parametrize(("within", "between"), [(0.065, 0.025), (0.04, 0.035)])
def test_the_median_is_covered_where_launches_differ(
    num_rounds: int, num_steps: int, within: float, between: float
) -> None:
    rng = np.random.default_rng(num_rounds)
    truth = find_true_median(rng, within=within, between=between)
    share = measure_coverage(
        lambda: estimate_median(simulate_rounds(rng, 1.0, num_rounds, num_steps, within=within, between=between)),
        truth,
    )
    assert 0.93 <= share <= (0.97 if num_rounds < 5 else 1.0)


@pytest.mark.parametrize(("num_rounds", "noise"), [(12, 1.0), (24, 1.0), (24, 2.0)])
def test_the_median_is_covered_while_the_machine_wanders(num_rounds: int, noise: float) -> None:
    """A wander of 3 % with a memory of 0.8 from round to round, and twice as much in twice the noise."""
    rng = np.random.default_rng(num_rounds)
    within, between, spread = 0.065 * noise, 0.015 * noise, 0.03 * noise
    truth = find_true_median(rng, within=within, between=float(np.hypot(between, spread)))

    def simulate() -> Estimate:
        drift = simulate_drift(rng, num_rounds, spread=spread, memory=0.8)
        return estimate_median(simulate_rounds(rng, 1.0, num_rounds, within=within, between=between, drift=drift))

    assert 0.93 <= measure_coverage(simulate, truth) <= 0.985


@pytest.mark.parametrize(("num_arms", "num_rounds", "most"), [(2, 24, 0.33), (5, 24, 0.14), (5, 12, 0.33)])
def test_a_wander_that_each_configuration_has_for_itself_is_seen_or_widened(
    num_arms: int, num_rounds: int, most: float
) -> None:
    """Rounds are not independent then: without `wander.py` a third of such comparisons would be wrong."""
    rng = np.random.default_rng(3)
    num_wrong, num_seen = 0, 0
    for _ in range(200):
        drifts = [simulate_drift(rng, num_rounds, spread=0.03, memory=0.8) for _ in range(num_arms)]
        arms = [simulate_rounds(rng, 1.0, num_rounds, drift=drift) for drift in drifts]
        ratios = compare_together({str(number): (arm, arms[0]) for number, arm in enumerate(arms[1:])})
        num_wrong += judge(ratios["0"]) in (Verdict.FASTER, Verdict.SLOWER)
        num_seen += find_common_memory(np.log(pair_medians(arms))) is not None
    assert num_wrong / 200 <= most
    assert num_seen / 200 >= {(2, 24): 0.2, (5, 24): 0.7, (5, 12): 0.2}[num_arms, num_rounds]


def test_independent_rounds_are_seldom_called_correlated() -> None:
    rng = np.random.default_rng(6)
    found = [find_common_memory(rng.standard_normal((5, 12))) for _ in range(1000)]
    assert sum(one is not None for one in found) <= 20
    assert find_common_memory(rng.standard_normal((1, 12))) is None


@pytest.mark.parametrize("num_rounds", [12, 8, 5, 3])
def test_the_ratio_is_covered_on_a_machine_that_drifts(num_rounds: int) -> None:
    rng = np.random.default_rng(num_rounds)
    share = measure_coverage(lambda: estimate_ratio(*simulate_pair(rng, 1.2, num_rounds)), truth=1.2)
    assert 0.93 <= share <= 0.97


def test_the_ratio_of_series_of_unequal_length_is_covered() -> None:
    rng = np.random.default_rng(0)
    share = measure_coverage(
        lambda: estimate_ratio(simulate_rounds(rng, 1.2, 8), simulate_rounds(rng, 1.0, 7)),
        truth=1.2,
    )
    assert 0.93 <= share <= 0.97


def test_the_ratio_is_covered_when_some_launches_are_hit_by_other_work() -> None:
    rng = np.random.default_rng(0)

    def simulate() -> Estimate:
        left, right = simulate_pair(rng, 1.0)
        for rounds in (left, right):
            for steps in rounds:
                if rng.random() < 0.05:
                    steps[:] = [seconds * 1.3 for seconds in steps]
        return estimate_ratio(left, right)

    assert 0.93 <= measure_coverage(simulate, truth=1.0) <= 0.97


BUDGET = Sampling()
"""What a study measures by default."""

STEPS_LEFT = BUDGET.steps - 5
"""Of the steps of a launch, after the warm-up that this machine shows."""


def count_verdicts(ratio: float, num_rounds: int) -> dict[Verdict, float]:
    rng = np.random.default_rng(7)
    pairs = (simulate_pair(rng, ratio, num_rounds, STEPS_LEFT) for _ in range(NUM_REPLICATIONS))
    verdicts = (judge(estimate_ratio(*pair)) for pair in pairs)
    return {verdict: count / NUM_REPLICATIONS for verdict, count in Counter(verdicts).items()}


def test_a_configuration_against_itself_is_no_difference() -> None:
    assert count_verdicts(1.0, BUDGET.rounds)[Verdict.NO_DIFFERENCE] >= 0.95


@pytest.mark.parametrize("num_rounds", [8, 10])
def test_fewer_rounds_leave_more_unresolved_and_not_more_wrong(num_rounds: int) -> None:
    shares = count_verdicts(1.0, num_rounds)
    assert shares.get(Verdict.FASTER, 0.0) + shares.get(Verdict.SLOWER, 0.0) <= 0.05


def test_five_percent_slower_is_found() -> None:
    shares = count_verdicts(1.05, BUDGET.rounds)
    assert shares[Verdict.SLOWER] >= 0.95
    assert shares.get(Verdict.NO_DIFFERENCE, 0.0) <= 0.03


def test_five_percent_faster_is_found() -> None:
    assert count_verdicts(1 / 1.05, BUDGET.rounds)[Verdict.FASTER] >= 0.95


def count_in_turns(ratio: float) -> Counter[Verdict]:
    """Of 200 comparisons by `compare --interleave` on a machine whose launches differ by 5 %."""
    rng = np.random.default_rng(5)
    return Counter(compare_in_turns(rng, 5 / 3, ratio=ratio)[0] for _ in range(200))


def test_further_rounds_find_five_percent_on_a_noisy_machine() -> None:
    """92 % of 1,500 are found so, and 69 % with 12 rounds and one look."""
    assert count_in_turns(1.05)[Verdict.SLOWER] >= 160


def test_further_rounds_do_not_make_equal_sides_differ() -> None:
    found = count_in_turns(1.0)
    assert found[Verdict.SLOWER] + found[Verdict.FASTER] <= 16


@pytest.mark.parametrize("noise", [1.0, 2.0])
def test_a_table_of_equal_rows_is_seldom_wrong_about_any(noise: float) -> None:
    """Ten rows against one reference: one by one, every fourth such table would call something different."""
    rng = np.random.default_rng(4)
    num_wrong = 0
    for _ in range(120):
        drift = simulate_drift(rng, 12, spread=0.02 * noise)
        rows = [simulate_rounds(rng, 1.0, within=0.065 * noise, between=0.015 * noise, drift=drift) for _ in range(11)]
        ratios = compare_together({str(number): (row, rows[0]) for number, row in enumerate(rows[1:])})
        num_wrong += any(judge(ratio) in (Verdict.FASTER, Verdict.SLOWER) for ratio in ratios.values())
    assert num_wrong <= 11  # 5 % of 120, and two standard errors


def test_a_row_that_differs_is_found_among_equal_ones() -> None:
    rng = np.random.default_rng(5)
    drift = simulate_drift(rng, 12)
    rows = {str(factor): simulate_rounds(rng, factor, drift=drift) for factor in (1.0, 1.0001, 1.0002, 1.3, 0.7)}
    ratios = compare_together({name: (row, rows["1.0"]) for name, row in rows.items() if name != "1.0"})
    assert (judge(ratios["1.3"]), judge(ratios["0.7"])) == (Verdict.SLOWER, Verdict.FASTER)
    assert all(ratio == estimate_ratio(rows[name], rows["1.0"]) for name, ratio in plain(ratios).items())


def plain(ratios: dict[str, Estimate]) -> dict[str, Estimate]:
    return {name: Estimate(value=one.value, low=one.low, high=one.high) for name, one in ratios.items()}
