"""`train`: a real training run, kept like every other run.

It has one trial with a course instead of a plan of blocks. The steps are timed like those of a measurement, but there
is one launch: the interval of the step time covers the steps of this launch and says nothing of the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import tyro

from scalelab.checks import check_at_least, check_divisible
from scalelab.errors import UsageError
from scalelab.measure.launchers.outcome import read_unfinished
from scalelab.ranks.affinity import default_threads_per_rank, is_oversubscribed
from scalelab.records.environment import count_cores
from scalelab.records.observations import CurvePoint
from scalelab.records.settings import Course
from scalelab.records.store import RunStore
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Cell, Column, Document, Section, Table, make_cell, make_row
from scalelab.report.findings import Caution, as_findings
from scalelab.strategies.catalogue import Strategy, check_spreading, check_strategy
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.cautions import find_cautions
from scalelab.studies.shared.job import Job, check_gpus, describe_trial_fields
from scalelab.studies.shared.learning_charts import plot_learning
from scalelab.studies.shared.study import Study
from scalelab.units import format_duration, format_learning_rate, format_loss, format_quantity

MOST_ROWS = 20
"""Lines of the curve in the table; all of them are in the run."""


@dataclass(frozen=True, kw_only=True)
class Train(Study):
    """A real training run: loss, accuracy, learning rate and time per line, checkpoints, exact resume."""

    name: ClassVar[str] = "train"
    title: ClassVar[str] = "Training"
    question: ClassVar[str] = "What does this training learn, and how fast?"

    ranks: int = 1
    """Ranks to train on; under torchrun, as many as it started."""
    strategy: Annotated[Strategy | None, tyro.conf.arg(metavar="NAME")] = None
    """How the training is spread: single, dp, ddp, fsdp-full, fsdp-grad-op, fsdp-none or fsdp2. None: single on one
    rank, ddp on more."""
    global_batch: int = 64
    """Samples per step, over all ranks."""
    course: Course = field(default_factory=Course)
    job: Job = field(default_factory=lambda: Job(timeout="30d"))
    local_ranks: Annotated[int | None, tyro.conf.Suppress, tyro.conf.Fixed] = None
    """Ranks on this machine; None: all."""

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 1)
        check_at_least("global_batch", self.global_batch, 1)
        check_divisible(self.global_batch, self.ranks)

    @property
    def found_strategy(self) -> str:
        return self.strategy or ("single" if self.ranks == 1 else "ddp")

    def plan(self) -> list[Trial]:
        job, device = self.job, self.job.found_device
        check_spreading(self.found_strategy, job.spreading)
        here = self.local_ranks or job.count_on_node(self.ranks)
        if device == "cuda" and not job.is_elsewhere:
            check_gpus(here)
        rank = job.perturbation.delay_rank
        if rank is not None and rank >= self.ranks:
            raise UsageError(f"--delay-rank {rank} does not exist: the last of {self.ranks} is {self.ranks - 1}")
        threads = job.threads_per_rank or default_threads_per_rank(here, count_cores())
        trial = Trial(
            configuration="train",
            strategy=self.found_strategy,
            num_ranks=self.ranks,
            global_batch=self.global_batch,
            threads_per_rank=threads,
            is_oversubscribed=is_oversubscribed(here, threads, count_cores()),
            course=self.course,
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
        sections += [Section(heading="Speed", tables=(make_speed_table(arm),)) for arm in arms.values()]
        summary = tuple(words for arm in arms.values() for words in summarise(arm))
        return Document(
            title=self.title,
            question=self.question,
            setting=self._describe_setting(),
            sections=tuple(sections),
            findings=as_findings(summary),
            cautions=(*_warn_of_end(results), *find_cautions(arms.values()), *_warn_of_learning(results)),
        )

    def _describe_setting(self) -> str:
        job = self.job
        ranks = f"{self.found_strategy} on {self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return " · ".join([job.label, ranks, job.dtype, f"global batch {self.global_batch}"])


def make_curve_table(curve: Sequence[CurvePoint]) -> Table:
    """Every evaluation, and of the steps' lines as many as fit, evenly chosen, the first and the last among them."""
    chosen = choose_lines(curve)
    columns = (
        Column(key="step", header="step", quantity="count"),
        Column(key="epoch", header="epoch", quantity="epochs"),
        Column(key="data", header="data", align="left"),
        Column(key="loss", header="loss", quantity="loss"),
        Column(key="accuracy", header="accuracy", quantity="accuracy"),
        Column(key="learning_rate", header="learning rate"),
        Column(key="seconds", header="time", quantity="seconds"),
    )
    rows = tuple(
        make_row(
            point.step,
            point.epoch,
            "test" if point.is_evaluation else "train",
            point.loss,
            point.accuracy,
            None if point.learning_rate is None else format_learning_rate(point.learning_rate),
            point.seconds,
        )
        for point in chosen
    )
    hidden = len(curve) - len(chosen)
    notes = (f"{hidden} more lines are in the run's result.json",) if hidden else ()
    return Table(columns=columns, rows=rows, notes=notes)


def choose_lines(curve: Sequence[CurvePoint]) -> list[CurvePoint]:
    lines = [point for point in curve if not point.is_evaluation]
    tests = [point for point in curve if point.is_evaluation]
    kept = {id(point) for part in (lines, tests) for point in spread_evenly(part, MOST_ROWS)}
    return [point for point in curve if id(point) in kept]


def spread_evenly(points: Sequence[CurvePoint], count: int) -> list[CurvePoint]:
    """At most so many of them, the first and the last included."""
    if len(points) <= count:
        return list(points)
    return [points[round(i * (len(points) - 1) / (count - 1))] for i in range(count)]


def make_speed_table(arm: Arm) -> Table:
    columns = (
        Column(key="run", header="run", align="left"),
        Column(key="step_seconds", header="step", quantity="seconds"),
        Column(key="samples_per_second", header="samples/s", quantity="rate"),
        Column(key="peak_memory_bytes", header="peak memory", quantity="bytes"),
        Column(key="num_parameters", header="parameters", quantity="count"),
    )
    parameters = next((rank.num_parameters for result in arm.results for rank in result.ranks), None)
    if arm.is_measured:
        step = arm.step
        rate: Cell = make_cell(step.map(lambda seconds: arm.trial.global_batch / seconds))
        row = make_row(arm.label, step, rate, arm.peak_memory_bytes, parameters)
    else:
        words = arm.failure.status.words if arm.failure else "no step"
        row = make_row(arm.label, words, None, None, parameters)
    notes = ("± is a 95 % confidence interval over the steps of this one launch",)
    return Table(columns=columns, rows=(row,), notes=notes)


def summarise(arm: Arm) -> Iterator[str]:
    """What was learnt, and at what speed."""
    curve = [point for result in arm.results for point in result.curve]
    lines = [point for point in curve if not point.is_evaluation]
    tests = [point for point in curve if point.is_evaluation]
    if not curve and arm.completed:
        yield "Nothing was left to do: the checkpoints had every step of it already."
    if lines:
        begin, end = (f"{format_loss(point.loss)} at step {point.step}" for point in (lines[0], lines[-1]))
        yield f"The training loss went from {begin} to {end}."
    if tests:
        last = tests[-1]
        right = "" if last.accuracy is None else f", accuracy {format_quantity('accuracy', last.accuracy)}"
        yield f"On the test data after step {last.step}: loss {format_loss(last.loss)}{right}."
    if arm.is_measured:
        wall = sum(result.wall_seconds for result in arm.results)
        yield f"A step took {format_quantity('seconds', arm.step)}; the launch {format_duration(wall)} in all."


def _warn_of_end(results: Sequence[TrialResult]) -> Iterator[Caution]:
    for result in results:
        if result.status is not Status.COMPLETED:
            yield Caution(
                message=f"the training did not end ({result.status.words}): {result.reason}",
                next_step="scalelab resume goes on from its last checkpoint, or from the beginning without one",
            )


def _warn_of_learning(results: Sequence[TrialResult]) -> Iterator[Caution]:
    for result in results:
        losses = [point.loss for point in result.curve if not point.is_evaluation]
        if len(losses) > 1 and losses[0] is not None and losses[-1] is not None and losses[-1] >= losses[0]:
            yield Caution(
                message=f"the training loss did not fall: {losses[0]:.4f} at first, {losses[-1]:.4f} at last",
                next_step="random data cannot be learnt; with real data, try a smaller --lr or --lr-warmup",
            )
