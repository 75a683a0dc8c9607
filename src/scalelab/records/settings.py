"""Step shape, optimizer, strategy options, injected delay and training run: the settings that all studies share.

Each is a frozen record whose fields are flags, JSON keys and help texts at once. The defaults are torch's, so a
trial that sets none of them runs plain torch.

The device kinds come first, one record each: what a device can do is asked of its record, never of its name.
`worker/device.py` drives it by torch's own seam and the module that torch has for its kind. ROCm's devices are called
`cuda` by torch and go by the same record.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from scalelab.checks import check_at_least, check_not_negative, check_positive, flag, parse_seconds, read_flag
from scalelab.errors import UsageError
from scalelab.records.strategy import Phase, parse_mesh


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One kind of device."""

    name: str
    """torch's name of its type."""
    title: str
    """One of them, in a sentence."""
    backend: str = "gloo"
    """The backend of its process groups, unless another is asked for."""
    is_accelerator: bool = True
    """Whether its work is queued: a clock is right only after a synchronise, and memory is the device's own."""
    activity: str = ""
    """What torch's profiler calls its kernels; empty: it records none."""
    block_bytes: int = 1
    """What its caching allocator rounds an allocation up to."""
    has_peaks: bool = True
    """Whether its allocator keeps the highest of what was allocated."""
    has_history: bool = False
    """Whether its allocator keeps a history, from which memory is recorded by category."""
    may_have_float8: bool = False
    """Whether some of the kind multiply in 8 bits."""
    has_graphs: bool = False
    """Whether torch.compile can record its kernels in graphs that start as a whole."""
    is_listed: bool = False
    """Whether nvidia-smi lists it, so that a study can refuse more ranks than there are before it starts any."""


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """What the self-test expected of a device, and what it saw."""

    name: str
    expectation: str
    figure: str
    is_right: bool | None
    """None: it could not be checked."""
    next_step: str = ""


_KNOWN = (
    DeviceKind(name="cpu", title="CPU", is_accelerator=False, has_peaks=False),
    DeviceKind(
        name="cuda",
        title="GPU",
        backend="nccl",
        activity="CUDA",
        block_bytes=512,
        has_history=True,
        may_have_float8=True,
        has_graphs=True,
        is_listed=True,
    ),
    DeviceKind(name="xpu", title="XPU", backend="xccl", activity="XPU", block_bytes=512),
    DeviceKind(name="mps", title="MPS device", has_peaks=False),
)
DEVICES: dict[str, DeviceKind] = {kind.name: kind for kind in _KNOWN}
DeviceChoice = Literal["auto", "cpu", "cuda", "xpu", "mps"]
"""The type of --device."""


def find_kind(name: str) -> DeviceKind:
    """The record of a kind; an unknown one is taken for an accelerator of which nothing is known."""
    return DEVICES.get(name) or DeviceKind(name=name, title=name, has_peaks=False)


Dtype = Literal["float32", "tf32", "bfloat16", "float16", "float64", "float8"]
"""float8: bfloat16 weights whose linear layers multiply in 8 bits (torchao)."""
Bind = Literal["none", "cores", "numa"]
"""Which cores ranks get; see `ranks/affinity.py`."""

DEFAULT_STEPS = 100
"""Steps of a training run without --steps and --epochs."""

MaybeInt = Annotated[int | None, tyro.conf.arg(metavar="INT")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
MaybeBytes = Annotated[str | None, tyro.conf.arg(metavar="BYTES")]
MaybeName = Annotated[str | None, tyro.conf.arg(metavar="NAME")]
MaybePath = Annotated[str | None, tyro.conf.arg(metavar="PATH")]
MaybeTime = Annotated[str | None, tyro.conf.arg(metavar="TIME")]
Time = Annotated[str, tyro.conf.arg(metavar="TIME")]


def refuse_unread(settings: Any, names: tuple[str, ...], needed: str) -> None:
    """Reject settings that have no effect."""
    for name in names:
        value = getattr(settings, name)
        if value != getattr(type(settings), name):
            raise UsageError(f"{flag(name)} {value} has no effect without {needed}: add it")


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
    compile_mode: Literal["default", "reduce-overhead", "cudagraphs"] = "default"
    """torch.compile: reduce-overhead records its kernels in CUDA graphs; cudagraphs records eager kernels in them."""

    def __post_init__(self) -> None:
        if self.micro_batch is not None:
            check_at_least("micro_batch", self.micro_batch, 1)
        if not self.compile:
            refuse_unread(self, ("compile_mode",), "--compile")


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
    """fsdp2 and hsdp: free gathered parameters after forward and gather them again for backward."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=SIZE,…")] = None
    """hsdp, tp, pp, ep and cp: ranks per axis (pp, dp, fsdp, ep, cp, tp), for example dp=2,tp=2. None: all ranks on
    the strategy's own axis; for hsdp, two replicas."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"] = "1f1b"
    """pp: order of micro-batches. gpipe: all forwards, then all backwards; 1f1b: one forward, one backward;
    interleaved: 1f1b with two stages per rank; zero-bubble: the same, with gradients of weights in the bubble;
    zbv: zero-bubble with stages in a V, so that rank 0 has the first and the last."""
    sequence_parallel: bool = False
    """tp: shard norms and residuals along the sequence: reduce-scatter and all-gather instead of all-reduce."""
    async_tp: bool = False
    """tp with --sequence-parallel and --compile, on CUDA: overlap all-gather and reduce-scatter with the matrix
    products they feed (torch's async TP, with symmetric memory)."""
    averaging_period: int = 8
    """local-sgd: steps between two averagings of the parameters."""
    averaging_warmup: int = 0
    """local-sgd: steps with a gradient all-reduce, as in ddp, before replicas train alone (post-local SGD)."""

    def __post_init__(self) -> None:
        check_at_least("averaging_period", self.averaging_period, 1)
        check_at_least("averaging_warmup", self.averaging_warmup, 0)
        if self.bucket_mb is not None:
            check_positive("bucket_mb", self.bucket_mb)
        check_at_least("powersgd_rank", self.powersgd_rank, 1)
        check_at_least("powersgd_start", self.powersgd_start, 2)
        if self.gradient_hook != "powersgd":
            refuse_unread(self, ("powersgd_rank", "powersgd_start"), "--comm-hook powersgd")
        if self.mesh:
            parse_mesh(self.mesh)


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """A delay injected into every step, on one rank or all."""

    delay: Time = "0s"
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
class TrainingRun:
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
    profile_name: MaybeName = None
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

    @property
    def num_steps(self) -> int | None:
        """The optimizer steps; None if given in epochs."""
        return None if self.epochs is not None else self.steps or DEFAULT_STEPS
