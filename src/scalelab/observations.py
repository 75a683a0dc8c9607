"""What is known of a trial besides the times of its steps: its ranks, its learning curve, its instruments.

An instrument is asked for by a trial, and its record comes back with the result. Each runs where it cannot disturb the
clean steps: after them, in steps of its own, or outside the ranks.

    memory           the bytes of tensors alive, by category, at the highest point of a step; a timeline beside it
    memory_forecast  the same from fake tensors, before anything is allocated; the trial then runs no step
    messages         what the ranks send in one step, by kind, with bytes
    counters         what DDP itself says of forward, backward, exchange and their overlap
    utilization      how busy every core or GPU is over time, seen from outside the ranks
    gradient_noise   how much gradients of samples differ: the simple noise scale of a training
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Instrument = Literal["memory", "memory_forecast", "messages", "counters", "utilization", "gradient_noise"]


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes of one rank's tensors."""

    peak_bytes: int
    """The most that was alive at once, of everything that torch's allocator gave out."""
    current_bytes: int | None = None
    """Alive after the last step."""
    reserved_bytes: int | None = None
    """Held by the caching allocator (CUDA); None on CPU."""
    by_category: Mapping[str, int] = field(default_factory=dict)
    """At the peak: parameters, gradients, optimizer, activations, buckets, batch, rest … They add up to the peak."""
    file: str = ""
    """The timeline or snapshot, in the trial's directory; empty: none."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One kind of collective operation that a rank takes part in during a step."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, broadcast …"""
    count: int
    """Calls in one step."""
    payload_bytes: int | None
    """Of all calls together, as handed to the collective; None where it was not recorded."""
    purpose: str = ""
    """gradients, parameters, buffers, batch norm …; empty: unknown."""


@dataclass(frozen=True, kw_only=True)
class DdpCounters:
    """What DistributedDataParallel measured itself: means over its sampled steps, in seconds."""

    forward_seconds: float
    backward_seconds: float
    """Until the last gradient was computed."""
    communication_seconds: float
    """From the first bucket's start to the last one's end."""
    overlap_seconds: float
    """The part of communication during which backward was still computing."""
    bucket_bytes: tuple[int, ...] = ()
    """Sizes of the buckets, rebuilt in the order in which gradients become ready."""


@dataclass(frozen=True, kw_only=True)
class DeviceLoad:
    """How busy one core or GPU was during one interval."""

    seconds: float
    """The end of the interval, on the host's monotonic clock, as the samples' `start_seconds`."""
    device: str
    """core 0, gpu 0 …"""
    busy: float
    """The share of the interval, in [0, 1]."""
    memory_bytes: int | None = None
    """Used on the device then (GPUs)."""


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
    """Of this step, or of this evaluation."""
    is_evaluation: bool = False
    small_gradient_square: float | None = None
    """The squared norm of the gradient of one pass, where gradient noise is looked at."""
    large_gradient_square: float | None = None
    """The same of the whole step's gradient."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What is known of one rank besides its samples."""

    rank: int
    host: str = ""
    exit_code: int | None = None
    """As the operating system gave it: negative is a signal. None: unknown."""
    cores: tuple[int, ...] = ()
    """The cores it was allowed to run on; empty: all."""
    start_memory_bytes: int | None = None
    """Resident before the workload was built (CPU), or None."""
    peak_memory_bytes: int | None = None
    """The highest it rose to during the lead-in: resident (CPU) or allocated (CUDA)."""
    num_parameters: int | None = None
    involuntary_switches: int | None = None
    """How often the kernel took the core away while the rank wanted to run."""
    buffer_bytes: int | None = None
    """Of the model's buffers, such as batch-norm statistics."""
    memory: MemoryReport | None = None
    messages: tuple[Message, ...] = ()
    counters: DdpCounters | None = None
