"""The universal scalability law: exact data, its special cases, and coverage under noise."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import UslFit, _estimate_loss, fit_usl
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


def test_the_interval_of_a_loss_is_that_of_fits_to_single_rounds() -> None:
    """σ of 0.1, 0.2 and 0.3: Student's t of two degrees of freedom times 0.1 over √3; κ is the same in all."""
    fit = fit_usl({size: [[scale(contention, 0.01)(size)] for contention in (0.1, 0.2, 0.3)] for size in SIZES})
    assert fit is not None
    assert fit.contention.low == 0.0
    assert fit.contention.high == pytest.approx(0.2 + 4.302653 * 0.1 / 3**0.5, abs=5e-3)
    assert fit.coherency.value == pytest.approx(0.01, abs=5e-4)
    assert fit.coherency.high == pytest.approx(fit.coherency.value, abs=1e-6)
    assert fit.coherency.low == pytest.approx(fit.coherency.value, abs=1e-6)


def test_a_loss_that_some_round_cannot_have_has_no_interval() -> None:
    ones = np.ones((3, 3))
    alone = _estimate_loss(1, np.array([2.0, 1.0, 0.0]), np.array([2.0, 1.0, 0.0]), ones * [[1], [0], [1]])
    assert alone == Estimate(value=0.5)
    assert _estimate_loss(1, np.array([2.0, 1.0, 0.0]), np.array([0.0, 1.0, 0.0]), ones) == Estimate(value=0.5)
    found = _estimate_loss(2, np.array([2.0, 1.0, 3.0]), np.array([4.0, 1.0, 8.0]), ones)
    assert found == Estimate(value=1.5, low=1.5, high=2.0), "the free fit says 2, and no round differs"


def test_a_peak_is_where_ranks_begin_to_cost_more_than_they_add() -> None:
    def make(low: float, contention: float) -> UslFit:
        return UslFit(
            contention=Estimate(value=contention),
            coherency=Estimate(value=0.01, low=low, high=0.02),
            one_rank_throughput=1.0,
            residual_ratio=0.0,
            largest_ranks=4,
        )

    assert make(0.001, 0.19).peak_ranks == pytest.approx(9.0)
    assert make(0.0, 0.19).peak_ranks is None
    assert make(0.001, 1.5).peak_ranks == 0.0


def test_ranks_that_only_wait_for_each_other_have_no_law() -> None:
    """N / X(N) = N − 1: on one rank it would take no time at all."""
    assert fit_usl({size: [[size / (size - 1)]] for size in (2, 4, 8)}) is None
