"""A real training run on one rank: steps, lines, evaluations, profiler, checkpoints.

The steps are those of the measurements, with the same two clock readings. What happens between them (reading the loss
of the other ranks, evaluating, saving) is not part of any step's time. Rank 0 appends every line to `curve.jsonl`,
which the parent prints as it grows. After an interruption the lines and samples beyond the checkpoint are dropped,
because those steps are taken again.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from time import perf_counter

from scalelab.files import write_atomically, write_json
from scalelab.measure.agreement import (
    checkpoint_directory,
    curve_file,
    keep_curve,
    samples_file,
    start_file,
)
from scalelab.measure.batches import BatchStream
from scalelab.measure.checkpoint import clear_leftovers, find_checkpoint, load_checkpoint, save_checkpoint, wait_for_all
from scalelab.measure.evaluation import OutputTap, Score, evaluate, score_step
from scalelab.measure.gradient_noise import GradientNoise
from scalelab.measure.loop import RawStep, make_sample
from scalelab.measure.profiles import RankProfiler, find_profile_file
from scalelab.measure.step import mark_nothing, take_step
from scalelab.measure.training import Training
from scalelab.observations import CurvePoint
from scalelab.samples import read_partial_samples, render_samples
from scalelab.trial import StepKind, StepSample, Trial, to_builtins


class CourseRun:
    """One rank's part of a training run."""

    def __init__(self, trial: Trial, training: Training, rank: int, directory: Path, samples: list[StepSample]) -> None:
        assert trial.course is not None
        assert isinstance(training.batches, BatchStream)
        self._trial, self._course, self._training = trial, trial.course, training
        self._batches: BatchStream = training.batches
        self._rank, self._directory, self._samples = rank, directory, samples
        self._num_steps = training.num_steps
        self._checkpoints = checkpoint_directory(directory, trial.course)
        self._num_written = self._num_epochs = 0
        self._tap = OutputTap(training.model)
        self._noise = GradientNoise(trial, training) if "gradient_noise" in trial.instruments else None

    def run(self) -> None:
        """From the last whole checkpoint, or the beginning, to the end."""
        first = self._begin()
        trace = find_profile_file(self._trial, self._directory, self._rank, self._num_steps)
        profiler = RankProfiler(self._course, trace, first)
        try:
            for step in range(first, self._num_steps):
                self._take(step, profiler.kind_of(step))
                profiler.advance()
                self._finish(step + 1)
        finally:
            profiler.close()
            self._write_samples()
            self._tap.close()

    def _begin(self) -> int:
        """Go on from a checkpoint if there is one; gives the step to begin with."""
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
        start = perf_counter()
        loss = take_step(training, self._noise.mark if self._noise else mark_nothing)
        training.synchronize()
        raw = RawStep(start, perf_counter(), loss.item())
        self._samples.append(make_sample(self._rank, step, kind, raw))
        if (step + 1) % self._course.log_every == 0 or step + 1 == self._num_steps:
            score = score_step(training, raw.loss, self._tap, self._batches.last)
            self._write_line(step, score, raw.end - raw.start, rate)
        self._tap.output = None

    def _finish(self, num_done: int) -> None:
        """What is due after a step: an evaluation, a checkpoint, writing out what was measured."""
        is_end = num_done == self._num_steps
        is_due = self._is_evaluation_due(num_done)
        if self._training.test_batches is not None and (is_end or is_due):
            start = perf_counter()
            self._write_line(num_done - 1, evaluate(self._training, self._tap), perf_counter() - start, None)
        every = self._course.checkpoint_every
        if self._course.keep and (is_end or (every is not None and num_done % every == 0)):
            self._write_samples()
            save_checkpoint(
                self._checkpoints, num_done, self._training, self._trial, self._rank, keep=self._course.keep
            )
        elif num_done % max(self._course.log_every, 10) == 0:
            self._write_samples()

    def _is_evaluation_due(self, num_done: int) -> bool:
        """By the count of steps, or when another epoch has been completed."""
        before, self._num_epochs = self._num_epochs, int(self._batches.epochs_done)
        every = self._course.evaluate_every
        return num_done % every == 0 if every is not None else self._num_epochs > before

    def _write_line(self, step: int, score: Score, seconds: float, rate: float | None) -> None:
        if self._rank != 0:
            return
        point = CurvePoint(
            step=step,
            epoch=self._batches.epochs_done,
            loss=score.loss if math.isfinite(score.loss) else None,
            accuracy=score.accuracy,
            learning_rate=rate,
            seconds=seconds,
            is_evaluation=rate is None,
            small_gradient_square=self._noise.small if self._noise and rate is not None else None,
            large_gradient_square=self._noise.large if self._noise and rate is not None else None,
        )
        with curve_file(self._directory).open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_builtins(point)) + "\n")

    def _write_samples(self) -> None:
        with samples_file(self._directory, self._rank).open("a", encoding="utf-8", newline="") as file:
            file.write(render_samples(self._samples[self._num_written :]).partition("\n")[2])
        self._num_written = len(self._samples)
