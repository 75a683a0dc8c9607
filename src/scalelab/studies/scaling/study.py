"""Strong scaling: the same job and global batch on more ranks; the ideal is T(N) = T(1) / N.

Weak scaling: every rank keeps its batch, so more ranks do more work in, ideally, the same time T(N) = T(1). The scaled
speedup is N·T(1)/T(N) (Gustafson 1988).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from scalelab.checks import check_at_least
from scalelab.errors import UnknownName
from scalelab.records.observations import Instrument
from scalelab.records.strategies import PLAIN, SCRIPT, STRATEGIES, ParallelStrategy, find_strategy
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Document
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import (
    FEW_STEPS,
    Configuration,
    Sampling,
    Study,
    check_ranks,
    plan_link,
    plan_rounds,
)


@dataclass(frozen=True, kw_only=True)
class Scaling(Study):
    """One strategy on several world sizes, beside the plain loop."""

    takes_script: ClassVar[bool] = True
    is_strong: ClassVar[bool]

    ranks: tuple[int, ...] = (1, 2)
    """World sizes; 1 and the plain loop are always measured."""
    strategy: ParallelStrategy = "ddp"
    """How training is distributed."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(profile_steps=FEW_STEPS))

    @property
    def batch_words(self) -> str:
        raise NotImplementedError

    def size_batch(self, num_ranks: int) -> int:
        """The global batch on this many ranks."""
        raise NotImplementedError

    def resize(self, batch: int) -> Self:
        """The same study with another batch: global, or per rank."""
        raise NotImplementedError

    def plan(self) -> list[Trial]:
        """The plain loop, its control, and the strategy on one rank and on each number of ranks.

        A script has no plain loop: one rank of it is the reference.
        """
        if self.job.script is not None:
            return self._plan_script()
        if self.strategy not in STRATEGIES:
            raise UnknownName("strategy", self.strategy, STRATEGIES)
        names = ["single-1", "control"] if self.sampling.control else ["single-1"]
        configurations = [
            Configuration(name=name, strategy=PLAIN, num_ranks=1, global_batch=self.size_batch(1)) for name in names
        ]
        configurations += [
            Configuration(
                name=f"{self.strategy}-{n}",
                strategy=self.strategy,
                num_ranks=n,
                global_batch=self.size_batch(n),
                instruments=choose_instruments(self.strategy, n),
            )
            for n in sorted({1, *self.ranks})
        ]
        trials = plan_rounds(self.job, self.sampling, configurations)
        is_counted = "messages" in choose_instruments(self.strategy, 2) and 2 in self.ranks
        return [*trials, *plan_link(self.job, self.sampling, max(self.ranks))] if is_counted else trials

    def _plan_script(self) -> list[Trial]:
        """The script on one rank, once more as the control, and on each number of ranks."""
        rows = {f"{SCRIPT.name}-1": 1} | ({"control": 1} if self.sampling.control else {})
        rows |= {f"{SCRIPT.name}-{n}": n for n in sorted(self.ranks) if n > 1}
        configurations = [
            Configuration(
                name=name,
                strategy=SCRIPT.name,
                num_ranks=n,
                global_batch=self.size_batch(n),
                instruments=() if name == "control" else choose_instruments(SCRIPT.name, n),
            )
            for name, n in rows.items()
        ]
        return plan_rounds(self.job, self.sampling, configurations)

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        from scalelab.studies.scaling.answer import ScalingAnswer  # here: --help needs no numpy
        from scalelab.studies.scaling.report import conclude_scaling

        answer = ScalingAnswer.from_results(results, self.strategy, self.sampling.warmup, is_strong=self.is_strong)
        return conclude_scaling(self, answer, self.batch_words, self.ranks)


@dataclass(frozen=True, kw_only=True)
class StrongScaling(Scaling):
    """The global batch stays the same; each of N ranks computes one N-th of it."""

    is_strong: ClassVar[bool] = True

    global_batch: int = 64
    """Samples per step, over all ranks."""

    def __post_init__(self) -> None:
        check_at_least("global_batch", self.global_batch, 1)
        check_ranks(self.ranks, self.global_batch)

    @property
    def batch_words(self) -> str:
        return f"global batch {self.global_batch}"

    def find_notes(self) -> list[str]:
        """A script that is not given its batch may well divide one itself, or the study fails."""
        script = self.job.script
        if script is None or script.sets_batch or max(self.ranks) == 1:
            return []
        words = f"{script.label} must divide the {self.batch_words} by the number of ranks itself"
        return [f"{words}; if it does not, write {{batch_per_rank}} where it takes its batch size"]

    def size_batch(self, num_ranks: int) -> int:
        return self.global_batch

    def resize(self, batch: int) -> Self:
        return replace(self, global_batch=batch)


@dataclass(frozen=True, kw_only=True)
class WeakScaling(Scaling):
    """Each rank keeps its batch; N ranks process N times as many samples per step."""

    is_strong: ClassVar[bool] = False

    batch_per_rank: int = 32
    """Samples per step on each rank."""

    def __post_init__(self) -> None:
        check_at_least("batch_per_rank", self.batch_per_rank, 1)
        check_ranks(self.ranks)

    @property
    def batch_words(self) -> str:
        return f"batch {self.batch_per_rank} per rank"

    def size_batch(self, num_ranks: int) -> int:
        return self.batch_per_rank * num_ranks

    def resize(self, batch: int) -> Self:
        return replace(self, batch_per_rank=batch)


def choose_instruments(strategy: str, num_ranks: int) -> tuple[Instrument, ...]:
    """One rank and two show when gradients are ready, and two what shards and split layers send, what predictions need;
    more than one what DDP counts."""
    record = find_strategy(strategy)
    wanted = {"gradients": num_ranks <= 2, "counters": num_ranks > 1}
    found = tuple(name for name in record.instruments if wanted.get(name))
    is_counted = num_ranks == 2 and bool(record.axes or record.shards)
    return (*found, "messages") if is_counted else found
