"""What the record of a strategy says: how ranks take part, what they send, hold and refuse; without torch.

The records themselves are in `records/strategies.py`. How ranks are arranged is a mesh, one axis per kind of
parallelism:

    pp     pipeline stages: each holds some of the layers
    dp     replicas: each has its own samples, gradients are averaged
    fsdp   shards of parameters, gradients and optimizer state; each has its own samples
    ep     experts of a mixture-of-experts model; each has its own samples
    cp     positions of every sequence; all have the same samples
    tp     pieces of every layer's matrices; all have the same samples

Axes are ordered from the outside in, so neighbouring ranks share the axis that communicates most: rank r of a mesh
pp × dp × fsdp × ep × cp × tp has the coordinates of r in mixed radix (as `init_device_mesh` of torch numbers them). A
data rank is a rank's place among those with different samples: dp × fsdp × ep of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from scalelab.errors import UsageError

if TYPE_CHECKING:
    from scalelab.records.observations import Instrument

Phase = Literal["input", "forward", "backward", "optimizer"]
"""Of a step."""
EXAMPLE = "dp=2,tp=2"
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2, "zbv": 2}
"""By the schedule of a pipeline."""
IN_ROUNDS = ("interleaved", "zero-bubble")
"""Schedules that take micro-batches in rounds of as many as there are ranks."""
SPLITS_BACKWARD = ("zero-bubble", "zbv")
"""Schedules that compute the gradients of weights apart from those of activations."""


def list_stages(schedule: str, place: int, num_ranks: int) -> list[int]:
    """The stages of one rank of a pipeline: every so many, or with zbv down the ranks and up again (a V)."""
    if schedule == "zbv":
        return [place, 2 * num_ranks - 1 - place]
    return [place + chunk * num_ranks for chunk in range(STAGES_PER_RANK[schedule])]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The size of every axis, outermost first."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def axes(self) -> tuple[str, ...]:
        """Those with more than one rank."""
        return tuple(axis for axis, size in self.sizes.items() if size > 1)

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def num_data_ranks(self) -> int:
        """Ranks with their own samples."""
        return self.dp * self.fsdp * self.ep

    @property
    def text(self) -> str:
        """As --mesh takes it."""
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "dp=1"

    def locate(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on every axis."""
        found = {}
        for axis, size in reversed(self.sizes.items()):
            rank, found[axis] = divmod(rank, size)
        return found

    def find_data_rank(self, rank: int) -> int:
        place = self.locate(rank)
        return (place["dp"] * self.fsdp + place["fsdp"]) * self.ep + place["ep"]


AXES = tuple(field.name for field in fields(Mesh))


def parse_mesh(text: str) -> Mesh:
    """The mesh of a text such as dp=2,tp=2; axes may be given in any order."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if axis not in AXES:
            raise UsageError(f"--mesh {text}: unknown axis {axis!r}; the axes are {', '.join(AXES)}, as in {EXAMPLE}")
        if axis in sizes:
            raise UsageError(f"--mesh {text} names {axis} twice: give each axis once")
        if not size.isascii() or not size.isdigit() or int(size) < 1:
            raise UsageError(f"--mesh {text}: the size of {axis} must be a whole number ≥ 1, got {size!r}")
        sizes[axis] = int(size)
    return Mesh(**sizes)


def list_meshes(num_ranks: int, axes: tuple[str, ...] = AXES) -> Iterator[Mesh]:
    """Every mesh of so many ranks over these axes."""
    if not axes:
        if num_ranks == 1:
            yield Mesh()
        return
    for size in range(1, num_ranks + 1):
        if num_ranks % size == 0:
            for rest in list_meshes(num_ranks // size, axes[1:]):
                yield Mesh(**rest.sizes | {axes[0]: size})


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
    def bubble(self) -> float | None:
        """The idle share by theory, with p ranks, m micro-batches and v stages per rank: (p − 1)/(v·m + p − 1).

        Of stages that all take as long and messages that take no time (Huang et al. 2019; Narayanan et al. 2021 for v).
        None for zero-bubble and zbv: it depends on how long the gradients of weights take (Qi et al. 2023).
        """
        if self.schedule in ("zero-bubble", "zbv"):
            return None
        waiting = self.num_ranks - 1
        return waiting / (self.stages_per_rank * self.num_micro_batches + waiting)


StatePart = Literal["parameters", "gradients", "optimizer"]


@dataclass(frozen=True, kw_only=True)
class MemoryRules:
    """What a strategy allocates and releases in a step; `analysis/memory_sharding.py` applies the rules."""

    has_buckets: bool = False
    """Whether communication buckets as large as all gradients are there all the time."""
    forward: Literal["", "gather", "arrive"] = ""
    forward_end: Literal["", "give_back"] = ""
    backward: Literal["", "gather_ahead", "arrive_ahead"] = ""
    gradients: Literal["", "copy_to_buckets", "reduce", "join", "send"] = ""
    """What happens when a unit's forward begins and ends, its backward begins, and its last gradient is there."""
    releases_gradients_in: Literal["input", "optimizer"] = "input"
    """The phase that ends with the strategy's own gradients released."""
    updates_whole_parameters: bool = False
    """Whether a rank updates some parameters whole, and not its piece of each."""
    cuts_rows: bool = False
    """Whether every parameter is cut along its first dimension: the first ranks have a row more, or the only ones."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A field of `StepShape`, or `dtype`, that the strategy cannot be combined with unless it is as by default."""

    field: str
    reason: str
    instead: str
    only_emulated: bool = False
    """Whether only the emulation on a CPU refuses it."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How training is distributed."""

    name: str
    description: str
    apply: str
    """The function that prepares the model, as module:function: `(model, device, trial) -> model`."""
    ranks: Literal["one", "threads", "processes"] = "processes"
    """Whether it runs on one rank only, as replicas in the threads of one process, or as one process per rank."""
    optimizer: str = ""
    """The function that makes the optimizer, as module:function: `(make, model, trial) -> optimizer`; empty: `make`."""
    loss: str = ""
    """The function that adapts the loss, as module:function: `(loss, model) -> loss`; empty: as it is."""
    options: tuple[str, ...] = ()
    """The fields of `Spreading` that it takes."""
    shards: tuple[StatePart, ...] = ()
    """What every rank has only its share of."""
    sends: tuple[Send, ...] = ()
    memory: MemoryRules | None = None
    """None: memory can be neither forecast nor recorded by category."""
    instruments: tuple[Instrument, ...] = ()
    """Those that only some strategies have."""
    can_skip_communication: bool = False
    """Whether a step without any communication can be taken, to time what communication adds."""
    wraps_blocks: bool = False
    """Whether every block of the model is a unit of its own: it is compiled alone, and its gradients lie together."""
    rebuilds_buckets: bool = False
    """Whether gradients are put into other buckets after the first step."""
    needs_gpus: bool = False
    """Whether torch has it on GPUs only; on a CPU its algorithm is emulated."""
    not_on_cpu: str = ""
    """Why a CPU cannot run it; empty: it can."""
    on_one_rank: str = ""
    """The strategy that it becomes on one rank; empty: itself."""
    refuses: tuple[Refusal, ...] = ()
    axes: tuple[str, ...] = ()
    """The axes that its mesh may have, its own last; empty: it has no mesh."""
    has_phases: bool = True
    """Whether a step has a forward and a backward one after the other, to be timed apart."""
    has_equal_replicas: bool = True
    """Whether ranks that hold the same parameters hold the same values after every step."""
    keeps_gradients: bool = False
    """Whether it has gradients to itself, so that they can be neither accumulated nor clipped."""
    library: str = ""
    """The package that does it, which is an extra of ours by the same name and keeps state that a checkpoint would not
    hold; empty: torch."""

    @property
    def splits_model(self) -> bool:
        """Whether ranks hold different parts of the model, and not just pieces of its state."""
        return bool({"tp", "pp", "ep"} & set(self.axes))

    @property
    def is_plain(self) -> bool:
        """Whether it is the plain loop, without anything to distribute."""
        return self.ranks == "one"

    @property
    def has_replicas(self) -> bool:
        """Whether its ranks are replicas in one process."""
        return self.ranks == "threads"

    @property
    def has_processes(self) -> bool:
        """Whether every rank is a process and belongs to a process group."""
        return self.ranks == "processes"

    def count_shards(self, part: StatePart, num_ranks: int) -> int:
        """Into how many pieces a part of the training state is cut."""
        return num_ranks if part in self.shards else 1

    def count_ranks(self, num_ranks: int) -> int:
        """The ranks it runs on where the others run on so many."""
        return 1 if self.is_plain else num_ranks

    def name_on(self, num_ranks: int) -> str:
        return self.name if self.is_plain else f"{self.name} × {num_ranks}"

    def does_send(self, purpose: str, phase: str) -> bool:
        return any((send.purpose, send.phase) == (purpose, phase) for send in self.sends)
