"""Trainings from a formula: a launcher that plays learning curves instead of processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scalelab.launch.fake import FakeLauncher
from scalelab.records.observations import CurvePoint
from scalelab.records.trial import Status, StepKind, StepSample, Trial, TrialResult

Accuracy = Callable[[Trial, int], float]
"""After so many epochs, from 1."""
NUM_IMAGES = 1024


class LearningLauncher(FakeLauncher):
    """Plays trainings on 1024 images: accuracies from a formula, losses that fall, gradients of a known noise scale."""

    def __init__(
        self,
        accuracy: Accuracy,
        *,
        diverges: Callable[[Trial], bool] = lambda _: False,
        gradient_square: float = 0.5,
        noise_trace: float = 40.0,
        failures: dict[str, Status] | None = None,
    ) -> None:
        super().__init__(lambda _: 0.01, failures=failures)
        self._accuracy, self._diverges = accuracy, diverges
        self._gradient, self._trace = gradient_square, noise_trace

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        result = super().launch(trial, directory)
        if result.status is not Status.COMPLETED:
            return result
        assert trial.training_run is not None
        assert trial.training_run.epochs is not None
        per_epoch = NUM_IMAGES // trial.global_batch
        samples, curve = [], []
        for step in range(trial.training_run.epochs * per_epoch):
            loss = math.nan if self._diverges(trial) else 2.0 / (1 + step)
            samples.append(StepSample(0, step, StepKind.CLEAN, 0.01 * step, 0.01, loss=loss))
            if step % trial.training_run.log_every == 0 or step + 1 == trial.training_run.epochs * per_epoch:
                curve.append(self._make_line(trial, step, (step + 1) / per_epoch))
            if (step + 1) % per_epoch == 0:
                curve.append(self._make_test(trial, step, (step + 1) // per_epoch))
        return replace(result, samples=tuple(samples), curve=tuple(curve))

    def _make_line(self, trial: Trial, step: int, epoch: float) -> CurvePoint:
        point = CurvePoint(step=step, epoch=epoch, loss=1.0, learning_rate=0.01)
        if "gradient_noise" not in trial.instruments:
            return point
        return replace(
            point,
            small_gradient_square=self._gradient + self._trace / trial.batch_per_pass,
            large_gradient_square=self._gradient + self._trace / trial.global_batch,
        )

    def _make_test(self, trial: Trial, step: int, epoch: int) -> CurvePoint:
        loss = None if self._diverges(trial) else 1.0 / epoch
        return CurvePoint(
            step=step, epoch=float(epoch), loss=loss, accuracy=self._accuracy(trial, epoch), is_evaluation=True
        )
