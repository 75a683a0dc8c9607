"""One optimizer step: what is timed everywhere, in clean steps, in phases, under the profiler and in training runs.

A step is `accumulation` forward and backward passes, of which only the last exchanges gradients, and one update. The
gradient is the mean over the passes, so each pass's loss is divided by their number; the loss that is given back is
the mean over the passes, which is the loss of the whole batch.

A step may have several turns, as that of a GAN: each updates its own part of the model by its own loss, on the same
batches. Only that part exchanges gradients then; those that the others get on the way are dropped.

`mark` is called with a phase's name where the phase ends. Clean steps pass a function that does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from scalelab.worker.strategies.apply import clip_gradients, without_sync
from scalelab.worker.training import Training, Turn

Mark = Callable[[str], None]
OVERSLEPT_SECONDS = 0.0005
"""By how much a sleep may end too late."""


def take_step(training: Training, mark: Mark) -> torch.Tensor:
    """Run one optimizer step and give its loss, still on the device."""
    if is_shaped(training):
        return take_shaped_step(training, mark)
    batch = next(training.batches)
    mark("input")
    loss = training.loss(training.model, batch)
    mark("forward")
    loss.backward()
    mark("backward")
    training.optimizer.step()
    training.optimizer.zero_grad()
    mark("optimizer")
    return loss


def is_shaped(training: Training) -> bool:
    """Whether a step is more than one pass and one plain update."""
    if training.accumulation > 1 or training.scheduler or training.clip_norm is not None:
        return True
    return bool(training.scaler or training.delays or training.turns)


def take_shaped_step(training: Training, mark: Mark) -> torch.Tensor:
    """The same with accumulation, a loss scale, clipping, delays, a schedule, or several turns."""
    turns = training.list_turns()
    batches: list[Any] = []
    total: torch.Tensor | None = None
    for turn in turns:
        loss = accumulate(training, turn, batches, mark)
        total = loss if total is None else total + loss
        hold_up(training, "optimizer", turn is turns[0])
        update(training, turn)
        mark("optimizer")
    if training.scaler:
        training.scaler.update()
    assert total is not None
    return total


def accumulate(training: Training, turn: Turn, batches: list[Any], mark: Mark) -> torch.Tensor:
    """Forward and backward of all passes of a turn; the first turn fetches the batches, which later ones find."""
    num_passes, is_again = training.accumulation, bool(batches)
    total: torch.Tensor | None = None
    for number in range(num_passes):
        is_first, is_last = number == 0 and not is_again, number == num_passes - 1
        if is_again:
            batch = batches[number]
        else:
            hold_up(training, "input", is_first)
            batch = next(training.batches)
            batches += [batch] if training.turns else []
            mark("input")
        with ExitStack() as held:
            for part in training.parts:
                if part is not turn.model or not is_last:
                    held.enter_context(without_sync(part))
            hold_up(training, "forward", is_first)
            loss = turn.loss(training.model, batch)
            mark("forward")
            hold_up(training, "backward", is_first)
            share = loss / num_passes if num_passes > 1 else loss
            (training.scaler.scale(share) if training.scaler else share).backward()
            mark("backward")
        total = share.detach() if total is None else total + share.detach()
    assert total is not None
    return total


def update(training: Training, turn: Turn) -> None:
    """One optimizer's step, with what belongs to it."""
    scaler = training.scaler
    if training.clip_norm is not None:
        if scaler:
            scaler.unscale_(turn.optimizer)
        clip_gradients(turn.model, training.clip_norm)
    if scaler:
        scaler.step(turn.optimizer)
    else:
        turn.optimizer.step()
    for optimizer in training.optimizers:
        optimizer.zero_grad()
    if turn.scheduler:
        turn.scheduler.step()


def hold_up(training: Training, phase: str, is_due: bool) -> None:
    """Wait where a delay was asked for, once per step; the device first finishes what it has, so that it waits too."""
    if is_due and training.delays and phase in training.delays:
        training.synchronize()
        wait(training.delays[phase])


def wait(seconds: float) -> None:
    """Sleep for exactly so long: a sleep ends late, by a tenth of a millisecond or so, so the last part is spun."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - OVERSLEPT_SECONDS))
    while time.perf_counter() < end:
        pass


def mark_nothing(_: str) -> None:
    """For steps without phase timing."""
