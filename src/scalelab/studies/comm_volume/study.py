"""Messages: what data-parallel strategies send in a step, counted and computed.

Every collective of one step is counted on every rank with the bytes of its tensors, and stands beside what theory says
from the sizes of the model alone. Where theory is exact the two must be equal to the byte; where they are not, either
the strategy does something that it need not, or theory leaves something out, and both are worth knowing.

For a model with batch norm three variants of DDP show what its statistics cost: buffers that are not sent, statistics
over the samples of all ranks, and (resnet18) the same network without the norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.checks import check_at_least
from scalelab.errors import UsageError
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Document, Section
from scalelab.report.findings import as_findings
from scalelab.strategies.catalogue import Spread
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
from scalelab.studies.shared.sampling import Configuration, Sampling
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import describe_measurement, find_sweep_cautions, plan_sweep
from scalelab.studies.strategies.study import check_strategies, fit_job, name_row
from scalelab.workloads.image_options import Resnet18Options

NO_BUFFERS = "the model has no buffers, so that this row would be ddp once more"


@dataclass(frozen=True, kw_only=True)
class Messages(Study):
    """What one step sends, by kind and bytes."""

    name: ClassVar[str] = "comm-volume"
    title: ClassVar[str] = "Communication volume"
    question: ClassVar[str] = "What do DDP and FSDP send in a step, and is it what theory says?"

    strategies: tuple[Spread, ...] = ("ddp", "fsdp-full", "fsdp-grad-op", "fsdp2")
    """What to compare; the first is the reference."""
    ranks: int = 2
    """Ranks of every strategy."""
    batch_per_rank: int = 8
    """Samples per step on each rank; only the statistics of batch norm care."""
    batch_norm: bool = True
    """For models with buffers, ddp also without sending them, with synchronised batch norm, and (resnet18) without
    batch norm."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(comm_free_steps=0))

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 2)
        check_at_least("batch_per_rank", self.batch_per_rank, 1)
        check_strategies(self.strategies)
        if "dp" in self.strategies:
            raise UsageError("--strategies dp sends no messages, its replicas share a process: leave it out")

    def plan(self) -> list[Trial]:
        rows = [
            self._make_row(name_row(s, self.ranks), s, fit_job(self.job, s, self.strategies)) for s in self.strategies
        ]
        if self.batch_norm and "ddp" in self.strategies and may_have_norms(self.job):
            rows += self._plan_norms()
        return plan_sweep(self.job, self.sampling, rows)

    def _plan_norms(self) -> list[Configuration]:
        job = fit_job(self.job, "ddp", self.strategies)
        unsent = replace(job, spreading=replace(job.spreading, broadcast_buffers=False))
        synced = replace(job, spreading=replace(job.spreading, sync_batch_norm=True))
        rows = [
            self._make_row(UNSENT, "ddp", unsent, "ddp, buffers not sent"),
            self._make_row(SYNCED, "ddp", synced, "ddp, synchronised batch norm"),
        ]
        if job.workload == "resnet18":
            bare = replace(job, options={**job.options, "norm": "none"})
            rows.append(self._make_row(NO_NORM, "ddp", bare, "ddp, no batch norm"))
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
        """A model of the user's own shows only when it runs whether there are buffers to send."""
        if trial.configuration not in (UNSENT, SYNCED):
            return None
        reports = [r.ranks[0] for r in results if r.trial.configuration == name_row("ddp", self.ranks) and r.ranks]
        return NO_BUFFERS if any(report.buffer_bytes == 0 for report in reports) else None

    def expects(self, result: TrialResult) -> bool:
        """A row that would show nothing is left out on purpose."""
        return result.status is Status.NOT_RUN and result.reason == NO_BUFFERS

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms([result for result in results if not self.expects(result)], self.sampling.warmup)
        reference = arms.get(name_row(self.strategies[0], self.ranks))
        every = list(arms.values())
        table = make_message_table(every, reference)
        sections = [Section(tables=(table,), charts=draw_payloads(table, every))]
        kinds = make_kind_table(every)
        if kinds.rows:
            sections.append(Section(heading="By kind", tables=(kinds,), charts=draw_kinds(every)))
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(
                self.job, self.sampling, every, f"{self.ranks} ranks", f"{self.batch_per_rank} samples per rank"
            ),
            sections=tuple(sections),
            findings=as_findings(summarise_messages(arms, name_row("ddp", self.ranks))),
            cautions=(*find_sweep_cautions(arms, reference), *warn_of_messages(every)),
        )


def may_have_norms(job: Job) -> bool:
    """Whether a model has batch norm; of one of the user's own that is not known before it runs."""
    options = job.built_in
    return options is None or (isinstance(options, Resnet18Options) and options.norm == "batch")
