"""A job as a prediction sees it: how long each phase of a step takes on one rank, what it sends, over what.

    T(n) = t_input + t_forward + max(t_backward, e_K) + t_optimizer + residual + straggler(n) + crowding(n)

A phase costs a fixed part and a part per sample, so that a smaller piece of the batch is not simply that much faster.
The residual is what two ranks took beyond the rest of the formula. Ranks that differ by σ from step to step wait for
the slowest of n: σ times the mean of the largest of n normal numbers, which grows like √(2 ln n); of that, what two
ranks wait is in the residual already.

Ranks that share the cores of one host take turns: n of them on c cores wait for n/c − 1 times what a step of one rank
keeps a core busy. Its bytes are left to the network, where they may be hidden.

Every number carries how well it is known, as a relative standard deviation: a prediction is drawn many times, with all
of them drawn anew, and again with one of them alone, to see which one dominates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from scipy import optimize

from scalelab.errors import UsageError
from scalelab.predict.link_cost import Network
from scalelab.predict.overlap import Gradient, Unit, expected_maximum, fill_buckets, overlap_buckets, overlap_units
from scalelab.records.settings import SHARDED as SHARDED
from scalelab.records.steps import PHASES

NUM_UNITS = 12
"""What a sharded model is taken to be gathered in, unless told."""
WHOLE = ("ddp", "fsdp-none")
"""Strategies that exchange whole gradients in buckets."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """What grows with the samples of a rank: seconds of a phase, or bytes."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, batch: float) -> float:
        return self.fixed + self.per_sample * batch

    def scale(self, factor: float) -> Line:
        return Line(fixed=self.fixed * factor, per_sample=self.per_sample * factor)


@dataclass(frozen=True, kw_only=True)
class Known:
    """How well the inputs are known: relative standard deviations."""

    compute: float = 0.02
    latency: float = 0.2
    bandwidth: float = 0.1
    contention: float = 0.3
    jitter: float = 0.5
    residual: float = 0.5


@dataclass(frozen=True, kw_only=True)
class ScaledJob:
    """One training, whatever its ranks."""

    phases: Mapping[str, Line]
    """By the names of `PHASES`; one that is missing takes no time."""
    gradients: tuple[Gradient, ...]
    """Ready times as shares of backward, from 0 to 1."""
    network: Network
    core_seconds: float = 0.0
    """How long a step of one rank keeps a core busy, without the bytes that it sends; counts where cores are shared."""
    strategy: str = "ddp"
    dtype: str = "float32"
    """Of parameters and gradients."""
    bucket_bytes: float | None = None
    accumulation: int = 1
    compression: float = 1.0
    """Bytes that are sent over those of the gradients."""
    contention: float = 0.0
    jitter_ratio: float = 0.0
    """The standard deviation of a rank's own steps, over their time: the slowest of n sets the pace."""
    residual_seconds: float = 0.0
    delay_seconds: float = 0.0
    """Added to every step."""
    slow_factor: float = 1.0
    """How many times longer one rank computes than the others, which wait for it."""
    num_units: int = NUM_UNITS
    """Equal pieces that a sharded model is gathered in."""
    known: Known = field(default_factory=Known)

    def __post_init__(self) -> None:
        if self.accumulation < 1:
            raise UsageError(f"an accumulation of {self.accumulation} cannot be: use 1 or more")
        if not self.gradients:
            raise UsageError("a job without gradients has nothing to exchange: give its parameters")

    @property
    def gradient_bytes(self) -> float:
        return math.fsum(gradient.payload_bytes for gradient in self.gradients)


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """One step on n ranks, part by part; they add up."""

    num_ranks: int
    input_seconds: float
    forward_seconds: float
    backward_seconds: float
    exposed_seconds: float
    """Communication that no computing hides."""
    optimizer_seconds: float
    straggler_seconds: float
    crowding_seconds: float
    """Waiting for cores that ranks share."""
    rest_seconds: float
    communication_seconds: float
    """Hidden or not."""

    @property
    def seconds(self) -> float:
        return (
            self.input_seconds
            + self.forward_seconds
            + self.backward_seconds
            + self.exposed_seconds
            + self.optimizer_seconds
            + self.straggler_seconds
            + self.crowding_seconds
            + self.rest_seconds
        )


def predict_step(job: ScaledJob, num_ranks: int, batch_per_rank: float) -> StepParts:
    """One step of a job on so many ranks, with so many samples on each."""
    if num_ranks < 1:
        raise UsageError(f"--ranks {num_ranks} cannot be: use 1 or more")
    if batch_per_rank < 1:
        raise UsageError(f"{num_ranks} ranks leave {batch_per_rank:g} samples for each: use fewer, or a larger batch")
    per_pass = batch_per_rank / job.accumulation
    times = {name: job.phases.get(name, Line()).at(per_pass) for name in PHASES}
    passes = job.accumulation
    backward = times["backward"]
    forward_exposed = 0.0
    if num_ranks == 1:
        exposed = communication = 0.0
    elif job.strategy in SHARDED:
        forward_exposed, exposed, communication = _exchange_units(job, num_ranks, times["forward"], backward)
    else:
        buckets = fill_buckets(
            [Gradient(g.ready_seconds * backward, g.payload_bytes * job.compression) for g in job.gradients],
            job.bucket_bytes,
        )
        found = overlap_buckets(
            backward, buckets, lambda size: job.network.cost("all_reduce", num_ranks, size), job.contention
        )
        exposed, communication = found.exposed_seconds, found.communication_seconds
    computing = (times["forward"] + backward) * passes
    straggler = job.jitter_ratio * computing * max(0.0, expected_maximum(num_ranks) - expected_maximum(2))
    if num_ranks > 1:
        straggler += (job.slow_factor - 1) * computing
    return StepParts(
        num_ranks=num_ranks,
        input_seconds=times["input"] * passes,
        forward_seconds=times["forward"] * passes,
        backward_seconds=backward * passes,
        exposed_seconds=exposed + forward_exposed,
        optimizer_seconds=times["optimizer"],
        straggler_seconds=straggler + job.delay_seconds,
        crowding_seconds=_find_crowding(job, num_ranks),
        rest_seconds=job.residual_seconds if num_ranks > 1 else 0.0,
        communication_seconds=communication,
    )


def _find_crowding(job: ScaledJob, num_ranks: int) -> float:
    """What ranks wait for each other's cores."""
    per_node = min(job.network.ranks_per_node or num_ranks, num_ranks)
    return 0.0 if job.network.cores is None else max(0.0, per_node / job.network.cores - 1) * job.core_seconds


def _exchange_units(job: ScaledJob, num_ranks: int, forward: float, backward: float) -> tuple[float, float, float]:
    """Exposed in forward and in backward, and all communication, of a sharded model in equal units."""
    size = job.gradient_bytes * job.compression / job.num_units
    units = [Unit(forward / job.num_units, backward / job.num_units, size)] * job.num_units
    ahead, back = overlap_units(
        units,
        lambda payload: job.network.cost("all_gather", num_ranks, payload),
        lambda payload: job.network.cost("reduce_scatter", num_ranks, payload),
        is_regathered=job.strategy != "fsdp-grad-op",
    )
    total = ahead.communication_seconds + back.communication_seconds
    return ahead.exposed_seconds, back.exposed_seconds, total


def fit_line_by_batch(seconds: dict[float, float]) -> Line:
    """A line through the times of one or two batches; of one batch, all of it is per sample. Neither is negative."""
    if len(seconds) == 1:
        ((batch, value),) = seconds.items()
        return Line(per_sample=value / batch)
    (small, fast), (large, slow) = sorted(seconds.items())[:1] + sorted(seconds.items())[-1:]
    slope = max(0.0, (slow - fast) / (large - small))
    slope = min(slope, slow / large)
    return Line(fixed=slow - slope * large, per_sample=slope)


def find_core_seconds(network: Network, one_seconds: float, two_seconds: float, sent_bytes: float) -> float:
    """How long a step keeps a core busy without its bytes, from what it does on one and on two ranks."""
    return one_seconds + max(0.0, two_seconds - one_seconds - sent_bytes * network.byte_core_seconds)


def share_times(gradients: Sequence[Gradient], backward_seconds: float) -> tuple[Gradient, ...]:
    """Gradients with their times as shares of backward."""
    return tuple(
        Gradient(min(1.0, max(0.0, gradient.ready_seconds / backward_seconds)), gradient.payload_bytes)
        for gradient in gradients
    )


def settle_on_two(job: ScaledJob, measured_seconds: float, batch_per_rank: float) -> ScaledJob:
    """The job with contention and residual such that two ranks take what they were measured to take.

    Contention is tried first, from none to complete; what even that does not explain, or what two ranks needed less
    than without any, is the residual.
    """
    free = replace(job, residual_seconds=0.0, contention=0.0)
    full = replace(free, contention=1.0)
    low = predict_step(free, 2, batch_per_rank).seconds
    high = predict_step(full, 2, batch_per_rank).seconds
    if measured_seconds <= low:
        return replace(free, residual_seconds=measured_seconds - low)
    if measured_seconds >= high:
        return replace(full, residual_seconds=measured_seconds - high)

    def miss(contention: float) -> float:
        return predict_step(replace(free, contention=contention), 2, batch_per_rank).seconds - measured_seconds

    return replace(free, contention=float(optimize.brentq(miss, 0.0, 1.0)))
