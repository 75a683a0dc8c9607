"""Loader workers: the same training run with its batches prepared by 0, 1, 2 … processes beside it.

Without workers a step waits while its batch is cut, augmented and normalised. With them it waits only where they are
not ready, at the price of processes that need their own cores, and of handing batches over. A step is split into
that wait (load: the input phase) and the rest (train: forward, backward, optimizer).

On a CPU a rank computes on some of its cores and leaves the rest to its workers, the same in every row
(`Trial.spare_cores_per_rank`): pinned to the cores that it computes on, workers could only take time from it. On a GPU
the processor is free for them.

Workers live for all epochs. In a DataLoader without `persistent_workers`, starting them costs time in every epoch; here
it is part of the first step, which has a column of its own. Every epoch waits for its first batch, because none is
prepared beyond the end of an epoch. Means include that, medians do not; so the time of an epoch is the number of its
steps times the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, estimate_ratio, judge
from scalelab.checks import check_at_least
from scalelab.errors import UsageError
from scalelab.records.environment import count_cores
from scalelab.records.trial import Trial
from scalelab.report.charts.column_charts import draw_columns, draw_stacks, keep_charts
from scalelab.report.document import Chart, Section, Table
from scalelab.report.findings import MAIN, Caution, CautionKind, Finding
from scalelab.report.tables import Field, seconds_column, share_column
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import (
    LOADER_WAIT,
    estimate_first_step,
    estimate_mean_part,
    estimate_mean_step,
    estimate_part,
    estimate_phase_share,
    read_load,
    read_train,
)
from scalelab.studies.shared.job import Job, count_images, name_images, put_on_images
from scalelab.studies.shared.study import Configuration, Sampling
from scalelab.studies.shared.sweep import (
    FASTEST,
    Sweep,
    SweepStudy,
    judge_row,
    make_sweep_table,
    plan_sweep,
    relative_column,
    samples_column,
    step_column,
)
from scalelab.units import format_count, format_interval, format_known, format_quantity
from scalelab.workloads.catalogue import find_workload
from scalelab.workloads.source import OwnWorkload

CROWDED = CautionKind("crowded-workers", "More loader workers than free cores", "noise", ("free_cores",))


@dataclass(frozen=True, kw_only=True)
class LoaderWorkers(SweepStudy):
    """Train on real images (--data digits, or cifar10); 0 workers are always measured, as the reference."""

    row_header: ClassVar[str] = "workers"
    swept_options: ClassVar[tuple[str, ...]] = ("workers",)
    """Options of the workload that the study sets itself."""

    workers: tuple[int, ...] = (0, 1, 2, 4)
    """Worker processes on each rank."""
    batch_per_rank: int = 128
    """Samples per step on each rank."""
    job: Job = field(default_factory=lambda: Job(workload="resnet18"))
    sampling: Sampling = field(default_factory=lambda: Sampling(phase_steps=12, comm_free_steps=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("batch_per_rank", self.batch_per_rank, 1)
        if not self.workers:
            raise UsageError("--workers needs at least one number, for example --workers 0 1 2")
        for count in self.workers:
            check_at_least("workers", count, 0)
        if len(set(self.workers)) < len(self.workers):
            raise UsageError(f"--workers {' '.join(map(str, self.workers))} names a number twice: give each once")

    @property
    def counts(self) -> tuple[int, ...]:
        """0 first, the reference."""
        return (0, *sorted(count for count in self.workers if count))

    @property
    def reference_name(self) -> str:
        return "workers-0"

    @property
    def trained_job(self) -> Job:
        """The job on real images: random pixels are drawn once and need no loading."""
        return put_on_images(self.job, "has no option 'workers': nothing loads its batches")

    def check_option(self) -> None:
        """Reject a user's own workload that cannot be given a number of workers."""
        found = find_workload(self.job.workload)
        if not isinstance(found, OwnWorkload) or found.takes_any_option:
            return
        if "workers" not in [option.name for option in found.options]:
            raise UsageError(
                f"--workload {found.label} has no option 'workers': let build() take it and pass it to its DataLoader"
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

    def list_rows(self) -> Iterator[Configuration]:
        job = self.trained_job
        for count in self.counts:
            given = replace(job, options={**job.options, "workers": count})
            label = format_count(count, "worker")
            yield self.configure(f"workers-{count}", self.batch_per_rank, given, label=label)

    def plan(self) -> list[Trial]:
        self.check_option()
        threads, spare = self.cores_per_rank
        job = replace(self.trained_job, threads_per_rank=threads)
        trials = plan_sweep(job, self.sampling, list(self.list_rows()))
        return [replace(trial, spare_cores_per_rank=spare) for trial in trials]

    def list_settings(self) -> Iterable[str]:
        return name_images(self.trained_job), f"batch {self.batch_per_rank} per rank"

    def list_columns(self, sweep: Sweep) -> Iterable[Field[Arm]]:
        yield step_column("total")
        unit = {"unit_of": "step_seconds"}
        yield seconds_column("load_seconds", "load", lambda arm: estimate_part(arm, read_load), **unit)
        yield seconds_column("train_seconds", "train", lambda arm: estimate_part(arm, read_train), **unit)
        yield share_column("load_share", "load share", lambda arm: estimate_phase_share(arm, "input"))
        yield relative_column(sweep.reference, "× 0 workers")
        yield samples_column()

    def list_notes(self, sweep: Sweep) -> Iterable[str]:
        yield "total: a clean step; load: waiting for the batch; train: forward, backward and optimizer"
        yield "load and train come from steps whose phases are timed, so they need not add up to a clean step"

    def draw_charts(self, table: Table, sweep: Sweep) -> Iterable[Chart | None]:
        yield from super().draw_charts(table, sweep)
        yield draw_split(table)

    def list_sections(self, sweep: Sweep) -> Iterable[Section]:
        images = count_images(self.trained_job)
        steps = None if images is None else images // (self.batch_per_rank * self.ranks)
        table = make_epoch_table(sweep.arms.values(), steps)
        times = {"epoch_seconds": "with loading", "epoch_train_seconds": "without loading"}
        chart = draw_columns(table, times, title="An epoch", axis_title="epoch")
        yield Section(heading="An epoch", tables=(table,), charts=keep_charts(chart))

    def list_findings(self, sweep: Sweep) -> Iterator[Finding]:
        reference, ratios = sweep.reference, sweep.ratios
        if reference is None or not reference.is_measured:
            return
        yield from name_best(sweep)
        yield from describe_wait(reference)
        best = min(sweep.measured, key=lambda arm: ratios[arm.label].value if arm is not reference else 1.0)
        if best is not reference and judge(ratios[best.label]) is Verdict.FASTER:
            yield from describe_wait(best)
        for label, ratio in ratios.items():
            if judge(ratio) is Verdict.SLOWER:
                yield judge_row(label, ratio, reference.label)

    def list_cautions(self, sweep: Sweep) -> Iterator[Caution]:
        """Workers without a core of their own take turns with training, or with each other."""
        if not sweep.arms:
            return
        trial = next(iter(sweep.arms.values())).trial
        free = trial.spare_cores_per_rank if trial.device == "cpu" else trial.threads_per_rank
        crowded = ", ".join(str(count) for count in self.counts if count > free)
        if crowded:
            spare = format_count(free, "spare core") if free else "no spare core"
            yield CROWDED(
                crowded,
                f"a rank has {spare}: {crowded} workers compete with training or with each other",
                "trust those rows for this machine only; a lower --threads-per-rank leaves more cores",
                free_cores=free,
            )


def make_epoch_table(arms: Iterable[Arm], steps_per_epoch: int | None) -> Table:
    """What all steps of an epoch take, with loading and without, and what starting costs."""

    def stretch(mean: Estimate | None) -> Estimate | None:
        return mean.map(lambda seconds: seconds * steps_per_epoch) if mean and steps_per_epoch else None

    columns: Sequence[Field[Arm]] = [
        seconds_column(
            "epoch_seconds",
            "epoch",
            lambda arm: stretch(estimate_mean_step(arm)),
            note="its steps times the mean step",
        ),
        seconds_column(
            "epoch_train_seconds",
            "without loading",
            lambda arm: stretch(estimate_mean_part(arm, read_train)),
            note="its steps times the mean of forward, backward and optimizer",
        ),
        seconds_column("mean_step_seconds", "mean step", estimate_mean_step),
        seconds_column("first_step_seconds", "first step", estimate_first_step, note="workers have just started"),
    ]
    notes = (f"an epoch has {steps_per_epoch} steps",) if steps_per_epoch else ()
    return make_sweep_table(arms, columns, name_header="workers", notes=notes)


def draw_split(table: Table) -> Chart | None:
    return draw_stacks(
        table,
        ["load_seconds", "train_seconds"],
        title="A step in two parts",
        axis_title="median of each part",
        caption="load: waiting for the batch; train: forward, backward and optimizer. Medians of steps whose phases are"
        " timed, so they need not add up to a clean step; intervals are in the table.",
    )


def name_best(sweep: Sweep) -> Iterator[Finding]:
    """The fastest that is not slower than none, if it is faster, and the fewest that do as well."""
    ratios, others = sweep.ratios, [arm for arm in sweep.measured if arm is not sweep.reference]
    if not others:
        return
    best = min(others, key=lambda arm: (judge(ratios[arm.label]) is Verdict.SLOWER, ratios[arm.label].value))
    ratio = ratios[best.label]
    verdict = judge(ratio)
    against = f"a step with {best.label} takes {format_interval('ratio', ratio)} times as long as without workers"
    if verdict is not Verdict.FASTER:
        is_sure = all(judge(other) in (Verdict.SLOWER, Verdict.NO_DIFFERENCE) for other in ratios.values())
        text = (
            f"Use no workers: {against}, {verdict}." if is_sure else f"Whether workers help is unresolved: {against}."
        )
        subject = sweep.reference.label if is_sure and sweep.reference else ""
        yield FASTEST(subject, text, ratio=ratio, verdict=str(verdict))
        return
    yield FASTEST(best.label, f"Use {best.label}: {against}.", ratio=ratio, verdict=str(verdict))
    for arm in others[: others.index(best)]:
        alike = estimate_ratio(arm.clean, best.clean)
        if judge(alike) is Verdict.NO_DIFFERENCE:
            yield judge_row(arm.label, alike, best.label, weight=MAIN)
            return


def describe_wait(arm: Arm) -> Iterator[Finding]:
    load, share = estimate_part(arm, read_load), estimate_phase_share(arm, "input")
    if load is not None:
        wait, part = format_known("seconds", load), format_quantity("share", share)
        text = f"With {arm.label}, a step waits {wait} for its batch ({part} of the step)."
        yield LOADER_WAIT(arm.label, text, wait_seconds=load, share=share)
