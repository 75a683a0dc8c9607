"""How a step is shaped, spread, optimised and disturbed: the parts of a trial that are flags of every study.

Each is a frozen record whose fields are flags, JSON keys and help at once. The defaults are torch's own, so that a
trial that sets none of them is the plain thing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import tyro

from scalelab.checks import check_at_least, check_not_negative, check_positive, flag, read_flag
from scalelab.errors import UsageError
from scalelab.units import parse_seconds

Phase = Literal["input", "forward", "backward", "optimizer"]
Dtype = Literal["float32", "tf32", "bfloat16", "float16", "float64"]
Bind = Literal["none", "cores", "numa"]
"""Which cores ranks get; see `ranks/affinity.py`."""
SHARDED = ("fsdp-full", "fsdp-grad-op", "fsdp2")
"""The strategies whose ranks each keep a shard of parameters, gradients and optimizer state."""
LauncherName = Literal["local", "hosts", "torchrun", "mpi", "slurm", "pbs", "lsf"]

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "point_to_point"]
"""What an exchange may be; kinds of `analysis/communication.py`."""
Backend = Literal["auto", "gloo", "nccl", "mpi"]

MEMORY = "memory"
"""What stands for a format where samples are in memory and in no file."""
ReadingMode = Literal["lazy", "eager", "naive"]
Order = Literal["sequential", "shuffled", "blocks"]
Access = Literal["batch", "item"]
Cache = Literal["cold", "warm", "memcpy"]
"""Where the bytes of a pass are before it: on the disk, in the kernel's memory, or in the process itself."""

CalibrationMethod = Literal["minmax", "sigma", "percentile", "mse", "entropy", "lab"]
"""How the ranges of activations are found; lab: as the laboratory of the course chains its scales."""
KernelProfile = Literal["onnxruntime", "qnnpack", "fbgemm"]
"""Whose kernels are simulated: they differ in how they round."""
LabBias = Literal["scaled", "raw", "none"]
LabRange = Literal["max", "3sigma"]

NUMBER_BYTES = 4
"""Messages are made of float32 numbers."""
LACKED = "lacks this operation"
"""The words by which the reason of an exchange says that its backend cannot do it."""

MaybeInt = Annotated[int | None, tyro.conf.arg(metavar="INT")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]


def refuse_unread(settings: Any, names: tuple[str, ...], needed: str) -> None:
    """Refuse numbers that were given where nothing reads them."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name in names and value != field.default:
            raise UsageError(f"{flag(field.name)} {value} has no effect without {needed}: add it")


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The shape of a step."""

    autocast: bool = False
    """Keep the weights in float32 and compute in --dtype where that is safe (torch.autocast; with a GradScaler for
    float16), instead of casting the whole model."""
    micro_batch: MaybeInt = None
    """Samples of one forward pass on one rank; gradients are accumulated, without exchange, over as many passes as
    the rank's batch needs. None: the whole batch at once."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in backward instead of keeping: full, those inside every block; selective, all but
    the results of matrix products and attention."""
    compile: bool = False
    """torch.compile the model."""

    def __post_init__(self) -> None:
        if self.micro_batch is not None:
            check_at_least("micro_batch", self.micro_batch, 1)


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """How the parameters are updated."""

    optimizer: Literal["sgd", "nesterov", "adagrad", "adadelta", "adam", "adamw"] | None = None
    """None: the workload's own."""
    lr: MaybeFloat = None
    """Learning rate before scaling. None: the workload's own; with --optimizer, torch's default for it."""
    momentum: MaybeFloat = None
    """Of sgd and nesterov. None: 0 for sgd, 0.9 for nesterov."""
    weight_decay: MaybeFloat = None
    """None: the optimizer's own."""
    lr_scaling: Literal["none", "ranks", "batch"] = "none"
    """Multiply the learning rate by the number of ranks, or by the global batch over --lr-base-batch."""
    lr_base_batch: MaybeInt = None
    """The global batch that the learning rate was chosen for, with --lr-scaling batch."""
    schedule: Literal["constant", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up."""
    schedule_steps: MaybeInt = None
    """Steps until a cosine schedule arrives at --lr-min. None: all steps of the training."""
    lr_min: float = 0.0
    """Where a cosine schedule ends."""
    lr_warmup: int = 0
    """First steps over which the learning rate rises linearly to its full value."""
    lr_warmup_epochs: float = 0.0
    """The same in epochs; added to --lr-warmup."""

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            value = getattr(self, name)
            if value is not None:
                check_not_negative(name, value)
        check_not_negative("lr_min", self.lr_min)
        check_not_negative("lr_warmup_epochs", self.lr_warmup_epochs)
        check_at_least("lr_warmup", self.lr_warmup, 0)
        if self.momentum is not None and self.optimizer not in ("sgd", "nesterov"):
            raise UsageError(f"--momentum {self.momentum:g} needs --optimizer sgd or nesterov")
        if self.optimizer == "nesterov" and self.momentum == 0:
            raise UsageError("--optimizer nesterov needs --momentum > 0, got 0")
        if self.schedule_steps is not None:
            check_at_least("schedule_steps", self.schedule_steps, 1)
        if self.schedule != "cosine":
            refuse_unread(self, ("schedule_steps", "lr_min"), "--schedule cosine")
        if self.lr_base_batch is not None:
            check_at_least("lr_base_batch", self.lr_base_batch, 1)
        if (self.lr_scaling == "batch") != (self.lr_base_batch is not None):
            raise UsageError("--lr-scaling batch and --lr-base-batch must be given together")


@dataclass(frozen=True, kw_only=True)
class Spreading:
    """How a strategy is set up. What a strategy does not know is refused."""

    bucket_mb: MaybeFloat = None
    """ddp: megabytes of gradients exchanged at once. None: torch's own, 1 for the first bucket and 25 for the others;
    for PowerSGD on a CPU, all at once."""
    static_graph: bool = False
    """ddp: promise that every step uses the same parameters in the same order."""
    gradient_as_bucket_view: bool = False
    """ddp: gradients live in the buckets instead of being copied there."""
    broadcast_buffers: bool = True
    """ddp: rank 0's buffers, such as batch-norm statistics, replace the others' before every forward."""
    find_unused_parameters: bool = False
    """ddp: look after every forward for parameters that get no gradient."""
    gradient_hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """ddp: how gradients are compressed for the exchange."""
    powersgd_rank: int = 1
    """ddp: rank of PowerSGD's approximation."""
    powersgd_start: int = 10
    """ddp: steps with plain exchange before PowerSGD begins."""
    sync_batch_norm: bool = False
    """ddp and fsdp: batch-norm statistics over all ranks' samples instead of each rank's own."""
    reshard_after_forward: bool = True
    """fsdp2: give gathered parameters back after forward and gather them again for backward."""

    def __post_init__(self) -> None:
        if self.bucket_mb is not None:
            check_positive("bucket_mb", self.bucket_mb)
        check_at_least("powersgd_rank", self.powersgd_rank, 1)
        check_at_least("powersgd_start", self.powersgd_start, 2)
        if self.gradient_hook != "powersgd":
            refuse_unread(self, ("powersgd_rank", "powersgd_start"), "--comm-hook powersgd")


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """A delay added to every step, on all ranks or on one."""

    delay: Annotated[str, tyro.conf.arg(metavar="TIME")] = "0s"
    """How long every step is held up, for example 10ms; with accumulation, once per step."""
    delay_phase: Phase = "backward"
    """The phase that the delay is part of: it comes at its beginning."""
    delay_rank: MaybeInt = None
    """The rank that is delayed. None: all."""

    def __post_init__(self) -> None:
        check_not_negative("delay", self.seconds)
        if self.delay_rank is not None:
            check_at_least("delay_rank", self.delay_rank, 0)

    @property
    def seconds(self) -> float:
        return read_flag("delay", self.delay, parse_seconds)

    def seconds_on(self, rank: int) -> float:
        """The delay of one rank."""
        return self.seconds if self.delay_rank in (None, rank) else 0.0


@dataclass(frozen=True, kw_only=True)
class Course:
    """A real training run: how far, and what is done on the way."""

    steps: MaybeInt = None
    """Optimizer steps. None: as many as --epochs make; 100 without either."""
    epochs: MaybeInt = None
    """Passes over the training data."""
    log_every: int = 1
    """Steps between two lines."""
    evaluate_every: MaybeInt = None
    """Steps between two evaluations on the test data. None: after every epoch, and at the end."""
    checkpoint_every: MaybeInt = None
    """Steps between two checkpoints. None: only at the end."""
    keep: int = 2
    """How many of the newest checkpoints are kept. 0: none is written."""
    checkpoints: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Where checkpoints go. A training that finds one of its own there goes on from it. None: with the run."""
    profile_wait: int = 1
    """Steps before the profiler's warm-up."""
    profile_warmup: int = 1
    """Steps that the profiler runs and throws away."""
    profile_active: int = 0
    """Steps that it records: a trace and a table of key averages for every rank. 0: no profiler."""
    profile_repeat: int = 1
    """How often it waits, warms up and records."""
    profile_name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """What traces are called: NAME-RANK-of-RANKS.json, in a directory whose name says nodes, epochs, ranks and time.
    None: rank0.json.gz …"""

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "evaluate_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None:
                check_at_least(name, value, 1)
        for name in ("keep", "profile_wait", "profile_warmup", "profile_active"):
            check_at_least(name, getattr(self, name), 0)
        for name in ("log_every", "profile_repeat"):
            check_at_least(name, getattr(self, name), 1)
        if not self.profile_active:
            unread = ("profile_wait", "profile_warmup", "profile_repeat", "profile_name")
            refuse_unread(self, unread, "--profile-active")
        if not re.fullmatch(r"[A-Za-z0-9._-]*", self.profile_name or ""):
            raise UsageError(
                f"--profile-name {self.profile_name!r} is not a valid file name: use letters, digits and ._-"
            )
        if self.steps is not None and self.epochs is not None:
            raise UsageError(f"--steps {self.steps} and --epochs {self.epochs} are mutually exclusive: give one")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Communication alone, instead of a training: one operation on messages of several sizes."""

    operation: Operation
    sizes: tuple[int, ...]
    """Bytes of the whole message, as `analysis/communication.py` defines it: whole float32 numbers."""
    repeats: int = 50
    """Timings of every size, at the most."""
    warmup_calls: int = 3
    """Calls of every size before its first timing."""
    budget_seconds: float = 0.5
    """What the timings of one size may take in one launch; a size that needs more is timed less often."""
    backend: Backend = "auto"
    """auto: nccl on GPUs, gloo on a CPU."""

    def __post_init__(self) -> None:
        check_at_least("repeats", self.repeats, 1)
        check_at_least("warmup_calls", self.warmup_calls, 0)
        check_positive("budget", self.budget_seconds)
        if not self.sizes:
            raise UsageError(f"{self.operation} needs at least one message size")
        for size in self.sizes:
            if size < NUMBER_BYTES or size % NUMBER_BYTES:
                raise UsageError(
                    f"a message of {size} bytes is not a whole number of float32 values: use a multiple of 4"
                )


@dataclass(frozen=True, kw_only=True)
class DataField:
    """One column of a stored set: what it holds of every sample."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def num_bytes(self) -> int:
        """Of one sample; the digits of a type's name are its bits, and a truth takes a byte."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(bits[0]) // 8 if bits else 1)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One way to go through a stored set."""

    order: Order = "shuffled"
    access: Access = "batch"
    cache: Cache = "warm"

    @property
    def name(self) -> str:
        return f"{self.order} {self.access} {self.cache}"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A stored set that is written and read, instead of a training or as the source of its batches."""

    format: str
    """Of `data/formats/catalogue.py`, or `MEMORY`."""
    mode: ReadingMode = "lazy"
    """lazy: what is asked for is read when it is. eager: all is loaded when the set is opened. naive: HDF5 by
    `dataset[i]`, sample by sample."""
    automatic_chunks: bool = False
    """HDF5 is written as h5py writes by itself: it chooses the chunks."""
    source: str = ""
    """The file whose samples are written and read; empty: random numbers, as `fields` say."""
    is_as_it_is: bool = False
    """Read the source itself: nothing is written."""
    num_samples: int = 2048
    fields: tuple[DataField, ...] = ()
    passes: tuple[Pass, ...] = ()
    epochs: int = 2
    """Of every warm pass; the first finds the reader as it was opened."""
    budget_seconds: float = 2.0
    """What one epoch of one pass may take; one that needs more ends with the batch that it is in."""
    workers: int = 0
    """Processes that read for each rank."""

    def __post_init__(self) -> None:
        check_at_least("samples", self.num_samples, 1)
        check_at_least("epochs", self.epochs, 1)
        check_at_least("workers", self.workers, 0)
        check_positive("budget", self.budget_seconds)
        if self.mode == "naive" and not self.format.startswith("hdf5"):
            raise UsageError(f"{self.format} has no naive reader: only HDF5 does")

    @property
    def sample_bytes(self) -> int:
        return sum(one.num_bytes for one in self.fields)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """A trained model that is taken to int8, after the training or in its place."""

    method: CalibrationMethod = "mse"
    num_samples: int = 512
    """Training samples that activations are observed on."""
    is_per_tensor: bool = False
    """One scale for all weights of a layer, instead of one for each output channel."""
    rounds_logits: bool = False
    """Whether the logits become bytes too, instead of the numbers that their sums stand for."""
    profile: KernelProfile = "onnxruntime"
    mixed_points: float | None = None
    """Layers are kept in float, the worst first, until at most so many points of accuracy are lost; None: none is."""
    num_tested: int | None = None
    """Test samples on which every layer is tried alone; None: as many as fit into a bounded amount of arithmetic."""
    weights: str = ""
    """The file of the trained weights; empty: as they are built, or trained."""
    batches: tuple[int, ...] = (1, 64)
    """Batch sizes whose latency is measured."""
    num_rounds: int = 15
    """How often every runtime is timed at every batch size."""
    lab_peak: int = 127
    """What the lab scales the largest activation to: 127, or the published 255."""
    lab_bias: LabBias = "scaled"
    lab_range: LabRange = "max"

    def __post_init__(self) -> None:
        check_at_least("samples", self.num_samples, 1)
        check_at_least("rounds", self.num_rounds, 1)
        if self.mixed_points is not None:
            check_not_negative("mixed", self.mixed_points)
        if self.num_tested is not None:
            check_at_least("tested", self.num_tested, 1)
        for batch in self.batches:
            check_at_least("batches", batch, 1)
