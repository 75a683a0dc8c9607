"""The promises of the intervals and verdicts, kept under the noise of a shared machine (`noise.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, estimate_median, estimate_ratio, judge
from scalelab.studies.shared.sampling import Sampling
from tests.analysis.noise import find_true_median, simulate_drift, simulate_pair, simulate_rounds

pytestmark = pytest.mark.slow

NUM_REPLICATIONS = 4000
"""The share of 95 % is then known to ±0.7 points, two standard errors."""


def measure_coverage(simulate: Callable[[], Estimate], truth: float, replications: int = NUM_REPLICATIONS) -> float:
    covered = 0
    for _ in range(replications):
        estimate = simulate()
        assert estimate.low is not None
        assert estimate.high is not None
        covered += estimate.low <= truth <= estimate.high
    return covered / replications


@pytest.mark.parametrize(("num_rounds", "num_steps"), [(12, 20), (8, 20), (5, 30), (4, 30), (3, 30), (2, 30), (1, 30)])
def test_the_median_of_independent_skewed_steps_is_covered(num_rounds: int, num_steps: int) -> None:
    rng = np.random.default_rng(num_rounds)
    share = measure_coverage(
        lambda: estimate_median(simulate_rounds(rng, 1.0, num_rounds, num_steps, between=0.0)), truth=1.0
    )
    assert 0.93 <= share <= 0.97


@pytest.mark.parametrize(("num_rounds", "num_steps"), [(12, 20), (8, 20), (5, 30), (3, 30)])
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
    assert 0.93 <= share <= 0.97


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
        replications=2000,
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

    assert 0.93 <= measure_coverage(simulate, truth=1.0, replications=2000) <= 0.97


BUDGET = Sampling()
"""What a study measures by default."""

STEPS_LEFT = BUDGET.steps - 5
"""Of the steps of a launch, after the warm-up that this machine shows."""


def count_verdicts(ratio: float, num_rounds: int, replications: int = 1000) -> dict[Verdict, float]:
    rng = np.random.default_rng(7)
    pairs = (simulate_pair(rng, ratio, num_rounds, STEPS_LEFT) for _ in range(replications))
    verdicts = (judge(estimate_ratio(*pair)) for pair in pairs)
    return {verdict: count / replications for verdict, count in Counter(verdicts).items()}


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


def test_a_slow_wander_of_the_machine_shortens_the_interval_of_a_median() -> None:
    """A known limit, stated in `stats.py`; the ratio of two configurations does not have it."""
    rng = np.random.default_rng(0)
    truth = find_true_median(rng)
    share = measure_coverage(
        lambda: estimate_median(simulate_rounds(rng, 1.0, 8, drift=simulate_drift(rng, 8))),
        truth,
        replications=1000,
    )
    assert 0.75 <= share <= 0.92
