"""Laws of scaling that two points determine, as laws of the stretch.

    linear    s(n) = s(n_last)               efficiency stays what it is
    ring      s(n) = a + b · (n − 1)/n       each rank sends 2(n − 1)/n of the gradients in a ring all-reduce
                                             (Patarasuk & Yuan 2009): what two ranks pay is half of what ever more pay
    tree      s(n) = a + b · log₂ n          rounds of a tree, or of stragglers: each doubling adds the same

a and b come from least squares of the relative residuals and are not negative: a job that seems to gain efficiency
does not go on to gain. Whatever the law says is moved to go through the last point, which is the best known guide to
the next. Amdahl's law is not among them: it makes s grow with n itself, and on public tables it is off by a third.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from scipy.optimize import nnls

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
