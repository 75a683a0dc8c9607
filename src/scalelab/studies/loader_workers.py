"""Loader workers: the same training with its batches prepared by 0, 1, 2 … processes beside it.

Without workers a step waits while its batch is cut, augmented and normalised. With them it waits only where they are
not ready, at the price of processes that need cores of their own, and of handing batches over. A step is split into
that wait (load: the input phase) and the rest (train: forward, backward, optimizer).

On a CPU a rank computes on some of its cores and leaves the rest to its workers, the same in every row
(`Trial.spare_cores_per_rank`): pinned to the cores that it computes on, as ranks are elsewhere, workers could only take
time from it. On a GPU the processor is free for them.

Workers live for all epochs. Where they do not, as in a DataLoader without `persistent_workers`, their start is paid
for in every epoch; here it is part of the first step, which has a column of its own. At the beginning of an epoch the
first batch is waited for in any case, because none is prepared beyond the end. Means have that in them, medians not;
so the time of an epoch is the number of its steps times the mean.

The figures of `loader-workers`: what a step waits for, and what an epoch takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.checks import check_at_least
from scalelab.errors import UsageError
from scalelab.records.environment import count_cores
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.charts.amounts import make_value_axis, read_columns, read_number
from scalelab.report.charts.plot import Axis, plot_bars
from scalelab.report.document import Chart, Document, Section, Table
from scalelab.report.findings import Caution, as_findings
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.input_split import make_epoch_table, make_split_table, summarise_workers
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.real_images import count_images, name_images, put_on_images
from scalelab.studies.shared.sampling import Configuration, Sampling
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import (
    CONTROL,
    MaybeStrategy,
    check_placement,
    choose_strategy,
    describe_measurement,
    describe_placement,
    draw_columns,
    find_sweep_cautions,
    keep_charts,
    list_keys,
    plan_sweep,
)
from scalelab.workloads.catalogue import find_workload
from scalelab.workloads.source import OwnWorkload


def draw_split(table: Table, arms: Sequence[Arm]) -> tuple[Chart, ...]:
    """The step, and its two parts on top of each other."""
    keys = list_keys(arms)
    parts = {"load_seconds": "load", "train_seconds": "train"}
    every = read_columns(table, parts, keys, leaving_out=(CONTROL,))
    rows = [row for row in every if read_number(row, "value") is not None]
    names = {row["name"] for row in rows}
    failed = {row["name"]: row for row in every if row["name"] not in names}
    stacked = None
    if len(names) > 1:
        stacked = plot_bars(
            title="A step in two parts",
            x=make_value_axis(table, "load_seconds", "median of each part"),
            y=Axis(field="name", title="", quantity="text"),
            rows=rows,
            failed=list(failed.values()),
            has_labels=True,
            caption="load: waiting for the batch; train: forward, backward and optimizer. Medians of steps whose phases"
            " were timed, so they need not add up to a clean step; intervals are in the table.",
        )
    return keep_charts(draw_columns(table, ["step_seconds"], title="Step by number of workers", keys=keys), stacked)


def draw_epochs(table: Table, arms: Sequence[Arm]) -> tuple[Chart, ...]:
    """An epoch as it is, and as it would be without loading."""
    columns = {"epoch_seconds": "with loading", "epoch_train_seconds": "without loading"}
    chart = draw_columns(table, columns, title="An epoch", keys=list_keys(arms), axis_title="epoch")
    return keep_charts(chart)


@dataclass(frozen=True, kw_only=True)
class LoaderWorkers(Study):
    """Trains on real images (--data digits, or cifar10); 0 workers are always measured, as the reference."""

    name: ClassVar[str] = "loader-workers"
    title: ClassVar[str] = "Loader workers"
    question: ClassVar[str] = "How many worker processes should prepare the batches?"
    swept_options: ClassVar[tuple[str, ...]] = ("workers",)
    """Options of the workload that the study sets itself."""

    workers: tuple[int, ...] = (0, 1, 2, 4)
    """Worker processes on each rank."""
    ranks: int = 1
    """Ranks to measure on."""
    strategy: MaybeStrategy = None
    """How the training is spread: single, dp, ddp, fsdp-full, fsdp-grad-op, fsdp-none or fsdp2. None: single on one
    rank, ddp on more."""
    batch_per_rank: int = 128
    """Samples per step on each rank."""
    job: Job = field(default_factory=lambda: Job(workload="resnet18"))
    sampling: Sampling = field(default_factory=lambda: Sampling(phase_steps=12, comm_free_steps=0))

    def __post_init__(self) -> None:
        check_placement(self.ranks, self.batch_per_rank)
        if not self.workers:
            raise UsageError("--workers needs at least one number, for example --workers 0 1 2")
        for count in self.workers:
            check_at_least("workers", count, 0)
        if len(set(self.workers)) < len(self.workers):
            raise UsageError(f"--workers {' '.join(map(str, self.workers))} names a number twice: give each once")

    @property
    def counts(self) -> tuple[int, ...]:
        """0 first, which all are compared with."""
        return (0, *sorted(count for count in self.workers if count))

    @property
    def trained_job(self) -> Job:
        """The job on real images: random pixels are drawn once and need no loading."""
        return put_on_images(self.job, "has no option 'workers': nothing loads its batches")

    def check_option(self) -> None:
        """Refuse a workload of the user's own that cannot be told how many workers to start."""
        found = find_workload(self.job.workload)
        if not isinstance(found, OwnWorkload) or found.takes_any_option:
            return
        if "workers" not in [option.name for option in found.options]:
            raise UsageError(
                f"--workload {found.label} has no option 'workers': let build() take it and give it to its DataLoader"
                " as num_workers"
            )

    @property
    def cores_per_rank(self) -> tuple[int, int]:
        """Cores that a rank computes on, and cores that are left for its workers."""
        fair = max(1, count_cores() // self.ranks)
        if self.job.found_device != "cpu":
            return self.job.threads_per_rank or fair, 0  # the processor has nothing else to do
        threads = self.job.threads_per_rank or max(1, fair // 2)
        return threads, max(0, fair - threads)

    def plan(self) -> list[Trial]:
        self.check_option()
        job = self.trained_job
        threads, spare = self.cores_per_rank
        configurations = [
            Configuration(
                name=f"workers-{count}",
                strategy=choose_strategy(self.strategy, self.ranks),
                num_ranks=self.ranks,
                global_batch=self.batch_per_rank * self.ranks,
                job=replace(job, options={**job.options, "workers": count}),
                label=f"{count} worker{'s'[: count != 1]}",
            )
            for count in self.counts
        ]
        trials = plan_sweep(replace(job, threads_per_rank=threads), self.sampling, configurations)
        return [replace(trial, spare_cores_per_rank=spare) for trial in trials]

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        job = self.trained_job
        arms = group_arms(results, self.sampling.warmup)
        reference = arms.get("workers-0")
        images = count_images(job)
        steps_per_epoch = None if images is None else images // (self.batch_per_rank * self.ranks)
        tables = (make_split_table(arms.values(), reference), make_epoch_table(arms.values(), steps_per_epoch))
        words = (
            name_images(job),
            describe_placement(self.strategy, self.ranks),
            f"batch {self.batch_per_rank} per rank",
        )
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(job, self.sampling, arms.values(), *words),
            sections=(
                Section(tables=tables[:1], charts=draw_split(tables[0], list(arms.values()))),
                Section(heading="An epoch", tables=tables[1:], charts=draw_epochs(tables[1], list(arms.values()))),
            ),
            findings=as_findings(summarise_workers(arms, reference)),
            cautions=(*self._warn_of_cores(results), *find_sweep_cautions(arms, reference)),
        )

    def _warn_of_cores(self, results: Sequence[TrialResult]) -> tuple[Caution, ...]:
        """Workers without a core of their own take turns with the training, or with each other."""
        if not results:
            return ()
        trial = results[0].trial
        free = trial.spare_cores_per_rank if trial.device == "cpu" else trial.threads_per_rank
        crowded = [count for count in self.counts if count > free]
        if not crowded:
            return ()
        rows = ", ".join(map(str, crowded))
        beside = f"{free} core{'s'[: free != 1]} beside those that it computes on" if free else "no core to spare"
        return (
            Caution(
                message=f"a rank has {beside}: {rows} workers take turns with the training or with each other",
                next_step="believe those rows for this machine only; fewer --threads-per-rank leave more cores",
            ),
        )
