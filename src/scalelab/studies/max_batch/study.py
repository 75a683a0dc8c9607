"""Max batch: the largest batch per rank that fits into memory, found by few probes and confirmed.

Every probe is a trial of its own: fresh processes that may die. A probe completes when all ranks have run all its
steps, so all of them agree on what is found, under any strategy. The peak is the highest of any rank. The probes so far
decide which batch comes next (`analysis/batch_limits.py`).

A few memory forecasts decide where to begin (`worker/memory/forecast.py`): they allocate nothing, and their line lacks
only what libraries take on top. A job that cannot be forecast begins with one sample.

A probe runs five steps. The optimizer creates its state at the end of the first, so the second is the first one that
needs everything at once; random batches are reused after the fourth.

On a CPU ranks always have a limit, even without --memory-limit: otherwise the kernel's out-of-memory killer would end
the probe that is meant to fail, or another program. There every tensor gets pages of its own, because how well an
ordinary allocator packs them differs from launch to launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import tyro

from scalelab.analysis.batch_limits import choose_next_batch
from scalelab.checks import check_at_least, parse_percent, read_flag
from scalelab.errors import UsageError
from scalelab.records.environment import read_available_memory
from scalelab.records.settings import MaybeInt
from scalelab.records.strategies import StrategyName, choose_strategy, find_strategy
from scalelab.records.tasks import Forecast, Measure
from scalelab.records.trial import Status, StepPlan, Trial, TrialResult
from scalelab.report.charts.column_charts import keep_charts
from scalelab.report.document import Document, Section
from scalelab.studies.max_batch.answer import BatchSearch, find_data_end
from scalelab.studies.max_batch.report import (
    draw_probes,
    draw_search,
    list_cautions,
    list_findings,
    make_answer_table,
    make_probe_table,
)
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Configuration, Sampling, Study, plan_rounds
from scalelab.studies.shared.sweep import describe_placement
from scalelab.units import format_bytes

PROBE_PLAN = StepPlan(lead_in_steps=4, clean_steps=1, phase_steps=0, comm_free_steps=0, cycles=1)
FORECAST_BATCHES = (16, 64)
"""Large enough to peak where larger ones do, mostly in backward."""
SHARE_OF_MEMORY = 0.5
"""Of the host's available memory: what the ranks of a probe may take together without --memory-limit."""


@dataclass(frozen=True, kw_only=True)
class MaxBatch(Study):
    """Probe a few batches in separate processes, predict the maximum from their memory, and confirm that it runs."""

    takes_script: ClassVar[bool] = True
    is_search: ClassVar[bool] = True
    quick_fields: ClassVar[Mapping[str, Any]] = {"tolerance": "5%"}
    quick_cost: ClassVar[str] = "the largest batch may be up to 5 % larger"

    ranks: int = 1
    """Ranks to train on."""
    strategy: StrategyName | None = None
    """How training is distributed. None: single on one rank, ddp on more."""
    start: int = 1
    """Smallest batch per rank of the first probe; a memory forecast may start higher."""
    most: MaybeInt = None
    """Largest batch per rank to try. None: until memory runs out."""
    tolerance: Annotated[str, tyro.conf.arg(metavar="PERCENT")] = "0%"
    """How far the answer may fall below the true maximum. 2% needs fewer probes; 0%: exact."""
    job: Job = field(default_factory=Job)

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 1)
        check_at_least("start", self.start, 1)
        read_flag("tolerance", self.tolerance, parse_tolerance)
        if self.most is not None:
            check_at_least("most", self.most, 1)
            if self.start > self.most:
                raise UsageError(f"--start {self.start} is more than --most {self.most}: begin with less")
        if self.job.shape.micro_batch is not None:
            raise UsageError(
                f"--micro-batch {self.job.shape.micro_batch} bounds the memory of a step whatever its batch: leave it"
                " out"
            )
        if self.job.allocator == "keep":
            raise UsageError(
                "--allocator keep needs a different amount of memory in every launch, so no batch is the largest:"
                " leave it out"
            )

    def plan(self) -> list[Trial]:
        self.job.check_sets_batch(self.name)
        configuration = Configuration(
            name=f"batch-{self.start}",
            label=f"batch {self.start}",
            strategy=choose_strategy(self.strategy, self.ranks),
            num_ranks=self.ranks,
            global_batch=self.start * self.ranks,
        )
        (trial,) = plan_rounds(self.job, Sampling(rounds=1), [configuration])
        if trial.device == "cpu":
            share = int(SHARE_OF_MEMORY * read_available_memory()) // trial.num_processes
            trial = replace(trial, memory_limit_bytes=trial.memory_limit_bytes or share, allocator="pages")
        trial = self._make_probe(trial, self.start)
        if find_strategy(trial.strategy).memory is None:
            return [trial]
        return [make_forecast(trial, batch) for batch in FORECAST_BATCHES]

    def plan_more(self, results: Sequence[TrialResult]) -> list[Trial]:
        """The next forecast or probe; none when the search is over, or a probe failed for another reason."""
        search = BatchSearch.from_results(results)
        if search.broken is not None:
            return []
        most = search.bound(self.most)
        further = search.choose_forecast(most) or search.choose_smallest_forecast()
        if further is not None:
            return [make_forecast(results[0].trial, further)]
        batch = choose_next_batch(
            search.probes,
            limit_bytes=search.limit_bytes,
            start=self.start,
            most=most,
            hint=search.forecast,
            tolerance=self.tolerated_share,
        )
        return [] if batch is None else [self._make_probe(results[0].trial, batch)]

    @property
    def tolerated_share(self) -> float:
        return parse_tolerance(self.tolerance)

    def _make_probe(self, template: Trial, batch: int) -> Trial:
        """The trial that runs a batch; a script gets it as an argument."""
        probe = make_probe_trial(template, batch)
        is_script = self.job.script is not None
        task = self.job.make_script_task(PROBE_PLAN, batch, self.ranks) if is_script else probe.task
        return replace(probe, task=task, instruments=() if is_script else probe.instruments)

    def expects(self, result: TrialResult) -> bool:
        """Ends of memory and of the data are what it looks for; without a forecast it begins with one sample."""
        is_end = result.status is Status.OUT_OF_MEMORY or find_data_end(result) is not None
        return is_end or result.trial.is_forecast

    def find_unexpected(self, results: Sequence[TrialResult]) -> list[TrialResult]:
        """A probe that a signal killed where memory ends is an answer too, which only all of them together show."""
        search = BatchSearch.from_results(results)
        return [one for one in super().find_unexpected(results) if not search.is_at_limit(one)]

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        search = BatchSearch.from_results(results)
        probes = make_probe_table(search)
        sections = [Section(tables=(probes,), charts=keep_charts(draw_probes(probes, search), draw_search(search)))]
        if search.largest is not None:
            sections.append(Section(heading="The answer", tables=(make_answer_table(search, self.ranks),)))
        is_script = self.job.script is not None
        words = (
            self.job.label,
            self.job.name_ranks("", self.ranks) if is_script else describe_placement(self.strategy, self.ranks),
            *([] if is_script else [self.job.dtype]),
            f"{format_bytes(search.limit_bytes)} per {search.owner}",
            f"probes of {PROBE_PLAN.num_steps if search.trial else '–'} steps",
        )
        return Document(
            title=self.title,
            question=self.question,
            setting=" · ".join(words),
            sections=tuple(sections),
            findings=tuple(list_findings(search, self.ranks, self.most, self.tolerance, self.tolerated_share)),
            cautions=tuple(list_cautions(search, self.job, self.most)),
        )


def parse_tolerance(text: str) -> float:
    """A share from 2%; 0 is a share too."""
    return 0.0 if text.strip().rstrip("%") in ("0", "0.0") else parse_percent(text)


def make_probe_trial(template: Trial, batch: int) -> Trial:
    """The trial that runs a batch, made from any other trial of the search."""
    return replace(
        template,
        configuration=f"batch-{batch}",
        label=f"batch {batch}",
        global_batch=batch * template.num_ranks,
        task=Measure(plan=PROBE_PLAN),
        instruments=("shapes",),
    )


def make_forecast(template: Trial, batch: int) -> Trial:
    """The trial that only forecasts what a batch needs."""
    probe = make_probe_trial(template, batch)
    return replace(probe, configuration=f"forecast-{batch}", task=Forecast(), instruments=())
