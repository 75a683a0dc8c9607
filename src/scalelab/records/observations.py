"""What is known of a trial besides the times of its steps: its ranks, its learning curve, its instruments.

An instrument is asked for by a trial, and its record comes back with the result. Each runs where it cannot disturb the
clean steps: after them, in steps of its own, or outside the ranks.

    memory           the bytes of tensors alive, by category, at the highest point of a step; a timeline beside it
    messages         what the ranks send in one step, by kind, with bytes
    gradients        when every gradient is ready in backward
    counters         what DDP itself says of forward, backward, exchange and their overlap
    utilization      how busy every core or GPU is over time, seen from outside the ranks
    replicas         what every replica of dp holds
    gradient_noise   how much gradients of samples differ: the simple noise scale of a training run
    flops            floating-point operations of a step, where the workload does not say them
    mpi              who every rank is by MPI itself, where a cluster's launcher starts the ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from scalelab.records.strategy import Message as Message
from scalelab.records.strategy import MessageBasis as MessageBasis
from scalelab.records.strategy import PipelineTimes

Instrument = Literal[
    "memory", "messages", "counters", "gradients", "utilization", "replicas", "gradient_noise", "mpi", "norms",
    "shapes", "flops", "pipeline",
]  # fmt: skip


NUM_LOOKED_AT = 8
"""Batches whose shapes are compared."""


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes of one rank's tensors."""

    peak_bytes: int
    """The most that was alive at once, of everything that torch's allocator gave out."""
    peak_phase: str = ""
    """The phase of the step that it falls in."""
    current_bytes: int | None = None
    """Alive after the last step."""
    reserved_bytes: int | None = None
    """The most that the caching allocator held (CUDA); None on CPU."""
    by_category: Mapping[str, int] = field(default_factory=dict)
    """At the peak: parameters, gradients, optimizer, activations, buckets, batch, rest … They add up to the peak."""
    phase_peaks: Mapping[str, int] = field(default_factory=dict)
    """The highest point of every phase."""
    file: str = ""
    """The timeline, in the trial's directory; empty: none."""
    snapshot: str = ""
    """What the public memory viewer reads, in the trial's directory (CUDA); empty: none."""


@dataclass(frozen=True, kw_only=True)
class DdpCounters:
    """What DistributedDataParallel measured itself, in seconds: one number for each watched step."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    """Until the last gradient was computed."""
    communication_seconds: tuple[float, ...]
    """From the first bucket's start to the last one's end."""
    overlap_seconds: tuple[float, ...]
    """The part of communication during which backward was still computing."""
    bucket_bytes: tuple[int, ...] = ()
    """Sizes of the buckets, rebuilt in the order in which gradients become ready."""

    @property
    def exposed_seconds(self) -> tuple[float, ...]:
        """Communication that no computing hides, waiting for slower ranks included."""
        pairs = zip(self.communication_seconds, self.overlap_seconds, strict=True)
        return tuple(communication - overlap for communication, overlap in pairs)


@dataclass(frozen=True, kw_only=True)
class GradientTimes:
    """When gradients are ready, in the order in which they are: medians over a few steps."""

    ready_seconds: tuple[float, ...]
    """After the end of forward."""
    payload_bytes: tuple[int, ...]
    backward_seconds: float
    """Of all backward in the same steps, the exchange included where there is one."""
    core_seconds: float | None = None
    """Processor time of all threads in one of these steps: how long it keeps a core busy."""


@dataclass(frozen=True, kw_only=True)
class DeviceLoad:
    """How busy one core or GPU was during one interval."""

    seconds: float
    """The end of the interval, on the host's monotonic clock, as the samples' `start_seconds`."""
    device: str
    """rank 0: the cores of one rank's process; replica 0: those of one replica of emulated dp, all replicas: its
    process as a whole; gpu 0; other programs: what the same cores did besides."""
    busy: float
    """The share of the interval, in [0, 1]."""
    interval_seconds: float = 0.0
    """The length of the interval."""
    memory_bytes: int | None = None
    """Used on the device then (GPUs)."""
    clock_hertz: float | None = None
    """Of its multiprocessors then; this and the rest are of GPUs, and unknown before 0.2."""
    power_watts: float | None = None
    temperature_celsius: float | None = None
    slowed: tuple[str, ...] = ()
    """Why the driver held its clock down."""
    num_others: int | None = None
    """Processes on it besides its rank."""


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One line of a training run: the state of learning after a step."""

    step: int
    """The step that it was taken in or after, from 0."""
    epoch: float
    """Passes over the data done."""
    loss: float | None
    """On this step's batches, or on the whole test data; the mean over ranks. None: it was no finite number."""
    accuracy: float | None = None
    """The share of right answers, where the output has classes."""
    learning_rate: float | None = None
    """What this step's update used; None for an evaluation."""
    seconds: float = 0.0
    """Of this step, of this evaluation, or of the steps of this epoch with all that is between them."""
    elapsed_seconds: float | None = None
    """Since the first step of this launch; None before 0.2."""
    compute_seconds: float | None = None
    """Of an epoch: its steps without the wait for their batches."""
    is_evaluation: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the evaluation of a workload of one's own gives besides loss and accuracy, by name."""
    is_epoch: bool = False
    """Whether it is about all training steps of an epoch: mean loss, accuracy."""
    small_gradient_square: float | None = None
    """The squared norm of the gradient of one pass, where gradient noise is looked at."""
    large_gradient_square: float | None = None
    """The same of the whole step's gradient."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """Where one profiled step of one rank went, in nanoseconds of its trace.

    compute + exposed + copy + idle = span, exactly; communication is exposed + overlapped.
    """

    span_ns: int
    compute_ns: int
    """Computing, with or without communication beside it."""
    overlapped_ns: int
    """Communication while something is computed."""
    exposed_ns: int
    """Communication while nothing is computed."""
    copy_ns: int
    """Memory copies with neither beside them."""
    idle_ns: int
    transfer_ns: int | None = None
    """Of the collectives that all ranks' traces hold: the shortest time that any rank spent in each, added up."""
    waiting_ns: int | None = None
    """What this rank spent in them beyond that: it was early."""
    num_matched: int | None = None
    """How many of its collectives those are."""
    messages: tuple[Message, ...] = ()
    """Its collectives by kind."""

    @property
    def num_collectives(self) -> int:
        return sum(message.count for message in self.messages)

    @property
    def payload_bytes(self) -> int | None:
        """Of the collectives whose size was recorded; None: of none."""
        sizes = [message.payload_bytes for message in self.messages if message.payload_bytes is not None]
        return sum(sizes) if sizes else None


@dataclass(frozen=True, kw_only=True)
class TracedOperator:
    """All calls of one operator on the host during the profiled steps."""

    name: str
    count: int
    self_ns: int
    """Without what it called."""


@dataclass(frozen=True, kw_only=True)
class RankSource:
    """What one source says of who a rank is: a launcher's variables, or MPI itself."""

    source: str
    rank: int | None = None
    num_ranks: int | None = None
    local_rank: int | None = None
    """None: it does not say."""
    variables: tuple[str, ...] = ()
    """The ones that it was read from."""
    reason: str = ""
    """Why it could not be asked; empty: it was."""


@dataclass(frozen=True, kw_only=True)
class ReadingReport:
    """What is known of a stored set, and of one rank's reading, besides the times of its batches."""

    num_samples: int
    sample_bytes: int
    write_seconds: float | None = None
    """Until all was on the disk; of the rank that wrote."""
    file_bytes: int | None = None
    open_seconds: tuple[float, ...] = ()
    """Of every opening while the kernel had the file in memory; with eager reading, loading included."""
    cold_open_seconds: tuple[float, ...] = ()
    """The same after the kernel was asked to forget the file."""
    resident_shares: tuple[float, ...] = ()
    """What of the file it had not forgotten, each time; empty: it was not asked, or could not be looked at."""
    cold_obstacle: str = ""
    """Why the kernel could not be asked to forget."""
    private_bytes: int | None = None
    """The most that reading added to the process's own memory, as seen after every pass: without mapped files."""
    amplification: float | None = None
    """Bytes that must be read or inflated for one sample, all its columns, over its own; None: unknown."""
    chunks: str = ""
    """Of the column of which most is read or inflated for a sample, in words."""
    shuffle: str = ""
    """How a training run would shuffle the set, in words, where that is by blocks of its chunks."""


@dataclass(frozen=True, kw_only=True)
class ScriptReport:
    """What was seen of a training script besides its steps."""

    num_optimizers: int = 0
    num_passes: int | None = None
    """Backward passes per step; None: the script ended before it was known."""
    num_samples: int | None = None
    """Samples per step on this rank, as they came out of the data loader or went into the model; None: not seen."""
    batch_samples: int | None = None
    """Samples of one batch; a step that accumulates gradients has several. None: not seen."""
    num_sharing: int = 1
    """Ranks that work on the same samples, as under tensor parallelism."""
    input_mark: int | None = None
    """A checksum of the rank's first batch; None: not seen."""
    num_uneven: int = 0
    """Steps with another number of backward passes."""
    is_regular: bool = True
    """Whether every step has the same optimizer calls."""
    num_evaluations: int = 0
    num_checkpoints: int = 0
    num_skipped: int = 0  # by a GradScaler; steps of these three kinds are kept apart
    obstacle: str = ""
    """Why communication-free steps were left out; empty: they were not."""
    strategy: str = ""
    """The strategy that the script applies to its model itself; empty: none of those that scalelab has."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why instruments were left out, by name."""
    has_group: bool = True  # whether it made a process group
    is_joined: bool = True  # whether its ranks sent each other anything in the steps after the first


class NormSpread(NamedTuple):
    """How far the batch statistics of ranks are apart in one step: root mean squares over channels."""

    mean: float
    """Standard deviation over ranks of a channel's batch mean, in standard deviations of the channel."""
    variance: float
    """Standard deviation over ranks of a channel's batch variance, as a share of that variance."""
    num_channels: int


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What is known of one rank besides its samples."""

    rank: int
    host: str = ""
    launcher: str = ""
    """Who started it, as it found out itself; empty: scalelab's own launcher for this machine, or unknown."""
    agreeing: tuple[str, ...] = ()
    """Further sources that say the same of its rank."""
    local_rank: int | None = None
    """Its local rank, from its launcher; None: unknown."""
    sources: tuple[RankSource, ...] = ()
    """What each source reports; empty: only scalelab knows."""
    exit_code: int | None = None
    """As the operating system gave it: negative is a signal. None: unknown."""
    cores: tuple[int, ...] = ()
    """The cores that the kernel let it run on; empty: unknown."""
    numa_nodes: tuple[int, ...] = ()
    """Of these cores; empty: unknown."""
    host_memory_bytes: int | None = None
    """Of its host, which all ranks there share; None: unknown."""
    start_memory_bytes: int | None = None
    """Resident before the workload was built (CPU), or None."""
    peak_memory_bytes: int | None = None
    """The highest it rose to during the lead-in: resident (CPU) or allocated (CUDA)."""
    num_parameters: int | None = None
    involuntary_switches: int | None = None
    """How often the kernel took the core away while the rank wanted to run."""
    buffer_bytes: int | None = None
    """Of the model's buffers, such as batch-norm statistics."""
    optimizer_bytes: int | None = None
    """Of what the optimizer of this rank keeps between steps, after the last of them."""
    limited_bytes: int | None = None
    """The highest of what a memory limit counts, over the whole launch; see `worker/memory/limit.py`."""
    limit_bytes: int | None = None
    """The limit in the same bytes, where there is one: the trial's (CPU), or what the device has for torch (CUDA)."""
    memory: MemoryReport | None = None
    messages: tuple[Message, ...] = ()
    message_basis: MessageBasis | None = None
    pipeline: PipelineTimes | None = None
    replica_bytes: tuple[int, ...] = ()
    """What each replica of dp holds: allocated at most on its device (CUDA), its tensors added up (CPU)."""
    norms: NormSpread | None = None
    """Of batch norm, the same on every rank."""
    counters: DdpCounters | None = None
    gradients: GradientTimes | None = None
    reading: ReadingReport | None = None
    script: ScriptReport | None = None
    num_batch_shapes: int | None = None
    """How many different shapes `NUM_LOOKED_AT` batches had; None: not looked at."""
    most_samples: int | None = None
    """The largest batch that the data fills on every rank, where the trial asked for more; None: it did not."""
    shuffle: str = ""
    """How the samples of its training are shuffled, in words, where that is not fully."""
    num_passes: int | None = None
    """Forward passes of one turn of a step; None: those of the plan."""
    tokens_per_sample: float | None = None
    flops_per_sample: float | None = None
    """As the workload says, or as counted; None: neither."""
    traced_steps: tuple[TracedStep, ...] = ()
    """What the trace of the profiled steps says, one by one; see `trace/`."""
    traced_operators: tuple[TracedOperator, ...] = ()
    """The operators of all of them together; of rank 0 only, for ranks run the same."""


class Transfer(NamedTuple):
    """One timing of one rank where communication alone is measured: so many calls in a row."""

    rank: int
    operation: str
    """A kind of `analysis/traffic.py`."""
    payload_bytes: int
    """Of the whole message of one call."""
    repeat: int
    """From 0, for every size."""
    num_calls: int
    """In this timing; a ping-pong counts as two, one each way."""
    start_seconds: float
    """On the host's monotonic clock."""
    seconds: float
    """Of all calls together."""


class Fetch(NamedTuple):
    """One batch that one rank has read where reading is measured alone."""

    rank: int
    order: str
    access: str
    cache: str
    """The pass; see `Pass` of `settings.py`."""
    epoch: int
    """Of the pass, from 0."""
    batch: int
    """Of the epoch, from 0."""
    num_samples: int
    start_seconds: float
    """On the host's monotonic clock."""
    fetch_seconds: float
    """Until the samples were there as arrays."""
    copy_seconds: float
    """Until they were tensors on the device."""
