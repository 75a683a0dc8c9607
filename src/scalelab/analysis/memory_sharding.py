"""From the memory of a plain step to that of the same step under DDP or FSDP, by rules.

A plain step is known as a list of the allocator's calls, with marks where the forward of every unit (a block, or the
rest of the model) begins and ends, where its backward begins, and where its last gradient is there. The rules say what
a strategy adds and takes away at these marks, for a unit of U bytes on N ranks:

    ddp         buckets as large as all gradients, all the time; with `gradient_as_bucket_view` the gradients
                themselves lie there
    fsdp-full   forward: U is gathered, and given back at its end; backward: U is gathered again, and already the unit
                that comes next; when its gradients are there they are joined (U), reduced to a piece (U/N), and
                everything but the piece is released
    fsdp-grad-op   the same, but U stays from forward to backward
    fsdp-none   gradients are joined (U) and stay whole
    local-sgd   as ddp; parameters are averaged where they lie
    fsdp2       as fsdp-full; what arrives (U) is copied out (U), and in forward the arrived is released only when the
                next unit has been; what was sent is released when the next unit's gradients are there

The last unit to be used in forward, the rest of the model, is needed first in backward and is not given back between.
Parameters and optimizer are N-ths. FSDP keeps its pieces of gradients until the next forward, whatever `zero_grad`
says; fsdp2 does not. On a CPU gloo takes a further U while it gathers and while it reduces; NCCL does not.

Sources: Zhao et al. 2023, "PyTorch FSDP" (section 4); Li et al. 2020, "PyTorch Distributed"; torch's own code for the
order of calls (`torch/distributed/fsdp`), against which the rules are measured (benchmarks/memory.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from scalelab.analysis.memory import MemoryEvent, PhaseMark
from scalelab.records.strategies import ALL_PARTS
from scalelab.records.strategy import MemoryRules, Mesh, StatePart, Strategy

Moment = Literal["forward", "forward_end", "backward", "gradients"]


@dataclass(frozen=True, kw_only=True)
class UnitMark:
    """A moment in the life of a unit."""

    position: int
    unit: int
    """0 is the rest of the model, which contains the others."""
    moment: Moment
    gradients: tuple[int, ...] = ()
    """Addresses of its gradients, when all are there."""


class MemoryRecording(NamedTuple):
    """A plain step, or two."""

    events: list[MemoryEvent]
    marks: list[PhaseMark | UnitMark]
    """In the order in which they were made."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the step is distributed."""

    strategy: Strategy
    num_ranks: int
    unit_bytes: tuple[int, ...]
    """Parameters of every unit."""
    gradient_bytes: int
    """Of all parameters that are trained."""
    has_scratch: bool = False
    """Whether collectives take memory for themselves (gloo)."""
    gradients_in_buckets: bool = False
    """ddp: `gradient_as_bucket_view`."""

    @property
    def rules(self) -> MemoryRules:
        return self.strategy.memory or MemoryRules()

    largest_share: float | None = None
    """Of the parameters, on the rank that has the most, where they are not cut into equal pieces; None: equal ones."""

    def cut(self, part: StatePart, num_bytes: int) -> int:
        """A rank's share of a part of the training state."""
        num_shards = self.strategy.count_shards(part, self.num_ranks)
        is_whole = part == "optimizer" and self.rules.updates_whole_parameters
        if self.largest_share is not None and (is_whole or (self.rules.cuts_rows and num_shards > 1)):
            return math.ceil(num_bytes * self.largest_share)
        return -(-num_bytes // num_shards)


def adapt_to_mesh(strategy: Strategy, mesh: Mesh) -> Strategy:
    """The strategy with the rules of its data axes: nothing is gathered from shards of one rank, nor added by none."""
    if not strategy.axes or strategy.memory is None:
        return strategy
    if mesh.num_data_ranks == 1:
        return replace(strategy, memory=MemoryRules(), shards=())
    rules = strategy.memory if mesh.fsdp > 1 else replace(strategy.memory, forward="", forward_end="", backward="")
    return replace(strategy, memory=rules, shards=ALL_PARTS)


def find_largest_share(sizes: Sequence[int], num_ranks: int) -> float:
    """What the fullest rank has of whole parameters: each, by falling size, goes to the rank with the least so far.

    As torch's `ZeroRedundancyOptimizer` partitions them.
    """
    held = [0] * num_ranks
    for size in sorted(sizes, reverse=True):
        held[held.index(min(held))] += size
    return max(held) / sum(held) if sum(held) else 1.0


def find_row_share(sizes: Sequence[tuple[int, int]], num_ranks: int) -> float:
    """What the first rank has of parameters that are cut along their first dimension, given as rows and bytes.

    As torch's `fully_shard` cuts them: four experts on eight ranks are one on each of the first four, not half of one.
    """
    held = sum(-(-rows // num_ranks) * num_bytes / max(1, rows) for rows, num_bytes in sizes)
    return held / sum(num_bytes for _, num_bytes in sizes) if sizes else 1.0


def shard_standing(standing: Mapping[str, int], sharding: Sharding) -> dict[str, int]:
    """What is there all the time, of this rank."""
    kept = dict(standing)
    kept["parameters"] = sharding.cut("parameters", standing.get("parameters", 0))
    kept["optimizer"] = sharding.cut("optimizer", standing.get("optimizer", 0))
    if sharding.rules.has_buckets:
        kept["buckets"] = sharding.gradient_bytes
    return kept


def shard_recording(recording: MemoryRecording, sharding: Sharding) -> tuple[list[MemoryEvent], list[PhaseMark]]:
    """The calls and the marks of the same step under the strategy."""
    return _Replay(recording, sharding).run()


def drop_early_gradients(marks: Sequence[PhaseMark | UnitMark]) -> list[PhaseMark | UnitMark]:
    """The marks, with only the last arrival of a unit's gradients in every step: earlier passes only accumulate."""
    kept: list[PhaseMark | UnitMark] = []
    seen: set[int] = set()
    for mark in reversed(marks):
        if isinstance(mark, PhaseMark):
            if mark.phase == "optimizer":
                seen.clear()
        elif mark.moment == "gradients":
            if mark.unit in seen:
                continue
            seen.add(mark.unit)
        kept.append(mark)
    return kept[::-1]


@dataclass
class _Replay:
    """Goes through a plain recording and writes the distributed one."""

    recording: MemoryRecording
    sharding: Sharding
    events: list[MemoryEvent] = field(default_factory=list)
    marks: list[PhaseMark] = field(default_factory=list)
    held: dict[tuple[str, int], MemoryEvent] = field(default_factory=dict)
    """What the strategy has allocated and not released, by purpose and unit."""
    order: list[int] = field(default_factory=list)
    """Units in the order in which their forward ended."""
    kept: set[int] | None = None
    num_made: int = 0
    phase: str = "input"
    now: float = 0.0

    def run(self) -> tuple[list[MemoryEvent], list[PhaseMark]]:
        waiting = drop_early_gradients(self.recording.marks)
        for number, event in enumerate(self.recording.events):
            while waiting and waiting[0].position <= number:
                self._pass(waiting.pop(0))
            self.now = event.seconds
            self.events.append(self._cut(event))
        for mark in waiting:
            self._pass(mark)
        return self.events, self.marks

    def _cut(self, event: MemoryEvent) -> MemoryEvent:
        """What an optimizer allocates goes with the parameters that it updates."""
        if self.phase != "optimizer" or event.num_bytes < 0:
            return event
        if self.sharding.rules.updates_whole_parameters and event.address not in self._find_kept():
            return event
        return event._replace(num_bytes=self.sharding.cut("optimizer", event.num_bytes))

    def _find_kept(self) -> set[int]:
        """Where the optimizer's state lies; what else it allocates is gone after one parameter."""
        if self.kept is None:
            named = [mark.named for mark in self.recording.marks if isinstance(mark, PhaseMark)]
            self.kept = {at for names in named for at, category in names.items() if category == "optimizer"}
        return self.kept

    def _pass(self, mark: PhaseMark | UnitMark) -> None:
        if isinstance(mark, UnitMark):
            action = getattr(self.sharding.rules, mark.moment)
            if action:
                _ACTIONS[action](self, mark)
            if mark.moment == "forward_end":
                self.order = [unit for unit in self.order if unit != mark.unit] + [mark.unit]
            return
        self._end_phase(mark.phase)
        pieces = {made.address: "gradients" for (purpose, _), made in self.held.items() if purpose == "piece"}
        self.marks.append(replace(mark, position=len(self.events), named={**mark.named, **pieces}))

    def _end_phase(self, phase: str) -> None:
        """What a strategy releases at the end of a phase, and which phase comes next."""
        following = {"input": "forward", "forward": "backward", "backward": "optimizer", "optimizer": "input"}
        self.phase = following.get(phase, self.phase)
        for purpose, unit in list(self.held):
            is_over = purpose == "piece" and phase == self.sharding.rules.releases_gradients_in
            is_sent = purpose in ("sent", "arrived") and phase in ("forward", "backward")
            if is_over or is_sent:
                self._release(purpose, unit)

    def _make(self, purpose: str, unit: int, num_bytes: int, *, is_exchange: bool = True) -> None:
        if (purpose, unit) not in self.held and num_bytes:
            self.num_made += 1
            made = MemoryEvent(self.now, num_bytes, -self.num_made, is_exchange)
            self.held[purpose, unit] = made
            self.events.append(made)

    def _release(self, purpose: str, unit: int) -> None:
        made = self.held.pop((purpose, unit), None)
        if made is not None:
            self.events.append(MemoryEvent(self.now, -made.num_bytes, made.address, made.is_exchange))

    def _release_gradients(self, mark: UnitMark) -> None:
        self.events += [MemoryEvent(self.now, -1, address) for address in mark.gradients]

    def _communicate(self, unit: int) -> None:
        """What a collective takes for itself, while it runs."""
        if self.sharding.has_scratch:
            self._make("scratch", unit, self._size(unit))
            self._release("scratch", unit)

    def _size(self, unit: int) -> int:
        return self.sharding.unit_bytes[unit]

    def _find_next(self, unit: int) -> int | None:
        """The unit whose backward comes after this one's."""
        place = self.order.index(unit) if unit in self.order else 0
        return self.order[place - 1] if place else None

    def gather(self, mark: UnitMark) -> None:
        self._gather_unit(mark.unit)

    def _gather_unit(self, unit: int) -> None:
        if ("whole", unit) not in self.held:
            self._make("whole", unit, self._size(unit))
            self._communicate(unit)

    def give_back(self, mark: UnitMark) -> None:
        if mark.unit:
            self._release("whole", mark.unit)

    def gather_ahead(self, mark: UnitMark) -> None:
        self._gather_unit(mark.unit)
        following = self._find_next(mark.unit)
        if following is not None:
            self._gather_unit(following)

    def reduce(self, mark: UnitMark) -> None:
        """Gradients are joined, and reduced to this rank's piece."""
        size = self._size(mark.unit) if mark.gradients else 0
        self._make("joined", mark.unit, size, is_exchange=False)
        self._release_gradients(mark)
        self._release("whole", mark.unit)
        self._make("piece", mark.unit, self.sharding.cut("gradients", size))
        self._communicate(mark.unit)
        self._release("joined", mark.unit)

    def join(self, mark: UnitMark) -> None:
        """Gradients are joined and stay."""
        self._make("piece", mark.unit, self._size(mark.unit) if mark.gradients else 0)
        self._release_gradients(mark)

    def copy_to_buckets(self, mark: UnitMark) -> None:
        if self.sharding.gradients_in_buckets:
            self._release_gradients(mark)

    def arrive(self, mark: UnitMark) -> None:
        """fsdp2: what was gathered is copied out; what arrived before is released then."""
        earlier = [unit for purpose, unit in self.held if purpose == "arrived" and unit != mark.unit]
        if ("whole", mark.unit) in self.held:
            return
        self._receive(mark.unit)
        self._make("whole", mark.unit, self._size(mark.unit))
        for unit in earlier:
            self._release("arrived", unit)

    def arrive_ahead(self, mark: UnitMark) -> None:
        if ("whole", mark.unit) not in self.held:
            self._receive(mark.unit)
            self._make("whole", mark.unit, self._size(mark.unit))
        self._release("arrived", mark.unit)
        following = self._find_next(mark.unit)
        if following is not None and ("whole", following) not in self.held:
            self._receive(following)

    def _receive(self, unit: int) -> None:
        if ("arrived", unit) not in self.held:
            self._make("arrived", unit, self._size(unit))
            self._communicate(unit)

    def send(self, mark: UnitMark) -> None:
        """fsdp2: gradients are copied into what is sent, which is released when the next unit's are there."""
        size = self._size(mark.unit) if mark.gradients else 0
        self._release("whole", mark.unit)
        for purpose, unit in list(self.held):
            if purpose == "sent":
                self._release("sent", unit)
        self._make("sent", mark.unit, size)
        self._release_gradients(mark)
        self._make("piece", mark.unit, self.sharding.cut("gradients", size))
        self._communicate(mark.unit)


Action = Callable[[_Replay, UnitMark], None]

_ACTIONS: dict[str, Action] = {
    "gather": _Replay.gather,
    "gather_ahead": _Replay.gather_ahead,
    "give_back": _Replay.give_back,
    "reduce": _Replay.reduce,
    "join": _Replay.join,
    "copy_to_buckets": _Replay.copy_to_buckets,
    "arrive": _Replay.arrive,
    "arrive_ahead": _Replay.arrive_ahead,
    "send": _Replay.send,
}
"""By the names that the records of strategies use."""
