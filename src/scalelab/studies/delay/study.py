"""Delay: what a fixed time in every step does to the speedup.

A delay that every rank sits out is a serial part: more ranks do not shorten it. Amdahl's law predicts its effect,
S_N(d) = (T₁ + d) / (T_N + d), and the study compares that with the measurement (`analysis/scaling_laws.py`): once with
the measured T_N, which asks only whether the delay adds up, and once with T_N = T₁ / N, which also assumes that
everything else scales perfectly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.checks import check_at_least, read_flag
from scalelab.errors import UsageError
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Document, Section
from scalelab.strategies.catalogue import Spread
from scalelab.studies.delay.report import (
    DelayAnswer,
    find_findings,
    make_delay_table,
    make_overlay_table,
    name_label,
    name_row,
    plot_delayed_speedups,
    plot_delayed_steps,
)
from scalelab.studies.shared.arms import group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Configuration, Sampling, check_ranks
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import describe_measurement, find_sweep_cautions, plan_sweep
from scalelab.units import parse_seconds


@dataclass(frozen=True, kw_only=True)
class Delay(Study):
    """Measure every delay on every number of ranks; --delay-phase says where in the step."""

    name: ClassVar[str] = "delay"
    title: ClassVar[str] = "Injected delay"
    question: ClassVar[str] = "How does a fixed delay per step change the speedup, and does Amdahl's law predict it?"

    delays: tuple[str, ...] = ("0ms", "10ms")
    """Delays in every step of every rank; no delay is always measured."""
    ranks: tuple[int, ...] = (1, 2)
    """World sizes to measure; one rank is always measured."""
    global_batch: int = 64
    """Samples per step, over all ranks."""
    strategy: Spread = "ddp"
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
    def delay_seconds(self) -> list[float]:
        return sorted({0.0, *(parse_seconds(text) for text in self.delays)})

    @property
    def all_ranks(self) -> list[int]:
        return sorted({1, *self.ranks})

    def plan(self) -> list[Trial]:
        return plan_sweep(self.job, self.sampling, list(self._configure()))

    def _configure(self) -> Iterator[Configuration]:
        for delay in self.delay_seconds:
            perturbation = replace(self.job.perturbation, delay=f"{delay * 1e3:.6g}ms")
            for num_ranks in self.all_ranks:
                yield Configuration(
                    name=name_row(self.strategy, num_ranks, delay),
                    strategy=self.strategy,
                    num_ranks=num_ranks,
                    global_batch=self.global_batch,
                    job=replace(self.job, perturbation=perturbation),
                    label=name_label(self.strategy, num_ranks, delay),
                )

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        answer = DelayAnswer(
            arms=arms, strategy=self.strategy, delays=tuple(self.delay_seconds), ranks=tuple(self.all_ranks)
        )
        phase = self.job.perturbation.delay_phase
        words = (self.strategy, self.job.dtype, f"global batch {self.global_batch}", f"delays in {phase}")
        steps, speedups = plot_delayed_steps(answer), plot_delayed_speedups(answer)
        sections = [Section(tables=(make_delay_table(answer),), charts=(steps,) if steps else ())]
        overlay = make_overlay_table(answer)
        if overlay is not None:
            sections.append(
                Section(heading="Against Amdahl's law", tables=(overlay,), charts=(speedups,) if speedups else ())
            )
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(self.job, self.sampling, arms.values(), *words),
            sections=tuple(sections),
            findings=tuple(find_findings(answer, phase)),
            cautions=find_sweep_cautions(arms, answer.find(1, 0.0)),
        )
