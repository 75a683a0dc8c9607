"""I/O formats: the same samples stored in every format, and read in every way.

A comparison is fair when all formats are read alike. So each is read *lazily* (on demand) and *eagerly* (all at the
start, then from memory) by the readers of `data/formats`; HDF5 also *naively*, as most scripts do, sample by sample
with `dataset[i]`. Shuffled and in order, by whole batches and by samples, from disk and from the page cache, by the
rank itself and by worker processes, alone and in training.

One trial is one format read in one way, all passes in one launch; rank 0 writes the data set before that into the
trial's directory, and it is deleted afterwards. The references are measured in the same rounds: a memory map of the
plain array (`npy`, lazily), and gathering the samples in memory, in the same process.

In training two numbers show what reading costs: the share of the step that waits for its batch, from steps with timed
phases, and accelerator utilization as MLPerf Storage defines it: compute time of the same
training from memory, over total time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from scalelab.analysis.fetches import group_fetches
from scalelab.checks import check_at_least, check_positive, parse_seconds, read_flag
from scalelab.data.formats.catalogue import ENTRIES, find_format, load_format
from scalelab.errors import UnknownName, UsageError
from scalelab.records.settings import Time
from scalelab.records.strategies import choose_strategy
from scalelab.records.tasks import MEMORY, Access, DataField, Dataset, Measure, Pass, Read, ReadingMode, ReadOrder
from scalelab.records.trial import StepPlan, Trial, TrialResult
from scalelab.report.document import Document, Section, Table
from scalelab.studies.io_formats.findings import summarise_formats, warn_of_reading
from scalelab.studies.io_formats.report import (
    draw_batches,
    draw_costs,
    draw_trainings,
    draw_workers,
    list_workers,
    make_batch_table,
    make_cost_table,
    make_pass_table,
    make_training_table,
    make_worker_table,
    name_reader,
    name_set,
)
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.job import Job, check_devices
from scalelab.studies.shared.study import (
    Configuration,
    Sampling,
    Study,
    check_ranks,
    describe_bare_trial,
    plan_rounds,
    was_refused,
)
from scalelab.units import format_bytes, format_count
from scalelab.workloads.catalogue import TransformerOptions

PUBLISHED = (MEMORY, "npy", "npz", "npz-compressed", "pt", "hdf5", "hdf5-gzip")
CHUNKED = ("hdf5-gzip", "hdf5-lzf", "hdf5-blosc2", "zarr", "parquet")
"""Formats that are read by chunks; a user's own HDF5 file may be too."""
ALL = "all"
DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
)
PATIENCE = 10
"""Times the budget for readers that keep what they have decompressed: their first batches pay for all."""
TRAINING = "train-"
"""Prefix of the configurations that train."""


@dataclass(frozen=True, kw_only=True)
class IoFormats(Study):
    """Write the samples of --workload transformer, --shape or --data in every format, and read them."""

    swept_options: ClassVar[tuple[str, ...]] = ("stored", "reader", "workers")
    """Options of the workload that the study sets itself."""

    formats: tuple[str, ...] = PUBLISHED
    """memory (no file), npy, npz, npz-compressed, pt, hdf5, hdf5-gzip, hdf5-lzf, hdf5-blosc2, files, tokens,
    safetensors, zarr, arrow, parquet, lmdb, webdataset, or all."""
    modes: tuple[ReadingMode, ...] = ("lazy", "eager", "naive")
    """lazy: read on demand. eager: read everything at the start. naive: HDF5 by dataset[i], sample by sample."""
    data: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Store the samples of this file instead, and also read the file itself."""
    shape: Annotated[str | None, tyro.conf.arg(metavar="SHAPE")] = None
    """Store random samples of this shape and type instead, such as 3x32x32:uint8. None: those of the workload."""
    ranks: tuple[int, ...] = (1,)
    """Numbers of ranks that read at the same time, each its part of every batch; training uses the largest."""
    workers: tuple[int, ...] = (0,)
    """Worker processes per rank; lazily, and in memory."""
    batch_per_rank: int = 32
    """Samples per batch and rank."""
    epochs: int = 2
    """Epochs of every warm pass; the first is reported separately."""
    budget: Time = "2s"
    """Time limit of one epoch of a naive reader; ten times as long for the others. A longer epoch is cut short and
    extrapolated."""
    cold: bool = True
    """Also read from disk, after dropping the file from the page cache."""
    chunks: Literal["automatic", "samples"] = "automatic"
    """Chunks of HDF5 files: automatic, as h5py chooses them, or whole samples."""
    train: bool = False
    """Also train the workload on every format."""
    job: Job = field(default_factory=lambda: Job(workload="transformer"))
    sampling: Sampling = field(
        default_factory=lambda: Sampling(rounds=3, steps=12, phase_steps=8, comm_free_steps=0, control=False)
    )

    def __post_init__(self) -> None:
        check_ranks(self.ranks)
        for name, least in (("batch_per_rank", 1), ("epochs", 1)):
            check_at_least(name, getattr(self, name), least)
        check_positive("budget", self.budget_seconds)
        for name in ("formats", "modes", "workers"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise UsageError(f"--{name} {' '.join(map(str, given))} must name at least one, each once")
        for count in self.workers:
            check_at_least("workers", count, 0)
        for wanted in self.formats:
            if wanted not in (MEMORY, ALL, *ENTRIES):
                raise UnknownName("format", wanted, (MEMORY, *ENTRIES, ALL))
        self._check_data()

    def _check_data(self) -> None:
        if self.job.workload != "transformer":
            raise UsageError(
                f"--workload {self.job.workload}: only transformer's samples are stored; use --shape for samples of"
                " another shape, or --data for your own file"
            )
        if self.data is not None and self.shape is not None:
            raise UsageError(f"--data {self.data} and --shape {self.shape} contradict each other: give one")
        if self.train and (self.data is not None or self.shape is not None):
            given = f"--data {self.data}" if self.data is not None else f"--shape {self.shape}"
            raise UsageError(f"--train trains on the workload's own samples, not on {given}: leave one out")
        if self.shape is not None:
            parse_shape(self.shape)

    @property
    def budget_seconds(self) -> float:
        return read_flag("budget", self.budget, parse_seconds)

    @property
    def listed_formats(self) -> tuple[str, ...]:
        """All where all were asked for, but those that hold tokens only."""
        if ALL not in self.formats:
            return self.formats
        return (MEMORY, *(name for name in ENTRIES if name != "tokens"))

    @property
    def fields(self) -> tuple[DataField, ...]:
        """What is stored of every sample; nothing of a file, which only ranks open."""
        if self.data is not None:
            return ()
        if self.shape is not None:
            return (parse_shape(self.shape),)
        options = self.options
        lengths = {"src": options.src_length, "tgt": options.tgt_length}
        return tuple(DataField(name=name, shape=(length, options.features)) for name, length in lengths.items())

    @property
    def options(self) -> TransformerOptions:
        found = self.job.built_in
        assert isinstance(found, TransformerOptions)
        return found

    def plan(self) -> list[Trial]:
        if self.data is not None:
            find_format(Path(self.data))
        check_devices(self.job, self.job.count_on_node(max(self.ranks)))
        alone = [self._plan_trial(dataset, ranks) for dataset in self._list_datasets() for ranks in self.ranks]
        trainings = self._plan_trainings() if self.train else []
        trials = []
        for number in range(1, self.sampling.rounds + 1):
            own = [replace(trial, round=number) for trial in (alone if number % 2 else reversed(alone))]
            trials += own + [trial for trial in trainings if trial.round == number]
        return trials

    def _list_datasets(self) -> Iterator[Dataset]:
        """Every way to read every format; the user's own file first, as it is."""
        if self.data is not None:
            path = str(Path(self.data).expanduser().absolute())
            name = find_format(Path(path))
            for mode in self._list_modes(name):
                yield from self._spread(Dataset(format=name, mode=mode, source=path, is_as_it_is=True))
        for name in self.listed_formats:
            for mode in self._list_modes(name):
                is_automatic = name.startswith("hdf5") and (self.chunks == "automatic" or mode == "naive")
                yield from self._spread(Dataset(format=name, mode=mode, automatic_chunks=is_automatic))

    def _list_modes(self, name: str) -> Iterator[ReadingMode]:
        if name == MEMORY:
            yield "eager"
            return
        is_hdf5 = name in ("hdf5", "hdf5-gzip", "hdf5-lzf")
        yield from (mode for mode in self.modes if mode != "naive" or is_hdf5)

    def _spread(self, dataset: Dataset) -> Iterator[Dataset]:
        """The same by this process and by workers."""
        source = str(Path(self.data).expanduser().absolute()) if self.data is not None else ""
        for count in self.workers:
            if count and (dataset.mode == "naive" or (dataset.mode == "eager" and dataset.format != MEMORY)):
                continue
            yield replace(
                dataset,
                source=dataset.source or source,
                num_samples=self.options.samples,
                fields=self.fields,
                workers=count,
            )

    def _plan_trial(self, dataset: Dataset, num_ranks: int) -> Trial:
        name, label = name_reading(dataset, num_ranks if len(self.ranks) > 1 else 1)
        return Trial(
            configuration=name,
            label=label,
            task=Read(
                dataset=dataset,
                passes=tuple(list_passes(dataset, self.cold)),
                epochs=self.epochs,
                budget_seconds=self.budget_seconds * (1 if dataset.mode == "naive" else PATIENCE),
            ),
            global_batch=self.batch_per_rank * num_ranks,
            seed=self.job.seed,
            **describe_bare_trial(self.job, num_ranks, max(self.ranks)),
        )

    def _plan_trainings(self) -> list[Trial]:
        """The same training on every format, read in every way; in memory first, which all are compared with."""
        num_ranks = max(self.ranks)
        datasets = {f"{TRAINING}{name_reading(one)[0]}": one for one in self._list_datasets()}
        datasets = {f"{TRAINING}{MEMORY}": Dataset(format=MEMORY, mode="eager")} | datasets
        configurations = [
            Configuration(
                name=name,
                strategy=choose_strategy(None, num_ranks),
                num_ranks=num_ranks,
                global_batch=self.batch_per_rank * num_ranks,
                label=name_reading(dataset)[1],
            )
            for name, dataset in datasets.items()
        ]
        trials = plan_rounds(self.job, self.sampling, configurations)
        return [put_on_set(trial, datasets[trial.configuration]) for trial in trials]

    def refuse(self, trial: Trial, results: Sequence[TrialResult]) -> str | None:
        """Formats whose library is not installed are not tried."""
        return find_missing(trial.dataset.format) if trial.dataset is not None else None

    def expects(self, result: TrialResult) -> bool:
        """A missing library is part of the answer."""
        return was_refused(result)

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        every = list(group_fetches(results).values())
        arms = group_arms([result for result in results if result.trial.workload], self.sampling.warmup)
        alone = [series for series in every if not series.dataset.workers]
        return Document(
            title=self.title,
            question=self.question,
            setting=self._describe_setting(results),
            sections=tuple(self._make_sections(results)),
            findings=tuple(summarise_formats(alone, every, arms)),
            cautions=tuple(warn_of_reading(every, arms)),
        )

    def _make_sections(self, results: Sequence[TrialResult]) -> Iterator[Section]:
        every = list(group_fetches(results).values())
        alone = [series for series in every if not series.dataset.workers]
        costs = make_cost_table(alone)
        yield Section(tables=(costs,), charts=draw_costs(costs, alone))
        yield Section(heading="Batch", tables=(make_batch_table(alone),), charts=draw_batches(alone))
        passes: list[Table | None] = [make_pass_table(alone, "warm"), make_pass_table(alone, "cold")]
        yield Section(heading="By order and access", tables=tuple(table for table in passes if table is not None))
        workers = make_worker_table(every)
        if workers is not None:
            yield Section(heading="Workers", tables=(workers,), charts=draw_workers(workers, list_workers(every)))
        arms: dict[str, Arm] = group_arms([one for one in results if one.trial.workload], self.sampling.warmup)
        if arms:
            table = make_training_table(arms)
            yield Section(heading="In training", tables=(table,), charts=draw_trainings(table))

    def _describe_setting(self, results: Sequence[TrialResult]) -> str:
        reports = [rank.reading for result in results for rank in result.ranks if rank.reading is not None]
        samples = f"{reports[0].num_samples} samples of {format_bytes(reports[0].sample_bytes)}" if reports else "–"
        source = [Path(self.data).name] if self.data is not None else []
        trial = results[0].trial if results else None
        cores = [f"{format_count(trial.threads_per_rank, 'core')} per rank"] if trial else []
        ranks = f"{', '.join(map(str, self.ranks))} rank{'s'[: self.ranks != (1,)]}"
        words = [*source, samples, f"batch {self.batch_per_rank} per rank", ranks, *cores]
        return " · ".join([*words, f"{self.sampling.launches} × {self.epochs} epochs"])


def list_passes(dataset: Dataset, has_cold: bool) -> Iterator[Pass]:
    """Cold ones first, then the main one, which finds the reader just opened.

    A naive reader has no batches and is not read cold; workers get whole batches. Eagerly, only opening touches the
    disk. Blocks of chunks are for data sets too large to be kept; for others that pass is empty.
    """
    if dataset.workers:
        yield Pass()
        return
    accesses: tuple[Access, ...] = ("item",) if dataset.mode == "naive" else ("batch", "item")
    orders: tuple[ReadOrder, ...] = ("shuffled", "sequential")
    if has_cold and dataset.mode == "eager" and dataset.format != MEMORY:
        yield Pass(cache="cold")
    elif has_cold and dataset.mode == "lazy":
        yield from (Pass(order=order, access=access, cache="cold") for order in orders for access in accesses)
    yield from (Pass(order=order, access=access) for order in orders for access in accesses)
    if dataset.mode == "lazy" and (dataset.format in CHUNKED or (dataset.is_as_it_is and dataset.format == "hdf5")):
        yield Pass(order="blocks")
    yield Pass(cache="memcpy")


def name_reading(dataset: Dataset, num_ranks: int = 1) -> tuple[str, str]:
    """The configuration, and how tables call it."""
    name = name_set(dataset) if dataset.format == MEMORY else f"{name_set(dataset)}-{dataset.mode}"
    label = name_reader(dataset, num_ranks)
    if num_ranks > 1:
        name = f"{name}-x{num_ranks}"
    if dataset.workers:
        name, label = f"{name}-w{dataset.workers}", f"{label}, {format_count(dataset.workers, 'worker')}"
    return name, label


def put_on_set(trial: Trial, dataset: Dataset) -> Trial:
    """A training trial with batches from a stored set; from memory it has only its workers."""
    if dataset.format != MEMORY:
        return replace(trial, task=Measure(plan=trial.step_plan or StepPlan(), dataset=dataset))
    return replace(trial, options={**trial.options, "workers": dataset.workers})


def parse_shape(text: str) -> DataField:
    """A sample as typed: 3x32x32:uint8, or 20x512, which is float32."""
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+))?", text.strip())
    shape = tuple(int(size) for size in match[1].split("x")) if match else ()
    dtype = (match[2] if match else None) or "float32"
    if not math.prod(shape) or not shape or dtype not in DTYPES:
        raise UsageError(f"--shape {text} is not a shape: use a form such as 20x512 or 3x32x32:uint8")
    return DataField(name="x", shape=shape, dtype=dtype)


@cache
def find_missing(name: str) -> str | None:
    """Why a format cannot be used here, with what to install; torch, which `.pt` needs, is not checked."""
    if name in (MEMORY, "pt"):
        return None
    try:
        load_format(name)
    except UsageError as error:
        return str(error)
    return None
