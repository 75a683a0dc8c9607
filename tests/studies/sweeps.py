"""Sweeps run by a fake launcher, with what a real one adds: losses by seed and time to the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalelab.launch.fake import FakeLauncher
from scalelab.launch.local import LocalLauncher
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Document
from scalelab.runs.experiment import run_study
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling

FEW = Sampling(rounds=6, steps=16, phase_steps=0, comm_free_steps=0)
SMALL_TRANSFORMER = Job(
    workload="transformer",
    options={
        "d_model": 16, "features": 16, "heads": 2, "feedforward": 32, "encoder_layers": 1, "decoder_layers": 1,
        "samples": 32, "tgt_length": 4,
    },
    device="cpu",
    threads_per_rank=1,
)  # fmt: skip

Seconds = Callable[[Trial], float]
Change = Callable[[TrialResult], TrialResult]


class SweepLauncher(FakeLauncher):
    """A fake launcher whose results are changed before they are given back; failures have a reason of their own."""

    def __init__(self, step_seconds: Seconds, change: Change = lambda result: result, **fields: Any) -> None:
        super().__init__(step_seconds, **fields)
        self._change = change

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        return self._change(super().launch(trial, directory))


def take_constant(_: Trial) -> float:
    return 0.1


def run(study: Any, runs_dir: Path, step_seconds: Seconds = take_constant, **fields: Any) -> Document:
    """The answer of a study whose steps take what a formula says."""
    return run_study(study, runs_dir=runs_dir, launcher=SweepLauncher(step_seconds, **fields))[1]


def plan_names(study: Any) -> list[str]:
    """The configurations of the first round."""
    return [trial.configuration for trial in study.plan() if trial.round == 1]


def make_results(study: Any, status: Status, reason: str) -> list[TrialResult]:
    """Every trial of a plan, failed the same way."""
    return [TrialResult(trial=trial, status=status, reason=reason) for trial in study.plan()]


def with_losses(result: TrialResult, losses: Sequence[float]) -> TrialResult:
    """The same result with other losses, step by step; the last is repeated."""
    samples = (s._replace(loss=losses[min(s.step, len(losses) - 1)]) for s in result.samples)
    return replace(result, samples=tuple(samples))


class Shared:
    """A launcher that others go on using: closing it closes nothing."""

    def __init__(self, launcher: LocalLauncher) -> None:
        self.launch = launcher.launch

    def close(self) -> None:
        """There is nothing to end."""
