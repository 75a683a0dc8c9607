"""A job on other numbers of ranks, with an interval and with what dominates it.

Inputs are drawn 400 times from log-normal distributions around what is known, all together for the interval, then one
group at a time: the group whose own draws move the step most is the one that is worth measuring better. The draws are
the same in every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scalelab.predict.job import ScaledJob, StepParts, predict_step
from scalelab.predict.prediction import Prediction, enclose

NUM_DRAWS = 400
SEED = 20190417
GROUPS = ("compute", "latency", "bandwidth", "contention", "jitter", "residual")
GROUP_WORDS = {
    "compute": "the computing of one rank",
    "latency": "the latency of the link",
    "bandwidth": "the bandwidth of the link",
    "contention": "how much communication slows computing",
    "jitter": "how much ranks differ from step to step",
    "residual": "what two ranks took beyond the model",
}


@dataclass(frozen=True, kw_only=True)
class ScaledStep:
    """A job on so many ranks."""

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
    return [_scale(job, count, batch if is_weak else batch / count, batch, is_weak) for count in ranks]


def _scale(job: ScaledJob, num_ranks: int, per_rank: float, batch: float, is_weak: bool) -> ScaledStep:
    parts = predict_step(job, num_ranks, per_rank)
    everything = [_draw(job, number, GROUPS) for number in range(NUM_DRAWS)]
    drawn = [predict_step(found, num_ranks, per_rank) for found in everything]
    steps = [found.seconds for found in drawn]
    more = num_ranks if is_weak else 1
    speedups = [
        more * predict_step(found, 1, batch).seconds / step for found, step in zip(everything, steps, strict=True)
    ]
    speedup = enclose(more * predict_step(job, 1, batch).seconds / parts.seconds, speedups)
    step = enclose(parts.seconds, steps)
    exposed = enclose(parts.exposed_seconds / parts.seconds, [one.exposed_seconds / one.seconds for one in drawn])
    variances = {
        group: float(
            np.var([predict_step(_draw(job, n, (group,)), num_ranks, per_rank).seconds for n in range(0, NUM_DRAWS, 4)])
        )
        for group in GROUPS
    }
    total = sum(variances.values()) or 1.0
    shares = {group: value / total for group, value in variances.items()}
    return ScaledStep(
        num_ranks=num_ranks,
        batch_per_rank=per_rank,
        parts=parts,
        step=step,
        throughput=step.map(lambda seconds: per_rank * num_ranks / seconds),
        speedup=speedup,
        efficiency=speedup.map(lambda value: value / num_ranks),
        exposed=exposed,
        dominant=max(shares, key=lambda group: shares[group]),
        shares=shares,
    )


def _draw(job: ScaledJob, number: int, groups: Sequence[str]) -> ScaledJob:
    """The job with some of its inputs drawn anew; the same number gives the same draws."""
    normal = dict(zip(GROUPS, np.random.default_rng((SEED, number)).standard_normal(len(GROUPS)), strict=True))
    factor = {
        group: float(np.exp(getattr(job.known, group) * normal[group])) if group in groups else 1.0 for group in GROUPS
    }
    network = job.network
    links = {"latency": factor["latency"], "bandwidth": factor["bandwidth"]}
    network = replace(
        network,
        inside=network.inside.scale(**links),
        between=network.between.scale(**links) if network.between else None,
        byte_core_seconds=network.byte_core_seconds / factor["bandwidth"],
    )
    return replace(
        job,
        phases={name: phase.scale(factor["compute"]) for name, phase in job.phases.items()},
        network=network,
        contention=min(1.0, job.contention * factor["contention"]),
        jitter_ratio=job.jitter_ratio * factor["jitter"],
        residual_seconds=job.residual_seconds * factor["residual"],
    )
