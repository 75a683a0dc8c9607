"""Weak scaling: every rank keeps its batch, so more ranks do more work in, ideally, the same time.

The ideal is T(N) = T(1). What grows is the work done per step: the scaled speedup is N·T(1)/T(N) (Gustafson 1988).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from scalelab.report.document import Document
from scalelab.studies.scaling import ScalingAnswer, conclude_scaling
from scalelab.studies.study import Configuration, Job, Sampling, check_ranks, plan_rounds
from scalelab.trial import Trial, TrialResult, check_at_least


@dataclass(frozen=True, kw_only=True)
class WeakScaling:
    """Each rank keeps its batch; N ranks process N times as many samples per step."""

    name: ClassVar[str] = "weak-scaling"
    question: ClassVar[str] = "How much more work gets done in the same time with more ranks?"

    ranks: tuple[int, ...] = (1, 2)
    """Numbers of ranks to measure; one rank and the plain loop are always measured."""
    batch_per_rank: int = 32
    """Samples per step on each rank."""
    strategy: Literal["ddp"] = "ddp"
    """How the training is spread."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        check_at_least("batch_per_rank", self.batch_per_rank, 1)
        check_ranks(self.ranks)

    def plan(self) -> list[Trial]:
        batch = self.batch_per_rank
        names = ["single-1", "control"] if self.sampling.control else ["single-1"]
        configurations = [
            Configuration(name=name, strategy="single", num_ranks=1, global_batch=batch) for name in names
        ]
        configurations += [
            Configuration(name=f"{self.strategy}-{n}", strategy=self.strategy, num_ranks=n, global_batch=batch * n)
            for n in sorted({1, *self.ranks})
        ]
        return plan_rounds(self.job, self.sampling, configurations)

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        answer = ScalingAnswer.from_results(results, self.strategy, self.sampling.warmup, is_strong=False)
        setting = f"batch {self.batch_per_rank} per rank"
        return conclude_scaling(answer, self.question, "Weak scaling", self.job, self.sampling, setting)
