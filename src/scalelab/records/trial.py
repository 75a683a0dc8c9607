"""What to run and how it ended: `Trial` and `TrialResult`.

A trial is one configuration run once in fresh processes. It is a frozen record that travels as `trial.json` from the
planner to the ranks: a header that every trial has (what is trained, on which ranks, within which limits) and one
task (`records/tasks.py`). A result, or failure, is what comes back: a status and the samples of every rank and step.

    completed       every rank ran every step
    out_of_memory   a rank needed more memory than it may use
    invalid         the configuration does not work: building it or its first step raised an error
    crashed         a rank died, or raised an error after it had completed a step
    timed_out       the time limit was reached; every rank's stack is in its log
    not_run         never started; the reason says why
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar, get_args

import msgspec

from scalelab.checks import check_at_least, check_divisible, check_one_of, check_positive, flag
from scalelab.errors import UsageError
from scalelab.records.launchers import BatchNote, LauncherName
from scalelab.records.observations import CurvePoint, DeviceLoad, Fetch, Instrument, RankReport, Transfer
from scalelab.records.quantized import Quantized
from scalelab.records.settings import (
    DEVICES,
    Bind,
    Dtype,
    Optimization,
    Perturbation,
    Spreading,
    StepShape,
    TrainingRun,
)
from scalelab.records.strategies import DEFAULT, arrange_ranks, find_strategy
from scalelab.records.strategy import Mesh
from scalelab.records.tasks import PHASES as PHASES
from scalelab.records.tasks import Block as Block
from scalelab.records.tasks import Dataset, Exchange, Forecast, Measure, Quantize, Read, Script, Task, Train
from scalelab.records.tasks import StepKind as StepKind
from scalelab.records.tasks import StepPlan as StepPlan
from scalelab.records.tasks import StepSample as StepSample

Option = bool | int | float | str
"""The type of a workload's option: it must survive JSON and a command line."""
DTYPES = get_args(Dtype)
ALLOCATORS = ("system", "keep", "pages")
T = TypeVar("T")
NO_STRATEGY = "none"
"""The strategy of a trial that does not train: it times collectives, or reads a dataset."""


class Status(StrEnum):
    """How a trial ended."""

    COMPLETED = "completed"
    OUT_OF_MEMORY = "out_of_memory"
    INVALID = "invalid"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    NOT_RUN = "not_run"

    @property
    def is_final(self) -> bool:
        """Whether the same trial would end the same way again, so there is no point in repeating it."""
        return self in (Status.OUT_OF_MEMORY, Status.INVALID, Status.TIMED_OUT, Status.NOT_RUN)

    @property
    def words(self) -> str:
        return self.value.replace("_", " ")


class Cause(StrEnum):
    """Why a trial did not complete. The reason is for people, the cause for programs."""

    ALLOCATION = "allocation"
    """An allocation failed, or the kernel killed a rank for lack of memory."""
    RAISED = "raised"
    """The workload raised an error."""
    UNUSED_PARAMETERS = "unused_parameters"
    """Some parameters get no gradient, which DDP does not support."""
    UNUSABLE = "unusable"
    """The settings do not work together, or a requirement is missing."""
    OTHER_BATCH = "other_batch"  # than planned: of a script
    UNSUPPORTED = "unsupported"
    """The backend does not support the operation."""
    LOST_PEER = "lost_peer"
    """Another rank disconnected first."""
    ENDED = "ended"
    """A process exited on a signal or with an error code."""
    TIME_LIMIT = "time_limit"
    INTERRUPTED = "interrupted"
    LAUNCHER = "launcher"
    """The launcher did not start the ranks."""
    JOB = "job"
    """The batch system rejected, cancelled or ended the job."""
    REPEATED = "repeated"
    """An earlier round ended the same way."""
    ANSWERED = "answered"
    """Earlier trials had already answered the question."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One configuration, run once in fresh processes."""

    configuration: str
    """The unit of comparison: trials that differ only in their round share it, for example `ddp-2`."""
    workload: str
    """Name of a built-in workload, or `file.py:build`; empty for a trial that does not train."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """The workload's own options."""
    strategy: str = "single"
    num_ranks: int = 1
    global_batch: int = 64
    """Samples per step over all ranks."""
    round: int = 1
    """Number of the interleaved repetition, from 1."""
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    threads_per_rank: int = 1
    spare_cores_per_rank: int = 0
    """Cores of a rank beyond those it computes on, for its data loader processes."""
    is_oversubscribed: bool = False
    """Whether the ranks share cores or devices."""
    shape: StepShape = field(default_factory=StepShape)
    optimization: Optimization = field(default_factory=Optimization)
    spreading: Spreading = field(default_factory=Spreading)
    perturbation: Perturbation = field(default_factory=Perturbation)
    task: Task = field(default_factory=Measure)
    """What the ranks do; `Exchange` and `Read` have no workload, and `NO_STRATEGY`."""
    instruments: tuple[Instrument, ...] = ()
    """What is recorded besides time."""
    label: str = ""
    """The configuration's name in tables; empty: its strategy and number of ranks."""
    timeout_seconds: float = 600.0
    memory_limit_bytes: int | None = None
    """Memory that one rank may allocate beyond the interpreter and torch; None: only the machine's limit."""
    allocator: str = "system"
    """`system`: unchanged; `keep`: freed memory stays with the process; `pages`: every tensor gets its
    own pages (glibc, CPU)."""
    port: int = 0
    """Rendezvous port on loopback; 0: any free one."""
    launcher: LauncherName = "local"
    mpiexec: str | None = None
    ranks_per_node: int | None = None
    bind: Bind = "cores"
    """How ranks are started (launcher, mpiexec, ranks per node; None: as found) and bound to cores."""
    link: str = ""
    """The link between emulated hosts, as `ranks/links.py` reads it; empty: all ranks on one host."""
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.configuration):
            raise UsageError(
                f"configuration {self.configuration!r} is not a valid name: use letters, digits, '.', '_' and '-'"
            )
        for name in ("num_ranks", "global_batch", "round", "threads_per_rank", "ranks_per_host"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("seed", self.seed, 0)
        check_at_least("spare_cores_per_rank", self.spare_cores_per_rank, 0)
        check_divisible(self.global_batch, self.num_data_ranks)
        for name, known in (("device", DEVICES), ("dtype", DTYPES), ("allocator", ALLOCATORS)):
            check_one_of(name, getattr(self, name), known)
        check_positive("timeout", self.timeout_seconds)
        if self.memory_limit_bytes is not None:
            check_at_least("memory_limit", self.memory_limit_bytes, 1)
        for name, value in self.options.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{flag(name)} must be finite, got {value:g}")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port must be 1 to 65535, or 0 for any free one, got {self.port}")
        if find_strategy(self.strategy).is_plain and self.num_ranks > 1:
            raise UsageError(
                f"--strategy {self.strategy} runs on one rank, got {self.num_ranks}: use --strategy {DEFAULT}"
            )
        if self.trains_nothing and (self.workload or self.strategy != NO_STRATEGY):
            what = "timing collectives" if isinstance(self.task, Exchange) else "reading a dataset"
            raise UsageError(
                f"{what} does not train: leave the workload empty, got {self.workload!r}, and use strategy"
                f" {NO_STRATEGY!r}, got {self.strategy!r}"
            )
        self._check_shape()

    def _check_shape(self) -> None:
        if self.shape.autocast and self.dtype not in ("bfloat16", "float16"):
            raise UsageError(f"--autocast needs --dtype bfloat16 or float16, got {self.dtype}")
        micro, batch = self.shape.micro_batch, self.batch_per_rank
        if micro is not None and batch % micro:
            raise UsageError(f"--micro-batch must divide the {batch} samples per rank, got {micro}")
        rank, num = self.perturbation.delay_rank, self.num_processes
        if rank is not None and rank >= num > 1:
            raise UsageError(f"--delay-rank must be at most {num - 1} with {num} ranks, got {rank}")

    @property
    def name(self) -> str:
        """The name of the trial's directory."""
        return f"{self.configuration}-r{self.round}"

    @property
    def num_processes(self) -> int:
        """One per rank; `dp` replicas are threads of one process, and a memory estimate needs no ranks."""
        return self.num_ranks if self.joins_group else 1

    @property
    def joins_group(self) -> bool:
        """Whether its ranks are processes that meet in a process group."""
        return find_strategy(self.strategy).has_processes and not self.is_forecast

    @property
    def trains_nothing(self) -> bool:
        """Whether the trial only times collectives or reads a dataset."""
        return isinstance(self.task, Exchange | Read)

    @property
    def num_hosts(self) -> int:
        """1 unless a link connects several."""
        return -(-self.num_processes // self.ranks_per_host) if self.link else 1

    @property
    def is_forecast(self) -> bool:
        """Whether memory is estimated from a step on fake tensors, without training."""
        return isinstance(self.task, Forecast)

    @property
    def takes_steps(self) -> bool:
        """Whether the trial trains: every task but timing collectives, reading a dataset and estimating memory."""
        return not isinstance(self.task, Exchange | Read | Forecast)

    @property
    def training_run(self) -> TrainingRun | None:
        """The training run, if the trial has one: alone, or before quantization."""
        return self.task.run if isinstance(self.task, Train | Quantize) else None

    @property
    def step_plan(self) -> StepPlan | None:
        """The steps to measure, if the trial measures."""
        return self.task.plan if isinstance(self.task, Measure | Script) else None

    @property
    def dataset(self) -> Dataset | None:
        """The dataset to write and read, if the trial has one: on its own, or for training."""
        return self.task.dataset if isinstance(self.task, Measure | Read) else None

    @property
    def is_emulated(self) -> bool:
        """Whether the strategy is GPU-only in torch and emulated here by threads on cores."""
        return find_strategy(self.strategy).needs_gpus and self.device == "cpu"

    @property
    def mesh(self) -> Mesh:
        """How its ranks are arranged."""
        return arrange_ranks(self.strategy, self.num_ranks, self.spreading)

    @property
    def num_data_ranks(self) -> int:
        """Ranks with their own samples; those that share a layer, or are stages of one model, have the same."""
        return self.mesh.num_data_ranks

    @property
    def batch_per_rank(self) -> int:
        """Samples of one step on one data rank, or on one replica of `dp`."""
        return self.global_batch // self.num_data_ranks

    @property
    def accumulation(self) -> int:
        """Forward passes of one step on one rank; the stages of a pipeline split one batch themselves."""
        is_whole = self.shape.micro_batch is None or self.mesh.pp > 1
        return 1 if is_whole else self.batch_per_rank // (self.shape.micro_batch or 1)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a pipeline: by --micro-batch, otherwise two per stage, or one where that does not divide."""
        batch, stages = self.batch_per_rank, self.mesh.pp
        micro = self.shape.micro_batch or batch // (2 * stages if batch % (2 * stages) == 0 else stages) or 1
        return batch // micro

    @property
    def batch_per_pass(self) -> int:
        """Samples of one forward pass of one process."""
        num_processes = self.num_data_ranks if find_strategy(self.strategy).has_processes else 1
        return self.global_batch // num_processes // self.accumulation


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """How a trial ended, with the raw samples of every rank and step that it completed."""

    trial: Trial
    status: Status
    cause: Cause | None = None
    """Why it did not complete; None if it did, and in results of 0.1."""
    reason: str = ""
    """Why it did not complete, in one sentence."""
    traceback: str = ""
    """The frames in the user's file, if the error was raised there."""
    samples: tuple[StepSample, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    """Timings of collectives on every rank; empty for training."""
    fetches: tuple[Fetch, ...] = ()
    """Every batch that was read, if only reading is measured."""
    ranks: tuple[RankReport, ...] = ()
    batch: BatchNote | None = None
    """The batch job of this trial, if it had its own or was rejected."""
    curve: tuple[CurvePoint, ...] = ()
    """The log lines of a training run; empty for a measurement."""
    epochs: tuple[CurvePoint, ...] = ()
    """Its whole epochs: time, mean loss and accuracy of their training steps; empty before 0.2."""
    quantized: Quantized | None = None
    """The result of quantization, as far as it got; None if not requested."""
    loads: tuple[DeviceLoad, ...] = ()
    """Utilization of cores and GPUs over time, if recorded."""
    started_at: str = ""
    """UTC, ISO 8601."""
    wall_seconds: float = 0.0
    """From the launch to the end of the last process."""
    first_step_seconds: float | None = None
    """From the launch to the start of the first step."""
    load_before: float | None = None
    """The host's one-minute load average before the launch."""
    steal_ratio: float | None = None
    """The share of CPU time that the hypervisor gave to other guests (steal)."""

    @property
    def advice(self) -> str:
        """What to do about a trial that did not complete; empty if the reason says it, as our own errors do."""
        if self.status is Status.INVALID and self.cause in (Cause.UNUSABLE, Cause.UNUSED_PARAMETERS, Cause.OTHER_BATCH):
            return ""
        return {
            Status.OUT_OF_MEMORY: "use a smaller batch or model, or more memory (raise --memory-limit if set)",
            Status.TIMED_OUT: "see there where ranks wait, or raise --timeout",
            Status.INVALID: "fix the workload or script, or its options",
            Status.NOT_RUN: "fix what the reason names",
        }.get(self.status, "check the end of the logs")

    def step_seconds(self, kind: StepKind) -> Mapping[int, float]:
        """The time of each complete step of one kind, by step number: the maximum over ranks."""
        return self._step_seconds.get(kind, {})

    @cached_property
    def _step_seconds(self) -> dict[StepKind, dict[int, float]]:
        by_kind: dict[StepKind, dict[int, list[float]]] = {kind: {} for kind in StepKind}
        for _, step, kind, _, seconds, *_ in self.samples:
            by_kind[kind].setdefault(step, []).append(seconds)
        num = self.trial.num_processes
        return {k: {s: max(t) for s, t in sorted(steps.items()) if len(t) == num} for k, steps in by_kind.items()}

    def losses(self) -> dict[int, float]:
        """The loss of each step, by step number: the mean over ranks; comm-free steps do not count as training."""
        by_step: dict[int, list[float]] = {}
        for sample in self.samples:
            if sample.loss is not None and sample.kind is not StepKind.COMM_FREE:
                by_step.setdefault(sample.step, []).append(sample.loss)
        return {step: sum(values) / len(values) for step, values in sorted(by_step.items())}

    @cached_property
    def first_non_finite_loss(self) -> StepSample | None:
        """The first sample whose loss is NaN or infinite, if any; a step that a GradScaler skipped may have one."""
        bad = [sample for sample in self.samples if sample.loss is not None and not math.isfinite(sample.loss)]
        counted = (sample for sample in bad if sample.kind not in (StepKind.COMM_FREE, StepKind.SETTLE))
        return min(counted, key=lambda sample: (sample.step, sample.rank), default=None)


def with_samples(
    result: TrialResult,
    samples: Iterable[StepSample],
    transfers: Iterable[Transfer] = (),
    fetches: Iterable[Fetch] = (),
) -> TrialResult:
    """The same result with other samples, transfers and fetches: they are stored in separate files."""
    return replace(result, samples=tuple(samples), transfers=tuple(transfers), fetches=tuple(fetches))


def not_run(trial: Trial, reason: str, batch: BatchNote | None = None, *, cause: Cause | None = None) -> TrialResult:
    """The result of a trial that was never started."""
    return TrialResult(trial=trial, status=Status.NOT_RUN, cause=cause, reason=reason, batch=batch)


def to_builtins(record: object) -> Any:
    """A record as dicts, lists and scalars for JSON."""
    return msgspec.to_builtins(record, enc_hook=_encode_mapping)


def from_builtins(data: object, kind: type[T]) -> T:
    """The record from `to_builtins`; a wrong or missing field raises `ValueError` with its path."""
    return msgspec.convert(data, kind)


def _encode_mapping(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"cannot store a {type(value).__name__}")
