"""`train`: a real training run, kept like every other run.

It has one trial with a training schedule instead of measured blocks. Its steps are timed like those of a measurement,
but there is one launch: the interval of the step time covers its steps and says nothing about the next launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import tyro

from scalelab.analysis.estimate import Estimate
from scalelab.answers.metered import LOSS
from scalelab.checks import check_at_least, check_divisible
from scalelab.errors import DamagedRun, UsageError
from scalelab.launch.outcome import read_unfinished
from scalelab.launch.ranks.placement import default_threads_per_rank, is_oversubscribed
from scalelab.records.environment import count_cores
from scalelab.records.observations import CurvePoint
from scalelab.records.refusals import check_spreading, check_strategy
from scalelab.records.settings import TrainingRun
from scalelab.records.store import RunStore
from scalelab.records.strategies import StrategyName, choose_strategy
from scalelab.records.tasks import Train
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Document, Section, Table
from scalelab.report.findings import DETAIL, MAIN, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import (
    bytes_column,
    count_column,
    make_column,
    make_table,
    rate_column,
    seconds_column,
    text_column,
)
from scalelab.studies.shared.arms import Arm, describe_status, group_arms
from scalelab.studies.shared.cautions import FAILED, find_cautions
from scalelab.studies.shared.job import Job, check_devices, describe_trial_fields
from scalelab.studies.shared.losses import plot_learning
from scalelab.studies.shared.step_charts import thin
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.work import count_tokens, measure_rate
from scalelab.studies.throughput import THROUGHPUT
from scalelab.units import (
    format_count,
    format_duration,
    format_known,
    format_learning_rate,
    format_loss,
    format_quantity,
)
from scalelab.workloads.gpt2_options import Gpt2Options

ACCURACY = FindingKind("accuracy", "Loss and accuracy on the test data", MAIN, ("accuracy", "loss", "step"))
COMPLETE = FindingKind("already-complete", "The checkpoints already held every step", DETAIL)
NOT_LEARNING = CautionKind("not-learning", "The training loss did not decrease", "note", ("first", "last"))

MOST_ROWS = 20
"""Rows of the curve in the table, of training and of test data each; result.json has all."""


@dataclass(frozen=True, kw_only=True)
class TrainStudy(Study):
    """A real training run: loss, accuracy, learning rate and time per line, checkpoints, exact resume."""

    name: ClassVar[str] = "train"
    title: ClassVar[str] = "Training"
    question: ClassVar[str] = "What does this model learn, and how fast?"

    ranks: int = 1
    """Ranks to train on; under torchrun, as many as it started."""
    strategy: StrategyName | None = None
    """How training is distributed. None: single on one rank, ddp on more."""
    global_batch: int = 64
    """Samples per step, over all ranks."""
    course: TrainingRun = field(default_factory=TrainingRun)
    job: Job = field(default_factory=lambda: Job(timeout="30d"))
    local_ranks: Annotated[int | None, tyro.conf.Suppress, tyro.conf.Fixed] = None
    """Ranks on this machine; None: all."""

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 1)
        check_at_least("global_batch", self.global_batch, 1)
        check_divisible(self.global_batch, self.ranks)

    @property
    def found_strategy(self) -> str:
        return choose_strategy(self.strategy, self.ranks)

    def plan(self) -> list[Trial]:
        job = self.job
        check_spreading(self.found_strategy, job.spreading)
        here = self.local_ranks or job.count_on_node(self.ranks)
        check_devices(job, here)
        rank = job.perturbation.delay_rank
        if rank is not None and rank >= self.ranks:
            raise UsageError(f"--delay-rank must be < --ranks ({self.ranks}), got {rank}")
        threads = job.threads_per_rank or default_threads_per_rank(here, count_cores())
        trial = Trial(
            configuration="train",
            strategy=self.found_strategy,
            num_ranks=self.ranks,
            global_batch=self.global_batch,
            threads_per_rank=threads,
            is_oversubscribed=is_oversubscribed(here, threads, count_cores()),
            task=Train(run=self.course),
            **describe_trial_fields(job, self.found_strategy),
        )
        check_strategy(trial)
        return [trial]

    def rescue(self, store: RunStore) -> TrialResult | None:
        (trial,) = store.trials()
        return read_unfinished(trial, store.trial_directory(trial.name))

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, None)
        sections: list[Section] = []
        if results:
            curve = results[0].curve
            sections.append(Section(tables=(make_curve_table(curve),), charts=plot_learning(curve)))
        if results and results[0].epochs:
            sections.append(Section(heading="Epochs", tables=(make_epoch_table(results[0].epochs),)))
        sections += [Section(heading="Speed", tables=(make_speed_table(arm),)) for arm in arms.values()]
        return Document(
            title=self.title,
            question=self.question,
            setting=self._describe_setting(),
            sections=tuple(sections),
            findings=tuple(finding for arm in arms.values() for finding in summarise(arm)),
            cautions=(*_warn_of_end(results), *find_cautions(arms.values()), *_warn_of_learning(results)),
        )

    def _describe_setting(self) -> str:
        job = self.job
        ranks = f"{self.found_strategy} on {format_count(self.ranks, 'rank')}"
        return " · ".join([job.label, ranks, job.dtype, f"global batch {self.global_batch}", *count_shards(job)])


def count_shards(job: Job) -> Iterator[str]:
    """`100,000,000 tokens in 1 shard`, where a language model trains on shards that are still there."""
    options: object = job.built_in
    if not isinstance(options, Gpt2Options) or options.data != "tokens":
        return
    try:
        from scalelab.data.shards import open_shard  # here: it needs numpy

        sizes = [len(open_shard(path)) for path in options.find_data()[0]]
    except (UsageError, OSError):
        return
    yield f"{sum(sizes):,} tokens in {format_count(len(sizes), 'shard')}"


def make_curve_table(curve: Sequence[CurvePoint]) -> Table:
    """Points of the curve, evenly chosen, the first and the last included."""
    chosen = choose_lines(curve)
    hidden = len(curve) - len(chosen)
    return make_table(
        chosen,
        count_column("step", "step", lambda point: point.step),
        make_column("epochs", "epoch", "epoch", lambda point: point.epoch),
        text_column("data", "data", lambda point: "test" if point.is_evaluation else "train"),
        make_column("loss", "loss", "loss", lambda point: point.loss),
        make_column("accuracy", "accuracy", "accuracy", lambda point: point.accuracy),
        make_column("text", "learning_rate", "learning rate", show_learning_rate),
        seconds_column("seconds", "time", lambda point: point.seconds),
        notes=(f"{hidden} more points are in result.json",) if hidden else (),
    )


def make_epoch_table(epochs: Sequence[CurvePoint]) -> Table:
    """Time, mean loss and accuracy of the training steps of every epoch."""
    return make_table(
        thin(epochs, MOST_ROWS),
        count_column("epoch", "epoch", lambda point: round(point.epoch)),
        seconds_column("epoch_seconds", "time", lambda point: point.seconds),
        seconds_column("compute_seconds", "without loading", lambda point: point.compute_seconds),
        make_column("loss", "loss", "mean loss", lambda point: point.loss),
        make_column("accuracy", "accuracy", "accuracy", lambda point: point.accuracy),
        notes=("of training steps, without evaluations and checkpoints; loss and accuracy before each update",),
    )


def show_learning_rate(point: CurvePoint) -> str | None:
    return None if point.learning_rate is None else format_learning_rate(point.learning_rate)


def choose_lines(curve: Sequence[CurvePoint]) -> list[CurvePoint]:
    lines = [point for point in curve if not point.is_evaluation]
    tests = [point for point in curve if point.is_evaluation]
    kept = {id(point) for part in (lines, tests) for point in thin(part, MOST_ROWS)}
    return [point for point in curve if id(point) in kept]


def make_speed_table(arm: Arm) -> Table:
    parameters = next((rank.num_parameters for result in arm.results for rank in result.ranks), None)
    return make_table(
        [arm],
        text_column("run", "run", lambda arm: arm.label),
        seconds_column("step_seconds", "step", lambda arm: arm.step),
        rate_column("samples_per_second", "samples/s", find_rate),
        rate_column("tokens_per_second", "tokens/s", measure_rate) if count_tokens(arm) != arm.step_samples else None,
        bytes_column("peak_memory_bytes", "peak memory", lambda arm: arm.peak_memory_bytes),
        count_column("num_parameters", "parameters", lambda _: parameters),
        status=lambda arm: None if arm.is_measured else describe_status(arm),
        notes=("± is the 95 % CI half-width over the steps of this launch",),
    )


def find_rate(arm: Arm) -> Estimate:
    return arm.step.map(lambda seconds: arm.trial.global_batch / seconds)


def summarise(arm: Arm) -> Iterator[Finding]:
    """What was learnt, and how fast."""
    curve = [point for result in arm.results for point in result.curve]
    lines = [point for point in curve if not point.is_evaluation]
    tests = [point for point in curve if point.is_evaluation]
    if not curve and arm.completed:
        yield COMPLETE(arm.label, "Nothing was left to do: the checkpoints already held every step.", weight=MAIN)
    if lines:
        begin, end = (f"{format_loss(point.loss)} at step {point.step}" for point in (lines[0], lines[-1]))
        yield LOSS(
            arm.label,
            f"Training loss went from {begin} to {end}.",
            weight=MAIN,
            first=lines[0].loss,
            last=lines[-1].loss,
        )
    if tests:
        last = tests[-1]
        right = "" if last.accuracy is None else f", accuracy {format_quantity('accuracy', last.accuracy)}"
        more = "".join(f", {name} {value:.4g}" for name, value in last.metrics.items())
        text = f"Test loss after step {last.step}: {format_loss(last.loss)}{right}{more}."
        yield ACCURACY(arm.label, text, accuracy=last.accuracy, loss=last.loss, step=last.step)
    if arm.is_measured:
        wall = sum(result.wall_seconds for result in arm.results)
        tokens = (
            f" ({format_known('rate', measure_rate(arm))} tokens/s)" if count_tokens(arm) != arm.step_samples else ""
        )
        text = (
            f"A step took {format_known('seconds', arm.step)}{tokens}; the whole launch took {format_duration(wall)}."
        )
        yield THROUGHPUT(arm.label, text, weight=REASON, step_seconds=arm.step, samples_per_second=find_rate(arm))


def _warn_of_end(results: Sequence[TrialResult]) -> Iterator[Caution]:
    for result in results:
        if result.status is not Status.COMPLETED:
            yield FAILED(
                result.trial.configuration,
                f"the training run did not finish ({result.status.words}): {result.reason}",
                "`scalelab resume` continues from the last checkpoint, or from the start without one",
                status=result.status.value,
                failed=1,
                rounds=1,
            )


def _warn_of_learning(results: Sequence[TrialResult]) -> Iterator[Caution]:
    for result in results:
        losses = [point.loss for point in result.curve if not point.is_evaluation]
        if len(losses) > 1 and losses[0] is not None and losses[-1] is not None and losses[-1] >= losses[0]:
            yield NOT_LEARNING(
                result.trial.configuration,
                f"the training loss did not decrease: {losses[0]:.4f} first, {losses[-1]:.4f} last",
                "random data cannot be learnt; with real data, try a smaller --lr or --lr-warmup",
                first=losses[0],
                last=losses[-1],
            )


def reopen_training(store: RunStore) -> None:
    """A training run that failed or was killed continues from its last checkpoint; other failures are results."""
    name = store.record.trials[0]
    if store.record.study == TrainStudy.name and store.has_result(name):
        try:
            is_over = store.result(name).status is Status.COMPLETED
        except DamagedRun:
            return  # the run sets it aside
        if not is_over:
            store.set_aside(name, "before")
