"""A training run on one rank: steps, log lines, evaluations, profiler, checkpoints.

The steps are those of the measurements, with the same two clock readings. What happens between them (reading the loss
of the other ranks, evaluating, saving) is not part of any step's time. Rank 0 appends every line to `curve.jsonl`,
which the parent prints as it grows. After an interruption the lines and samples beyond the checkpoint are dropped,
because those steps are taken again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.launch.agreement import (
    checkpoint_directory,
    curve_file,
    keep_curve,
    samples_file,
    start_file,
)
from scalelab.records.files import write_atomically, write_json
from scalelab.records.observations import CurvePoint
from scalelab.records.samples import read_partial_samples, render_samples
from scalelab.records.settings import TrainingRun
from scalelab.records.strategies import DEFAULT, find_strategy
from scalelab.records.trial import StepKind, StepSample, Trial, to_builtins
from scalelab.worker.batches.stream import BatchStream, count_samples, list_parts
from scalelab.worker.checkpoint import clear_leftovers, find_checkpoint, load_checkpoint, save_checkpoint
from scalelab.worker.group import is_so_everywhere, sum_over_ranks, wait_for_all
from scalelab.worker.instruments.profiles import RankProfiler, find_profile_file
from scalelab.worker.loop import RawStep, make_sample
from scalelab.worker.randomness import untouched_randomness
from scalelab.worker.step import take_step
from scalelab.worker.training import Training

NO_BATCH = object()


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well the model does, over all ranks."""

    loss: float
    accuracy: float | None
    """The share of right answers; None if the output has no classes."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the workload's own evaluation gives besides."""


class OutputTap:
    """Keeps the output of the model's last forward pass, by a hook, so that accuracy works with any loss.

    In training only outputs of one row per sample are kept: those of a language model are as large as the rest.
    """

    def __init__(self, model: nn.Module) -> None:
        self.output: torch.Tensor | None = None
        self._handle = model.register_forward_hook(self._keep)

    def _keep(self, model: nn.Module, _: Any, output: Any) -> None:
        is_small = isinstance(output, torch.Tensor) and output.ndim == 2
        self.output = output.detach() if isinstance(output, torch.Tensor) and (is_small or not model.training) else None

    def close(self) -> None:
        self.output = None
        self._handle.remove()


def count_right(output: torch.Tensor | None, batch: Any) -> tuple[int, int]:
    """Correct and total predictions if the batch is a pair with class labels; else two zeros."""
    parts = list_parts(batch)
    if output is None or len(parts) != 2 or not isinstance(parts[1], torch.Tensor):
        return 0, 0
    target = parts[1].to(output.device)
    if target.is_floating_point() or output.ndim != target.ndim + 1 or output.shape[:-1] != target.shape:
        return 0, 0
    return int((output.argmax(-1) == target).sum()), target.numel()


def evaluate(training: Training, tap: OutputTap) -> Score:
    """Loss and accuracy on the test data; leaves neither the model nor the random state changed."""
    totals = [0.0, 0.0, 0.0, 0.0]
    move = training.move or (lambda batch: batch)
    with untouched_randomness(), eval_mode(training.model), torch.no_grad():
        if training.evaluate is not None:
            return evaluate_by(training.evaluate, training, move)
        for raw in take_together(training):
            batch = move(raw)
            num_samples = count_samples(batch, training.batch_dim) or 1
            loss = training.loss(training.model, batch).item()
            right, answers = count_right(tap.output, batch)
            for index, value in enumerate((loss * num_samples, num_samples, right, answers)):
                totals[index] += value
        tap.output = None
    return gather_score(training, totals)


def evaluate_by(function: Callable[..., Any], training: Training, move: Callable[[Any], Any]) -> Score:
    """The numbers of the workload's own evaluation: the mean over batches, by their samples, and over ranks."""
    sums, weight = dict[str, float](), 0.0
    for raw in take_together(training):
        found = function(training.model, move(raw))
        num_samples = count_samples(raw, training.batch_dim) or 1
        weight += num_samples
        for name, value in (found if isinstance(found, Mapping) else {"loss": found}).items():
            sums[name] = sums.get(name, 0.0) + float(value) * num_samples
    device = next(training.model.parameters()).device
    *totals, weight = sum_over_ranks([*(sums[name] for name in sorted(sums)), weight], device)
    means = {name: total / weight for name, total in zip(sorted(sums), totals, strict=True)}
    return Score(loss=means.pop("loss", math.nan), accuracy=means.pop("accuracy", None), metrics=means)


def take_together(training: Training) -> Iterator[Any]:
    """This rank's test batches; raises `UsageError` on all ranks where one has more of them than another.

    A forward pass of a sharded model is done by all ranks or none, so this is agreed on before every batch.
    """
    assert training.test_batches is not None
    iterator, num_taken = iter(training.test_batches), 0
    device = next(training.model.parameters()).device
    while True:
        batch = next(iterator, NO_BATCH)
        if not is_so_everywhere(batch is not NO_BATCH, device):
            break
        num_taken += 1
        yield batch
    if not is_so_everywhere(batch is NO_BATCH, device):
        raise UsageError(
            f"some ranks have only {num_taken} test batches, others have more: return the same number on every rank"
        )
    if not num_taken:
        raise UsageError("test_batches is empty: return a list or a DataLoader from build()")


def gather_score(training: Training, totals: list[float]) -> Score:
    """Sum over ranks: weighted losses, weights, right answers, answers."""
    loss, weight, right, answers = sum_over_ranks(totals, next(training.model.parameters()).device)
    return Score(loss=loss / weight if weight else float("nan"), accuracy=right / answers if answers else None)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


class GradientNoise:
    """The squared norms of a step's gradients, after its first pass and after its last.

    A step that accumulates has the gradient of b samples in `.grad` after its first pass and that of all B after its
    last. Both norms are read at the marks that every step makes after backward, so training is unchanged;
    `analysis/learning.py` computes the noise scale. The first gradient is already divided by the number of passes and
    not yet all-reduced; with a loss scale both are multiplied by it. FSDP shards gradients and is refused.
    """

    def __init__(self, trial: Trial, training: Training) -> None:
        if training.accumulation < 2 or training.turns:
            raise UsageError(
                "the gradient noise scale needs one update of at least two passes per step, and a step of"
                f" {trial.batch_per_rank} samples does not: set --micro-batch to at most half of that"
            )
        if find_strategy(trial.strategy).wraps_blocks or find_strategy(trial.strategy).keeps_gradients:
            raise UsageError(
                f"the gradient noise scale needs full gradients, and {trial.strategy} shards them: use {DEFAULT}"
            )
        self._training = training
        self._num_passes = 0
        self.small: float | None = None
        """Of the first pass; None if not finite."""
        self.large: float | None = None
        """Of the whole step."""

    def begin(self) -> None:
        """Before a step."""
        self._num_passes = 0
        self.small = self.large = None

    def mark(self, phase: str) -> None:
        """Called where a phase ends."""
        if phase != "backward":
            return
        self._num_passes += 1
        if self._num_passes == 1:
            self.small = self._read_square(self._training.accumulation)
        if self._num_passes == self._training.accumulation:
            self.large = self._read_square(1)

    def _read_square(self, factor: float) -> float | None:
        """The squared norm of what is in `.grad`, multiplied by a factor and without the loss scale."""
        parameters = self._training.model.parameters()
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters if p.grad is not None]
        scale = self._training.scaler.get_scale() if self._training.scaler else 1.0
        square = (float(torch.stack(norms).norm()) * factor / scale) ** 2 if norms else math.nan
        return square if math.isfinite(square) else None


class EpochSum:
    """What the steps of an epoch add up to on this rank: time, loss, right answers.

    Between steps, loading ahead and logging count; evaluations, checkpoints and traces do not.
    """

    def __init__(self, origin: float) -> None:
        self.origin = origin
        """When the first step of this launch began."""
        self.seconds = self.compute_seconds = 0.0
        self.totals = [0.0, 0.0, 0.0, 0.0]
        """Losses, their number, right answers, answers."""
        self._since = self._phase_begin = perf_counter()
        self._waited = 0.0

    def see(self, phase: str) -> None:
        """Where a phase of a step ends."""
        now = perf_counter()
        if phase == "input":
            self._waited += now - self._phase_begin
        self._phase_begin = now

    def begin(self) -> float:
        """Before a step."""
        self._phase_begin, self._waited = perf_counter(), 0.0
        return self._phase_begin

    def add(self, start: float, end: float, loss: float, weight: float, counted: tuple[int, int]) -> None:
        self.seconds += end - self._since
        self.compute_seconds += end - start - self._waited
        self._since = end
        for place, value in enumerate((loss, weight, *counted)):
            self.totals[place] += value

    def resume(self) -> None:
        """After what does not count."""
        self._since = perf_counter()


class TrainingLoop:
    """One rank's part of a training run."""

    def __init__(
        self, trial: Trial, run: TrainingRun, training: Training, rank: int, directory: Path, samples: list[StepSample]
    ) -> None:
        assert isinstance(training.batches, BatchStream)
        self._trial, self._settings, self._training = trial, run, training
        self._batches: BatchStream = training.batches
        self._rank, self._directory, self._samples = rank, directory, samples
        self._num_steps = training.num_steps
        self._checkpoints = checkpoint_directory(directory, run)
        self._num_written = self._num_epochs = 0
        self._tap = OutputTap(training.model)
        self._noise = GradientNoise(trial, training) if "gradient_noise" in trial.instruments else None
        self._epoch = EpochSum(perf_counter())

    def run(self) -> None:
        """From the last whole checkpoint, or the beginning, to the end."""
        first = self._begin()
        self._epoch = EpochSum(perf_counter())
        trace = find_profile_file(self._trial, self._settings, self._directory, self._rank, self._num_steps)
        profiler = RankProfiler(self._settings, trace, first)
        try:
            for step in range(first, self._num_steps):
                self._take(step, profiler.kind_of(step))
                if profiler.advance():
                    wait_for_all()  # the next step would wait for ranks that still write
                self._finish(step + 1)
                self._epoch.resume()
        finally:
            profiler.close()
            self._write_samples()
            self._tap.close()

    def _begin(self) -> int:
        """Continue from a checkpoint if there is one; returns the first step."""
        found, damaged = find_checkpoint(self._checkpoints)
        wait_for_all()
        first = load_checkpoint(found, self._training, self._trial, self._rank) if found else 0
        file = samples_file(self._directory, self._rank)
        self._samples += [sample for sample in read_partial_samples(file) if sample.step < first]
        self._num_written = len(self._samples)
        write_atomically(file, render_samples(self._samples))
        self._num_epochs = int(self._batches.epochs_done)
        if self._rank == 0:
            clear_leftovers(self._checkpoints, first)
            keep_curve(curve_file(self._directory), first)
            write_json(start_file(self._directory), {"step": first, "damaged": damaged})
        return first

    def _take(self, step: int, kind: StepKind) -> None:
        training = self._training
        rate = float(training.optimizer.param_groups[0]["lr"])
        if self._noise:
            self._noise.begin()
        training.synchronize()
        start = self._epoch.begin()
        loss = take_step(training, self._mark)
        training.synchronize()
        end, value, weight = perf_counter(), loss.item(), float(training.gives_loss)
        raw = RawStep(start, end, value if weight else None)
        self._samples.append(make_sample(self._rank, step, kind, raw))
        counted = count_right(self._tap.output, self._batches.last)
        self._epoch.add(start, end, value, weight, counted)
        if step % self._settings.log_every == 0 or step + 1 == self._num_steps:
            score = gather_score(training, [value, weight, *counted])
            self._write_line(step, score, end - start, rate)
        self._tap.output = None

    def _mark(self, phase: str) -> None:
        self._epoch.see(phase)
        if self._noise:
            self._noise.mark(phase)

    def _finish(self, num_done: int) -> None:
        """What is due after a step: an evaluation, a checkpoint, writing out what was measured."""
        is_end = num_done == self._num_steps
        num_epochs = self._num_epochs
        is_due = self._is_evaluation_due(num_done)
        if self._num_epochs > num_epochs:
            self._write_epoch(num_done - 1)
        if self._training.test_batches is not None and (is_end or is_due):
            start = perf_counter()
            self._write_line(num_done - 1, evaluate(self._training, self._tap), perf_counter() - start, None)
        every = self._settings.checkpoint_every
        if self._settings.keep and (is_end or (every is not None and num_done % every == 0)):
            self._write_samples()
            save_checkpoint(
                self._checkpoints, num_done, self._training, self._trial, self._rank, keep=self._settings.keep
            )
        elif num_done % max(self._settings.log_every, 10) == 0:
            self._write_samples()

    def _is_evaluation_due(self, num_done: int) -> bool:
        """By the count of steps, or when another epoch has been completed."""
        before, self._num_epochs = self._num_epochs, int(self._batches.epochs_done)
        every = self._settings.evaluate_every
        return num_done % every == 0 if every is not None else self._num_epochs > before

    def _write_epoch(self, step: int) -> None:
        """The line of an epoch that has just ended; all ranks add up what they trained on."""
        epoch, self._epoch = self._epoch, EpochSum(self._epoch.origin)
        score = gather_score(self._training, epoch.totals)
        self._write(
            CurvePoint(
                step=step,
                epoch=float(self._num_epochs),
                loss=score.loss if math.isfinite(score.loss) else None,
                accuracy=score.accuracy,
                seconds=epoch.seconds,
                elapsed_seconds=perf_counter() - epoch.origin,
                compute_seconds=epoch.compute_seconds,
                is_epoch=True,
            )
        )

    def _write_line(self, step: int, score: Score, seconds: float, rate: float | None) -> None:
        point = CurvePoint(
            step=step,
            epoch=self._batches.epochs_done,
            loss=score.loss if math.isfinite(score.loss) else None,
            accuracy=score.accuracy,
            learning_rate=rate,
            seconds=seconds,
            elapsed_seconds=perf_counter() - self._epoch.origin,
            is_evaluation=rate is None,
            metrics={name: value for name, value in score.metrics.items() if math.isfinite(value)},
            small_gradient_square=self._noise.small if self._noise and rate is not None else None,
            large_gradient_square=self._noise.large if self._noise and rate is not None else None,
        )
        self._write(point)

    def _write(self, point: CurvePoint) -> None:
        if self._rank == 0:
            with curve_file(self._directory).open("a", encoding="utf-8") as file:
                file.write(json.dumps(to_builtins(point)) + "\n")

    def _write_samples(self) -> None:
        with samples_file(self._directory, self._rank).open("a", encoding="utf-8", newline="") as file:
            file.write(render_samples(self._samples[self._num_written :]).partition("\n")[2])
        self._num_written = len(self._samples)
