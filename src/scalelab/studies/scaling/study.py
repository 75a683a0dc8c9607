"""Strong scaling: the same job and global batch on more ranks; the ideal is T(N) = T(1) / N.

Weak scaling: every rank keeps its batch, so more ranks do more work in, ideally, the same time T(N) = T(1). The scaled
speedup is N·T(1)/T(N) (Gustafson 1988).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from scalelab.checks import check_at_least
from scalelab.records.strategies import ParallelStrategy
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Document
from scalelab.studies.scaling.answer import ScalingAnswer, plan_scaling
from scalelab.studies.scaling.report import conclude_scaling
from scalelab.studies.shared.communication import FEW_STEPS
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Sampling, check_ranks
from scalelab.studies.shared.study import Study


@dataclass(frozen=True, kw_only=True)
class StrongScaling(Study):
    """The global batch stays the same; each of N ranks computes one N-th of it."""

    name: ClassVar[str] = "strong-scaling"
    title: ClassVar[str] = "Strong scaling"
    question: ClassVar[str] = "How much faster does the same job get with more ranks?"

    ranks: tuple[int, ...] = (1, 2)
    """World sizes to measure; one rank and the plain loop (no process group) are always measured."""
    global_batch: int = 64
    """Samples per step, over all ranks."""
    strategy: ParallelStrategy = "ddp"
    """How training is distributed."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(profile_steps=FEW_STEPS))

    def __post_init__(self) -> None:
        check_at_least("global_batch", self.global_batch, 1)
        check_ranks(self.ranks, self.global_batch)

    def plan(self) -> list[Trial]:
        return plan_scaling(self.job, self.sampling, self.strategy, self.ranks, lambda _: self.global_batch)

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        answer = ScalingAnswer.from_results(results, self.strategy, self.sampling.warmup, is_strong=True)
        return conclude_scaling(self, answer, f"global batch {self.global_batch}", self.ranks)


@dataclass(frozen=True, kw_only=True)
class WeakScaling(Study):
    """Each rank keeps its batch; N ranks process N times as many samples per step."""

    name: ClassVar[str] = "weak-scaling"
    title: ClassVar[str] = "Weak scaling"
    question: ClassVar[str] = "How much more work gets done in the same time with more ranks?"

    ranks: tuple[int, ...] = (1, 2)
    """World sizes to measure; one rank and the plain loop (no process group) are always measured."""
    batch_per_rank: int = 32
    """Samples per step on each rank."""
    strategy: ParallelStrategy = "ddp"
    """How training is distributed."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(profile_steps=FEW_STEPS))

    def __post_init__(self) -> None:
        check_at_least("batch_per_rank", self.batch_per_rank, 1)
        check_ranks(self.ranks)

    def plan(self) -> list[Trial]:
        return plan_scaling(self.job, self.sampling, self.strategy, self.ranks, lambda n: self.batch_per_rank * n)

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        answer = ScalingAnswer.from_results(results, self.strategy, self.sampling.warmup, is_strong=False)
        return conclude_scaling(self, answer, f"batch {self.batch_per_rank} per rank", self.ranks)
