"""The training runs of one way to train, seed by seed: what large-batch compares."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.learning import GradientSquares, NoiseScale, estimate_change, estimate_noise_scale
from scalelab.analysis.stats import estimate_location
from scalelab.records.observations import CurvePoint
from scalelab.records.trial import Status, StepKind, Trial, TrialResult
from scalelab.studies.shared.arms import NOT_YET

SMALL, LARGE, SCALED, WARMED, NOISE = "small", "large", "scaled", "warmed", "noise"
LABELS = {
    SMALL: "small batch",
    LARGE: "large batch",
    SCALED: "+ linear scaling",
    WARMED: "+ warm-up",
    NOISE: "gradient noise",
}
"""How tables call each way to train."""
BLOWN_UP = 10.0
"""A loss this many times the first is not noise."""


@dataclass(frozen=True, kw_only=True)
class LearningArm:
    """All seeds of one way to train; those that did not complete are left out."""

    trial: Trial
    """The first seed's; the others differ in seed and round."""
    results: tuple[TrialResult, ...]

    @property
    def label(self) -> str:
        return self.trial.label

    @property
    def completed(self) -> dict[int, TrialResult]:
        """By seed."""
        return {result.trial.seed: result for result in self.results if result.status is Status.COMPLETED}

    @property
    def failure(self) -> TrialResult | None:
        return next((result for result in self.results if result.status is not Status.COMPLETED), None)

    @property
    def status(self) -> str | None:
        """What its row shows instead of numbers; None if a seed completed."""
        if self.completed:
            return None
        return self.failure.status.words if self.failure else NOT_YET

    @property
    def epochs(self) -> list[int]:
        """Those after which some seed was tested."""
        return sorted({epoch for result in self.completed.values() for epoch in find_tests(result)})

    @property
    def diverged(self) -> set[int]:
        """Seeds whose loss blew up on the way: a dead network may still end with a finite loss."""
        return {seed for seed, result in self.completed.items() if has_diverged(result)}

    @property
    def num_updates(self) -> int | None:
        """Steps of the optimizer in one training."""
        return max((len(result.losses()) for result in self.completed.values()), default=None)

    @property
    def learning_rate(self) -> float | None:
        """The highest of any update: after a warm-up, before a schedule lowers it."""
        rates = [p.learning_rate for r in self.completed.values() for p in r.curve if p.learning_rate is not None]
        return max(rates, default=None)

    @property
    def training_seconds(self) -> Estimate | None:
        """All steps of one training together, without evaluations."""
        sums = [sum(result.step_seconds(StepKind.CLEAN).values()) for result in self.completed.values()]
        return estimate_location(sums) if sums else None

    def accuracies(self, epoch: int) -> dict[int, float]:
        """On the test data after an epoch, by seed."""
        return self._read(epoch, lambda point: point.accuracy)

    def test_losses(self, epoch: int) -> dict[int, float]:
        """The same, but for seeds that diverged."""
        found = self._read(epoch, lambda point: point.loss)
        return {seed: loss for seed, loss in found.items() if seed not in self.diverged}

    def train_losses(self, num_epochs: int) -> dict[int, float]:
        """The mean over the steps of the last epoch, by seed, but for those that diverged."""
        found: dict[int, float] = {}
        for seed, result in self.completed.items():
            losses = list(result.losses().values())
            if losses and seed not in self.diverged:
                found[seed] = statistics.fmean(losses[-max(1, len(losses) // num_epochs) :])
        return found

    def is_whole(self, values: Mapping[int, float]) -> bool:
        """Whether every completed seed has a value: a mean without the diverged ones would flatter."""
        return bool(values) and len(values) == len(self.completed)

    def _read(self, epoch: int, read: Callable[[CurvePoint], float | None]) -> dict[int, float]:
        points = {seed: find_tests(result).get(epoch) for seed, result in self.completed.items()}
        values = {seed: read(point) for seed, point in points.items() if point is not None}
        return {seed: value for seed, value in values.items() if value is not None}


def has_diverged(result: TrialResult) -> bool:
    """Whether the loss of a run became NaN, infinite, or many times its first."""
    losses = list(result.losses().values())
    return any(not math.isfinite(loss) or loss > BLOWN_UP * losses[0] for loss in losses)


def find_tests(result: TrialResult) -> dict[int, CurvePoint]:
    """The evaluations of a run by the number of completed epochs."""
    return {round(point.epoch): point for point in result.curve if point.is_evaluation}


def group_learning(results: Sequence[TrialResult]) -> dict[str, LearningArm]:
    """One arm per way to train, in the order of the plan."""
    grouped: dict[str, list[TrialResult]] = {name: [] for name in LABELS}
    for result in sorted(results, key=lambda result: result.trial.round):
        grouped[result.trial.configuration].append(result)
    return {name: LearningArm(trial=found[0].trial, results=tuple(found)) for name, found in grouped.items() if found}


def centre(arm: LearningArm, values: Mapping[int, float]) -> Estimate | None:
    """Over seeds; None if a seed has no number."""
    return estimate_location(list(values.values())) if arm.is_whole(values) else None


def compare_accuracy(arm: LearningArm | None, reference: LearningArm | None, epoch: int) -> Estimate | None:
    """How much more of the test data an arm gets right than another after an epoch, seed by seed."""
    if arm is None or reference is None or arm is reference:
        return None
    return estimate_change(arm.accuracies(epoch), reference.accuracies(epoch))


def find_noise_scales(arm: LearningArm | None, num_epochs: int) -> dict[int | None, NoiseScale]:
    """By epoch, from 1; the whole training is None."""
    if arm is None:
        return {}
    whole = [_read_squares(result) for result in arm.completed.values()]
    b, big = arm.trial.batch_per_pass, arm.trial.global_batch
    found: dict[int | None, NoiseScale] = {}
    for epoch in (*range(1, num_epochs + 1), None):
        wanted = [[squares for at, squares in steps if epoch in (None, at)] for steps in whole]
        scale = estimate_noise_scale(wanted, b, big)
        if scale is not None:
            found[epoch] = scale
    return found


def _read_squares(result: TrialResult) -> list[tuple[int, GradientSquares]]:
    """The squared norms of every step, with the epoch that it belongs to."""
    found = []
    for point in result.curve:
        small, large = point.small_gradient_square, point.large_gradient_square
        if small is not None and large is not None:
            found.append((math.ceil(point.epoch - 1e-9), GradientSquares(small, large)))
    return found
