"""A step split in two: waiting for its batch (load), and forward, backward and optimizer (train)."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_location, estimate_median
from scalelab.records.trial import StepKind, StepSample, TrialResult
from scalelab.report.findings import REASON, FindingKind
from scalelab.studies.shared.arms import Arm

LOADER_WAIT = FindingKind(
    "loader-wait", "How long a step waits for its batch", REASON, ("wait_seconds", "share", "utilization", "rank")
)
Read = Callable[[StepSample], float | None]


def read_load(sample: StepSample) -> float | None:
    """How long a step waits for its batch."""
    return sample.input_seconds


def read_train(sample: StepSample) -> float | None:
    """The rest of the step."""
    parts = (sample.forward_seconds, sample.backward_seconds, sample.optimizer_seconds)
    known = [seconds for seconds in parts if seconds is not None]
    return sum(known) if len(known) == len(parts) else None


def collect_phases(result: TrialResult, read: Read) -> list[float]:
    """Of every timed step of every rank."""
    found = (read(sample) for sample in result.samples if sample.kind is StepKind.PHASES)
    return [seconds for seconds in found if seconds is not None]


def estimate_part(arm: Arm, read: Read) -> Estimate | None:
    """The median of a part of the step, over steps and ranks."""
    rounds = [collect_phases(result, read) for result in arm.completed]
    return estimate_median(rounds) if any(rounds) else None


def estimate_mean_part(arm: Arm, read: Read) -> Estimate | None:
    """The mean of a part of the step, from the means of the launches."""
    rounds = [collect_phases(result, read) for result in arm.completed]
    means = [statistics.fmean(steps) for steps in rounds if steps]
    return estimate_location(means) if means else None


def estimate_mean_step(arm: Arm) -> Estimate | None:
    """The mean of the clean steps, from the means of the launches."""
    means = [statistics.fmean(steps) for steps in arm.clean if len(steps)]
    return estimate_location(means) if means else None


def estimate_first_step(arm: Arm) -> Estimate | None:
    """The very first step of every launch: workers have just started."""
    firsts = [next(iter(result.step_seconds(StepKind.CLEAN).values()), None) for result in arm.completed]
    known = [seconds for seconds in firsts if seconds is not None]
    return estimate_location(known) if known else None
