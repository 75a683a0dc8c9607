"""What a rank sends in a step, what that follows from, and how long a stage of a pipeline stands still."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

from scalelab.records.settings import Phase

Sized = Literal[
    "gradients", "buffers", "units", "inner_units", "root_unit", "regathered", "unit_shards", "parameters",
    "reductions", "input_reductions", "gathers", "input_gathers", "scatters", "input_scatters", "norms", "hops", "tied",
    "experts", "exchanges", "averages", "attended", "attended_gradients",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Send:
    """Collectives that a strategy starts in every step; `analysis/traffic.py` gives their bytes."""

    kind: str
    purpose: str
    phase: Phase
    size: Sized
    """All gradients, all buffers, every unit (the blocks of the model and its root), every unit but the root, the
    root, blocks that the micro-batches of a pipeline gather again, a rank's shard of every unit, all parameters; the
    activations that a plan reduces, or gathers and scatters, gradients of norms that see pieces of sequences; those
    that leave a stage, tied weights; a rank's experts, the tokens that are sent to experts, the parameters that
    replicas average; keys and values that attention needs of other ranks' positions, and their gradients."""
    option: str = ""
    """The field of `Spreading` that turns them off; empty: they are always sent."""
    axis: str = ""
    """The axis of the mesh whose ranks take part; empty: all ranks."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One kind of collective operation that a rank takes part in during a step."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, broadcast …"""
    count: int
    """Calls in one step."""
    payload_bytes: int | None
    """Of the whole tensors of all calls together: what an all-gather gives and what a reduce-scatter takes, not one
    rank's piece of it; None if it was not recorded."""
    purpose: str = ""
    """gradients, parameters, buffers, batch norm …; empty: unknown."""
    phase: str = ""
    """The phase of the step that it was started in; empty: unknown."""
    axis: str = ""
    """The axis of the mesh whose ranks take part; empty: all ranks."""


@dataclass(frozen=True, kw_only=True)
class MessageBasis:
    """What the messages of a step follow from: sizes of one rank's model, read off before the step."""

    gradient_bytes: int
    """Of all parameters that get a gradient, whole."""
    num_gradients: int
    """The numbers in them."""
    buffer_bytes: int = 0
    unit_bytes: tuple[int, ...] = ()
    """Of each sharded unit, the root first, filled up so that ranks get equal pieces; empty: nothing is sharded."""
    regathered_bytes: int = 0
    """Pipeline: of sharded blocks, gathered once more for every micro-batch."""
    shard_bytes: tuple[int, ...] = ()
    """Of this rank's shard of each unit, where a mesh replicates them; empty: it does not."""
    norm_channels: tuple[int, ...] = ()
    """Of each synchronized batch norm."""
    clip_bytes: int = 0
    """Of the norm of sharded gradients, which ranks add up to clip them; 0: they do not."""
    reduced_bytes: tuple[int, int] = (0, 0)
    """Tensor parallelism: activations all-reduced in forward, and their gradients in backward."""
    gathered_bytes: tuple[int, int] = (0, 0)
    """Sequence parallelism: activations gathered in forward, and their gradients in backward."""
    scattered_bytes: tuple[int, int] = (0, 0)
    """The same of reduce-scatters."""
    norm_bytes: int = 0
    """Sequence parallelism: gradients of norms, to which every rank has added its piece of the sequences."""
    hop_bytes: int = 0
    """Pipeline: activations and gradients that this rank sends to other stages."""
    tied_bytes: int = 0
    """Pipeline: of the weights that its first and last stage share."""
    expert_bytes: int = 0
    """Expert parallelism: gradients of this rank's experts, where a mesh replicates them."""
    exchanged_bytes: int = 0
    """Expert parallelism: what this rank sends to experts and their results, in forward; as much again in backward."""
    attended_bytes: tuple[int, int] = (0, 0)
    """Context parallelism: keys and values of whole sequences, and their gradients as rings pass them."""
    averaged_bytes: int = 0
    """Local SGD: of the parameters that replicas average."""
    is_complete: bool = True
    """Whether all bytes follow from these sizes: not those of a plan of the user's own, or of activations that are
    computed twice."""


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """How long this rank's schedule took and how long it computed in it, one number for each watched step."""

    schedule_seconds: tuple[float, ...]
    busy_seconds: tuple[float, ...]
    """Of forward and backward of its micro-batches; the rest is waiting for other stages, and sending."""
    num_ranks: int
    num_micro_batches: int
    stages_per_rank: int = 1
    schedule: str = ""
    """Empty: before 0.2 had a schedule that fills the bubble."""

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """The share of the schedule in which the rank did not compute, of each watched step."""
        pairs = zip(self.busy_seconds, self.schedule_seconds, strict=True)
        return tuple(max(0.0, 1 - busy / total) for busy, total in pairs if total > 0)

    @property
    def idle_share(self) -> float | None:
        """The median over steps; None: not watched."""
        return statistics.median(self.idle_shares) if self.idle_shares else None

    @property
    def bubble(self) -> float | None:
        """The idle share by theory, with p ranks, m micro-batches and v stages per rank: (p − 1)/(v·m + p − 1).

        Of stages that all take as long and messages that take no time (Huang et al. 2019; Narayanan et al. 2021 for v).
        None for zero-bubble and zbv: it depends on how long the gradients of weights take (Qi et al. 2023).
        """
        if self.schedule in ("zero-bubble", "zbv"):
            return None
        waiting = self.num_ranks - 1
        return waiting / (self.stages_per_rank * self.num_micro_batches + waiting)
