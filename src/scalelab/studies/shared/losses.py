"""The losses of two configurations side by side: do they train the same thing?

All rounds of a configuration train from the same seed on the same batches, so the losses of its first completed round
stand for all of them; rounds that differ are a warning of their own.
"""

from __future__ import annotations

import math

from scalelab.report.findings import DETAIL, FindingKind
from scalelab.studies.shared.arms import Arm

LOSSES_EQUAL = FindingKind(
    "losses-equal",
    "Whether losses match the reference's (data types: within a tolerance; seeds: bit by bit)",
    DETAIL,
    ("is_equal", "difference", "first_step"),
)
Losses = dict[int, float]
"""By step number."""


def read_losses(arm: Arm | None) -> Losses:
    """Of the first round that completed."""
    return arm.completed[0].losses() if arm is not None and arm.completed else {}


def read_last_loss(losses: Losses) -> float | None:
    """Of the last step; None if it is not finite."""
    last = losses[max(losses)] if losses else math.nan
    return last if math.isfinite(last) else None


def compare_last_losses(losses: Losses, reference: Losses) -> float | None:
    """The relative difference in the last step that both have; None if either loss is not finite."""
    common = [step for step in losses if step in reference]
    if not common:
        return None
    ours, theirs = losses[common[-1]], reference[common[-1]]
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return None
    return abs(ours - theirs) / abs(theirs) if theirs else abs(ours - theirs)


def find_first_difference(left: Losses, right: Losses) -> int | None:
    """The first common step whose losses are not bit-equal; NaN equals NaN here."""
    return next((step for step in left if step in right and repr(left[step]) != repr(right[step])), None)


def is_non_finite(arm: Arm) -> bool:
    """Whether any loss of any round is NaN or infinite."""
    return any(result.first_non_finite_loss() is not None for result in arm.results)
