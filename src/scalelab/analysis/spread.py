"""How steps of one configuration differ among themselves: coefficient of variation and high quantiles.

Both are computed within a launch, so that a launch that is slower as a whole does not count as variation of its steps;
the interval is that of the launches' values.
"""

from __future__ import annotations

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.location import estimate_location
from scalelab.analysis.rounds import Rounds, drop_empty
from scalelab.analysis.stats import estimate_over_rounds


def estimate_variation(rounds: Rounds) -> Estimate | None:
    """The standard deviation of steps over their mean, within a launch: the centre over launches.

    None where no launch has two steps. The lower end is never below 0.
    """
    ratios = [float(steps.std(ddof=1) / steps.mean()) for steps in drop_empty(rounds) if len(steps) > 1]
    if not ratios:
        return None
    centre = estimate_location(ratios)
    return centre.map(lambda end: max(0.0, end))


def estimate_quantile(rounds: Rounds, share: float) -> Estimate | None:
    """The step time below which a share of all steps lies, with the interval of the launches' own quantiles."""
    series = drop_empty(rounds)
    if not series:
        return None
    value = float(np.quantile(np.concatenate(series), share))
    return estimate_over_rounds(value, [float(np.quantile(steps, share)) for steps in series])
