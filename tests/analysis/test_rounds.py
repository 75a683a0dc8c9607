"""Rounds that resemble each other: banded algebra against whole matrices, memories at their limits, single averages."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, stats

from scalelab.analysis.rounds import (
    MEMORIES,
    STEADY,
    WANDER_SHARES,
    Floats,
    _prepare,
    _search_average,
    _test_memory,
    find_common_memory,
    find_memory,
    find_position,
    find_widening,
    tabulate_signed_rank,
)


def list_covariances(places: Floats) -> list[tuple[float, Floats]]:
    distance = np.abs(np.subtract.outer(places, places))
    kinds = [(STEADY, np.eye(len(places)))]
    for memory, weight in MEMORIES.items():
        for share in WANDER_SHARES:
            covariance = share * memory**distance + (1 - share) * np.eye(len(places))
            kinds.append(((1 - STEADY) * weight / len(WANDER_SHARES), covariance))
    return kinds


@pytest.mark.parametrize("places", [(0, 1, 2), (0, 1, 4, 5, 6, 9), tuple(range(25))])
def test_every_model_is_that_of_its_whole_covariance(places: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).normal(size=len(places))
    models = _prepare(places)
    squares = models.sum_squares(values)
    for number, (weight, covariance) in enumerate(list_covariances(np.array(places, dtype=np.float64))):
        inverse = np.linalg.inv(covariance)
        sums = inverse.sum(axis=1)
        projected = inverse - np.outer(sums, sums) / sums.sum()
        log_weight = np.log(weight) - (np.linalg.slogdet(covariance)[1] + np.log(sums.sum())) / 2
        assert squares[number] == pytest.approx(values @ projected @ values)
        assert models.log_weights[number] == pytest.approx(log_weight)
        assert models.mean_variances[number] == pytest.approx(covariance.mean())


@pytest.mark.parametrize("places", [(0, 1, 2), (0, 1, 2, 5, 6, 7, 8, 10)])
def test_the_factor_is_that_of_the_mixture_of_students(places: tuple[int, ...]) -> None:
    """Each model counts by its restricted likelihood, |V|^-1/2 (1ᵀV⁻¹1)^-1/2 S^-(n-1)/2, from whole matrices."""
    measured = np.cumsum(np.random.default_rng(4).normal(size=11)) + 100
    values = np.where(np.isin(np.arange(11), places), measured, np.nan)
    known, num = values[list(places)], len(places)
    weights, scales = [], []
    for prior, covariance in list_covariances(np.array(places, dtype=np.float64)):
        inverse = np.linalg.inv(covariance)
        precision = inverse.sum()
        deviations = known - known.mean()
        square = deviations @ inverse @ deviations - (inverse.sum(axis=1) @ deviations) ** 2 / precision
        weights.append(prior * (np.linalg.det(covariance) * precision) ** -0.5 * square ** (-(num - 1) / 2))
        scales.append(np.sqrt(covariance.mean() * square / (num - 1)))
    shares, mixture = np.array(weights) / sum(weights), stats.t(num - 1)
    reach = optimize.brentq(lambda x: shares @ mixture.cdf(x / np.array(scales)) - 0.975, 0, 100 * max(scales))
    independent = mixture.ppf(0.975) * known.std(ddof=1) / np.sqrt(num)
    assert find_widening(values) == pytest.approx(max(1.0, reach / independent), rel=1e-6)
    assert reach > 1.2 * independent


def test_thousands_of_steady_rounds_need_no_longer_interval() -> None:
    """By whole matrices, 5,000 rounds would take gigabytes."""
    rng = np.random.default_rng(2)
    assert find_widening(rng.normal(size=5000)) == pytest.approx(1.0, abs=0.05)
    assert find_widening(np.repeat(rng.normal(size=500), 10)) > 2


def test_few_rounds_or_equal_ones_need_no_longer_interval_whatever_their_unit() -> None:
    assert find_widening(np.array([])) == find_widening(np.array([1.0, 2.0])) == 1.0
    assert find_widening(np.array([1.0, np.nan, 2.0])) == find_widening(np.ones(9)) == 1.0
    values = np.array([1.0, 1.1, 1.3, 1.2, 1.0])
    assert find_widening(values / 1e6) == pytest.approx(find_widening(values), rel=1e-6)


def step(first: float) -> Floats:
    return np.array([first, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])


def test_eight_rounds_that_rise_have_a_memory_and_seven_show_none() -> None:
    """Deviations of 1 … 8: 26.25 between neighbours, 42 in all."""
    assert find_memory(np.arange(8.0)) == pytest.approx(0.625)
    assert find_memory(np.insert(np.arange(8.0), 3, np.nan)) == pytest.approx(0.625)
    assert find_memory(np.arange(7.0)) is None
    assert find_memory(np.ones(8)) is None


@pytest.mark.parametrize(("first", "is_seen"), [(0.19, True), (0.2, False)])
def test_a_memory_is_one_that_one_of_a_hundred_independent_series_has(first: float, is_seen: bool) -> None:
    """Von Neumann's ratio of eight is 16/7 ± √(1536/3087): 2.326 deviations below it is 0.6448, and these have 0.6430
    and 0.6477."""
    assert (find_memory(step(first)) is not None) is is_seen


@pytest.mark.parametrize(("first", "is_seen"), [(0.87, True), (0.88, False)])
def test_two_series_show_together_what_one_does_not(first: float, is_seen: bool) -> None:
    """Each is 1.645 deviations below: 1.1253, and these have 1.1203 and 1.1281."""
    one = step(first)
    found = _test_memory(np.array([one, 3 * one + 7]))
    assert (found is not None) is is_seen
    if found is not None:
        rest = one - one.mean()
        assert found == pytest.approx(rest[:-1] @ rest[1:] / (rest @ rest))
    assert find_memory(one) is None


def test_configurations_are_compared_beyond_what_all_share() -> None:
    shared = 100 * np.random.default_rng(3).normal(size=8)
    first, second, third = np.arange(8.0), step(0.1), np.array([0.0, 1, 2, 3, 3, 2, 1, 0])
    found = find_common_memory(np.array([first, second, third]) + shared)
    assert found == pytest.approx(_test_memory(np.array([first - second, (first + second) / 2 - third])))
    assert found is not None
    assert find_common_memory(np.array([first + shared, shared])) == pytest.approx(0.625)
    assert find_common_memory(first[None, :]) is None


@pytest.mark.parametrize("digits", [0, 1, 9])
def test_any_average_is_found_by_search(monkeypatch: pytest.MonkeyPatch, digits: int) -> None:
    """Also where limits pass a rank by one, and where thousands of averages are equal."""
    monkeypatch.setattr("scalelab.analysis.rounds.FEW_PAIRS", 5)
    data = np.sort(np.random.default_rng(digits).normal(size=24).round(digits))
    first, second = np.triu_indices(len(data))
    listed = np.sort((data[first] + data[second]) / 2).tolist()
    assert [_search_average(data, rank) for rank in range(len(listed))] == pytest.approx(listed, abs=1e-12)


def test_limits_lie_between_two_ranks_as_the_tail_does_between_their_chances() -> None:
    """Of 256 sums of eight signs, 5 are at most 3 and 7 at most 4; 6.4 are a tail."""
    assert find_position(8, 0.025) == pytest.approx(3 + 1.4 / 2)
    table = tabulate_signed_rank(200)
    assert find_position(200, 0.025) == pytest.approx(float(np.interp(0.025, table, np.arange(len(table)))), rel=1e-9)
    deviation = np.sqrt(1000 * 1001 * 2001 / 24)
    assert find_position(1000, 0.025) == pytest.approx(1000 * 1001 / 4 - 0.5 + stats.norm.ppf(0.025) * deviation)
