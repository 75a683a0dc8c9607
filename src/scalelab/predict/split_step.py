"""What a mesh makes of a step: layers that are split, stages of a pipeline, and shards that are replicated.

    tensor parallel   compute / t + every all-reduce of activations, which nothing hides
    pipeline          (m + p − 1) · compute of a micro-batch / p, and the sends that a stage of 1F1B waits for: torch's
                      schedule exchanges activations for gradients before every forward and before every backward
                      (Huang et al. 2019; Narayanan et al. 2021); the optimizer has 1/p of the parameters. What the
                      schedule itself takes for a micro-batch comes as often: it does not shrink with samples or layers
    two-level shards  a unit is gathered and its gradients are scattered inside a group as by FSDP; this rank's piece of
                      them is then all-reduced between the groups (Zhao et al. 2023, hybrid sharding)

m is two micro-batches per stage, or one where the batch does not divide, as in `records/trial.py`. What splitting does
not divide (norms, embeddings, dispatch, a last stage with the logits) is in what two ranks take beyond the formula, and
is kept constant like every other rest: dispatch does not grow with ranks, undivided compute would, to twice as much.

Units have their real sizes where they were counted. Their compute is divided like their bytes, for want of better.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from scalelab.predict.network_model import FsdpUnit, overlap_units
from scalelab.records.settings import Spreading
from scalelab.records.strategies import arrange_ranks, find_strategy
from scalelab.records.strategy import Mesh

Collective = Callable[[str, int, float], float]
"""Seconds of a collective, by its kind, ranks and bytes."""


@dataclass(frozen=True, kw_only=True)
class PerSampleCost:
    """What grows with the samples of a rank: seconds of a phase, or bytes."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, batch: float) -> float:
        return self.fixed + self.per_sample * batch

    def scale(self, factor: float) -> PerSampleCost:
        return PerSampleCost(fixed=self.fixed * factor, per_sample=self.per_sample * factor)


def fit_line_by_batch(seconds: dict[float, float]) -> PerSampleCost:
    """A line through the times of one or two batches; of one batch, all of it is per sample. Neither is negative."""
    if len(seconds) == 1:
        ((batch, value),) = seconds.items()
        return PerSampleCost(per_sample=value / batch)
    (small, fast), (large, slow) = sorted(seconds.items())[:1] + sorted(seconds.items())[-1:]
    slope = max(0.0, (slow - fast) / (large - small))
    slope = min(slope, slow / large)
    return PerSampleCost(fixed=slow - slope * large, per_sample=slope)


def is_meshed(strategy: str) -> bool:
    """Whether ranks do more than average gradients: shards, split layers or stages."""
    record = find_strategy(strategy)
    return bool(record.axes) or record.does_send("parameters", "forward")


def arrange(strategy: str, num_ranks: int) -> Mesh:
    """The mesh of a strategy on so many ranks; without axes it shards, or replicates, over all of them."""
    record = find_strategy(strategy)
    if record.axes:
        return arrange_ranks(strategy, num_ranks, Spreading())
    return Mesh(**{"fsdp" if record.does_send("parameters", "forward") else "dp": num_ranks})


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """What ranks that share a sample send each other."""

    num_reductions: int = 0
    """All-reduces of activations and their gradients in one pass."""
    reduced_bytes: float = 0.0
    """Of one sample in all of them together."""
    hop_bytes: float = 0.0
    """Of one sample between two stages, one way."""
    slot_seconds: float = 0.0
    """What the schedule of a pipeline takes for forward and backward of one micro-batch, whatever is computed."""
    micro_batch: int | None = None
    """Samples of a micro-batch; None: two micro-batches per stage, or one."""


@dataclass(frozen=True, kw_only=True)
class MeshPass:
    """Forward, backward and update of one pass on a mesh."""

    forward: float
    backward: float
    optimizer: float
    bubble: float = 0.0
    exposed: float = 0.0
    communication: float = 0.0


def count_micro_batches(samples: float, stages: int, micro_batch: int | None) -> float:
    """As `Trial.num_micro_batches` has it."""
    if micro_batch:
        return max(1.0, samples / micro_batch)
    return 2.0 * stages if samples >= 2 * stages and samples % (2 * stages) == 0 else float(min(stages, samples))


def count_exchanges(stages: int, micro_batches: float) -> float:
    """How often a message lies on the longest path through 1F1B, if equal stages wait for each to arrive.

    An inner stage exchanges with both neighbours in every slot. Of two stages each has one neighbour.
    """
    slots = micro_batches + stages - 1
    return slots if stages == 2 else 2 * slots - 3


def count_reduced_bytes(strategy: str, samples: float, splitting: Splitting, gradient_bytes: float) -> float:
    """Bytes of the all-reduces of a pass on two ranks, or of messages that are as many: shards are gathered twice."""
    mesh = arrange(strategy, 2)
    if mesh.tp > 1:
        return splitting.reduced_bytes * samples
    if mesh.pp > 1:
        return splitting.hop_bytes * samples
    return gradient_bytes * (2 if mesh.fsdp > 1 else 1)


def find_slot_seconds(one_core: float, two_core: float, num_micro_batches: float) -> float:
    """Core time of a stage's micro-batch beyond its compute, from steps on one rank and on two stages."""
    return max(0.0, two_core - one_core / 2) / num_micro_batches


def split_pass(
    mesh: Mesh,
    samples: float,
    times: Callable[[float], dict[str, float]],
    splitting: Splitting,
    cost: Collective,
    contention: float = 0.0,
) -> MeshPass:
    """One pass through layers that are split and stages, before any shards; `times` gives the phases of one rank.

    `contention`: of the two messages that stages exchange; 0: at once, 1: one after the other.
    """
    share = 1 / (mesh.tp * mesh.pp)
    count = count_micro_batches(samples, mesh.pp, splitting.micro_batch) if mesh.pp > 1 else 1.0
    micro = samples / count
    alone = times(micro)
    found = MeshPass(
        forward=count * share * alone["forward"],
        backward=count * share * alone["backward"],
        optimizer=alone["optimizer"] * share,
    )
    if mesh.tp > 1 and splitting.num_reductions:
        per_call = splitting.reduced_bytes * micro / splitting.num_reductions
        reduced = count * splitting.num_reductions * cost("all_reduce", mesh.tp, per_call) / mesh.pp
        found = replace(found, exposed=reduced, communication=reduced)
    if mesh.pp > 1:
        found = replace(found, backward=found.backward + count * splitting.slot_seconds)
        one = (found.forward + found.backward + found.exposed) / count
        hop = (1 + contention) * cost("send", 2, splitting.hop_bytes * micro)
        sent = count_exchanges(mesh.pp, count) * hop
        found = replace(
            found,
            bubble=(mesh.pp - 1) * one,
            exposed=found.exposed + sent,
            communication=found.communication + sent,
        )
    return found


def shard_pass(
    mesh: Mesh,
    found: MeshPass,
    units: tuple[float, ...],
    cost: Collective,
    *,
    is_regathered: bool,
    is_blocking: bool = False,
) -> MeshPass:
    """The pass with its units gathered and scattered inside a group, and all-reduced between groups.

    `is_blocking`: a rank computes nothing while it sends, as with gloo.
    """
    total = math.fsum(units)

    def scatter(size: float) -> float:
        return cost("reduce_scatter", mesh.fsdp, size) + cost("all_reduce", mesh.dp, size / mesh.fsdp)

    ahead, back = overlap_units(
        [FsdpUnit(found.forward * size / total, found.backward * size / total, size) for size in units],
        lambda size: cost("all_gather", mesh.fsdp, size),
        scatter,
        is_regathered=is_regathered,
    )
    sent = ahead.communication_seconds + back.communication_seconds
    exposed = sent if is_blocking else ahead.exposed_seconds + back.exposed_seconds
    return replace(found, exposed=found.exposed + exposed, communication=found.communication + sent)
