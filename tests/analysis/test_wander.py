"""How much longer an interval is where rounds resemble each other: the banded algebra against whole matrices."""

from __future__ import annotations

import numpy as np
import pytest

from scalelab.analysis.wander import MEMORIES, STEADY, WANDER_SHARES, Floats, _prepare, find_widening


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


def test_thousands_of_steady_rounds_need_no_longer_interval() -> None:
    """By whole matrices, 5,000 rounds would take gigabytes."""
    rng = np.random.default_rng(2)
    assert find_widening(rng.normal(size=5000)) == pytest.approx(1.0, abs=0.05)
    assert find_widening(np.repeat(rng.normal(size=500), 10)) > 2
