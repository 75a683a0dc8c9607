"""Extrapolate a scaling series: a weighted mean of scaling laws.

Every law predicts each known size from the others (leave-one-out), and its weight follows from its error:

    w = prior · exp(−mean |ln(said / known)| / 2 %)

With two sizes nothing can be left out and the prior decides: 0.41 linear, 0.37 ring, 0.22 tree. A creep per doubling is
added for what grows with every job and does not show on two ranks: stragglers, slower links, shared input. The first
size that leaves a node of N (eight, where a table does not say how many) is another regime: it costs its own step,
and half of the weight goes to the tree, since sizes inside a node say little of rounds between nodes.

    s(n) = Σ w · law(n) · (1 + creep · log₂(n / n_last)) · (1 + step, from n_last ≤ N to n > N)

The scale of ln s(n) grows with the distance, with what scaling has cost so far, and from three sizes on with how far
the laws are off where they say each known size from the others; where a node is left, by the spread of that mixture of
two. How many scales an 80 % interval
reaches is calibrated by conformal prediction (Vovk, Gammerman & Shafer, "Algorithmic Learning in a Random World",
2005) over public tables of data-parallel training, apart for three kinds of rows: far away, after costly scaling, and
the rest. Each end has a reach of its own, since jobs often scale much worse than their first sizes say and seldom much
better: 6 % of rows may be worse than the interval and 14 % better. `benchmarks/predict_tables.py` scores each table
with everything chosen on the others.

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
from typing import Literal

import numpy as np
from scipy.optimize import nnls

from scalelab.analysis.estimate import Prediction
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
NODE_SIZE = 8
"""Ranks in a node, as most published machines have; used where a table does not say it."""
FAR_DOUBLINGS = 3.0
COSTLY = 0.05
"""What each doubling so far has added to the stretch, from which on scaling is costly."""

Kind = Literal["near", "costly", "far"]


REACHES: dict[Kind, tuple[float, float]] = {"near": (1.65, 4.9), "costly": (1.65, 4.9), "far": (1.25, 4.9)}


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What cannot be learned from one series."""

    priors: Mapping[str, float] = field(default_factory=lambda: {"linear": 0.41, "ring": 0.37, "tree": 0.22})
    creep: float = 0.007
    """Stretch that every doubling beyond the last size adds."""
    node_step: float = 0.02
    """Stretch that leaving a node adds."""
    node_tree: float = 0.5
    """The share of all weight that the tree gets where a node is left: as much as all other evidence."""
    base_scale: float = 0.002
    distance_scale: float = 0.012
    """Per doubling."""
    excess_scale: float = 0.43
    """Of the stretch per doubling so far, times the root of the doublings to come."""
    reaches: Mapping[Kind, tuple[float, float]] = field(default_factory=lambda: dict(REACHES))
    """Scales of the arms of the 80 % interval: towards less stretch, and towards more."""


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
        stretch = predict_stretch(known, count, weights, tuning, series.node_size or NODE_SIZE)
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
    known: Mapping[int, float], ranks: int, weights: Mapping[str, float], tuning: Tuning = DEFAULT,
    node_size: int = NODE_SIZE,
) -> Prediction:  # fmt: skip
    """The stretch on so many ranks; of a size that is known, itself."""
    if ranks in known:
        return Prediction(value=known[ranks], low=known[ranks], high=known[ranks])
    last = max(known)
    doublings = abs(math.log2(ranks / min(known, key=lambda size: abs(math.log(size / ranks)))))
    value = sum(weight * LAWS[name](known, ranks) for name, weight in weights.items() if weight)
    scale = find_scale(known, doublings, tuning)
    if last <= node_size < ranks:
        tree = follow_tree(known, ranks)
        scale = math.hypot(scale, math.sqrt(tuning.node_tree * (1 - tuning.node_tree)) * math.log(tree / value))
        value = ((1 - tuning.node_tree) * value + tuning.node_tree * tree) * (1 + tuning.node_step)
    if ranks > last:
        value *= 1 + tuning.creep * doublings
    below, above = (reach * scale for reach in tuning.reaches[find_kind(known, doublings)])
    return Prediction(value=value, low=value * math.exp(-below), high=value * math.exp(above))


def weigh_laws(known: Mapping[int, float], tuning: Tuning = DEFAULT) -> dict[str, float]:
    """The weight of every law, by how well it says each size from the others; the smallest is always known."""
    weights = {name: tuning.priors.get(name, 0.0) for name in LAWS}
    for name, misses in find_misses(known).items():
        weights[name] *= math.exp(-misses / FORGIVENESS)
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def find_misses(known: Mapping[int, float]) -> dict[str, float]:
    """By law, the mean |ln(said / known)| over sizes said from the others; empty: there are two sizes."""
    inner = sorted(known)[1:]
    if len(inner) < 2:
        return {}
    rests = {left_out: {size: value for size, value in known.items() if size != left_out} for left_out in inner}
    return {
        name: sum(abs(math.log(law(rest, size) / known[size])) for size, rest in rests.items()) / len(rests)
        for name, law in LAWS.items()
    }


def find_scale(known: Mapping[int, float], doublings: float, tuning: Tuning = DEFAULT) -> float:
    """The scale of ln s so many doublings away from what is known."""
    excess = find_excess(known) * math.sqrt(doublings)
    weights = weigh_laws(known, tuning)
    misfit = sum(weights[name] * misses for name, misses in find_misses(known).items()) * math.sqrt(doublings)
    return math.hypot(tuning.base_scale, tuning.distance_scale * doublings, tuning.excess_scale * excess, misfit)


def find_excess(known: Mapping[int, float]) -> float:
    """What a doubling has changed of ln s so far."""
    first, last = min(known), max(known)
    return abs(math.log(known[last] / known[first])) / math.log2(last / first)


def find_kind(known: Mapping[int, float], doublings: float) -> Kind:
    """Which calibration a size has."""
    if doublings >= FAR_DOUBLINGS:
        return "far"
    return "costly" if find_excess(known) > COSTLY else "near"
