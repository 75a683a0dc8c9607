"""Statistics of one number per round: the interval of its centre, and how much longer wandering speed makes it.

The Hodges–Lehmann centre and its interval are read from Walsh averages and the signed-rank distribution. A few hundred
numbers have all their pairs listed. Of more, single averages are found without listing any: 2,500 rounds have three
million pairs.

The speed of a machine wanders: it is a little slower for some rounds, then faster. The mean of n rounds then says less
than that of n independent ones, and their spread, which gives an interval its length, hides it. Rounds are modelled as

    y_i = μ + wander_i + noise_i          wander: first-order autoregression with memory ρ, a share λ of the variance

ρ cannot be read off a dozen rounds: with ρ = 0.8 their lag-1 correlation comes out anywhere from 0 to 0.8. So every ρ
counts by its weight: a prior times its restricted likelihood (Harville 1974), which leaves μ and the variance out.
Given ρ and λ, the mean of the rounds has Student's distribution with n − 1 degrees of freedom; the mixture of these is
the distribution of μ (Box & Tiao, "Bayesian Inference in Statistical Analysis", 1973, chapter 2), and its 95 %
interval over that of independent rounds is the factor.

The prior is the price of not knowing: with 12 rounds the interval of a median is about twice as long as on a machine
that is known to be steady. A ratio of neighbouring launches has lost the wander that both share; it is widened only
where its rounds are surely correlated (`find_memory`), as if every configuration had a wander of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MEMORIES = {0.5: 0.1, 0.7: 0.2, 0.8: 0.3, 0.9: 0.2, 0.95: 0.2}
"""ρ from round to round, and how likely each is if there is any."""
WANDER_SHARES = (0.5, 1.0)
"""λ, equally likely."""
STEADY = 0.4
"""How likely independent rounds are before any is seen."""
UPPER = 0.975


class WanderModels(NamedTuple):
    """Every ρ and λ for rounds at given places: all that does not depend on what was measured."""

    log_weights: Floats
    precision: Floats
    """Diagonal and first off-diagonal of T, the inverse of the wander's covariance: a row of each per model."""
    factor: Floats
    """Banded Cholesky factor of λ I + (1 − λ) T, all models one after the other."""
    sums: Floats
    """V⁻¹ 1 per model, where V is the covariance of rounds."""
    mean_variances: Floats
    """Of the mean of all rounds, for a variance of 1."""

    def sum_squares(self, deviations: Floats) -> Floats:
        """The residual sum of squares per model: dᵀ V⁻¹ d − (1ᵀ V⁻¹ d)² / 1ᵀ V⁻¹ 1."""
        solved = _solve(self.precision, self.factor, deviations)
        squares: Floats = solved @ deviations - (self.sums @ deviations) ** 2 / self.sums.sum(axis=1)
        return squares


@lru_cache(maxsize=256)
def _prepare(places: tuple[int, ...]) -> WanderModels:
    """The models, in time and memory that grow with the number of rounds.

    An autoregression has a tridiagonal inverse covariance T, so that of V = λ T⁻¹ + (1 − λ) I is
    V⁻¹ = (λ I + (1 − λ) T)⁻¹ T, and both factors are banded. Independent rounds are ρ = 0.
    """
    from scipy.linalg import cholesky_banded

    num = len(places)
    kinds = [(STEADY, 0.0, 1.0)]
    kinds += [
        ((1 - STEADY) * weight / len(WANDER_SHARES), memory, share)
        for memory, weight in MEMORIES.items()
        for share in WANDER_SHARES
    ]
    weights, memories, shares = (np.array(column)[:, None] for column in zip(*kinds, strict=True))
    kept = memories ** np.diff(places)  # ρ to the distance of neighbours
    lost = 1 - kept**2
    ends = np.zeros((len(kinds), 1))
    diagonal = 1 + np.hstack([ends, kept**2 / lost]) + np.hstack([kept**2 / lost, ends])
    beside = np.hstack([ends, -kept / lost])  # above the diagonal; a model's first has no neighbour
    precision = np.array([beside, diagonal])
    mixed = np.array([(1 - shares) * beside, shares + (1 - shares) * diagonal])
    factor = cholesky_banded(mixed.reshape(2, -1))
    sums = _solve(precision, factor, np.ones(num))
    log_determinants = np.log(lost).sum(axis=1) + 2 * np.log(factor[1].reshape(len(kinds), num)).sum(axis=1)
    total = np.full(len(kinds), float(num))
    before = np.zeros(len(kinds))
    for column in kept.T:
        before = column * (before + 1)
        total += 2 * before
    return WanderModels(
        log_weights=np.log(weights[:, 0]) - (log_determinants + np.log(sums.sum(axis=1))) / 2,
        precision=precision,
        factor=factor,
        sums=sums,
        mean_variances=(shares[:, 0] * total + (1 - shares[:, 0]) * num) / num**2,
    )


def _solve(precision: Floats, factor: Floats, values: Floats) -> Floats:
    """V⁻¹ of every model times the values."""
    from scipy.linalg import cho_solve_banded

    beside, diagonal = precision
    product = diagonal * values
    product[:, 1:] += beside[:, 1:] * values[:-1]
    product[:, :-1] += beside[:, 1:] * values[1:]
    solved: Floats = cho_solve_banded((factor, False), product.reshape(-1))
    return solved.reshape(product.shape)


def find_widening(values: Floats) -> float:
    """By how much the 95 % interval of the mean of independent values must be longer; 1 or more.

    `values` are one number per round in the order of the rounds; NaN is a round without one.
    """
    (places,) = np.nonzero(np.isfinite(values))
    known = values[places]
    num = len(known)
    deviations = known - known.mean() if num else known
    if num < 3 or not deviations.any():
        return 1.0
    from scipy.special import stdtr, stdtrit  # here, because loading it takes longer than --help

    models = _prepare(tuple(int(place) for place in places))
    squares = np.maximum(models.sum_squares(deviations), 1e-300)
    log_weights = models.log_weights - (num - 1) / 2 * np.log(squares)
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    scales = np.sqrt(models.mean_variances * squares / (num - 1))
    reach = float(stdtrit(num - 1, UPPER))
    low, high = 0.0, reach * float(scales.max())
    for _ in range(30):
        middle = (low + high) / 2
        if float(weights @ stdtr(num - 1, middle / scales)) < UPPER:
            low = middle
        else:
            high = middle
    independent = reach * float(np.sqrt((deviations**2).sum() / (num - 1) / num))
    return max(1.0, high / independent)


FEWEST_FOR_MEMORY = 8
"""Fewer rounds show no correlation that is not chance."""
MEMORY_CHANCE = 0.01
"""How often independent rounds may be called correlated."""


def find_memory(values: Floats) -> float | None:
    """The lag-1 correlation of one number per round, where it is surely above 0; None: the rounds may be independent.

    Von Neumann's ratio (1941): the mean squared difference of neighbours over the variance is 2 for independent values,
    with variance 4(n − 2)/((n − 1)(n + 1)), and falls as neighbours resemble each other.
    """
    return _test_memory(values[np.isfinite(values)][None, :])


def find_common_memory(arms: Floats) -> float | None:
    """The same of several configurations, a row each, beyond the wander that all share.

    Their differences are k − 1 independent series (Helmert's contrasts), and together they show what none shows alone:
    with a wander of 3 % and a memory of 0.8 for each of five configurations, 24 rounds are called correlated in 8 of 10
    runs, those of two configurations in 3 of 10.
    """
    num = len(arms)
    if num < 2:
        return None
    contrasts = np.array([[1 / k] * k + [-1.0] + [0.0] * (num - k - 1) for k in range(1, num)])
    return _test_memory(contrasts @ arms)


def _test_memory(series: Floats) -> float | None:
    """The mean lag-1 correlation of series, a row each, where von Neumann's ratios are surely too small together."""
    num = series.shape[1]
    if num < FEWEST_FOR_MEMORY:
        return None
    deviations = series - series.mean(axis=1, keepdims=True)
    totals = (deviations**2).sum(axis=1)
    if not totals.all():
        return None
    ratios = (np.diff(series, axis=1) ** 2).sum(axis=1) / totals * num / (num - 1)
    spread = math.sqrt(4 * num**2 * (num - 2) / ((num - 1) ** 3 * (num + 1)))
    below = float((2 * num / (num - 1) - ratios).sum()) / spread / math.sqrt(len(series))
    from scipy.special import ndtr

    if float(ndtr(-below)) > MEMORY_CHANCE:
        return None
    return float(((deviations[:, :-1] * deviations[:, 1:]).sum(axis=1) / totals).mean())


MOST_LISTED = 200
"""With more values than this, pairs are not listed and the signed-rank distribution is normal to three digits."""
FEW_PAIRS = 5000
"""Listed at once."""


def select_averages(data: Floats, ranks: Sequence[int]) -> list[float]:
    """The Walsh averages (the mean of every pair, each value paired with itself too) of the given ranks from 0."""
    if len(data) <= MOST_LISTED:
        first, second = _list_pairs(len(data))
        averages: Floats = np.sort((data[first] + data[second]) / 2)
        return [float(averages[rank]) for rank in ranks]
    return [_search_average(np.sort(data), rank) for rank in ranks]


@lru_cache(maxsize=32)
def _list_pairs(num_values: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The places of both values of every pair: the rows of a table have equally many rounds."""
    return np.triu_indices(num_values)


def _search_average(data: Floats, rank: int) -> float:
    """One Walsh average of many sorted values: limits are narrowed until few pairs lie between them, which are listed.

    The averages up to a limit are counted without listing them, as Monahan (1984) does; the next limit is the weighted
    median of what is left in every row of pairs (Johnson & Mizoguchi 1978), so that at least a quarter drops out.
    """
    num = len(data)
    own = np.arange(num)

    def count(limit: float) -> NDArray[np.int64]:
        """How many values from its own place on pair with each value to at most the limit."""
        return np.asarray(np.maximum(np.searchsorted(data, 2 * limit - data, side="right") - own, 0))

    rounding = 2 * float(np.spacing(np.abs(data).max()))
    below, up_to = np.zeros_like(own), num - own
    while int((between := up_to - below).sum()) > FEW_PAIRS:
        rows = np.flatnonzero(between)
        half = between[rows] // 2
        middles = (data[rows] + data[rows + below[rows] + half]) / 2
        middle = _weigh_median(middles, between[rows])
        if int((counted := count(middle + rounding)).sum()) <= rank:
            below = counted
        elif int((counted := count(middle - rounding)).sum()) > rank:
            up_to = counted
        else:
            return middle  # of equal averages there may be thousands
    firsts = np.repeat(own, between)
    starts = np.repeat(own + below - (np.cumsum(between) - between), between)
    averages = np.sort((data[firsts] + data[starts + np.arange(len(firsts))]) / 2)
    return float(averages[rank - int(below.sum())])


def _weigh_median(values: Floats, weights: NDArray[np.int64]) -> float:
    """The value up to which half of the weight lies."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(total, total[-1] / 2)]])


@cache
def find_position(num_values: int, tail: float) -> float:
    """How far from either end of the Walsh averages the limits lie, in ranks from 0.

    The k-th smallest average, from 0, is too high a limit with probability P(W ≤ k). Between the two ranks
    that enclose the tail the limit is interpolated in that probability, as Hettmansperger & Sheather (1986) do
    for the median.
    """
    if num_values > MOST_LISTED:
        from scipy.special import ndtri

        variance = num_values * (num_values + 1) * (2 * num_values + 1) / 24
        return num_values * (num_values + 1) / 4 - 0.5 + float(ndtri(tail)) * math.sqrt(variance)
    distribution = tabulate_signed_rank(num_values)
    rank = int(np.searchsorted(distribution, tail, side="right")) - 1
    below, above = distribution[rank], distribution[rank + 1]
    return rank + float((tail - below) / (above - below))


def tabulate_signed_rank(num_values: int) -> Floats:
    """P(W ≤ w) for w = 0, 1, …: each rank 1…n is in the sum W or not, with equal chance (Wilcoxon 1945)."""
    chances = np.ones(1)
    for rank in range(1, num_values + 1):
        chances = (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0))) / 2
    return np.cumsum(chances)
