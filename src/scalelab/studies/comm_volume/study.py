"""Communication volume: what data-parallel strategies send in a step, counted and computed.

Every collective of one step is counted on every rank with the bytes of its tensors, beside what theory gives from the
sizes of the model alone. Where theory is exact the two must be equal to the byte; where they are not, either the
strategy sends something unnecessary or theory leaves something out.

For a model with batch norm, three variants of DDP show what its statistics cost: buffers not broadcast, synchronized
batch norm, and (resnet18) none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.checks import check_at_least
from scalelab.errors import UsageError
from scalelab.records.strategies import DEFAULT, SCRIPT, ParallelStrategy, find_strategy
from scalelab.records.tasks import Forecast
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Document, Section
from scalelab.studies.comm_volume.report import (
    NO_NORM,
    SYNCED,
    UNSENT,
    draw_kinds,
    draw_payloads,
    make_kind_table,
    make_message_table,
    summarise_messages,
    warn_of_messages,
)
from scalelab.studies.shared.arms import group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import (
    Configuration,
    Sampling,
    Study,
    check_fake,
    mark_fake,
    plan_forecast,
    was_refused,
)
from scalelab.studies.shared.sweep import (
    describe_measurement,
    find_sweep_cautions,
    plan_sweep,
)
from scalelab.studies.strategies.study import check_strategies, fit_job, name_row
from scalelab.workloads.image_options import Resnet18Options


@dataclass(frozen=True, kw_only=True)
class CommVolume(Study):
    """Count the messages and bytes of one step by kind, and compare them with theory."""

    takes_script: ClassVar[bool] = True

    strategies: tuple[ParallelStrategy, ...] = ("ddp", "fsdp-full", "fsdp-grad-op", "fsdp2")
    """Strategies to compare; the first is the reference."""
    ranks: int = 2
    """Ranks of every strategy."""
    batch_per_rank: int = 8
    """Samples per step and rank; only batch norm statistics depend on it."""
    batch_norm: bool = True
    """For models with buffers, also run ddp without broadcasting them, with synchronized batch norm, and (resnet18)
    without batch norm."""
    fake: bool = False
    """Start no ranks: count the messages of one process on fake tensors, in a fake process group of --ranks."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(comm_free_steps=0))

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 2)
        check_at_least("batch_per_rank", self.batch_per_rank, 1)
        check_strategies(self.strategies)
        check_fake(self.fake, self.job)
        for name in self.strategies:
            if not find_strategy(name).has_processes:
                raise UsageError(f"--strategies {name} sends no messages, its replicas share a process: leave it out")

    def plan(self) -> list[Trial]:
        if self.job.script is not None:
            row = self._make_row(name_row(SCRIPT.name, self.ranks), SCRIPT.name, self.job)
            return plan_sweep(self.job, self.sampling, [row])
        names = self.strategies
        rows = [self._make_row(name_row(name, self.ranks), name, fit_job(self.job, name, names)) for name in names]
        has_norms = self.batch_norm and DEFAULT in self.strategies and may_have_norms(self.job)
        rows += self._plan_norms() if has_norms else []
        if self.fake:
            return [plan_forecast(self.job, row, Forecast(messages=True)) for row in rows]
        return plan_sweep(self.job, self.sampling, rows)

    def _plan_norms(self) -> list[Configuration]:
        job = fit_job(self.job, DEFAULT, self.strategies)
        unsent = replace(job, spreading=replace(job.spreading, broadcast_buffers=False))
        synced = replace(job, spreading=replace(job.spreading, sync_batch_norm=True))
        rows = [
            self._make_row(UNSENT, DEFAULT, unsent, "ddp, buffers not sent"),
            self._make_row(SYNCED, DEFAULT, synced, "ddp, synchronized batch norm"),
        ]
        if job.workload == "resnet18":
            bare = replace(job, options={**job.options, "norm": "none"})
            rows.append(self._make_row(NO_NORM, DEFAULT, bare, "ddp, no batch norm"))
        return rows

    def _make_row(self, name: str, strategy: str, job: Job, label: str = "") -> Configuration:
        return Configuration(
            name=name,
            strategy=strategy,
            num_ranks=self.ranks,
            global_batch=self.ranks * self.batch_per_rank,
            job=job,
            label=label,
            instruments=("messages",),
        )

    def refuse(self, trial: Trial, results: Sequence[TrialResult]) -> str | None:
        """Whether the user's own model has buffers is known only when it runs."""
        if trial.configuration not in (UNSENT, SYNCED):
            return None
        reports = [r.ranks[0] for r in results if r.trial.configuration == name_row(DEFAULT, self.ranks) and r.ranks]
        is_bare = any(report.buffer_bytes == 0 for report in reports)
        return "the model has no buffers: this row would repeat ddp" if is_bare else None

    def expects(self, result: TrialResult) -> bool:
        """A row that would repeat ddp is left out on purpose."""
        return was_refused(result) and result.trial.configuration in (UNSENT, SYNCED)

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms([result for result in results if not self.expects(result)], self.sampling.warmup)
        reference = arms.get(name_row(self.job.name_strategy(self.strategies[0]), self.ranks))
        every = list(arms.values())
        table = make_message_table(every, reference)
        sections = [Section(tables=(table,), charts=draw_payloads(table))]
        kinds = make_kind_table(every)
        if kinds.rows:
            sections.append(Section(heading="By kind", tables=(kinds,), charts=draw_kinds(kinds)))
        size = (f"{self.ranks} ranks", f"{self.batch_per_rank} samples per rank")
        document = Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(self.job, self.sampling, every, *size),
            sections=tuple(sections),
            findings=tuple(summarise_messages(arms, name_row(self.job.name_strategy(DEFAULT), self.ranks))),
            cautions=(*find_sweep_cautions(arms, reference), *warn_of_messages(every)),
        )
        return mark_fake(document, self.job, *size) if self.fake else document


def may_have_norms(job: Job) -> bool:
    """Whether the model has batch norm; for the user's own model that is unknown before it runs."""
    options = job.built_in
    return options is None or (isinstance(options, Resnet18Options) and options.norm == "batch")
