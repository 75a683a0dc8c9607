"""How much longer an interval is where rounds resemble each other: the banded algebra against whole matrices."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, stats

from scalelab.analysis.rounds import MEMORIES, STEADY, WANDER_SHARES, Floats, _prepare, find_widening


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
