"""A launcher that plays ranks of different speed, step by step, as an exchange of all with all couples them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scalelab.records.observations import DdpCounters, RankReport
from scalelab.records.trial import PHASES, Status, StepKind, StepPlan, StepSample, Trial, TrialResult

EVEN: Mapping[str, float] = {"input": 0.001, "forward": 0.020, "backward": 0.040, "optimizer": 0.010}


@dataclass
class UnevenLauncher:
    """Every rank takes its `own` time in each phase, plus the trial's delay; all exchange when the last is ready.

    Nothing is exchanged on one rank. All phases but the optimizer shrink with the ranks.
    """

    own: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """By rank; a rank that is not named, and a phase, are `EVEN`."""
    exchange: float = 0.008
    noise: float = 0.0
    stall: float = 0.0
    """Added to forward of rank 0 in every step, and reported as a stall."""
    buffer_bytes: int = 0
    knows_ready: bool = True
    failures: Mapping[str, Status] = field(default_factory=dict)

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        status = self.failures.get(trial.configuration)
        if status is not None:
            return TrialResult(trial=trial, status=status, reason="simulated by the fake launcher")
        rng = np.random.default_rng([trial.round, *map(ord, trial.configuration)])
        clocks = [0.0] * trial.num_ranks
        samples: list[StepSample] = []
        step = 0
        for kind, num_steps in (trial.step_plan or StepPlan()).blocks:
            for _ in range(num_steps):
                samples += self._play_step(trial, kind, step, clocks, rng)
                step += 1
        return TrialResult(
            trial=trial,
            status=Status.COMPLETED,
            samples=tuple(samples),
            ranks=tuple(self._report(trial, rank) for rank in range(trial.num_ranks)),
        )

    def close(self) -> None:
        """There is nothing to end."""

    def _report(self, trial: Trial, rank: int) -> RankReport:
        counters = None
        if "counters" in trial.instruments:
            steps = (self.exchange,) * 20
            counters = DdpCounters(
                forward_seconds=steps, backward_seconds=steps, communication_seconds=steps, overlap_seconds=(0.0,) * 20
            )
        return RankReport(rank=rank, buffer_bytes=self.buffer_bytes, counters=counters)

    def _play_step(
        self, trial: Trial, kind: StepKind, step: int, clocks: list[float], rng: np.random.Generator
    ) -> list[StepSample]:
        ranks = range(trial.num_ranks)
        own = [self._draw(trial, rank, rng) for rank in ranks]
        enter = [clocks[rank] + own[rank]["input"] for rank in ranks]
        begin = [max(enter[rank], enter[0]) if self.buffer_bytes else enter[rank] for rank in ranks]
        forward = [begin[rank] + own[rank]["forward"] for rank in ranks]
        ready = [forward[rank] + own[rank]["backward"] for rank in ranks]
        exchanges = trial.num_ranks > 1 and kind is not StepKind.COMM_FREE
        done = [max(ready) + self.exchange if exchanges else ready[rank] for rank in ranks]
        found = []
        for rank in ranks:
            start, end = clocks[rank], done[rank] + own[rank]["optimizer"]
            stalled = self.stall if rank == 0 else 0.0
            phases = (
                (
                    own[rank]["input"],
                    forward[rank] - enter[rank],
                    done[rank] - forward[rank],
                    own[rank]["optimizer"],
                )
                if kind is StepKind.PHASES
                else (None,) * 4
            )
            last = (ready[rank] - start, 0.0, stalled, stalled, 0.0) if kind is StepKind.PHASES else (None,) * 5
            if not self.knows_ready:
                last = (None, *last[1:])
            found.append(StepSample(rank, step, kind, start, end - start, *phases, 1.0, *last))
            clocks[rank] = end
        return found

    def _draw(self, trial: Trial, rank: int, rng: np.random.Generator) -> dict[str, float]:
        delay = trial.perturbation
        times = {}
        for phase in PHASES:
            seconds = {**EVEN, **self.own.get(rank, {})}[phase] / (trial.num_ranks if phase != "optimizer" else 1)
            times[phase] = seconds * float(np.exp(self.noise * rng.standard_normal()))
            if phase == delay.delay_phase:
                times[phase] += delay.seconds_on(rank)
        if rank == 0:
            times["forward"] += self.stall
        return times
