"""How far one measurement lies from the next, and how many launches a wanted precision takes.

Times are compared on the log scale, where spreads are relative.

    spread      the standard deviation of the logs of launches' medians, from their median absolute deviation, so that
                one launch that was hit does not decide it; its interval is that of a normal distribution's standard
                deviation (chi-square), from as many facts as the median absolute deviation makes of them, 37 %
                (Rousseeuw & Croux 1993)
    one more    where one further measurement of the same kind falls in 95 of 100 cases: centre ± t · s · √(1 + 1/n)
                (Hahn & Meeker, "Statistical Intervals", 1991, chapter 4)
    launches    the smallest n with t₍ₙ₋₁₎ · s / √n ≤ log(1 + precision)

The limits for one more take the plain standard deviation: that one may well be the launch that is hit. The number of
launches is a guide, not a promise: s is known to a factor of about two from two dozen launches, and speaks of a machine
that stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import chdtri

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.location import TAIL, find_t_quantile
from scalelab.analysis.warmup import MAD_TO_DEVIATION

MAD_EFFICIENCY = 0.37
"""Of the median absolute deviation against the standard deviation, for normal numbers (Rousseeuw & Croux 1993)."""

MOST_LAUNCHES = 10_000
"""More than these are not a plan but a sign that the machine cannot be measured on."""


def estimate_spread(values: Sequence[float]) -> Estimate | None:
    """The relative standard deviation of positive numbers, with its interval; None for fewer than two."""
    if len(values) < 2:
        return None
    logs = np.log(values)
    freedom = max(1.0, MAD_EFFICIENCY * (len(values) - 1))
    deviation = MAD_TO_DEVIATION * float(np.median(np.abs(logs - np.median(logs))))
    low, high = (deviation * math.sqrt(freedom / float(chdtri(freedom, tail))) for tail in (TAIL, 1 - TAIL))
    return Estimate(value=deviation, low=low, high=high)


def predict_one_more(values: Sequence[float]) -> Estimate:
    """The centre of positive numbers, and the limits between which one more of them will probably fall."""
    logs = np.log(values)
    centre = float(logs.mean())
    if len(values) < 2:
        return Estimate(value=math.exp(centre))
    arm = find_t_quantile(len(values) - 1) * float(logs.std(ddof=1)) * math.sqrt(1 + 1 / len(values))
    return Estimate(value=math.exp(centre), low=math.exp(centre - arm), high=math.exp(centre + arm))


def count_launches(spread: float, precision: float) -> int | None:
    """Launches after which the interval of a median reaches no further than `precision`; None: beyond all reason."""
    wanted = math.log1p(precision)
    needed = (n for n in range(2, MOST_LAUNCHES + 1) if find_t_quantile(n - 1) * spread / math.sqrt(n) <= wanted)
    return next(needed, None)
