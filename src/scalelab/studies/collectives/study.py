"""Collectives: communication alone, without training.

Every operation is timed on messages from a few bytes to hundreds of megabytes, for every world size, and its result is
checked once per size. A line through the times gives latency and bandwidth (`analysis/link.py`): what a prediction of
larger jobs needs, and what nccl-tests and the OSU benchmarks print.

One trial is one operation at one world size, all message sizes in one launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, get_args

import tyro

from scalelab.analysis.link import TransferSeries, fit_series, group_transfers
from scalelab.analysis.traffic import POINT_TO_POINT
from scalelab.checks import check_at_least, check_positive, parse_bytes, parse_seconds, read_flag
from scalelab.errors import UsageError
from scalelab.launch.ranks.namespaces import UNSHAPED
from scalelab.records.environment import find_gpus, read_available_memory
from scalelab.records.launchers import LAUNCHERS, LauncherName
from scalelab.records.settings import Bind, DeviceChoice, MaybeBytes, MaybeInt, MaybePath, Time, find_kind
from scalelab.records.tasks import NUMBER_BYTES, Backend, Exchange, Operation
from scalelab.records.trial import Cause, Trial, TrialResult
from scalelab.report.document import Document, Section
from scalelab.studies.collectives.report import (
    make_fit_table,
    make_size_table,
    name_operation,
    plot_operation,
    plot_operations,
    summarise_operations,
    warn_of_exchanges,
    warn_of_left_out,
)
from scalelab.studies.shared.job import Job, check_devices
from scalelab.studies.shared.study import Study, check_ranks, describe_bare_trial
from scalelab.units import format_bytes, format_count

GROWTH = 4
"""Each size is this many times the one before."""
LARGEST_ON_CPU = "64MB"
LARGEST_ON_CUDA = "1GB"
COPIES = {"all_reduce": 2, "all_gather": 3, "reduce_scatter": 4, "broadcast": 2, "all_to_all": 3, POINT_TO_POINT: 2}
"""Memory of one rank in whole messages, gloo's scratch included: measured peaks, rounded up."""
GPU_SHARE = 0.9
"""Share of a GPU's memory that messages may take."""


@dataclass(frozen=True, kw_only=True)
class Collectives(Study):
    """Time all-reduce and the other collectives by message size, and fit latency and bandwidth."""

    quick_fields: ClassVar[Mapping[str, Any]] = {"rounds": 3, "repeats": 20, "budget": "0.1s"}
    quick_cost: ClassVar[str] = "intervals are about twice as wide"

    operations: tuple[Operation, ...] = get_args(Operation)
    """Operations to time."""
    ranks: tuple[int, ...] = (2,)
    """World sizes, each two or more; point_to_point always runs between two ranks."""
    min_size: Annotated[str, tyro.conf.arg(metavar="BYTES")] = "4B"
    """Smallest message; sizes grow by a factor of 4."""
    max_size: MaybeBytes = None
    """Largest message. None: 1GB on GPUs, 64MB on CPU, where bandwidth has levelled off and a gigabyte takes
    seconds."""
    backend: Backend = "auto"
    """torch.distributed backend. auto: nccl on GPUs, gloo on CPU."""
    rounds: int = 6
    """Launches of every operation, interleaved."""
    repeats: int = 50
    """Timings of every size in one launch, at most."""
    warmup_calls: int = 3
    """Untimed calls before the first timing of every size."""
    budget: Time = "0.5s"
    """Time limit for one size in one launch: large messages are timed less often, but at least three times."""
    device: DeviceChoice = "auto"
    """Device of the messages. auto: CUDA if there is a GPU."""
    threads_per_rank: MaybeInt = None
    """Cores per rank, the same in every trial. None: as many as the largest trial allows."""
    bind: Bind = "cores"
    """How ranks are bound to cores. cores: own cores. numa: own cores, spread over NUMA nodes and close to the GPU if
    known. none: all cores, shared."""
    timeout: Time = "10min"
    """Time limit of one trial, for example 90s or 10min."""
    port: int = 0
    """Rendezvous port on loopback. 0: any free port."""
    launcher: LauncherName = "local"
    """How ranks are started. local: on this host. hosts: on hosts emulated on this machine (Linux, root). torchrun,
    mpi, slurm, pbs, lsf, ray, k8s: as in every study."""
    mpiexec: MaybePath = None
    """With --launcher mpi, the command that starts ranks. None: mpiexec from the PATH."""
    ranks_per_node: MaybeInt = None
    """Ranks on each node, with a cluster launcher. None: the tasks per node of the allocation."""
    link: str = UNSHAPED
    """With --launcher hosts, the network between them: unshaped, or a rate such as 1gbit or 100mbit."""
    ranks_per_host: int = 1
    """With --launcher hosts, ranks on each emulated host."""

    def __post_init__(self) -> None:
        check_ranks(self.ranks)
        for num_ranks in self.ranks:
            check_at_least("ranks", num_ranks, 2)
        if not self.operations or len(set(self.operations)) < len(self.operations):
            raise UsageError(f"--operations {' '.join(self.operations)} must name at least one operation, each once")
        for name, least in (("rounds", 1), ("repeats", 1), ("warmup_calls", 0)):
            check_at_least(name, getattr(self, name), least)
        check_positive("budget", self.budget_seconds)
        check_at_least("min_size", self.smallest, 1)
        if self.largest < self.smallest:
            raise UsageError(f"--max-size {self.max_size} is less than --min-size {self.min_size}: raise it")
        assert self.job.timeout_seconds  # what a job refuses is refused now
        if LAUNCHERS[self.launcher].emulates_hosts and self.ranks_per_host >= max(self.ranks):
            raise UsageError(
                f"--ranks-per-host {self.ranks_per_host} puts all of --ranks {max(self.ranks)} on one host, without a"
                " link between them: use fewer per host, or more ranks"
            )

    @property
    def job(self) -> Job:
        """Where it runs; nothing is trained."""
        return Job(
            device=self.device,
            threads_per_rank=self.threads_per_rank,
            bind=self.bind,
            timeout=self.timeout,
            port=self.port,
            launcher=self.launcher,
            mpiexec=self.mpiexec,
            ranks_per_node=self.ranks_per_node,
            link=self.link,
            ranks_per_host=self.ranks_per_host,
        )

    @property
    def budget_seconds(self) -> float:
        return read_flag("budget", self.budget, parse_seconds)

    @property
    def smallest(self) -> int:
        return read_flag("min_size", self.min_size, parse_bytes)

    @property
    def largest(self) -> int:
        return self.find_largest(self.job.found_device)

    def find_largest(self, device: str) -> int:
        """For the device of a trial: a run may be shown on a machine other than the one it was measured on."""
        if self.max_size is not None:
            return read_flag("max_size", self.max_size, parse_bytes)
        return max(parse_bytes(LARGEST_ON_CUDA if find_kind(device).is_accelerator else LARGEST_ON_CPU), self.smallest)

    def plan(self) -> list[Trial]:
        device = self.job.found_device
        if self.backend == "nccl" and device != "cuda":
            raise UsageError("--backend nccl needs GPUs: use --backend gloo, or --device cuda on a machine with GPUs")
        check_devices(self.job, self.job.count_on_node(max(self.ranks)))
        first_round = [self._plan_trial(*configuration) for configuration in self._list_configurations()]
        return [
            replace(trial, round=number)
            for number in range(1, self.rounds + 1)
            for trial in (first_round if number % 2 else reversed(first_round))
        ]

    def _list_configurations(self) -> Iterator[tuple[Operation, int]]:
        """Operation and world size of every row."""
        for operation in self.operations:
            for num_ranks in (2,) if operation == POINT_TO_POINT else self.ranks:
                yield operation, num_ranks

    def _plan_trial(self, operation: Operation, num_ranks: int) -> Trial:
        is_one_host = LAUNCHERS[self.launcher].emulates_hosts and num_ranks <= self.ranks_per_host
        where = ", one host" if is_one_host else ""
        sizes = self.list_sizes(operation, num_ranks)
        return Trial(
            configuration=f"{operation}-{num_ranks}",
            global_batch=num_ranks,
            label=f"{name_operation(operation)} × {num_ranks}{where}",
            **describe_bare_trial(self.job, num_ranks, max(self.ranks)),
            task=Exchange(
                operation=operation,
                sizes=fit_sizes(sizes, operation, num_ranks, self.job.found_device),
                repeats=self.repeats,
                warmup_calls=self.warmup_calls,
                budget_seconds=self.budget_seconds,
                backend=self.backend,
            ),
        )

    def list_sizes(self, operation: str, num_ranks: int, device: str | None = None) -> tuple[int, ...]:
        """From the smallest to the largest, each rounded up to whole float32 numbers for every rank."""
        largest = self.find_largest(device or self.job.found_device)
        wanted, size = [largest], self.smallest
        while size < largest:
            wanted.append(size)
            size *= GROWTH
        is_divided = operation in ("all_gather", "reduce_scatter", "all_to_all")
        step = NUMBER_BYTES * (num_ranks if is_divided else 1)
        return tuple(sorted({-(-size // step) * step for size in wanted}))

    def expects(self, result: TrialResult) -> bool:
        """An operation that the backend lacks is part of the answer."""
        return result.cause in (Cause.UNSUPPORTED, Cause.REPEATED, Cause.ANSWERED)

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        every = list(group_transfers(results).values())
        fits = {series.trial.configuration: fit_series(series) for series in every}
        sections = [Section(tables=(make_fit_table(every, fits),), charts=plot_operations(every))]
        measured = [series for series in every if series.is_measured]
        for series in measured:
            fit = fits[series.trial.configuration]
            tables = (make_size_table(series, fit),)
            sections.append(Section(heading=series.trial.label, tables=tables, charts=plot_operation(series, fit)))
        left_out = {
            series.trial.label: [
                size
                for size in self.list_sizes(series.operation, series.trial.num_ranks, series.trial.device)
                if size not in series.exchange.sizes
            ]
            for series in every
        }
        return Document(
            title=self.title,
            question=self.question,
            setting=self._describe_setting(every),
            sections=tuple(sections),
            findings=tuple(summarise_operations(every, fits)),
            cautions=(*warn_of_left_out(left_out), *warn_of_exchanges(every, fits)),
        )

    def _describe_setting(self, every: Sequence[TransferSeries]) -> str:
        if not every:
            return ""
        trial = every[0].trial
        cores = f"{format_count(trial.threads_per_rank, 'core')} per rank"
        sizes = [size for series in every for size in series.exchange.sizes]
        reach = f"float32 messages of {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
        launches = f"{format_count(self.rounds, 'launch')} × at most {self.repeats} timings"
        hosts = [f"{self.ranks_per_host} per host, {trial.link}"] if trial.link else []
        return " · ".join([every[0].backend, trial.device, *hosts, reach, cores, launches])


def fit_sizes(sizes: Sequence[int], operation: str, num_ranks: int, device: str) -> tuple[int, ...]:
    """The sizes that fit into memory; raises `UsageError` if none does."""
    if find_kind(device).is_listed:
        room = GPU_SHARE * min((gpu.memory_bytes for gpu in find_gpus()), default=0)
    else:
        room = read_available_memory() / num_ranks
    fitting = tuple(size for size in sizes if COPIES[operation] * size <= room)
    if not fitting:
        needed = COPIES[operation] * min(sizes)
        raise UsageError(
            f"--min-size {format_bytes(min(sizes))}: {operation} needs {format_bytes(needed)} on each of {num_ranks}"
            f" ranks, and {format_bytes(room)} is free for each: use smaller messages or fewer ranks"
        )
    return fitting
