"""The step model behind `scalelab predict`: time per phase on one rank, bytes sent, and the link.

    T(n) = t_input + t_forward + max(t_backward, e_K) + t_optimizer + residual + straggler(n) + crowding(n)

A phase has a fixed part and a part per sample: half the batch does not take half the time. The residual is what two
ranks took beyond the rest of the formula. Ranks whose steps vary by σ wait for the slowest of n: σ times the mean of
the largest of n standard normal numbers, which grows like √(2 ln n); the part for two ranks is in the residual.
Shards, split layers and stages of a pipeline: `split_step.py`.

Ranks that share c cores of one host take turns: n of them wait n/c − 1 times the core time of one rank's step.

If two ranks took less than that formula says without contention, messages take less time than the link says; if that is
not enough, so does compute. A negative residual would make large sizes run in less than no time.

Each input has an uncertainty (a relative standard deviation). Inputs are drawn 400 times on the log scale: all together
for the interval, then one group at a time to find the group that moves the step most, which is the one worth measuring
better. Measured steps are drawn from Student's t with the degrees of freedom of their launches, others from a normal
distribution. A drawn two-rank step is fitted again, so that its noise reaches every size. Draws never change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from scalelab.analysis.estimate import Prediction, enclose
from scalelab.analysis.stats import Floats
from scalelab.errors import TooNoisy, UsageError
from scalelab.predict.network_model import SEND, Gradient, NetworkModel, expected_maximum, fill_buckets, overlap_buckets
from scalelab.predict.split_step import MeshPass, PerSampleCost, Splitting, arrange, is_meshed, shard_pass, split_pass
from scalelab.records.strategies import find_strategy
from scalelab.records.tasks import PHASES
from scalelab.units import format_seconds

NUM_UNITS = 12
"""FSDP units of a sharded model, by default."""


@dataclass(frozen=True, kw_only=True)
class InputErrors:
    """How well the inputs are known: relative standard deviations."""

    compute: float = 0.02
    latency: float = 0.2
    bandwidth: float = 0.1
    contention: float = 0.3
    jitter: float = 0.5
    residual: float = 0.5
    pair: float = 0.0
    """Of the step that was measured on two ranks."""
    freedom: Mapping[str, float] = field(default_factory=dict)
    """Degrees of freedom of those that launches gave; the others are normal."""


class Fitted(NamedTuple):
    """What makes the model take as long on two ranks as was measured."""

    contention: float = 0.0
    residual_seconds: float = 0.0
    link_factor: float = 1.0
    compute_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ScaledJob:
    """One training, whatever its ranks."""

    phases: Mapping[str, PerSampleCost]
    """By the names of `PHASES`; one that is missing takes no time."""
    gradients: tuple[Gradient, ...]
    """Ready times as shares of backward, from 0 to 1."""
    network: NetworkModel
    core_seconds: float = 0.0
    """How long a step of one rank keeps a core busy, without the bytes that it sends; counts where cores are shared."""
    strategy: str = "ddp"
    dtype: str = "float32"
    """Of parameters and gradients."""
    bucket_bytes: float | None = None
    accumulation: int = 1
    pass_samples: float | None = None
    """Samples of one backward pass, where that is fixed and a larger batch of a rank takes more passes."""
    compression: float = 1.0
    """Bytes that are sent over those of the gradients."""
    contention: float = 0.0
    jitter_ratio: float = 0.0
    """The standard deviation of a rank's own steps, over their time: the slowest of n sets the pace."""
    residual_seconds: float = 0.0
    link_factor: float = 1.0
    """Time of a message over what the link says; below 1 where two ranks took less than expected."""
    compute_factor: float = 1.0
    """The same of compute on several ranks, where messages alone do not explain it."""
    drawn_fits: tuple[Fitted, ...] = ()
    """What a two-rank step drawn from its interval fits, draw by draw."""
    delay_seconds: float = 0.0
    """Added to every step."""
    slow_factor: float = 1.0
    """How many times longer one rank computes than the others, which wait for it."""
    num_units: int = NUM_UNITS
    """Equal pieces that a sharded model is gathered in, unless `units` are known."""
    units: tuple[float, ...] = ()
    """Bytes of every unit of a sharded model as counted, the root first."""
    splitting: Splitting = field(default_factory=Splitting)
    known: InputErrors = field(default_factory=InputErrors)

    def __post_init__(self) -> None:
        if self.accumulation < 1:
            raise UsageError(f"accumulation must be ≥ 1, got {self.accumulation}")
        if not self.gradients:
            raise UsageError("the job has no gradients: give its parameters")

    def cost(self, kind: str, num_ranks: int, payload_bytes: float) -> float:
        """Seconds of one collective."""
        return self.link_factor * self.network.cost(kind, num_ranks, payload_bytes)

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
    bubble_seconds: float = 0.0
    """Stages of a pipeline that wait for others."""

    @property
    def seconds(self) -> float:
        computed = self.input_seconds + self.forward_seconds + self.backward_seconds + self.optimizer_seconds
        computed += self.bubble_seconds
        return computed + self.exposed_seconds + self.straggler_seconds + self.crowding_seconds + self.rest_seconds


def predict_step(job: ScaledJob, num_ranks: int, batch_per_rank: float) -> StepParts:
    """One step of a job, with `batch_per_rank` samples on each rank."""
    if num_ranks < 1:
        raise UsageError(f"--ranks must be ≥ 1, got {num_ranks}")
    if batch_per_rank < 1:
        raise UsageError(
            f"{num_ranks} ranks get {batch_per_rank:g} samples each: use --batch {num_ranks} or more, or at most"
            f" {math.floor(batch_per_rank * num_ranks + 1e-9)} ranks"
        )
    wanted = job.accumulation if job.pass_samples is None else math.ceil(batch_per_rank / job.pass_samples - 1e-9)
    passes = max(1, wanted)
    per_pass = batch_per_rank / passes
    factor = job.compute_factor if num_ranks > 1 else 1.0
    times = {name: factor * job.phases.get(name, PerSampleCost()).at(per_pass) for name in PHASES}
    backward, bubble = times["backward"], 0.0
    if num_ranks == 1:
        exposed = communication = 0.0
    elif is_meshed(job.strategy):
        found = _pass_mesh(job, num_ranks, per_pass, factor)
        times |= {"forward": found.forward, "optimizer": found.optimizer}
        backward, bubble, exposed, communication = found.backward, found.bubble, found.exposed, found.communication
    else:
        buckets = fill_buckets(
            [Gradient(g.ready_seconds * backward, g.payload_bytes * job.compression) for g in job.gradients],
            job.bucket_bytes,
        )
        sent = overlap_buckets(backward, buckets, lambda size: job.cost("all_reduce", num_ranks, size), job.contention)
        exposed, communication = sent.exposed_seconds, sent.communication_seconds
    computing = (times["forward"] + backward) * passes
    straggler = job.jitter_ratio * computing * max(0.0, expected_maximum(num_ranks) - expected_maximum(2))
    if num_ranks > 1:
        straggler += (job.slow_factor - 1) * computing
    return StepParts(
        num_ranks=num_ranks,
        input_seconds=times["input"] * passes,
        forward_seconds=times["forward"] * passes,
        backward_seconds=backward * passes,
        exposed_seconds=exposed,
        optimizer_seconds=times["optimizer"],
        straggler_seconds=straggler + job.delay_seconds,
        crowding_seconds=_find_crowding(job, num_ranks, bubble),
        bubble_seconds=bubble,
        rest_seconds=job.residual_seconds if num_ranks > 1 else 0.0,
        communication_seconds=communication,
    )


def _find_crowding(job: ScaledJob, num_ranks: int, bubble: float) -> float:
    """What ranks wait for each other's cores, beyond what they would stand still in a pipeline anyway."""
    if job.network.cores is None:
        return 0.0
    per_node = min(job.network.ranks_per_node or num_ranks, num_ranks)
    return max(0.0, max(0.0, per_node / job.network.cores - 1) * job.core_seconds - bubble)


def _pass_mesh(job: ScaledJob, num_ranks: int, samples: float, factor: float) -> MeshPass:
    """One pass of layers that are split, stages, and units that are sharded."""
    crowded = replace(job, network=job.network.crowd(num_ranks))
    mesh, record = arrange(job.strategy, num_ranks), find_strategy(job.strategy)

    def time_phases(batch: float) -> dict[str, float]:
        return {name: factor * job.phases.get(name, PerSampleCost()).at(batch) for name in PHASES}

    def cost(kind: str, members: int, size: float) -> float:
        """Cores work for one piece of a message while another is on the wire: the slower of the two counts."""
        plain = job.cost(kind, members, size * job.compression)
        if kind == SEND or not size:
            return plain  # stages take turns
        return max(plain, crowded.cost(kind, members, 1.0))

    found = split_pass(mesh, samples, time_phases, job.splitting, cost, job.contention)
    if mesh.num_data_ranks == 1:
        return found
    units = job.units or (job.gradient_bytes / job.num_units,) * job.num_units
    split = mesh.tp * mesh.pp
    is_regathered = record.does_send("parameters", "backward")
    return shard_pass(
        mesh,
        found,
        tuple(size / split for size in units),
        cost,
        is_regathered=is_regathered,
        is_blocking=job.network.is_gloo,
    )


LEAST_FACTOR, CREDIBLE_FACTOR = 0.01, 0.5
"""Two ranks that compute in less than half of the time one rank says contradict it: caches do not explain that."""


def settle_on_two(job: ScaledJob, measured_seconds: float, batch_per_rank: float) -> ScaledJob:
    """The job as it takes what two ranks were measured to take; how well that is known is `job.known.pair`.

    Contention is tried first, from none to complete; what even that does not explain is the residual. Two ranks that
    needed less than without contention have faster messages, or else faster compute, than the inputs say.
    """
    found = _fit_pair(job, measured_seconds, batch_per_rank)
    if found.compute_factor < CREDIBLE_FACTOR:
        least = predict_step(replace(job, link_factor=LEAST_FACTOR), 2, batch_per_rank).seconds
        raise TooNoisy(
            f"this run is too noisy to predict from: 2 ranks took {format_seconds(measured_seconds)} per step, their"
            f" compute as measured on 1 rank takes {format_seconds(least)}; measure again with more --rounds"
        )
    drawn: tuple[Fitted, ...] = ()
    if job.known.pair:
        standard = _draw_table(job.known.freedom.get("pair", math.inf))[:, GROUPS.index("pair")]
        factors = np.exp(np.clip(job.known.pair * standard, -math.log(MOST_FACTOR), math.log(MOST_FACTOR)))
        drawn = tuple(_fit_pair(job, measured_seconds * float(factor), batch_per_rank) for factor in factors)
    return replace(job, **found._asdict(), drawn_fits=drawn)


def _fit_pair(job: ScaledJob, measured_seconds: float, batch_per_rank: float) -> Fitted:
    free = replace(job, **Fitted()._asdict())

    def miss(**values: float) -> float:
        return predict_step(replace(free, **values), 2, batch_per_rank).seconds - measured_seconds  # type: ignore[arg-type]

    def solve(name: str, low: float, **values: float) -> float:
        return float(optimize.brentq(lambda value: miss(**values, **{name: value}), low, 1.0, xtol=1e-6))

    if miss() < 0:
        beyond = -miss(contention=1.0)
        return Fitted(contention=1.0, residual_seconds=beyond) if beyond >= 0 else Fitted(solve("contention", 0.0))
    if miss(link_factor=LEAST_FACTOR) <= 0:
        return Fitted(link_factor=solve("link_factor", LEAST_FACTOR))
    least = {"link_factor": LEAST_FACTOR}
    if miss(**least, compute_factor=LEAST_FACTOR) <= 0:
        return Fitted(**least, compute_factor=solve("compute_factor", LEAST_FACTOR, **least))
    return Fitted(**least, compute_factor=LEAST_FACTOR)


NUM_DRAWS = 400
SEED = 20190417
GROUPS = ("compute", "latency", "bandwidth", "contention", "jitter", "residual", "pair")
MOST_FACTOR = 1e4
"""No drawn input is further from its value: the tails of Student's t with one degree of freedom have no end."""


@dataclass(frozen=True, kw_only=True)
class ScaledStep:
    """A job on `num_ranks` ranks."""

    num_ranks: int
    batch_per_rank: float
    parts: StepParts
    step: Prediction
    throughput: Prediction
    """Samples per second, of all ranks."""
    speedup: Prediction
    """Over one rank with the same global batch (strong), or in throughput (weak)."""
    efficiency: Prediction
    exposed: Prediction
    """The share of the step that is communication which no computing hides."""
    dominant: str
    """Which of `GROUPS` moves the step most."""
    shares: dict[str, float]
    """Of the step's variance, by group."""


def scale_out(job: ScaledJob, ranks: Sequence[int], *, batch: float, is_weak: bool) -> list[ScaledStep]:
    """The job on other numbers of ranks; `batch` is per rank where it is weak, and global where it is strong."""
    everything = [_draw(job, number, GROUPS) for number in range(NUM_DRAWS)]

    def divide(count: int) -> float:
        return (batch * count if is_weak else batch) / arrange(job.strategy, count).num_data_ranks

    return [_scale(job, everything, count, divide(count), batch, is_weak) for count in ranks]


def _scale(
    job: ScaledJob, everything: Sequence[ScaledJob], num_ranks: int, per_rank: float, batch: float, is_weak: bool
) -> ScaledStep:
    parts = predict_step(job, num_ranks, per_rank)
    drawn = [predict_step(found, num_ranks, per_rank) for found in everything]
    steps = [found.seconds for found in drawn]
    more = num_ranks if is_weak else 1
    speedups = [
        more * predict_step(found, 1, batch).seconds / step for found, step in zip(everything, steps, strict=True)
    ]
    speedup = enclose(more * predict_step(job, 1, batch).seconds / parts.seconds, speedups)
    step = enclose(parts.seconds, steps)
    exposed = enclose(parts.exposed_seconds / parts.seconds, [one.exposed_seconds / one.seconds for one in drawn])
    variances = {group: _find_variance(job, group, num_ranks, per_rank) for group in GROUPS}
    total = sum(variances.values()) or 1.0
    shares = {group: value / total for group, value in variances.items()}
    return ScaledStep(
        num_ranks=num_ranks,
        batch_per_rank=per_rank,
        parts=parts,
        step=step,
        throughput=step.map(lambda seconds: batch * more / seconds),
        speedup=speedup,
        efficiency=speedup.map(lambda value: value / num_ranks),
        exposed=exposed,
        dominant=max(shares, key=lambda group: shares[group]),
        shares=shares,
    )


def _find_variance(job: ScaledJob, group: str, num_ranks: int, per_rank: float) -> float:
    """Of the log of the step, if only one group of inputs is drawn."""
    drawn = (_draw(job, number, (group,)) for number in range(0, NUM_DRAWS, 4))
    return float(np.var([math.log(predict_step(one, num_ranks, per_rank).seconds) for one in drawn]))


@lru_cache(maxsize=32)
def _draw_table(freedom: float) -> Floats:
    """Standard draws, one row per number and one column per group: Student's t, or normal for infinite `freedom`."""
    normal = np.array(
        [np.random.default_rng((SEED, number)).standard_normal(len(GROUPS)) for number in range(NUM_DRAWS)]
    )
    return normal if math.isinf(freedom) else np.asarray(special.stdtrit(freedom, special.ndtr(normal)), np.float64)


def _find_factors(job: ScaledJob, number: int, groups: Sequence[str]) -> dict[str, float]:
    """By how much each input is off in one draw; 1 for groups that are not drawn."""
    reach = math.log(MOST_FACTOR)
    found = dict.fromkeys(GROUPS, 1.0)
    for place, group in enumerate(GROUPS):
        if group in groups:
            standard = float(_draw_table(job.known.freedom.get(group, math.inf))[number, place])
            found[group] = math.exp(max(-reach, min(reach, getattr(job.known, group) * standard)))
    return found


def _draw(job: ScaledJob, number: int, groups: Sequence[str]) -> ScaledJob:
    """The job with some of its inputs drawn anew; the same number gives the same draws."""
    factor = _find_factors(job, number, groups)
    links = {"latency": factor["latency"], "bandwidth": factor["bandwidth"]}
    network = replace(
        job.network,
        inside=job.network.inside.scale(**links),
        between=job.network.between.scale(**links) if job.network.between else None,
        byte_core_seconds=job.network.byte_core_seconds / factor["bandwidth"],
    )
    fit = Fitted(job.contention, job.residual_seconds, job.link_factor, job.compute_factor)
    if "pair" in groups and job.drawn_fits:
        fit = job.drawn_fits[number]
    return replace(
        job,
        phases={name: phase.scale(factor["compute"]) for name, phase in job.phases.items()},
        network=network,
        contention=min(1.0, fit.contention * factor["contention"]),
        jitter_ratio=job.jitter_ratio * factor["jitter"],
        residual_seconds=fit.residual_seconds * factor["residual"],
        link_factor=fit.link_factor,
        compute_factor=fit.compute_factor,
    )
