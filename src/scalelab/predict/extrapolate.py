"""Extrapolate a scaling series: a weighted mean of scaling laws.

Every law predicts each known size from the others (leave-one-out), and its weight follows from its error:

    w = prior · exp(−mean |ln(said / known)| / 2 %)

With two sizes nothing can be left out and the prior decides: half linear, half ring. A creep of 1 % per doubling is
added for what grows with every job and does not show on two ranks: stragglers, slower links, shared input.

    s(n) = Σ w · law(n) · (1 + 0.01 · log₂(n / n_last))

The interval is that of Student's t with 3 degrees of freedom around ln s(n), whose scale grows with the distance and
with what scaling has cost so far. Prior, creep and scales were fitted to public tables of data-parallel training, each
table scored with parameters fitted to the others: `benchmarks/predict_tables.py` repeats that and prints both.

The laws have two parameters and describe the stretch:

    linear    s(n) = s(n_last)               efficiency stays what it is
    ring      s(n) = a + b · (n − 1)/n       each rank sends 2(n − 1)/n of the gradients in a ring all-reduce
                                             (Patarasuk & Yuan 2009): what two ranks pay is half of what ever more pay
    tree      s(n) = a + b · log₂ n          rounds of a tree, or of stragglers: each doubling adds the same

a and b come from least squares of the relative residuals and are not negative: an apparent efficiency gain does not
continue. Each law is shifted through the last point, the best predictor of the next. Amdahl's law is not included: it
makes s grow with n itself, and on public tables it is off by a third.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import stats
from scipy.optimize import nnls

from scalelab.analysis.estimate import PREDICTION_CONFIDENCE, Prediction
from scalelab.errors import UsageError
from scalelab.predict.scaling_table import ScalingSeries

Law = Callable[[Mapping[int, float], int], float]
"""The stretch on so many ranks from those that are known."""


def stay_linear(known: Mapping[int, float], ranks: int) -> float:
    """The stretch of the nearest size that is not larger; of the smallest where there is none."""
    below = [size for size in known if size <= ranks]
    return known[max(below)] if below else known[min(known)]


def follow_ring(known: Mapping[int, float], ranks: int) -> float:
    return _follow(known, ranks, lambda count: (count - 1) / count)


def follow_tree(known: Mapping[int, float], ranks: int) -> float:
    return _follow(known, ranks, math.log2)


LAWS: dict[str, Law] = {"linear": stay_linear, "ring": follow_ring, "tree": follow_tree}


def _follow(known: Mapping[int, float], ranks: int, grow: Callable[[int], float]) -> float:
    if len(known) < 2:
        return stay_linear(known, ranks)
    start, slope = fit_growth(known, grow)
    anchor = min(known, key=lambda size: (abs(math.log(size / ranks)), -size))
    line = start + slope * grow(ranks)
    return known[anchor] * line / (start + slope * grow(anchor))


def fit_growth(known: Mapping[int, float], grow: Callable[[int], float]) -> tuple[float, float]:
    """a and b of s(n) = a + b · g(n), neither negative, by least squares of relative residuals."""
    sizes = sorted(known)
    values = np.array([known[size] for size in sizes])
    design = np.array([[1.0, grow(size)] for size in sizes]) / values[:, None]
    (start, slope), _ = nnls(design, np.ones(len(sizes)))
    return float(start), float(slope)


FORGIVENESS = 0.02
"""A mean error of so much makes a law weigh 1/e of a perfect one."""
CHANCE = 0.4
"""What a law without a prior has of the smallest one, once there is something to learn from."""
TAILS = 3
"""Degrees of freedom: tables have surprises."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What cannot be learned from one series."""

    priors: Mapping[str, float] = field(default_factory=lambda: {"linear": 0.5, "ring": 0.5, "tree": 0.0})
    creep: float = 0.01
    """Stretch that every doubling beyond the last size adds."""
    base_scale: float = 0.004
    distance_scale: float = 0.010
    """Per doubling."""
    excess_scale: float = 0.35
    """Of the stretch per doubling so far, times the root of the doublings to come."""


DEFAULT = Tuning()


@dataclass(frozen=True, kw_only=True)
class Extrapolated:
    """One size of a series that was not run."""

    ranks: int
    throughput: Prediction
    efficiency: Prediction
    """Over the smallest size that is known."""
    weights: Mapping[str, float]
    """Of every law."""


def extrapolate(series: ScalingSeries, ranks: Sequence[int], tuning: Tuning = DEFAULT) -> list[Extrapolated]:
    """The series at other sizes, with 80 % intervals."""
    if len(series.ranks) < 2:
        raise UsageError(f"{series.label}: extrapolation needs at least two rank counts, got one size")
    known = series.stretch
    weights = weigh_laws(known, tuning)
    found = []
    for count in ranks:
        if count < 1:
            raise UsageError(f"--ranks must be ≥ 1, got {count}")
        stretch = predict_stretch(known, count, weights, tuning)
        found.append(
            Extrapolated(
                ranks=count,
                throughput=stretch.map(lambda value, count=count: series.throughput_at(count, value)),  # type: ignore[misc]
                efficiency=stretch.map(lambda value: 1 / value),
                weights=weights,
            )
        )
    return found


def predict_stretch(
    known: Mapping[int, float], ranks: int, weights: Mapping[str, float], tuning: Tuning = DEFAULT
) -> Prediction:
    """The stretch on so many ranks; of a size that is known, itself."""
    if ranks in known:
        return Prediction(value=known[ranks], low=known[ranks], high=known[ranks])
    last = max(known)
    doublings = abs(math.log2(ranks / min(known, key=lambda size: abs(math.log(size / ranks)))))
    value = sum(weight * LAWS[name](known, ranks) for name, weight in weights.items() if weight)
    if ranks > last:
        value *= 1 + tuning.creep * doublings
    reach = stats.t.ppf((1 + PREDICTION_CONFIDENCE) / 2, TAILS) * find_scale(known, doublings, tuning)
    return Prediction(value=value, low=value * math.exp(-reach), high=value * math.exp(reach))


def weigh_laws(known: Mapping[int, float], tuning: Tuning = DEFAULT) -> dict[str, float]:
    """The weight of every law, by how well it says each size from the others; the smallest is always known."""
    weights = {name: tuning.priors.get(name, 0.0) for name in LAWS}
    inner = sorted(known)[1:]
    if len(inner) > 1:
        least = min(prior for prior in weights.values() if prior) * CHANCE
        for name, law in LAWS.items():
            misses = []
            for left_out in inner:
                rest = {size: value for size, value in known.items() if size != left_out}
                misses.append(abs(math.log(law(rest, left_out) / known[left_out])))
            weights[name] = (weights[name] or least) * math.exp(-sum(misses) / len(misses) / FORGIVENESS)
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def find_scale(known: Mapping[int, float], doublings: float, tuning: Tuning = DEFAULT) -> float:
    """The scale of ln s so many doublings away from what is known."""
    first, last = min(known), max(known)
    excess = abs(math.log(known[last] / known[first])) / math.log2(last / first)
    return math.hypot(
        tuning.base_scale, tuning.distance_scale * doublings, tuning.excess_scale * excess * math.sqrt(doublings)
    )
