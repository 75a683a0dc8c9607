"""What the record of a strategy says: how ranks take part, what they send, hold and refuse; without torch.

The records themselves are in `records/strategies.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from scalelab.records.sending import Send

if TYPE_CHECKING:
    from scalelab.records.observations import Instrument

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
    averages_parameters: bool = False
    """Whether all parameters are copied into one tensor after the update, to be averaged."""


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
