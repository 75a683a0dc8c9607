"""The steps of a trial: their plan, their kinds, and what is measured in each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from scalelab.checks import check_at_least


class StepKind(StrEnum):
    """How a step is instrumented."""

    CLEAN = "clean"
    """Not at all: one clock reading before and one after."""
    PHASES = "phases"
    """A clock reading after input, forward, backward and optimizer."""
    COMM_FREE = "comm_free"
    """No gradient all-reduce (`no_sync`); the training state is restored afterwards."""
    PROFILED = "profiled"
    """torch's profiler."""
    SETTLE = "settle"
    """An ordinary step after a change of kind, recorded but not used."""


class Block(NamedTuple):
    """Consecutive steps of one kind."""

    kind: StepKind
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Which steps one launch runs: a lead-in of clean steps, then blocks of all kinds, interleaved.

    The counts are totals per launch; `cycles` says over how many turns they are spread. The profiled steps are one
    block, so that they make one trace, and the last: for a few steps after it the rank is slower.
    """

    lead_in_steps: int = 10
    clean_steps: int = 20
    phase_steps: int = 4
    comm_free_steps: int = 4
    profiled_steps: int = 0
    cycles: int = 2

    def __post_init__(self) -> None:
        for name in ("lead_in_steps", "phase_steps", "comm_free_steps", "profiled_steps"):
            check_at_least(name, getattr(self, name), 0)
        check_at_least("clean_steps", self.clean_steps, 1)
        check_at_least("cycles", self.cycles, 1)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks in the order in which they run."""
        found = [Block(StepKind.CLEAN, self.lead_in_steps)]
        for cycle in range(self.cycles):
            found.append(Block(StepKind.CLEAN, _share(self.clean_steps, self.cycles, cycle)))
            found.append(Block(StepKind.PHASES, _share(self.phase_steps, self.cycles, cycle)))
            comm_free = _share(self.comm_free_steps, self.cycles, cycle)
            if comm_free:
                found += [Block(StepKind.COMM_FREE, comm_free), Block(StepKind.SETTLE, 1)]
        found.append(Block(StepKind.PROFILED, self.profiled_steps))
        return tuple(block for block in found if block.num_steps)

    @property
    def num_steps(self) -> int:
        """All steps of one launch, of every kind."""
        return sum(block.num_steps for block in self.blocks)


def _share(total: int, parts: int, index: int) -> int:
    """The size of part `index` when `total` steps are divided over `parts` turns."""
    return total // parts + (1 if index < total % parts else 0)


class StepSample(NamedTuple):
    """One step of one rank. A phase that was not timed is None."""

    rank: int
    step: int
    """From 0, in the order of the launch, over all kinds."""
    kind: StepKind
    start_seconds: float
    """On the host's monotonic clock, so ranks of one host can be compared."""
    step_seconds: float
    input_seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    optimizer_seconds: float | None = None
    loss: float | None = None
    ready_seconds: float | None = None
    """From the start of the step until this rank computed its last gradient, without any waiting after it."""
    input_stall_seconds: float | None = None
    """Time in the phase when the rank was runnable but its core ran something else."""
    forward_stall_seconds: float | None = None
    ready_stall_seconds: float | None = None
    """The same from the start of the step until the last gradient."""
    optimizer_stall_seconds: float | None = None


PHASES = ("input", "forward", "backward", "optimizer")
"""The phases of a step, in order; `StepSample` has one `…_seconds` field for each."""
