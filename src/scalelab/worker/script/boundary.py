"""Where a training step ends in a script that we did not write: at an optimizer. What is kept of a step, and where.

A script may have one optimizer, several that step together (Muon and AdamW), or several that take turns (the two of a
GAN, where the critic may step more often). A step ends with the optimizer that steps least often; among equals, with
the one that steps last. An optimizer inside another one (ZeRO, wrappers) does not count: only the outermost call does.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from scalelab.records.samples import render_samples
from scalelab.records.trial import StepSample
from scalelab.worker.device import find_driver_of

TAKEN_OVER = 4
"""Calls of an optimizer, without any of the others, that make another training."""
MOST_REMEMBERED = 256
"""Optimizer calls that the rule looks at; later ones only confirm it."""


def choose_last(counts: Mapping[Hashable, int]) -> Hashable:
    """The optimizer that ends a step, given how often each was called, in the order of their first calls.

    In a cycle that is half done those that have stepped already are one call ahead: they are not the rarest.
    """
    fewest = min(counts.values())
    return [one for one, number in counts.items() if number == fewest][-1]


def is_regular(calls: Sequence[Hashable], last: Hashable) -> bool:
    """Whether every step after the first, which is kept apart, consists of the same optimizer calls."""
    cycles: list[tuple[Hashable, ...]] = []
    current: list[Hashable] = []
    for one in calls:
        current.append(one)
        if one == last:
            cycles.append(tuple(current))
            current = []
    return len(set(cycles[1:])) <= 1


class StepRule:
    """Learns from optimizer calls which of them end a step."""

    def __init__(self) -> None:
        self._calls: list[Hashable] = []
        self._counts = Counter[Hashable]()
        self._num_alone = 0
        self._is_new = False
        self.last: Hashable | None = None

    def see(self, optimizer: Hashable) -> tuple[bool, bool]:
        """Whether this call ends a step, and whether the rule had to change because of it."""
        if self.is_final:
            return optimizer == self.last, False
        if not self._calls or optimizer != self._calls[-1]:
            self._num_alone, self._is_new = 0, optimizer not in self._counts
        self._num_alone += 1
        self._calls.append(optimizer)
        self._counts[optimizer] += 1
        chosen = choose_last(self._counts)
        is_other = self.last is not None and chosen != self.last
        self.last = chosen
        return optimizer == chosen, is_other

    @property
    def is_second_training(self) -> bool:
        """Whether an optimizer that was not there before has taken over: it alone made the last calls.

        Those that take turns come back within a few calls; a critic may step first, but then it steps on.
        """
        num_before = len(self._calls) - self._num_alone
        return self._is_new and min(self._num_alone, num_before) >= TAKEN_OVER

    @property
    def is_final(self) -> bool:
        """Whether no further call can change the rule."""
        return len(self._calls) == MOST_REMEMBERED

    @property
    def num_optimizers(self) -> int:
        return len(self._counts)

    @property
    def is_regular(self) -> bool:
        return self.last is None or is_regular(self._calls, self.last)


@dataclass(slots=True)
class StepFacts:
    """What happened between two step ends."""

    losses: list[Any] = field(default_factory=list)
    """The tensors or numbers that backward was called on."""
    num_passes: int = 0
    has_closure: bool = False
    """Whether the optimizer itself called for passes, as LBFGS does: their number is its own affair."""
    other_work: set[str] = field(default_factory=set)
    """`evaluation`, `checkpoint`, or `skipped`, where a GradScaler left the update out."""
    delayed: set[str] = field(default_factory=set)
    """Phases whose injected delay has come."""
    loads: list[int] = field(default_factory=list)
    """Samples of each batch that came out of a data loader; counted while learning."""
    forwards: dict[int, list[int]] = field(default_factory=dict)
    """Samples of each batch that went through a trained module, by the module's place; counted while learning."""
    inputs: list[tuple[int, weakref.ref[torch.Tensor]]] = field(default_factory=list)
    """The first tensor of each of these batches: the same again, as two passes of one step take, counts once."""
    num_silent: int = 0
    """Passes through a trained module without gradients."""

    def clear(self) -> None:
        """Begin the next step: one object serves all steps, so that each leaves as little behind as possible."""
        self.num_passes, self.num_silent, self.has_closure = 0, 0, False
        for one in (self.losses, self.other_work, self.delayed, self.loads, self.forwards, self.inputs):
            if one:
                one.clear()

    def read_loss(self) -> float | None:
        """The sum of what was differentiated: the loss of the step. None: nothing scalar was."""
        return sum_losses(self.losses)

    def list_batches(self, num_ranks: int = 1) -> tuple[list[int], bool]:
        """Samples of each batch of the step, and whether a loader gave them: otherwise the module that is called least.

        A GAN calls its discriminator several times for one batch, but its generator once. A rank that loads for all,
        as `accelerate` does for a stream, trains on its own share.
        """
        given = min(self.forwards.values(), key=len, default=[])
        is_for_all = num_ranks > 1 and sum(self.loads) == num_ranks * sum(given)
        return (self.loads, True) if self.loads and not is_for_all else (given, False)


class FullestStep:
    """Of the steps that are learned from, the one with the most samples: an epoch may end with a smaller batch."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.is_loaded = False
        self.num_passes: int | None = None

    def see(self, facts: StepFacts, num_ranks: int = 1) -> None:
        batches, is_loaded = facts.list_batches(num_ranks)
        if self.num_passes is None or sum(batches) > sum(self.batches):
            self.batches, self.is_loaded, self.num_passes = [*batches], is_loaded, facts.num_passes


def sum_losses(losses: Sequence[Any]) -> float | None:
    """The loss of a step from what was differentiated in it; None: nothing scalar was."""
    if len(losses) == 1 and type(losses[0]) is float:
        return losses[0]
    if not losses:
        return None
    return float(sum(one.item() if isinstance(one, torch.Tensor) else one for one in losses))


QuickStep = tuple[float, float, list[Any], int]
"""A clean step as it was taken: its start and end on the host's monotonic clock, its losses, its backward passes."""


class QuickSteps:
    """The hooks of the optimizer: a clean step costs two readings of the clock in one call, to be sorted out later.

    The training evicts our code and data from the processor's caches, so a step costs by how much of both it touches.
    That is why everything that it touches is here and in `StepFacts`, and why the hook before an optimizer's step goes
    away while steps are clean, unless one optimizer steps inside another.
    """

    __slots__ = (
        *("_end_call", "_facts", "_optimizer", "_pre_hook", "_synchronize", "begin_call"),
        *("depth", "is_nesting", "left", "num_calls", "outermost", "start", "taken", "unscaled"),
    )

    def __init__(self, facts: StepFacts, begin_call: Callable[[], None], end_call: Callable[[Optimizer], None]) -> None:
        self.left = 0  # steps that may still be taken
        self.taken: list[QuickStep] = []
        self.outermost: object = None  # the optimizer that is stepping
        self.depth = 0  # steps of its own inside its step, as `super().step()` takes
        self.is_nesting = False  # whether an optimizer has stepped inside another one, or itself
        self.num_calls = 0  # of optimizers
        self.unscaled: tuple[weakref.ref[torch.Tensor], Any] | None = None  # a loss as scaled, and before
        self.start = 0.0
        self.begin_call, self._end_call, self._facts = begin_call, end_call, facts
        self._optimizer: object = None
        self._synchronize: Callable[[], None] | None = None
        self._pre_hook: RemovableHandle | None = None

    def look_before(self) -> None:
        """See optimizers begin to step."""
        if self._pre_hook is None:
            self._pre_hook = register_optimizer_step_pre_hook(self.before)

    def stop_looking_before(self) -> None:
        if self._pre_hook is not None:
            self._pre_hook.remove()
            self._pre_hook = None

    def before(self, optimizer: Optimizer, *_: object) -> None:
        if self.outermost is not None and is_nested():
            self.is_nesting = True
            self.depth += optimizer is self.outermost
        else:
            self.outermost, self.depth = optimizer, 0
            if not self.left:
                self.begin_call()

    def after(self, optimizer: Optimizer, *_: object) -> None:
        """An optimizer has stepped: all that a clean step runs through."""
        if self.left and optimizer is self._optimizer and not self.depth:
            facts = self._facts
            if not facts.other_work:
                if self._synchronize is not None:
                    self._synchronize()
                self.taken.append((self.start, perf_counter(), facts.losses, facts.num_passes))
                facts.losses, facts.num_passes, facts.num_silent = [], 0, 0
                self.outermost = None
                self.num_calls += 1
                self.left -= 1
                self.start = perf_counter()
                return
        if self._is_whole(optimizer):
            self.num_calls += 1
            self._end_call(optimizer)

    def _is_whole(self, optimizer: Optimizer) -> bool:
        """Whether the outermost step has ended, not one inside it."""
        if self._pre_hook is None:
            return not is_nested()
        if optimizer is not self.outermost:
            return False
        if self.depth:  # the step of a class that it inherits from
            self.depth -= 1
            return False
        self.outermost = None
        return True

    def begin(self, optimizer: object, num_steps: int, synchronize: Callable[[], None] | None) -> None:
        """Take so many steps, the first of which begins now."""
        self._optimizer, self._synchronize, self.left = optimizer, synchronize, num_steps
        if num_steps and not self.is_nesting:
            self.stop_looking_before()
        self.start = perf_counter()

    def stop(self) -> list[QuickStep]:
        """What was taken; no more is."""
        taken, self.taken = self.taken, []
        self.left, self._optimizer = 0, None
        self.look_before()
        return taken


STEP_CODE = Optimizer.profile_hook_step(lambda: None).__code__
"""What torch puts around every optimizer's `step`, and where it calls hooks."""


def is_nested() -> bool:
    """Whether an optimizer steps inside a step; a step that raised an error has left the stack."""
    frame: FrameType | None = sys._getframe(1)
    num_steps = 0
    while frame is not None and num_steps < 2:
        num_steps += frame.f_code is STEP_CODE
        frame = frame.f_back
    return num_steps == 2


def wait_for_nothing() -> None:
    """A CPU has done what it was given."""


def choose_synchronize(trained: Sequence[nn.Module]) -> Callable[[], None]:
    """Waits for the device that the modules are on; on a CPU there is nothing to wait for."""
    driver = find_driver_of(parameter for module in trained for parameter in module.parameters())
    return driver.synchronize if driver is not None else wait_for_nothing


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put a wrapper in the place of a function of a module or class; the original comes back at the end."""
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


class SampleSink(Protocol):
    """Where finished steps go."""

    def append(self, sample: StepSample) -> None: ...
    def flush(self) -> None: ...
    def clear(self) -> None: ...


class SampleFile:
    """A rank's samples: in a list, and after every block on disk."""

    def __init__(self, path: Path, samples: list[Any]) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._samples = samples
        self._num_written = 0
        self.clear()

    def append(self, sample: StepSample) -> None:
        self._samples.append(sample)

    def flush(self) -> None:
        self._file.write(render_samples(self._samples[self._num_written :]).partition("\n")[2])
        self._file.flush()
        self._num_written = len(self._samples)

    def clear(self) -> None:
        self._samples.clear()
        self._num_written = 0
        self._file.seek(0)
        self._file.truncate()
        self._file.write(render_samples(()))

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self._file.close()
