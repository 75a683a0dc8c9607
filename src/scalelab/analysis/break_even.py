"""When something pays that costs once and saves in every step.

    steps = cost / saving

The ends of the interval are the least favourable pairs, the smallest cost over the largest saving and the largest over
the smallest: wider than it need be, and never too narrow. Where a saving may be nothing there is no break-even.
"""

from __future__ import annotations

from scalelab.analysis.estimate import Estimate


def find_break_even(cost: Estimate, saving: Estimate) -> Estimate | None:
    """The number of steps after which a cost has come back; None where the saving is not surely above zero."""
    surely = saving.value if saving.low is None else saving.low
    if surely <= 0 or saving.value <= 0:
        return None
    steps = max(cost.value, 0.0) / saving.value
    if saving.low is None or saving.high is None:
        return Estimate(value=steps)
    least, most = (cost.value if end is None else end for end in (cost.low, cost.high))
    return Estimate(value=steps, low=max(least, 0.0) / saving.high, high=max(most, 0.0) / saving.low)
