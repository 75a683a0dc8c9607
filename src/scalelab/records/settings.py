"""Step shape, optimizer, strategy options, injected delay and training run: the settings that all studies share.

Each is a frozen record whose fields are flags, JSON keys and help texts at once. The defaults are torch's, so a
trial that sets none of them runs plain torch.
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
"""Strategies that shard parameters, gradients and optimizer state across ranks."""
LauncherName = Literal["local", "hosts", "torchrun", "mpi", "slurm", "pbs", "lsf"]

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "point_to_point"]
"""Collectives that can be timed alone; defined in `analysis/communication.py`."""
Backend = Literal["auto", "gloo", "nccl", "mpi"]

MEMORY = "memory"
"""The format name of samples that are in memory, without a file."""
ReadingMode = Literal["lazy", "eager", "naive"]
Order = Literal["sequential", "shuffled", "blocks"]
Access = Literal["batch", "item"]
Cache = Literal["cold", "warm", "memcpy"]
"""Where the bytes are before a pass: on disk, in the page cache, or in the process's own memory."""

CalibrationMethod = Literal["minmax", "sigma", "percentile", "mse", "entropy", "lab"]
"""How activation ranges are chosen; lab: the lab exercise, which chains its scales layer by layer."""
KernelProfile = Literal["onnxruntime", "qnnpack", "fbgemm"]
"""The kernels to simulate; they round differently."""
LabBias = Literal["scaled", "raw", "none"]
LabRange = Literal["max", "3sigma"]

NUMBER_BYTES = 4
"""Messages consist of float32 values."""

MaybeInt = Annotated[int | None, tyro.conf.arg(metavar="INT")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]


def refuse_unread(settings: Any, names: tuple[str, ...], needed: str) -> None:
    """Reject settings that have no effect."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name in names and value != field.default:
            raise UsageError(f"{flag(field.name)} {value} has no effect without {needed}: add it")


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The shape of a step."""

    autocast: bool = False
    """Keep weights in float32 and compute in --dtype where that is safe (torch.autocast, with a GradScaler for
    float16), instead of casting the whole model."""
    micro_batch: MaybeInt = None
    """Samples per forward pass on one rank; gradients are accumulated, without all-reduce, over as many passes as
    the rank's batch needs. None: the whole batch in one pass."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing. full: recompute everything inside each block in backward; selective: recompute all but
    matrix products and attention."""
    compile: bool = False
    """Run the model through torch.compile."""

    def __post_init__(self) -> None:
        if self.micro_batch is not None:
            check_at_least("micro_batch", self.micro_batch, 1)


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """How the parameters are updated."""

    optimizer: Literal["sgd", "nesterov", "adagrad", "adadelta", "adam", "adamw"] | None = None
    """Optimizer. None: the workload's own."""
    lr: MaybeFloat = None
    """Learning rate before scaling. None: the workload's own; with --optimizer, torch's default for it."""
    momentum: MaybeFloat = None
    """Momentum of sgd and nesterov. None: 0 for sgd, 0.9 for nesterov."""
    weight_decay: MaybeFloat = None
    """Weight decay. None: the optimizer's default."""
    lr_scaling: Literal["none", "ranks", "batch"] = "none"
    """Multiply the learning rate by the number of ranks, or by the global batch over --lr-base-batch."""
    lr_base_batch: MaybeInt = None
    """Global batch size the learning rate was tuned for, with --lr-scaling batch."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    schedule_steps: MaybeInt = None
    """Steps until the cosine schedule reaches --lr-min. None: all training steps."""
    lr_min: float = 0.0
    """Final learning rate of the cosine schedule."""
    lr_warmup: int = 0
    """Steps of linear learning-rate warm-up."""
    lr_warmup_epochs: float = 0.0
    """Linear learning-rate warm-up in epochs, added to --lr-warmup."""

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
    """Strategy options. An option that the strategy does not have is an error."""

    bucket_mb: MaybeFloat = None
    """ddp: bucket size of the gradient all-reduce in MiB. None: torch's default, 1 for the first bucket, then 25;
    for PowerSGD on a CPU, a single bucket."""
    static_graph: bool = False
    """ddp: declare that every step uses the same parameters in the same order."""
    gradient_as_bucket_view: bool = False
    """ddp: make gradients views of the buckets instead of copying them."""
    broadcast_buffers: bool = True
    """ddp: broadcast buffers, such as batch-norm statistics, from rank 0 before every forward."""
    find_unused_parameters: bool = False
    """ddp: search for parameters without a gradient after every forward."""
    gradient_hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """ddp: communication hook that compresses gradients for the all-reduce."""
    powersgd_rank: int = 1
    """ddp: rank of the PowerSGD approximation."""
    powersgd_start: int = 10
    """ddp: steps with a plain all-reduce before PowerSGD starts."""
    sync_batch_norm: bool = False
    """ddp and fsdp: compute batch-norm statistics over all ranks (SyncBatchNorm) instead of per rank."""
    reshard_after_forward: bool = True
    """fsdp2: free gathered parameters after forward and gather them again for backward."""

    def __post_init__(self) -> None:
        if self.bucket_mb is not None:
            check_positive("bucket_mb", self.bucket_mb)
        check_at_least("powersgd_rank", self.powersgd_rank, 1)
        check_at_least("powersgd_start", self.powersgd_start, 2)
        if self.gradient_hook != "powersgd":
            refuse_unread(self, ("powersgd_rank", "powersgd_start"), "--comm-hook powersgd")


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """A delay injected into every step, on one rank or all."""

    delay: Annotated[str, tyro.conf.arg(metavar="TIME")] = "0s"
    """Delay to inject into every step, for example 10ms; once per step, also with gradient accumulation."""
    delay_phase: Phase = "backward"
    """Phase to delay; the delay comes at its start."""
    delay_rank: MaybeInt = None
    """Rank to delay. None: all ranks."""

    def __post_init__(self) -> None:
        check_not_negative("delay", self.seconds)
        if self.delay_rank is not None:
            check_at_least("delay_rank", self.delay_rank, 0)

    @property
    def seconds(self) -> float:
        return read_flag("delay", self.delay, parse_seconds)

    def seconds_on(self, rank: int) -> float:
        """The delay on one rank."""
        return self.seconds if self.delay_rank in (None, rank) else 0.0


@dataclass(frozen=True, kw_only=True)
class Course:
    """A training run: its length, evaluations, checkpoints and profiles."""

    steps: MaybeInt = None
    """Optimizer steps. None: from --epochs; 100 without either."""
    epochs: MaybeInt = None
    """Passes over the training data."""
    log_every: int = 1
    """Steps between log lines."""
    evaluate_every: MaybeInt = None
    """Steps between evaluations on the test data. None: after every epoch and at the end."""
    checkpoint_every: MaybeInt = None
    """Steps between checkpoints. None: only at the end."""
    keep: int = 2
    """Number of latest checkpoints to keep. 0: write none."""
    checkpoints: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Checkpoint directory. A training run continues from its own checkpoint there. None: in the run's directory."""
    profile_wait: int = 1
    """Steps to skip before the profiler's warm-up."""
    profile_warmup: int = 1
    """Profiler warm-up steps, discarded."""
    profile_active: int = 0
    """Steps to record: a trace and a table of key averages per rank. 0: no profiler."""
    profile_repeat: int = 1
    """Number of wait, warm-up and record cycles."""
    profile_name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the traces: NAME-RANK-of-RANKS.json, in a directory named after nodes, epochs, ranks and time.
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
    """Communication only, without training: one collective at several message sizes."""

    operation: Operation
    sizes: tuple[int, ...]
    """Message sizes in bytes, as `analysis/communication.py` defines them: whole float32 values."""
    repeats: int = 50
    """Maximum number of timings per size."""
    warmup_calls: int = 3
    """Untimed calls per size before the first timing."""
    budget_seconds: float = 0.5
    """Time budget per size and launch; slower sizes get fewer timings."""
    backend: Backend = "auto"
    """auto: nccl on GPUs, gloo on CPU."""

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
    """One column of a dataset: its shape and type per sample."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def num_bytes(self) -> int:
        """Bytes of one sample; the digits of a dtype's name are its bits, and a bool takes a byte."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(bits[0]) // 8 if bits else 1)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One way to read through a dataset."""

    order: Order = "shuffled"
    access: Access = "batch"
    cache: Cache = "warm"

    @property
    def name(self) -> str:
        return f"{self.order} {self.access} {self.cache}"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A dataset that is written and read, on its own or as the source of training batches."""

    format: str
    """A format of `data/formats/catalogue.py`, or `MEMORY`."""
    mode: ReadingMode = "lazy"
    """lazy: read samples on access. eager: load everything on open. naive: HDF5 with
    `dataset[i]`, sample by sample."""
    automatic_chunks: bool = False
    """Let h5py choose the chunks when writing HDF5."""
    source: str = ""
    """File to take the samples from; empty: random numbers of the shapes in `fields`."""
    is_as_it_is: bool = False
    """Read the source itself, without writing a copy."""
    num_samples: int = 2048
    fields: tuple[DataField, ...] = ()
    passes: tuple[Pass, ...] = ()
    epochs: int = 2
    """Epochs of every warm pass; the first runs on a freshly opened reader."""
    budget_seconds: float = 2.0
    """Time budget per epoch and pass; a slower epoch stops after the current batch."""
    workers: int = 0
    """Reader processes per rank."""

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
    """Quantization of a model to int8, after training or without it."""

    method: CalibrationMethod = "mse"
    num_samples: int = 512
    """Training samples used for calibration."""
    is_per_tensor: bool = False
    """One weight scale per layer instead of per output channel."""
    rounds_logits: bool = False
    """Whether the logits are quantized too, instead of staying float."""
    profile: KernelProfile = "onnxruntime"
    mixed_points: float | None = None
    """Keep layers in float, worst first, until the accuracy loss is at most this many points. None: keep none."""
    num_tested: int | None = None
    """Test samples for quantizing each layer on its own. None: as many as fit a fixed compute budget."""
    weights: str = ""
    """File of trained weights; empty: the model as built or trained."""
    batches: tuple[int, ...] = (1, 64)
    """Batch sizes to measure latency at."""
    num_rounds: int = 15
    """Timing rounds per runtime and batch size."""
    lab_peak: int = 127
    """The integer that the lab maps the largest activation to: 127, or the published 255."""
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
