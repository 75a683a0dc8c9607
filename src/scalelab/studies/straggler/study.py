"""Straggler: which rank is slow, where, and what it costs the others.

An all-reduce ends when the last rank has joined, so one slow rank makes every step slow and all the others wait. Their
clocks do not show it plainly: the waiting is in their backward, where gradients are reduced, whatever phase the slow
rank was late in. So each rank's own time is separated from waiting first (`analysis/breakdown.py`), and the ranks are
then compared phase by phase (`analysis/breakdown.py`).

Without a delay the job is diagnosed as it is. With one (`--delay 20ms --delay-rank 0`) the job without delay is
measured in the same rounds too. That shows what the delay costs, and how well the model holds: a step takes as long as
its slowest rank, so the delay adds to it in full. The diagnosis does not know of the delay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.checks import check_at_least, check_divisible
from scalelab.errors import UsageError
from scalelab.records.settings import Perturbation
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Document, Section
from scalelab.strategies.catalogue import Spread
from scalelab.studies.shared.arms import group_arms
from scalelab.studies.shared.breakdown import make_breakdown_table, plot_rank_parts, warn_of_rest
from scalelab.studies.shared.cautions import find_cautions
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Configuration, Sampling, plan_rounds
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import describe_measurement
from scalelab.studies.straggler.report import (
    DELAYED,
    LABELS,
    UNDELAYED,
    StragglerAnswer,
    find_findings,
    make_model_table,
    make_own_time_table,
    make_straggler_table,
    plot_model,
    warn_of_limits,
)


@dataclass(frozen=True, kw_only=True)
class Straggler(Study):
    """Compare the ranks of one job phase by phase; with --delay on one rank, also with the job without the delay."""

    name: ClassVar[str] = "straggler"
    title: ClassVar[str] = "Straggler"
    question: ClassVar[str] = "Which rank is slow, in which phase, and what does it cost?"

    ranks: int = 2
    """Ranks of the job."""
    global_batch: int = 64
    """Samples per step, over all ranks."""
    strategy: Spread = "ddp"
    """How training is distributed; only ddp separates forward and backward from waiting."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(
        default_factory=lambda: Sampling(rounds=8, steps=18, phase_steps=20, comm_free_steps=0, control=False)
    )

    def __post_init__(self) -> None:
        check_at_least("global_batch", self.global_batch, 1)
        check_at_least("ranks", self.ranks, 2)
        check_divisible(self.global_batch, self.ranks)
        if self.strategy == "dp":
            raise UsageError("--strategy dp is one process, whose replicas are not timed separately: use ddp")
        if not self.sampling.phase_steps:
            raise UsageError("--phase-steps 0 leaves nothing to compare: use 20")
        told = self.job.perturbation
        if told.seconds and told.delay_rank is None:
            raise UsageError(
                f"--delay {told.delay} delays every rank alike: add --delay-rank 0, or use scalelab run delay"
            )
        if told.delay_rank is not None and told.delay_rank >= self.ranks:
            raise UsageError(
                f"--delay-rank {told.delay_rank} does not exist: with {self.ranks} ranks the last is {self.ranks - 1}"
            )

    @property
    def is_delayed(self) -> bool:
        return self.job.perturbation.seconds > 0

    def plan(self) -> list[Trial]:
        quiet = replace(self.job, perturbation=Perturbation())
        rows = {UNDELAYED: quiet, DELAYED: self.job} if self.is_delayed else {f"{self.strategy}-{self.ranks}": self.job}
        configurations = [
            Configuration(
                name=name,
                strategy=self.strategy,
                num_ranks=self.ranks,
                global_batch=self.global_batch,
                job=job,
                label=LABELS.get(name, ""),
            )
            for name, job in rows.items()
        ]
        return plan_rounds(self.job, self.sampling, configurations)

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        answer = StragglerAnswer(arms=arms, perturbation=self.job.perturbation)
        words = (f"{self.strategy} × {self.ranks}", self.job.dtype, f"global batch {self.global_batch}")
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(self.job, self.sampling, arms.values(), *words),
            sections=tuple(self._make_sections(answer)),
            findings=tuple(find_findings(answer)),
            cautions=(
                *find_cautions(arms.values()),
                *(caution for arm in arms.values() for caution in warn_of_rest(arm)),
                *warn_of_limits(answer),
            ),
        )

    def _make_sections(self, answer: StragglerAnswer) -> Iterator[Section]:
        yield Section(tables=(make_straggler_table(answer),))
        looked_at = answer.looked_at
        if looked_at is not None and looked_at.is_measured:
            title = f"Own time of every rank of {looked_at.label}"
            yield Section(heading="Who is slow", tables=(make_own_time_table(answer.diagnosis, title=title),))
        measured = [arm for arm in answer.arms.values() if arm.is_measured]
        if measured:
            tables = tuple(make_breakdown_table(arm, title=f"Every rank of {arm.label}") for arm in measured)
            charts = tuple(chart for arm in measured if (chart := plot_rank_parts(arm)) is not None)
            yield Section(heading="Where the time goes", tables=tables, charts=charts)
        if self.is_delayed:
            model = plot_model(answer)
            charts = (model,) if model is not None else ()
            yield Section(heading="Against the model", tables=(make_model_table(answer),), charts=charts)
