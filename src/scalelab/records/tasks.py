"""What a trial does: `Task`, a tagged union.

    measure    train for a few steps, in blocks of clean and instrumented ones
    script     run a training script of the user's own as it is, and measure its steps from outside
    train      a whole training run: log lines, evaluations, checkpoints
    exchange   time one collective at several message sizes, without a model
    read       write a dataset and read it in several ways, without a model
    forecast   estimate the memory of a step on fake tensors
    quantize   quantize a model to int8, after a training run or as it is

In JSON a task is an object whose `kind` is its tag: msgspec decodes a union of structs by it, which it cannot do for
dataclasses. The worker has one branch for each. The steps of `measure` have a plan, and kinds that say how each is
instrumented.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

import msgspec

from scalelab.checks import check_at_least, check_not_negative, check_positive
from scalelab.errors import UsageError
from scalelab.records.settings import TrainingRun


class StepKind(StrEnum):
    """How a step is instrumented."""

    CLEAN = "clean"
    """Not at all: one clock reading before and one after."""
    PHASES = "phases"
    """A clock reading after input, forward, backward and optimizer."""
    COMM_FREE = "comm_free"
    """No gradient all-reduce (`no_sync`); the training state is restored afterwards."""
    FREE = "free"
    """Not synchronized with the device at its edges: the host may run ahead, as in a training loop."""
    PROFILED = "profiled"
    """torch's profiler."""
    SETTLE = "settle"
    """An ordinary step after a change of kind, recorded but not used."""


class Block(NamedTuple):
    """Consecutive steps of one kind."""

    kind: StepKind
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Which steps one launch runs: a lead-in of clean steps, then blocks of all kinds, interleaved.

    The counts are totals per launch; `cycles` says over how many turns they are spread. The profiled steps are one
    block, so that they make one trace, and the last: for a few steps after it the rank is slower.
    """

    lead_in_steps: int = 10
    clean_steps: int = 20
    phase_steps: int = 4
    comm_free_steps: int = 4
    profiled_steps: int = 0
    cycles: int = 2
    free_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("lead_in_steps", "phase_steps", "comm_free_steps", "profiled_steps", "free_steps"):
            check_at_least(name, getattr(self, name), 0)
        check_at_least("clean_steps", self.clean_steps, 1)
        check_at_least("cycles", self.cycles, 1)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks in the order in which they run."""
        found = [Block(StepKind.CLEAN, self.lead_in_steps)]
        for cycle in range(self.cycles):
            found.append(Block(StepKind.CLEAN, _share(self.clean_steps, self.cycles, cycle)))
            found.append(Block(StepKind.FREE, _share(self.free_steps, self.cycles, cycle)))
            found.append(Block(StepKind.PHASES, _share(self.phase_steps, self.cycles, cycle)))
            comm_free = _share(self.comm_free_steps, self.cycles, cycle)
            if comm_free:
                found += [Block(StepKind.COMM_FREE, comm_free), Block(StepKind.SETTLE, 1)]
        found.append(Block(StepKind.PROFILED, self.profiled_steps))
        return tuple(block for block in found if block.num_steps)

    @property
    def num_steps(self) -> int:
        """All steps of one launch, of every kind."""
        return sum(block.num_steps for block in self.blocks)


def _share(total: int, parts: int, index: int) -> int:
    """The size of part `index` when `total` steps are divided over `parts` turns."""
    return total // parts + (1 if index < total % parts else 0)


class StepSample(NamedTuple):
    """One step of one rank. A phase that was not timed is None."""

    rank: int
    step: int
    """From 0, in the order of the launch, over all kinds."""
    kind: StepKind
    start_seconds: float
    """On the host's monotonic clock, so ranks of one host can be compared."""
    step_seconds: float
    input_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    optimizer_seconds: float | None = None
    loss: float | None = None
    ready_seconds: float | None = None
    """From the start of the step until this rank computed its last gradient, without any waiting after it."""
    input_stall_seconds: float | None = None
    """Time in the phase when the rank was runnable but its core ran something else."""
    forward_stall_seconds: float | None = None
    ready_stall_seconds: float | None = None
    """The same from the start of the step until the last gradient."""
    optimizer_stall_seconds: float | None = None


PHASES = ("input", "forward", "backward", "optimizer")
"""The phases of a step, in order; `StepSample` has one `…_seconds` field for each."""


Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "point_to_point"]
"""Collectives that can be timed alone; defined in `analysis/traffic.py`."""
Backend = Literal["auto", "gloo", "nccl", "mpi"]

MEMORY = "memory"
"""The format name of samples that are in memory, without a file."""
ReadingMode = Literal["lazy", "eager", "naive"]
ReadOrder = Literal["sequential", "shuffled", "blocks"]
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
class Dataset:
    """Samples that are written once and read in batches."""

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
    workers: int = 0
    """Reader processes per rank."""

    def __post_init__(self) -> None:
        check_at_least("samples", self.num_samples, 1)
        check_at_least("workers", self.workers, 0)
        if self.mode == "naive" and not self.format.startswith("hdf5"):
            raise UsageError(f"{self.format} has no naive reader: only HDF5 does")

    @property
    def sample_bytes(self) -> int:
        return sum(one.num_bytes for one in self.fields)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One way to read through a dataset."""

    order: ReadOrder = "shuffled"
    access: Access = "batch"
    cache: Cache = "warm"

    @property
    def key(self) -> tuple[str, str, str]:
        """What its fetches are stored under."""
        return self.order, self.access, self.cache

    @property
    def name(self) -> str:
        return " ".join(self.key)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a model is quantized to int8, and what is measured of it."""

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


SCRIPT_MARK = ":__main__"
"""What the workload of a script's trial ends in."""


class Measure(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="measure"):
    """Train for the steps of a plan."""

    plan: StepPlan = msgspec.field(default_factory=StepPlan)
    dataset: Dataset | None = None
    """Take the batches from this dataset; None: from the workload."""


class Script(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="script"):
    """Run a training script as `python FILE` or `python -m MODULE` would, until it has taken the steps of a plan."""

    target: str
    """The file, absolute, or the module."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    directory: str = ""
    """The working directory; empty: where scalelab was started."""
    is_told_batch: bool = True
    """Whether the arguments give the script the batch size of the trial."""
    step_at: str = "optimizer"
    """Where a step ends: `optimizer`, `dataloader`, or `module:function`."""
    is_scratch: bool = False
    """Run it in a copy of its working directory, which is removed afterwards."""
    is_fresh: bool = False
    """Start a new interpreter, in which the script itself imports torch."""
    plan: StepPlan = msgspec.field(default_factory=StepPlan)


class Train(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="train"):
    """Train to the end of a training run."""

    run: TrainingRun


class Exchange(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="exchange"):
    """Time one collective at several message sizes."""

    operation: Operation
    sizes: tuple[int, ...]
    """Message sizes in bytes, as `analysis/traffic.py` defines them: whole float32 values."""
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


class Read(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="read"):
    """Write a dataset and read it, pass by pass."""

    dataset: Dataset
    passes: tuple[Pass, ...] = ()
    epochs: int = 2
    """Epochs of every warm pass; the first runs on a freshly opened reader."""
    budget_seconds: float = 2.0
    """Time budget per epoch and pass; a slower epoch stops after the current batch."""

    def __post_init__(self) -> None:
        check_at_least("epochs", self.epochs, 1)
        check_positive("budget", self.budget_seconds)


class Forecast(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="forecast"):
    """Estimate a step on fake tensors: one process, and no step is taken."""

    messages: bool = False
    """Count its messages in a fake process group, instead of its memory."""


class Quantize(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="quantize"):
    """Quantize a model to int8, after a training run or as it is."""

    settings: Quantization = msgspec.field(default_factory=Quantization)
    run: TrainingRun | None = None
    """The training run before it; None: none."""


Task = Measure | Script | Train | Exchange | Read | Forecast | Quantize
