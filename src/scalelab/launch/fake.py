"""`FakeLauncher`: results from a formula instead of processes, so a study runs in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from scalelab.records.observations import Fetch, Message, RankReport, ReadingReport, TracedStep, Transfer
from scalelab.records.strategies import find_strategy
from scalelab.records.tasks import MEMORY, Dataset, Exchange, Pass, Read
from scalelab.records.trial import Status, StepKind, StepPlan, StepSample, Trial, TrialResult, not_run

WARMUP_FACTORS = (3.5, 1.6, 1.2)
"""How much longer the first steps take."""


class FakeLauncher:
    """Plays the ranks of a trial whose step takes `step_seconds(trial)`, of which `comm_seconds(trial)` is exposed.

    Noise is what a shared machine shows: a shift per launch, a skewed spread per step and rare spikes, from the
    trial's own seed, so that the same trial gives the same samples. `failures` maps a configuration to the status
    that it ends with. An exchange takes `transfer_seconds(trial, payload_bytes)` per call, a batch of a stored
    set `fetch_seconds(trial, pass)`.
    """

    def __init__(
        self,
        step_seconds: Callable[[Trial], float],
        *,
        comm_seconds: Callable[[Trial], float] = lambda _: 0.0,
        transfer_seconds: Callable[[Trial, int], float] = lambda _, payload_bytes: 5e-5 + payload_bytes / 1e9,
        fetch_seconds: Callable[[Trial, Pass], float] = lambda trial, _: 1e-4 + 1e-5 * trial.batch_per_rank,
        noise: float = 0.0,
        failures: Mapping[str, Status] | None = None,
        seed: int = 0,
    ) -> None:
        self._step_seconds = step_seconds
        self._comm_seconds = comm_seconds
        self._transfer_seconds = transfer_seconds
        self._fetch_seconds = fetch_seconds
        self._noise = noise
        self._failures = dict(failures or {})
        self._seed = seed
        self.launched: list[str] = []
        """The names of the trials so far, in order."""

    def check(self) -> None:
        """Nothing is missing where nothing is started."""

    def launch(self, trial: Trial, directory: Path) -> TrialResult:  # noqa: ARG002 - the protocol's signature
        self.launched.append(trial.name)
        status = self._failures.get(trial.configuration, Status.COMPLETED)
        if status is Status.NOT_RUN:
            return not_run(trial, "simulated by the fake launcher")
        if status is not Status.COMPLETED:
            return TrialResult(trial=trial, status=status, reason=f"simulated by the fake launcher: {status}")
        match trial.task:
            case Exchange() as exchange:
                transfers = tuple(self._play_exchange(trial, exchange))
                return TrialResult(trial=trial, status=status, transfers=transfers)
            case Read() as read:
                fetches, ranks = tuple(self._play_reading(trial, read)), _play_reports(trial, read.dataset)
                return TrialResult(trial=trial, status=status, fetches=fetches, ranks=ranks)
        samples = self._play(trial, trial.step_plan or StepPlan())
        return TrialResult(
            trial=trial,
            status=status,
            samples=tuple(samples),
            ranks=self._play_traces(trial, samples),
            wall_seconds=samples[-1].start_seconds,
        )

    def close(self) -> None:
        """There is nothing to end."""

    def _seed_trial(self, trial: Trial) -> tuple[np.random.Generator, float]:
        """The trial's own random numbers, and by how much its whole launch is slower."""
        name_seed = [ord(character) for character in trial.name]
        rng = np.random.default_rng([self._seed, trial.seed, *name_seed])
        return rng, float(np.exp(self._noise * 0.5 * rng.standard_normal()))

    def _play_exchange(self, trial: Trial, exchange: Exchange) -> list[Transfer]:
        rng, launch_shift = self._seed_trial(trial)
        found: list[Transfer] = []
        clock = 0.0
        for repeat in range(exchange.repeats):
            for size in exchange.sizes:
                skewed = launch_shift * float(np.exp(self._noise * rng.standard_normal()))
                seconds = self._transfer_seconds(trial, size) * skewed
                found += [
                    Transfer(rank, exchange.operation, size, repeat, 1, clock, seconds)
                    for rank in range(trial.num_ranks)
                ]
                clock += seconds
        return found

    def _play_reading(self, trial: Trial, read: Read) -> list[Fetch]:
        """All batches of all passes; the first epoch of a reader takes twice as long as the others."""
        rng, launch_shift = self._seed_trial(trial)
        found: list[Fetch] = []
        clock = 0.0
        for one in read.passes:
            for epoch in range(1 if one.cache == "cold" else read.epochs):
                for batch in range(read.dataset.num_samples // trial.global_batch):
                    skewed = launch_shift * float(np.exp(self._noise * rng.standard_normal()))
                    seconds = self._fetch_seconds(trial, one) * skewed * (2.0 if epoch == 0 else 1.0)
                    name = (one.order, one.access, one.cache)
                    found += [
                        Fetch(rank, *name, epoch, batch, trial.batch_per_rank, clock, seconds, 1e-5)
                        for rank in range(trial.num_ranks)
                    ]
                    clock += seconds
        return found

    def _play(self, trial: Trial, plan: StepPlan) -> list[StepSample]:
        rng, launch_shift = self._seed_trial(trial)
        samples: list[StepSample] = []
        clock, step = 0.0, 0
        for kind, num_steps in plan.blocks:
            for _ in range(num_steps):
                seconds = self._draw(trial, kind, step, launch_shift, rng)
                ready = self._find_ready(trial, seconds)
                samples += [
                    _make_sample(rank, step, kind, clock, seconds, ready) for rank in range(trial.num_processes)
                ]
                clock, step = clock + seconds, step + 1
        return samples

    def _play_traces(self, trial: Trial, samples: list[StepSample]) -> tuple[RankReport, ...]:
        """What the traces of the profiled steps would say: all ranks come at once, all communication is exposed."""
        if not any(sample.kind is StepKind.PROFILED for sample in samples):
            return ()
        exposed = round(1e9 * self._comm_seconds(trial))
        steps: dict[int, list[TracedStep]] = {rank: [] for rank in range(trial.num_processes)}
        for sample in samples:
            if sample.kind is StepKind.PROFILED:
                span = round(1e9 * sample.step_seconds)
                whole = TracedStep(
                    span_ns=span,
                    compute_ns=max(0, span - exposed),
                    overlapped_ns=0,
                    exposed_ns=min(span, exposed),
                    copy_ns=0,
                    idle_ns=0,
                    transfer_ns=exposed,
                    waiting_ns=0,
                    messages=(Message(kind="all_reduce", count=1, payload_bytes=None),) if exposed else (),
                )
                steps[sample.rank].append(whole)
        return tuple(RankReport(rank=rank, traced_steps=tuple(found)) for rank, found in steps.items())

    def _find_ready(self, trial: Trial, seconds: float) -> float | None:
        """The last gradient comes as long before the end of backward as communication is exposed."""
        is_known = find_strategy(trial.strategy).can_skip_communication
        return 0.9 * seconds - self._comm_seconds(trial) if is_known else None

    def _draw(self, trial: Trial, kind: StepKind, step: int, launch_shift: float, rng: np.random.Generator) -> float:
        seconds = self._step_seconds(trial)
        if kind is StepKind.COMM_FREE:
            seconds -= self._comm_seconds(trial)
        skewed = float(np.exp(self._noise * rng.standard_normal()))
        spike = 1.5 if self._noise and rng.random() < 0.02 else 1.0
        warmup = WARMUP_FACTORS[step] if step < len(WARMUP_FACTORS) else 1.0
        return seconds * launch_shift * skewed * spike * warmup


def _make_sample(rank: int, step: int, kind: StepKind, start: float, seconds: float, ready: float | None) -> StepSample:
    loss = (1.0 + 1e-12 * rank) / (1 + step)  # ranks see their own samples
    if kind is not StepKind.PHASES:
        return StepSample(rank, step, kind, start, seconds, loss=loss)
    return StepSample(
        rank, step, kind, start, seconds, 0.02 * seconds, 0.3 * seconds, 0.58 * seconds, 0.1 * seconds, loss, ready
    )


def _play_reports(trial: Trial, dataset: Dataset) -> tuple[RankReport, ...]:
    """What ranks would say of a stored set: HDF5 with a filter has 128 samples in a chunk."""
    is_file = dataset.format != MEMORY
    is_chunked = dataset.format.startswith("hdf5-")
    report = ReadingReport(
        num_samples=dataset.num_samples,
        sample_bytes=dataset.sample_bytes,
        write_seconds=0.5 if is_file else None,
        file_bytes=dataset.num_samples * dataset.sample_bytes if is_file else None,
        open_seconds=(0.001,) if is_file else (),
        cold_open_seconds=(0.002,) if is_file else (),
        resident_shares=(0.0,) if is_file else (),
        private_bytes=10**6,
        amplification=(128.0 if is_chunked else 1.0) if is_file else None,
        chunks="tgt in chunks of (128, 2, 64), gzip" if is_chunked else "",
    )
    return tuple(
        RankReport(rank=rank, start_memory_bytes=10**8, peak_memory_bytes=2 * 10**8, reading=report)
        for rank in range(trial.num_ranks)
    )
