"""`scalelab predict`: what sizes that nobody has run would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from scalelab.answers.prediction.best import describe_best, find_need
from scalelab.answers.prediction.job import FoundLink, MeasuredJob, find_measured_link, read_job, says_link
from scalelab.answers.prediction.report import describe_prediction
from scalelab.answers.prediction.table import describe_table
from scalelab.checks import check_at_least, read_flag
from scalelab.cli.confirm import confirm_best
from scalelab.cli.flags import parse_flags
from scalelab.cli.output import Output, RunsDir, write_outputs
from scalelab.errors import DamagedRun, UsageError
from scalelab.predict.link_cost import read_link
from scalelab.predict.scale_out import scale_out
from scalelab.predict.tables import Columns, read_table
from scalelab.predict.what_if import Compression, WhatIf, change_job, search_best
from scalelab.records.settings import Dtype, MaybeInt
from scalelab.records.store import RUNS_DIR, RunStore, open_run
from scalelab.records.trial import TrialResult
from scalelab.report.document import Document
from scalelab.runs.experiment import read_results, read_study
from scalelab.studies.scaling.answer import ScalingAnswer
from scalelab.studies.scaling.study import StrongScaling, WeakScaling
from scalelab.units import parse_bytes, parse_seconds

ColumnName = Annotated[str | None, tyro.conf.arg(metavar="NAME")]
Link = Annotated[str | None, tyro.conf.arg(metavar="RATE[,LATENCY]")]
STUDIES = (StrongScaling.name, WeakScaling.name)
USUAL_RANKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class TableFlags:
    """Of --table: which column is what."""

    ranks_column: ColumnName = None
    """The column with the ranks; None: told by its name."""
    value_column: ColumnName = None
    """The column with what was measured; None: told by its name."""
    by: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="NAME…")] = None
    """Columns that tell jobs apart; None: all that describe a job."""
    time: bool | None = None
    """Whether the values are times of the same job, not throughputs; None: told by the column's name."""
    force: bool = False
    """Extrapolate also what cannot be right."""


@dataclass(frozen=True, kw_only=True)
class ChangeFlags:
    """Of a run: what if something were different?"""

    link: Link = None
    """What joins the ranks, such as 25GB/s,5us or 100gbit."""
    ranks_per_node: MaybeInt = None
    """Ranks on each node; --node-link joins nodes."""
    node_link: Link = None
    """What joins nodes, for all ranks of a node together."""
    cores: MaybeInt = None
    """Cores of one host that all ranks share for their messages, as with gloo on a laptop. None: each has its own."""
    batch: MaybeInt = None
    """Another batch: in all for strong scaling, per rank for weak."""
    bucket_mb: float | None = None
    """Another size of DDP's buckets, in MiB."""
    compression: Compression = "none"
    """Gradients sent as fp16 or bf16."""
    accumulation: MaybeInt = None
    """Passes per step: only the last exchanges gradients."""
    delay: Annotated[str, tyro.conf.arg(metavar="TIME")] = "0s"
    """Added to every step, such as 10ms."""
    slow: float = 1.0
    """How many times longer one rank computes than the others."""
    compute: float = 1.0
    """How many times faster every rank computes: another device or data type."""
    dtype: Dtype | None = None
    """Parameters and gradients of another type: their bytes. What it does to computing is --compute."""
    strategy: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The same model spread otherwise: ddp, fsdp-none, fsdp-full, fsdp2 or fsdp-grad-op."""
    units: MaybeInt = None
    """Pieces that a sharded model is gathered in, such as its number of blocks. None: 12."""


@dataclass(frozen=True, kw_only=True)
class BestFlags:
    """Of a run: which combination would be fastest?"""

    best: bool = False
    """Try batches, buckets, compression and accumulation, and rank what fits memory; --ranks names one number."""
    memory: Annotated[str | None, tyro.conf.arg(metavar="BYTES")] = None
    """What a rank may use, such as 16GB. None: not looked at."""
    top: int = 5
    """How many combinations are shown."""
    confirm: bool = False
    """Run the best three here, and put what they give beside what was said."""


@dataclass(frozen=True, kw_only=True)
class Predict:
    """What sizes that nobody has run would give: from a run of strong-scaling or weak-scaling on one and two ranks, or
    from anybody's table."""

    run: Annotated[str | None, tyro.conf.arg(name="run", metavar="RUN"), tyro.conf.Positional] = None
    """A run's name, the beginning of its name, its path, or last."""
    ranks: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N…")] = ()
    """Numbers of ranks to predict; without any, up to 64, or 2, 4 and 8 times the largest of a table."""
    table: Annotated[Path | None, tyro.conf.arg(metavar="FILE.csv")] = None
    """Instead of a run: a table of ranks against throughput or time."""
    collectives: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None
    """A run of scalelab collectives on two ranks, which tells latency and bandwidth."""
    change: ChangeFlags = field(default_factory=ChangeFlags)
    search: BestFlags = field(default_factory=BestFlags)
    columns: TableFlags = field(default_factory=TableFlags)
    runs_dir: RunsDir = RUNS_DIR
    output: Output = field(default_factory=Output)

    def check(self) -> None:
        """Refuse what cannot work before anything is read."""
        self.output.check()
        for count in self.ranks:
            check_at_least("ranks", count, 1)
        if (self.run is None) == (self.table is None):
            raise UsageError("name a run (scalelab predict last), or a table with --table FILE.csv")
        if self.table is not None and (self.change != ChangeFlags() or self.collectives is not None):
            raise UsageError("a table says nothing of links, batches or buckets: these flags need a run")
        if self.run is not None and self.columns != TableFlags():
            raise UsageError("flags for columns need --table FILE.csv")
        if self.search.best and len(self.ranks) > 1:
            raise UsageError("--best looks for the fastest on one number of ranks: give one with --ranks")
        if not self.search.best and self.search != BestFlags():
            raise UsageError("--memory, --top and --confirm belong to --best: give it too")
        check_at_least("top", self.search.top, 1)
        if self.change.node_link is not None and self.change.ranks_per_node is None:
            raise UsageError("--node-link needs --ranks-per-node: which ranks share a node?")
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
    if wanted.table is not None:
        document = predict_table(wanted)
    else:
        document = predict_best(wanted) if wanted.search.best else predict_run(wanted)
    write_outputs(document, wanted.output)
    return 0


def predict_table(wanted: Predict) -> Document:
    assert wanted.table is not None
    flags = wanted.columns
    columns = Columns(ranks=flags.ranks_column, value=flags.value_column, by=flags.by, is_time=flags.time)
    found = read_table(wanted.table, columns)
    if all(len(one.series.ranks) < 2 for one in found):
        raise UsageError(
            f"{wanted.table} has no job with two sizes or more: say with --by which columns tell jobs apart"
        )
    return describe_table(found, wanted.ranks, wanted.table.name, is_forced=flags.force)


def predict_run(wanted: Predict) -> Document:
    change = wanted.make_change()
    store, _, answer = read_run(wanted)
    found = read_measured(wanted, answer)
    batch = change.batch or found.batch
    ranks = wanted.ranks or tuple(count for count in USUAL_RANKS if found.is_weak or count <= batch)
    steps = scale_out(change_job(found.job, change), ranks, batch=batch, is_weak=found.is_weak)
    return describe_prediction(found, steps, change, store.name)


def predict_best(wanted: Predict) -> Document:
    change = wanted.make_change()
    store, study, answer = read_run(wanted)
    found = read_measured(wanted, answer)
    num_ranks = wanted.ranks[0] if wanted.ranks else max(found.measured)
    memory = None if wanted.search.memory is None else float(read_flag("memory", wanted.search.memory, parse_bytes))
    batches = [change.batch] if change.batch else [found.batch, 2 * found.batch, 4 * found.batch]
    best, num_left_out = search_best(
        found.job,
        change,
        num_ranks,
        batches,
        is_weak=found.is_weak,
        need=find_need(answer),
        memory_bytes=memory,
        top=wanted.search.top,
        is_compressible=found.job.strategy == "ddp" and found.device == "cuda",
    )
    confirmed = confirm_best(study, best, wanted.runs_dir) if wanted.search.confirm else None
    return describe_best(found, best, num_left_out, store.name, confirmed)


def read_run(wanted: Predict) -> tuple[RunStore, StrongScaling | WeakScaling, ScalingAnswer]:
    """The run, its study and its arms."""
    assert wanted.run is not None
    store = open_run(wanted.run, wanted.runs_dir)
    study = read_study(store)
    if not isinstance(study, StrongScaling | WeakScaling):
        raise UsageError(
            f"{store.name} is a run of {store.record.study}: a prediction starts from {' or '.join(STUDIES)}"
        )
    is_strong = isinstance(study, StrongScaling)
    results = read_whole(store)
    return store, study, ScalingAnswer.from_results(results, study.strategy, study.sampling.warmup, is_strong=is_strong)


def read_whole(store: RunStore) -> list[TrialResult]:
    """The results of a run; a file that is not what was written would bend the prediction, so it is refused."""
    results, damaged = read_results(store)
    if damaged:
        raise DamagedRun(f"{damaged[0]}; scalelab resume {store.name} measures it again")
    return results


def read_measured(wanted: Predict, answer: ScalingAnswer) -> MeasuredJob:
    """The run as a job."""
    link: FoundLink | None = None
    if wanted.collectives is not None:
        measured = read_whole(open_run(wanted.collectives, wanted.runs_dir))
        link = find_measured_link(measured, wanted.collectives)
    elif wanted.change.link is not None and not says_link(answer):
        link = FoundLink(cost=read_link(wanted.change.link), source="declared, for what was measured too")
    return read_job(answer, link, wanted.change.cores)
