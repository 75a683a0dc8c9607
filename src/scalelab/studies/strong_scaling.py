"""Strong scaling: the same job, the same global batch, more ranks.

The ideal is T(N) = T(1) / N. Two references are measured, because they answer different questions: the plain loop
with no process group is what a user has today, and one rank under the strategy is what isolates the cost of more
ranks from the cost of the strategy's own machinery.
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
class StrongScaling:
    """The global batch stays the same; each of N ranks computes one N-th of it."""

    name: ClassVar[str] = "strong-scaling"
    question: ClassVar[str] = "How much faster does the same job get with more ranks?"

    ranks: tuple[int, ...] = (1, 2)
    """Numbers of ranks to measure; one rank and the plain loop are always measured."""
    global_batch: int = 64
    """Samples per step, over all ranks."""
    strategy: Literal["ddp"] = "ddp"
    """How the training is spread."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        check_at_least("global_batch", self.global_batch, 1)
        check_ranks(self.ranks, self.global_batch)

    def plan(self) -> list[Trial]:
        sizes = sorted({1, *self.ranks})
        configurations = [Configuration(name="single-1", strategy="single", num_ranks=1, global_batch=self.global_batch)]
        if self.sampling.control:
            configurations.append(
                Configuration(name="control", strategy="single", num_ranks=1, global_batch=self.global_batch)
            )
        configurations += [
            Configuration(
                name=f"{self.strategy}-{n}", strategy=self.strategy, num_ranks=n, global_batch=self.global_batch
            )
            for n in sizes
        ]
        return plan_rounds(self.job, self.sampling, configurations)

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        answer = ScalingAnswer.from_results(results, self.strategy, self.sampling.warmup, is_strong=True)
        setting = f"global batch {self.global_batch}"
        return conclude_scaling(answer, self.question, "Strong scaling", self.job, self.sampling, setting)
