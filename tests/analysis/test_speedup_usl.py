"""The universal scalability law: exact data, its special cases, and coverage under noise."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.analysis.speedup import fit_usl
from tests.analysis.noise import simulate_sizes

SIZES = (1, 2, 4, 8)


def scale(contention: float, coherency: float) -> Callable[[int], float]:
    return lambda n: n / (1 + contention * (n - 1) + coherency * n * (n - 1))


def repeat(law: Callable[[int], float], sizes: tuple[int, ...] = SIZES) -> dict[int, list[list[float]]]:
    return {size: [[100 * law(size)] * 5] * 3 for size in sizes}


@given(st.floats(0, 0.5), st.floats(0, 0.1))
@settings(deadline=None)
def test_an_exact_law_is_recovered(contention: float, coherency: float) -> None:
    fit = fit_usl(repeat(scale(contention, coherency)))
    assert fit is not None
    assert fit.contention.value == pytest.approx(contention, abs=1e-6)
    assert fit.coherency.value == pytest.approx(coherency, abs=1e-6)
    assert fit.one_rank_throughput == pytest.approx(100.0)
    assert fit.residual_ratio == pytest.approx(0.0, abs=1e-6)
    assert fit.predict_speedup(5) == pytest.approx(scale(contention, coherency)(5), rel=1e-4)


def test_perfect_scaling_has_no_losses_and_no_peak() -> None:
    fit = fit_usl(repeat(lambda n: float(n)))
    assert fit is not None
    assert fit.contention.value == pytest.approx(0.0, abs=1e-9)
    assert fit.coherency.value == pytest.approx(0.0, abs=1e-9)
    assert fit.predict_speedup(64) == pytest.approx(64.0, rel=1e-6)


def test_contention_alone_is_amdahls_law_without_a_peak() -> None:
    fit = fit_usl({size: [[scale(0.1, 0.0)(size)]] for size in SIZES})
    assert fit is not None
    assert fit.predict_speedup(10**6) == pytest.approx(10.0, rel=0.01)


def test_the_peak_is_where_the_law_has_it() -> None:
    fit = fit_usl(repeat(scale(0.05, 0.02)))
    assert fit is not None
    assert fit.peak_ranks == pytest.approx(np.sqrt(0.95 / 0.02))


def test_better_than_perfect_has_no_losses() -> None:
    fit = fit_usl({size: [[float(size) ** 1.2]] * 3 for size in SIZES})
    assert fit is not None
    assert (fit.contention.value, fit.coherency.value) == (0.0, 0.0)
    assert fit.peak_ranks is None


def test_two_sizes_are_too_few() -> None:
    assert fit_usl(repeat(scale(0.1, 0.0), (1, 2))) is None


def test_one_round_gives_no_interval() -> None:
    fit = fit_usl({size: [[scale(0.1, 0.01)(size)]] for size in SIZES})
    assert fit is not None
    assert fit.contention.low is None
    assert fit.coherency.low is None
    assert fit.peak_ranks is not None


def test_the_largest_measured_size_is_carried_along() -> None:
    fit = fit_usl(repeat(scale(0.1, 0.01)))
    assert fit is not None
    assert fit.largest_ranks == 8


@pytest.mark.slow
def test_known_coefficients_are_covered() -> None:
    """Each to ±1.8 points, two standard errors of twice 300, and all together to ±0.7."""
    rng = np.random.default_rng(0)
    shares = {}
    for (contention, coherency), sizes in itertools.product(
        [(0.05, 0.01), (0.1, 0.02), (0.05, 0.0)], [(1, 2, 4), SIZES]
    ):
        covered = []
        for _ in range(300):
            fit = fit_usl(simulate_sizes(rng, scale(contention, coherency), sizes))
            assert fit is not None
            for estimate, truth in ((fit.contention, contention), (fit.coherency, coherency)):
                assert estimate.low is not None
                assert estimate.high is not None
                covered.append(estimate.low <= truth <= estimate.high)
        shares[contention, coherency, sizes] = np.mean(covered)
    assert [case for case, share in shares.items() if not 0.92 <= share <= 0.985] == []
    assert 0.935 <= np.mean(list(shares.values())) <= 0.975


@pytest.mark.slow
def test_a_peak_is_rarely_seen_where_there_is_none() -> None:
    rng = np.random.default_rng(0)
    fits = [fit_usl(simulate_sizes(rng, scale(0.05, 0.0), (1, 2, 4))) for _ in range(200)]
    assert np.mean([fit is not None and fit.peak_ranks is not None for fit in fits]) <= 0.05
