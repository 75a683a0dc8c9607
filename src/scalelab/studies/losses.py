"""The losses of two configurations side by side: do they train the same thing?

All rounds of a configuration train from the same seed on the same batches, so the losses of its first completed round
stand for all of them; where rounds differ, that is a warning of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalelab.studies.arms import Arm
from scalelab.trial import TrialResult


@dataclass(frozen=True, kw_only=True)
class LossComparison:
    """Losses against those of a reference."""

    last: float | None
    """Of the last step; None where it is no finite number."""
    difference: float | None
    """Of the last step that both have, relative to the reference; None where either is no finite number."""
    first_step: int | None
    """The first step whose losses are not bit-equal; None: all are."""


def read_losses(arm: Arm) -> dict[int, float]:
    """By step number, of the first round that completed."""
    return arm.completed[0].losses() if arm.completed else {}


def compare_losses(losses: dict[int, float], reference: dict[int, float]) -> LossComparison:
    """How far the losses are from those of the reference, over the steps that both have."""
    common = [step for step in losses if step in reference]
    last = losses[max(losses)] if losses else None
    difference = None
    if common:
        ours, theirs = losses[common[-1]], reference[common[-1]]
        if math.isfinite(ours) and math.isfinite(theirs):
            difference = abs(ours - theirs) / abs(theirs) if theirs else abs(ours - theirs)
    return LossComparison(
        last=last if last is not None and math.isfinite(last) else None,
        difference=difference,
        first_step=find_first_difference(losses, reference),
    )


def find_first_difference(left: dict[int, float], right: dict[int, float]) -> int | None:
    """The first common step whose losses are not the very same number; NaN equals NaN here."""
    return next((step for step in left if step in right and repr(left[step]) != repr(right[step])), None)


def is_non_finite(arm: Arm) -> bool:
    """Whether any loss of any round is NaN or infinite."""
    results: tuple[TrialResult, ...] = arm.results
    return any(result.first_non_finite_loss() is not None for result in results)
