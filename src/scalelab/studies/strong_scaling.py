"""Strong scaling: the same job, the same global batch, more ranks.

The ideal is T(N) = T(1) / N. Two references are measured, because they answer different questions: the plain loop
with no process group is what a user has today, and one rank under the strategy is what isolates the cost of more
ranks from the cost of the strategy's own machinery.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from scalelab.checks import check_at_least
from scalelab.report.document import Document
from scalelab.strategies.catalogue import Spread
from scalelab.studies.profiled import FEW_STEPS
from scalelab.studies.scaling import ScalingAnswer, plan_scaling
from scalelab.studies.scaling_document import conclude_scaling
from scalelab.studies.study import Job, Sampling, check_ranks
from scalelab.trial import Trial, TrialResult


@dataclass(frozen=True, kw_only=True)
class StrongScaling:
    """The global batch stays the same; each of N ranks computes one N-th of it."""

    name: ClassVar[str] = "strong-scaling"
    question: ClassVar[str] = "How much faster does the same job get with more ranks?"

    ranks: tuple[int, ...] = (1, 2)
    """Numbers of ranks to measure; one rank and the plain loop are always measured."""
    global_batch: int = 64
    """Samples per step, over all ranks."""
    strategy: Spread = "ddp"
    """How the training is spread."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(profile_steps=FEW_STEPS))

    def __post_init__(self) -> None:
        check_at_least("global_batch", self.global_batch, 1)
        check_ranks(self.ranks, self.global_batch)

    def plan(self) -> list[Trial]:
        return plan_scaling(self.job, self.sampling, self.strategy, self.ranks, lambda _: self.global_batch)

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        warmup = self.sampling.warmup
        return conclude_scaling(
            ScalingAnswer.from_results(results, self.strategy, warmup, is_strong=True),
            title="Strong scaling",
            question=self.question,
            job=self.job,
            sampling=self.sampling,
            batch=f"global batch {self.global_batch}",
            ranks=self.ranks,
        )
