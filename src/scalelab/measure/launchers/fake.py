"""`FakeLauncher`: results from a formula instead of processes, so that a study can be tried in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from scalelab.trial import Status, StepKind, StepSample, Trial, TrialResult, not_run

WARMUP_FACTORS = (3.5, 1.6, 1.2)
"""How much longer the first steps take."""


class FakeLauncher:
    """Plays the ranks of a trial whose step takes `step_seconds(trial)`, of which `comm_seconds(trial)` is exposed.

    Noise is what a shared machine shows: a shift per launch, a skewed spread per step and rare spikes, from the
    trial's own seed, so that the same trial gives the same samples. `failures` maps a configuration to the status
    that it ends with.
    """

    def __init__(
        self,
        step_seconds: Callable[[Trial], float],
        *,
        comm_seconds: Callable[[Trial], float] = lambda _: 0.0,
        noise: float = 0.0,
        failures: Mapping[str, Status] | None = None,
        seed: int = 0,
    ) -> None:
        self._step_seconds = step_seconds
        self._comm_seconds = comm_seconds
        self._noise = noise
        self._failures = dict(failures or {})
        self._seed = seed
        self.launched: list[str] = []
        """The names of the trials so far, in order."""

    def launch(self, trial: Trial, directory: Path) -> TrialResult:  # noqa: ARG002 - the protocol's signature
        self.launched.append(trial.name)
        status = self._failures.get(trial.configuration, Status.COMPLETED)
        if status is Status.NOT_RUN:
            return not_run(trial, "the fake launcher was told to")
        if status is not Status.COMPLETED:
            return TrialResult(trial=trial, status=status, reason=f"the fake launcher was told to: {status}")
        samples = self._play(trial)
        return TrialResult(trial=trial, status=status, samples=tuple(samples), wall_seconds=samples[-1].start_seconds)

    def close(self) -> None:
        """There is nothing to end."""

    def _play(self, trial: Trial) -> list[StepSample]:
        name_seed = [ord(character) for character in trial.name]
        rng = np.random.default_rng([self._seed, trial.seed, *name_seed])
        launch_shift = float(np.exp(self._noise * 0.5 * rng.standard_normal()))
        samples: list[StepSample] = []
        clock, step = 0.0, 0
        for kind, num_steps in trial.plan.blocks:
            for _ in range(num_steps):
                seconds = self._draw(trial, kind, step, launch_shift, rng)
                ready = self._find_ready(trial, seconds)
                samples += [
                    _make_sample(rank, step, kind, clock, seconds, ready) for rank in range(trial.num_processes)
                ]
                clock, step = clock + seconds, step + 1
        return samples

    def _find_ready(self, trial: Trial, seconds: float) -> float | None:
        """The last gradient comes as long before the end of backward as communication is exposed."""
        return 0.9 * seconds - self._comm_seconds(trial) if trial.strategy in ("single", "ddp") else None

    def _draw(self, trial: Trial, kind: StepKind, step: int, launch_shift: float, rng: np.random.Generator) -> float:
        seconds = self._step_seconds(trial)
        if kind is StepKind.COMM_FREE:
            seconds -= self._comm_seconds(trial)
        skewed = float(np.exp(self._noise * rng.standard_normal()))
        spike = 1.5 if self._noise and rng.random() < 0.02 else 1.0
        warmup = WARMUP_FACTORS[step] if step < len(WARMUP_FACTORS) else 1.0
        return seconds * launch_shift * skewed * spike * warmup


def _make_sample(rank: int, step: int, kind: StepKind, start: float, seconds: float, ready: float | None) -> StepSample:
    loss = 1.0 / (1 + step)
    if kind is not StepKind.PHASES:
        return StepSample(rank, step, kind, start, seconds, loss=loss)
    return StepSample(
        rank, step, kind, start, seconds, 0.02 * seconds, 0.3 * seconds, 0.58 * seconds, 0.1 * seconds, loss, ready
    )
