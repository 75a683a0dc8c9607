"""Max batch: the largest batch per rank that fits into memory, found by few probes and confirmed.

Every probe is a trial of its own: fresh processes that may die. A probe completes when all ranks have run all its
steps, so that what is found has been agreed on by all of them, under any strategy. The peak is the highest of any
rank. Which batch comes next is decided by `analysis/batch_search.py` from the probes so far.

Where to begin is told by a few forecasts of the memory (`measure/memory_forecast.py`): they allocate nothing, and their
line needs only what libraries take on top. A job that cannot be forecast begins with one sample.

A probe runs five steps. The optimizer makes its state at the end of the first, so that the second is the first one
that needs everything at once; random batches are used in turn after the fourth.

On a CPU the ranks are always limited, also where the user gave no limit: without one, the probe that shall fail would
be ended by the kernel's out-of-memory killer, and perhaps somebody else's program in its place. There every tensor
gets pages of its own, because how well an ordinary allocator fits them together differs from launch to launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.analysis.batch_size import choose_next_batch
from scalelab.checks import check_at_least
from scalelab.errors import UsageError
from scalelab.records.environment import read_available_memory
from scalelab.records.settings import MaybeInt
from scalelab.records.trial import Status, StepPlan, Trial, TrialResult
from scalelab.report.document import Document
from scalelab.studies.max_batch.answer import BatchSearch
from scalelab.studies.max_batch.report import conclude_search
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Configuration, Sampling, plan_rounds
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import MaybeStrategy, choose_strategy

PROBE_PLAN = StepPlan(lead_in_steps=4, clean_steps=1, phase_steps=0, comm_free_steps=0, cycles=1)
FORECAST_BATCHES = (16, 64)
"""Large enough for the peak to lie where it lies for larger ones, mostly in backward."""
SHARE_OF_MEMORY = 0.5
"""Of what the host has available: what the ranks of a probe may take together where no limit was given."""


@dataclass(frozen=True, kw_only=True)
class MaxBatch(Study):
    """Few probes, each in processes that may die: a line through their memory, then its maximum and one sample more."""

    name: ClassVar[str] = "max-batch"
    title: ClassVar[str] = "Max batch"
    question: ClassVar[str] = "What is the largest batch that fits into memory?"

    ranks: int = 1
    """Ranks to train on."""
    strategy: MaybeStrategy = None
    """How the training is spread. None: single on one rank, ddp on more."""
    start: int = 1
    """Samples per rank of the first probe, at least: a forecast of the memory may tell it to begin with more."""
    most: MaybeInt = None
    """Samples per rank beyond which nobody wants to know. None: until memory ends."""
    job: Job = field(default_factory=Job)

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 1)
        check_at_least("start", self.start, 1)
        if self.most is not None:
            check_at_least("most", self.most, 1)
            if self.start > self.most:
                raise UsageError(f"--start {self.start} is more than --most {self.most}: begin with less")
        if self.job.shape.micro_batch is not None:
            raise UsageError(
                f"--micro-batch {self.job.shape.micro_batch} bounds what a step needs whatever its batch: leave it out"
            )
        if self.job.allocator == "keep":
            raise UsageError(
                "--allocator keep needs another amount of memory in every launch, so that no batch is the largest:"
                " leave it out"
            )

    def plan(self) -> list[Trial]:
        configuration = Configuration(
            name=name_probe(self.start),
            label=label_probe(self.start),
            strategy=choose_strategy(self.strategy, self.ranks),
            num_ranks=self.ranks,
            global_batch=self.start * self.ranks,
        )
        (trial,) = plan_rounds(self.job, Sampling(rounds=1), [configuration])
        if trial.device == "cpu":
            share = int(SHARE_OF_MEMORY * read_available_memory()) // trial.num_processes
            trial = replace(trial, memory_limit_bytes=trial.memory_limit_bytes or share, allocator="pages")
        trial = replace(trial, plan=PROBE_PLAN)
        if trial.strategy == "dp":
            return [trial]
        return [make_forecast(trial, batch) for batch in FORECAST_BATCHES]

    def plan_more(self, results: Sequence[TrialResult]) -> list[Trial]:
        """The next forecast or probe; none when the search is over, or a probe failed for another reason."""
        search = BatchSearch.from_results(results)
        if search.broken is not None:
            return []
        further = search.choose_forecast()
        if further is not None:
            return [make_forecast(results[0].trial, further)]
        batch = choose_next_batch(
            search.probes, limit_bytes=search.limit_bytes, start=self.start, most=self.most, hint=search.forecast
        )
        return [] if batch is None else [make_probe_trial(results[0].trial, batch)]

    def expects(self, result: TrialResult) -> bool:
        """Running out of memory is what the search looks for; without a forecast it begins with one sample."""
        return result.status is Status.OUT_OF_MEMORY or result.trial.is_forecast

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        return conclude_search(
            BatchSearch.from_results(results),
            question=self.question,
            job=self.job,
            strategy=choose_strategy(self.strategy, self.ranks),
            num_ranks=self.ranks,
            most=self.most,
        )


def make_probe_trial(template: Trial, batch: int) -> Trial:
    """The trial that runs a batch, made from any other trial of the search."""
    return replace(
        template,
        configuration=name_probe(batch),
        label=label_probe(batch),
        global_batch=batch * template.num_ranks,
        instruments=(),
    )


def make_forecast(template: Trial, batch: int) -> Trial:
    """The trial that only forecasts what a batch needs."""
    probe = make_probe_trial(template, batch)
    return replace(probe, configuration=f"forecast-{batch}", instruments=("memory_forecast",))


def name_probe(batch: int) -> str:
    return f"batch-{batch}"


def label_probe(batch: int) -> str:
    return f"batch {batch}"
