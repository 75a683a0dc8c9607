"""The measurement of a script: which block each of its steps belongs to, and what is written about it.

The script owns the loop, so every decision falls at the end of a step, inside the optimizer's hook. What we do there
is not part of any step: the clock is read when the step ends and again when we are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.records.trial import PHASES, Block, StepKind, StepSample
from scalelab.worker.loop import SavedState, is_so_everywhere
from scalelab.worker.script.instrumented import PhaseBlock, ProfiledBlock, find_replicated, without_all_reduce
from scalelab.worker.script.watch import StepFacts, TrainingWatch

LEARNING_STEPS = 3


class ScriptEnded(BaseException):
    """All planned steps were taken: raised out of the script's last optimizer step."""


class SampleSink(Protocol):
    """Where finished steps go."""

    def append(self, sample: StepSample) -> None: ...
    def flush(self) -> None: ...
    def clear(self) -> None: ...


class ScriptSession:
    """Takes a script's steps through the blocks of the plan, and ends it after the last."""

    def __init__(
        self,
        blocks: Sequence[Block],
        rank: int,
        trace: Path,
        sink: SampleSink,
        check_samples: Callable[[int], None] | None = None,
    ) -> None:
        self._blocks, self._rank, self._trace, self._sink = blocks, rank, trace, sink
        self._check_samples = check_samples
        self.watch = TrainingWatch(self._end_step, self._restart)
        self._synchronize: Callable[[], None] = lambda: None
        self._stack = ExitStack()
        self.num_steps = 0
        """Steps seen so far, of every kind."""
        self.num_apart = {"evaluation": 0, "checkpoint": 0, "skipped": 0}
        self.num_passes: int | None = None
        """Backward passes per step."""
        self.step_samples: int | None = None
        """Samples per step on this rank, as the script's data loader gave them."""
        self.obstacle = ""
        """Why communication-free steps were left out."""
        self._start: float | None = None
        self._position = self._in_block = 0
        self._phases: PhaseBlock | None = None
        self._profile: ProfiledBlock | None = None
        self._saved: list[SavedState] = []
        self._drops_next = False

    @property
    def num_planned(self) -> int:
        return sum(block.num_steps for block in self._blocks)

    def __enter__(self) -> ScriptSession:
        self.watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.watch.__exit__()

    def _restart(self) -> None:
        """What was taken for steps so far were parts of steps."""
        self._stack.close()
        self._phases = self._profile = None
        self.num_steps = self._position = self._in_block = 0
        self._sink.clear()
        self.watch.learn()

    def _end_step(self, facts: StepFacts) -> None:
        self._synchronize()
        end = perf_counter()
        start = self._start if self._start is not None else (self.watch.first_forward or end)
        if self._drops_next:
            self._drops_next = False
        else:
            self._record(facts, start, end)
        self._advance(facts)
        if self._phases is not None:
            self._phases.begin()
        self._start = perf_counter()

    def _record(self, facts: StepFacts, start: float, end: float) -> None:
        kind = self._blocks[self._position].kind
        for work in (*facts.other_work, *(("skipped",) if facts.is_skipped else ())):
            self.num_apart[work] += 1
        is_apart = bool(facts.other_work or facts.is_skipped or self.num_steps == 0)
        fields: dict[str, Any] = {}
        if self._phases is not None and not is_apart:
            seconds, ready, stalls = self._phases.read()
            fields = {f"{name}_seconds": seconds[name] for name in PHASES} | {"ready_seconds": ready}
            fields |= {f"{name}_stall_seconds": stalls[name] for name in ("input", "forward", "ready", "optimizer")}
        found = StepKind.SETTLE if is_apart else kind
        sample = StepSample(self._rank, self.num_steps, found, start, end - start, loss=facts.read_loss(), **fields)
        self._sink.append(sample)
        self.num_steps += 1
        self._in_block += 1

    def _advance(self, facts: StepFacts) -> None:
        """Learn from the first steps; enter the next block where this one is complete."""
        if self.num_steps == 1:
            self._synchronize = choose_synchronize(self.watch.trained)
        elif self.num_steps == LEARNING_STEPS:
            self._learn(facts)
        if self._profile is not None:
            self._profile.step()
        if self._in_block < self._blocks[self._position].num_steps:
            return
        self._leave_block()
        while True:
            self._position += 1
            self._in_block = 0
            if self._position == len(self._blocks):
                raise ScriptEnded
            if self._enter_block(self._blocks[self._position]):
                return

    def _learn(self, facts: StepFacts) -> None:
        self.watch.stop_learning()
        self.num_passes = facts.num_passes
        per_pass = (self.watch.pass_samples or 0) * max(1, facts.num_passes)
        self.step_samples = facts.loaded_samples or per_pass or None
        if self.step_samples is not None and self._check_samples is not None:
            self._check_samples(self.step_samples)

    def _enter_block(self, block: Block) -> bool:
        """Switch on what the block needs; False: it cannot be measured in this script and is left out."""
        if block.kind is StepKind.PHASES:
            self._phases = self._stack.enter_context(PhaseBlock(self.watch, self._synchronize))
        elif block.kind is StepKind.PROFILED:
            self._profile = self._stack.enter_context(ProfiledBlock(self._trace))
        elif block.kind is StepKind.COMM_FREE:
            return self._enter_comm_free()
        return True

    def _enter_comm_free(self) -> bool:
        trained = self.watch.trained
        if find_replicated(trained) is None:
            self.obstacle = "the gradient all-reduce can be left out only where one DDP model is trained"
            return False
        self._saved = save_state(trained, list(self.watch.optimizers))
        if not is_so_everywhere(bool(self._saved), next(trained[0].parameters()).device):
            self._saved = []
            self.obstacle = "there is no room for a copy of the model state"
            return False
        self._stack.enter_context(without_all_reduce(trained))
        self._drops_next = True
        return True

    def _leave_block(self) -> None:
        self._stack.close()
        self._sink.flush()
        for saved in self._saved:
            saved.restore()
        self._saved = []
        self._phases = self._profile = None


def save_state(trained: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> list[SavedState]:
    """Copies of all parameters, buffers and optimizer states; empty where there is no memory for them."""
    copies = [SavedState.copy_of(trained if number == 0 else (), one) for number, one in enumerate(optimizers)]
    return [one for one in copies if one is not None] if None not in copies else []


def choose_synchronize(trained: Sequence[nn.Module]) -> Callable[[], None]:
    """Waits for the device that the modules are on; on a CPU there is nothing to wait for."""
    devices = {parameter.device for module in trained for parameter in module.parameters()}
    if not any(device.type == "cuda" for device in devices):
        return lambda: None
    return torch.cuda.synchronize


def refuse_samples(expected: int) -> Callable[[int], None]:
    """Checks the samples that really came out of the loader against the plan."""

    def check(found: int) -> None:
        if found != expected:
            raise UsageError(
                f"the data loader gave {found} samples per step and rank, the plan says {expected}: pass"
                " {batch_per_rank} where the script takes its batch size"
            )

    return check
