"""The study of injected delays: its flags and its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.checks import check_at_least, read_flag
from scalelab.errors import UsageError
from scalelab.records.strategies import ParallelStrategy
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.charts.column_charts import keep_charts
from scalelab.report.document import Document, Section
from scalelab.studies.delay.answer import DelayAnswer, name_label, name_row
from scalelab.studies.delay.report import draw_speedups, draw_steps, find_findings, make_delay_table, make_overlay_table
from scalelab.studies.shared import sweep
from scalelab.studies.shared.arms import group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Configuration, Sampling, Study, check_ranks
from scalelab.units import parse_seconds


@dataclass(frozen=True, kw_only=True)
class Delay(Study):
    """Measure every delay on every number of ranks; --delay-phase says where in the step."""

    name: ClassVar[str] = "delay"
    title: ClassVar[str] = "Injected delay"
    question: ClassVar[str] = "How does a fixed delay per step change the speedup, and does Amdahl's law predict it?"
    takes_script: ClassVar[bool] = True

    delays: tuple[str, ...] = ("0ms", "10ms")
    """Delays in every step of every rank; no delay is always measured."""
    ranks: tuple[int, ...] = (1, 2)
    """World sizes to measure; one rank is always measured."""
    global_batch: int = 64
    """Samples per step, over all ranks."""
    strategy: ParallelStrategy = "ddp"
    """How training is distributed."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(comm_free_steps=0))

    def __post_init__(self) -> None:
        check_at_least("global_batch", self.global_batch, 1)
        check_ranks(self.ranks, self.global_batch)
        seconds = [read_flag("delays", text, parse_seconds) for text in self.delays]
        if not seconds or len(set(seconds)) < len(seconds):
            raise UsageError(f"--delays {' '.join(self.delays)} needs at least one time, each once")
        told = self.job.perturbation
        if told.seconds:
            raise UsageError(f"--delay {told.delay} is not used here: use --delays 0ms {told.delay}")
        if told.delay_rank is not None:
            raise UsageError(
                f"--delay-rank {told.delay_rank} would delay one rank only: leave it out, or use scalelab run straggler"
            )

    @property
    def _strategy(self) -> str:
        return self.job.name_strategy(self.strategy)

    @property
    def delay_seconds(self) -> tuple[float, ...]:
        return tuple(sorted({0.0, *(parse_seconds(text) for text in self.delays)}))

    @property
    def all_ranks(self) -> tuple[int, ...]:
        return tuple(sorted({1, *self.ranks}))

    def plan(self) -> list[Trial]:
        return sweep.plan_sweep(self.job, self.sampling, list(self._configure()))

    def _configure(self) -> Iterator[Configuration]:
        for delay in self.delay_seconds:
            perturbation = replace(self.job.perturbation, delay=f"{delay * 1e3:.6g}ms")
            for num_ranks in self.all_ranks:
                yield Configuration(
                    name=name_row(self._strategy, num_ranks, delay),
                    strategy=self._strategy,
                    num_ranks=num_ranks,
                    global_batch=self.global_batch,
                    job=replace(self.job, perturbation=perturbation),
                    label=name_label(self._strategy, num_ranks, delay),
                )

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        answer = DelayAnswer(arms=arms, strategy=self._strategy, delays=self.delay_seconds, ranks=self.all_ranks)
        phase = self.job.perturbation.delay_phase
        words = (self._strategy, self.job.dtype, f"global batch {self.global_batch}", f"delays in {phase}")
        sections = [Section(tables=(make_delay_table(answer),), charts=keep_charts(draw_steps(answer)))]
        if (overlay := make_overlay_table(answer)) is not None:
            charts = keep_charts(draw_speedups(answer))
            sections.append(Section(heading="Against Amdahl's law", tables=(overlay,), charts=charts))
        return Document(
            title=self.title,
            question=self.question,
            setting=sweep.describe_measurement(self.job, self.sampling, arms.values(), *words),
            sections=tuple(sections),
            findings=tuple(find_findings(answer, phase)),
            cautions=sweep.find_sweep_cautions(arms, answer.find(1, 0.0)),
        )
