"""`scalelab predict`: extrapolate a 1- and 2-rank run, or any ranks-vs-throughput CSV, to larger rank counts.

`--best --confirm` runs the best settings: each becomes the study of the original run with these settings on that one
rank count, and is kept like any other run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from scalelab.analysis.estimate import Estimate
from scalelab.answers.prediction.predicted_job import (
    FoundLink,
    MeasuredJob,
    ScalingRun,
    find_measured_link,
    read_job,
    says_link,
)
from scalelab.checks import check_at_least, parse_bytes, parse_seconds, read_flag
from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.cli.output import Output, write_outputs
from scalelab.data.remote import fetch_remote
from scalelab.errors import DamagedRun, ScalelabError, UsageError
from scalelab.predict.network_model import read_link
from scalelab.predict.scaled_job import scale_out
from scalelab.predict.what_if import Candidate, Compression, WhatIf, change_job, search_best
from scalelab.records.settings import Dtype, MaybeBytes, MaybeInt, MaybeName, Time, find_kind
from scalelab.records.store import RUNS_DIR, RunStore, open_run
from scalelab.records.strategies import DEFAULT, ProcessStrategy, find_strategy
from scalelab.records.trial import TrialResult
from scalelab.report.document import Document
from scalelab.runs.pool import POOLED, open_run_or_pool
from scalelab.units import format_count

if TYPE_CHECKING:
    from scalelab.studies.scaling.study import Scaling

Link = Annotated[str | None, tyro.conf.arg(metavar="RATE[,LATENCY]")]
STRONG, WEAK, LAYOUTS = "strong-scaling", "weak-scaling", "layouts"
USUAL_RANKS = (1, 2, 4, 8, 16, 32, 64)
NUM_CONFIRMED = 3
CONFIRM_ROUNDS = 4
SEARCHED = ("batch", "bucket_mb", "compression", "accumulation")
"""The changes that can be run here; the others describe another machine or another job."""


@dataclass(frozen=True, kw_only=True)
class TableFlags:
    """Columns of --table."""

    ranks_column: MaybeName = None
    """Column with the rank counts; None: recognized by its name."""
    value_column: MaybeName = None
    """Column with the measured values; None: recognized by its name."""
    by: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="NAME…")] = None
    """Columns that identify a job; None: all descriptive ones."""
    time: bool | None = None
    """Values are times of a fixed job, not throughputs; None: recognised by the column's name."""
    force: bool = False
    """Extrapolate series that look wrong, too."""


@dataclass(frozen=True, kw_only=True)
class ChangeFlags:
    """What if something about the run were different?"""

    link: Link = None
    """Link between ranks, such as 25GB/s,5us or 100gbit."""
    ranks_per_node: MaybeInt = None
    """Ranks per node; nodes are joined by --node-link."""
    node_link: Link = None
    """Link between nodes, shared by all ranks of a node."""
    cores: MaybeInt = None
    """Cores of one host that all ranks share, as with gloo on a laptop. None: every rank has its own."""
    batch: MaybeInt = None
    """Batch: global for strong scaling, per rank for weak scaling."""
    bucket_mb: float | None = None
    """DDP bucket size in MiB."""
    compression: Compression = "none"
    """DDP communication hook: send gradients as fp16 or bf16."""
    accumulation: MaybeInt = None
    """Gradient accumulation steps; only the last one communicates."""
    delay: Time = "0s"
    """Delay injected into every step, such as 10ms."""
    slow: float = 1.0
    """Factor by which one rank computes slower than the others."""
    compute: float = 1.0
    """Factor by which every rank computes faster (another device or data type)."""
    dtype: Dtype | None = None
    """Data type of parameters and gradients: changes their bytes. For its effect on compute use --compute."""
    strategy: ProcessStrategy | None = None
    """Another strategy."""
    units: MaybeInt = None
    """FSDP units of a sharded model, for example its number of blocks. None: 12."""


@dataclass(frozen=True, kw_only=True)
class BestFlags:
    """Which settings would be fastest?"""

    best: bool = False
    """Rank combinations of batch, bucket size, communication hook and accumulation on one rank count (--ranks N)."""
    memory: MaybeBytes = None
    """Memory per rank, such as 16GB. None: no limit."""
    top: int = 5
    """Number of combinations shown."""
    confirm: bool = False
    """Run the best three here and compare them with their predictions."""


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Extrapolate a strong- or weak-scaling run on 1 and 2 ranks (or any ranks-vs-throughput CSV) to larger rank
    counts, with 80 % intervals."""

    run: Annotated[str | None, tyro.conf.arg(name="run", metavar="RUN"), tyro.conf.Positional] = None
    """Name of a run (or its beginning), its path, or last."""
    ranks: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N…")] = ()
    """Rank counts to predict. Default: up to 64, or 2, 4 and 8 times the largest of a table."""
    table: Annotated[Path | None, tyro.conf.arg(metavar="FILE.csv")] = None
    """CSV, TSV, Markdown or JSON table of ranks and throughput or time, instead of a run; s3://… and https://… too."""
    collectives: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None
    """Run of `scalelab collectives` on 2 ranks: its link replaces the one measured in the run."""
    change: ChangeFlags = field(default_factory=ChangeFlags)
    search: BestFlags = field(default_factory=BestFlags)
    columns: TableFlags = field(default_factory=TableFlags)
    runs_dir: RunsDir = RUNS_DIR
    output: Output = field(default_factory=Output)

    def check(self) -> None:
        """Reject what cannot work before anything is read."""
        self.output.check()
        for count in self.ranks:
            check_at_least("ranks", count, 1)
        if (self.run is None) == (self.table is None):
            raise UsageError("give a run (scalelab predict last) or a table (--table FILE.csv)")
        if self.run is not None and Path(self.run).suffix and Path(self.run).is_file():
            raise UsageError(f"{self.run} is a file, not a run: scalelab predict --table {self.run}")
        if self.table is not None and (self.change != ChangeFlags() or self.collectives is not None):
            raise UsageError("what-if flags and --collectives need a run, not --table")
        if self.run is not None and self.columns != TableFlags():
            raise UsageError("--ranks-column, --value-column, --by, --time and --force need --table FILE.csv")
        if self.search.best and len(self.ranks) > 1:
            raise UsageError(f"--best takes one rank count, got --ranks {' '.join(map(str, self.ranks))}")
        if not self.search.best and self.search != BestFlags():
            raise UsageError("--memory, --top and --confirm need --best")
        check_at_least("top", self.search.top, 1)
        if self.change.node_link is not None and self.change.ranks_per_node is None:
            raise UsageError("--node-link needs --ranks-per-node")
        if self.change.cores is not None:
            check_at_least("cores", self.change.cores, 1)

    def make_change(self) -> WhatIf:
        flags = self.change
        return WhatIf(
            batch=flags.batch,
            bucket_mb=flags.bucket_mb,
            compression=flags.compression,
            accumulation=flags.accumulation,
            link=None if flags.link is None else read_link(flags.link),
            between=None if flags.node_link is None else read_link(flags.node_link),
            ranks_per_node=flags.ranks_per_node,
            delay_seconds=read_flag("delay", flags.delay, parse_seconds),
            slow_factor=flags.slow,
            compute_factor=flags.compute,
            dtype=flags.dtype,
            strategy=flags.strategy,
            num_units=flags.units,
        )


def main(args: Sequence[str]) -> int:
    wanted = parse_flags(Predict, args, "predict")
    wanted.check()
    write_outputs(describe_wanted(wanted), wanted.output)
    return 0


def describe_wanted(wanted: Predict) -> Document:
    """The prediction from a table, from launches of one name, or from a run."""
    if wanted.table is not None:
        return predict_table(wanted)
    pool = open_run_or_pool(str(wanted.run), wanted.runs_dir)
    if pool.record.study == POOLED:
        return predict_pool(wanted, pool)
    if pool.record.study == LAYOUTS:
        return predict_meshes(wanted, pool)
    return predict_best(wanted) if wanted.search.best else predict_run(wanted)


def predict_meshes(wanted: Predict, store: RunStore) -> Document:
    """Layouts on another number of ranks, from those that were measured."""
    from scalelab.studies.catalogue import read_study
    from scalelab.studies.strategies.layouts import Layouts
    from scalelab.studies.strategies.planned import predict_layouts

    if replace(wanted.change, cores=None) != ChangeFlags() or wanted.collectives is not None or wanted.search.best:
        raise UsageError(f"{store.name} is a {LAYOUTS} run: predict takes --ranks and --cores with it, nothing else")
    study = read_study(store)
    assert isinstance(study, Layouts)
    return predict_layouts(study, read_whole(store), wanted.ranks, store.name, wanted.change.cores)


def predict_table(wanted: Predict) -> Document:
    from scalelab.answers.prediction.table import describe_table
    from scalelab.predict.scaling_table import Columns, read_table

    assert wanted.table is not None
    flags = wanted.columns
    columns = Columns(ranks=flags.ranks_column, value=flags.value_column, by=flags.by, is_time=flags.time)
    with fetch_remote([wanted.table]) as (table,):
        found = read_table(table, columns)
    if all(len(one.series.ranks) < 2 for one in found):
        raise UsageError(
            f"{wanted.table} has no job with two sizes or more: use --by to name the columns that identify a job"
        )
    return describe_table(found, wanted.ranks, wanted.table.name, is_forced=flags.force)


def predict_pool(wanted: Predict, store: RunStore) -> Document:
    """Metered launches as a ranks-vs-throughput table: a Meter does not record when gradients are ready."""
    from scalelab.answers.pooled import PooledRuns, make_series
    from scalelab.answers.prediction.table import describe_table
    from scalelab.studies.catalogue import read_study

    if wanted.change != ChangeFlags() or wanted.collectives is not None or wanted.search.best:
        raise UsageError(
            f"what-if flags need gradient-ready times, which a Meter does not record: {STRONG} -- SCRIPT measures them"
        )
    study = read_study(store)
    assert isinstance(study, PooledRuns)
    arms = {arm.trial.num_ranks: arm for arm in study.answer(read_whole(store)).spread}
    if len(arms) < 2:
        raise UsageError(f"all launches of {store.name} have the same number of ranks: launch it on another one too")
    return describe_table([make_series(store.name, arms)], wanted.ranks, store.name, is_forced=wanted.columns.force)


def predict_run(wanted: Predict) -> Document:
    from scalelab.answers.prediction.report import describe_prediction

    change = wanted.make_change()
    store, run = read_run(wanted)
    found = read_measured(wanted, run)
    batch = change.batch or found.batch
    ranks = wanted.ranks or tuple(count for count in USUAL_RANKS if found.is_weak or count <= batch)
    steps = scale_out(change_job(found.job, change), ranks, batch=batch, is_weak=found.is_weak)
    return describe_prediction(found, steps, change, store.name)


def predict_best(wanted: Predict) -> Document:
    from scalelab.answers.prediction.report import describe_best, find_need

    change = wanted.make_change()
    store, run = read_run(wanted)
    found = read_measured(wanted, run)
    num_ranks = wanted.ranks[0] if wanted.ranks else max(found.measured)
    memory = None if wanted.search.memory is None else float(read_flag("memory", wanted.search.memory, parse_bytes))
    batches = [change.batch] if change.batch else [found.batch, 2 * found.batch, 4 * found.batch]
    best, num_left_out = search_best(
        found.job,
        change,
        num_ranks,
        batches,
        is_weak=found.is_weak,
        need=find_need(run),
        memory_bytes=memory,
        top=wanted.search.top,
        is_compressible="gradient_hook" in find_strategy(found.job.strategy).options
        and find_kind(found.device).is_accelerator,
    )
    confirmed = confirm_best(store, best, wanted.runs_dir) if wanted.search.confirm else None
    return describe_best(found, best, num_left_out, store.name, confirmed)


def read_run(wanted: Predict) -> tuple[RunStore, ScalingRun]:
    """The run and its measured arms; nothing of its study is loaded for that."""
    assert wanted.run is not None
    store = open_run_or_pool(wanted.run, wanted.runs_dir)
    record = store.record
    if record.study not in (STRONG, WEAK):
        raise UsageError(f"{store.name} is a {record.study} run; predict needs a {STRONG}, {WEAK} or {LAYOUTS} run")
    sampling = record.fields.get("sampling", {})
    run = ScalingRun.from_results(
        read_whole(store),
        record.fields.get("strategy", DEFAULT),
        sampling.get("warmup") if isinstance(sampling, dict) else None,
        is_strong=record.study == STRONG,
    )
    return store, run


def read_whole(store: RunStore) -> list[TrialResult]:
    """The results of a run; a damaged one would bias the prediction, so it is refused."""
    results, damaged = store.results()
    if damaged:
        raise DamagedRun(f"{damaged[0]}; scalelab resume {store.name} measures it again")
    return results


def read_measured(wanted: Predict, run: ScalingRun) -> MeasuredJob:
    """The run as a job."""
    link: FoundLink | None = None
    if wanted.collectives is not None:
        measured = read_whole(open_run(wanted.collectives, wanted.runs_dir))
        link = find_measured_link(measured, wanted.collectives)
    elif wanted.change.link is not None and not says_link(run):
        link = FoundLink(cost=read_link(wanted.change.link), source="given, for the measured sizes too")
    return read_job(run, link, wanted.change.cores)


def confirm_best(store: RunStore, best: Sequence[Candidate], runs_dir: Path) -> dict[int, Estimate]:
    """Measured samples per second of the first settings, by place; one that fails is reported and left out."""
    from scalelab.studies.catalogue import read_study

    check_confirmable(best[0])
    study = read_study(store)
    found: dict[int, Estimate] = {}
    for place, one in enumerate(best[:NUM_CONFIRMED], start=1):
        print(f"setting {place}: {', '.join(one.change.changes) or 'as measured'}", file=sys.stderr)  # noqa: T201
        try:
            found[place] = measure_rate(study, one, runs_dir)  # type: ignore[arg-type]
        except ScalelabError as error:
            print(f"setting {place} failed: {error}", file=sys.stderr)  # noqa: T201
    return found


def check_confirmable(one: Candidate) -> None:
    from scalelab.records.environment import count_cores

    others = [field.name for field in fields(WhatIf) if field.name not in SEARCHED]
    if any(getattr(one.change, name) != getattr(WhatIf(), name) for name in others):
        raise UsageError("--confirm runs on this machine: it takes no what-if flags but the batch and bucket size")
    if one.step.num_ranks > count_cores():
        wanted, there = format_count(one.step.num_ranks, "rank"), format_count(count_cores(), "core")
        raise UsageError(f"--confirm needs a core per rank: {wanted}, {there} here")


def measure_rate(study: Scaling, one: Candidate, runs_dir: Path) -> Estimate:
    """Samples per second of one setting, measured here."""
    from scalelab.runs.experiment import run_study

    change, num_ranks = one.change, one.step.num_ranks
    assert change.batch is not None
    per_rank = change.batch // num_ranks if study.is_strong else change.batch
    job = study.job
    spreading = replace(
        job.spreading,
        bucket_mb=job.spreading.bucket_mb if change.bucket_mb is None else change.bucket_mb,
        gradient_hook=change.compression,
    )
    micro = job.shape.micro_batch if change.accumulation is None else per_rank // change.accumulation
    shape = replace(job.shape, micro_batch=micro)
    changed = replace(job, spreading=spreading, shape=shape)
    sampling = replace(study.sampling, rounds=CONFIRM_ROUNDS, control=False, profile_steps=0)
    again = replace(study.resize(change.batch), ranks=(num_ranks,), job=changed, sampling=sampling)
    confirmed, _ = run_study(again, runs_dir=runs_dir)
    run = ScalingRun.from_results(confirmed.results()[0], study.strategy, sampling.warmup, is_strong=study.is_strong)
    arm = run.arms[num_ranks]
    return arm.step.map(lambda seconds: arm.trial.global_batch / seconds)
