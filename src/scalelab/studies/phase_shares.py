"""What part of a step a phase takes, from the steps whose phases were timed."""

from __future__ import annotations

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.location import estimate_location
from scalelab.studies.arms import Arm
from scalelab.trial import PHASES, StepKind, TrialResult


def estimate_phase_share(arm: Arm, phase: str) -> Estimate | None:
    """The phase's seconds over those of all phases, launch by launch; None where none were timed."""
    shares = [share for result in arm.completed if (share := read_phase_share(result, phase)) is not None]
    return estimate_location(shares) if shares else None


def read_phase_share(result: TrialResult, phase: str) -> float | None:
    """The same of one launch, over all its timed steps and ranks."""
    totals = dict.fromkeys(PHASES, 0.0)
    for sample in result.samples:
        if sample.kind is StepKind.PHASES:
            for name in PHASES:
                totals[name] += getattr(sample, f"{name}_seconds") or 0.0
    whole = sum(totals.values())
    return totals[phase] / whole if whole else None
