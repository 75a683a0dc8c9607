"""One optimizer step: what is timed everywhere, in clean steps, in phases, under the profiler and in training runs.

A step is `accumulation` forward and backward passes, of which only the last exchanges gradients, and one update. The
gradient is the mean over the passes, so each pass's loss is divided by their number; the loss that is given back is
the mean over the passes, which is the loss of the whole batch.

`mark` is called with a phase's name where the phase ends. Clean steps pass a function that does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

from scalelab.worker.strategies.apply import without_sync
from scalelab.worker.training import Training

Mark = Callable[[str], None]
OVERSLEPT_SECONDS = 0.0005
"""By how much a sleep may end too late."""


def take_step(training: Training, mark: Mark) -> torch.Tensor:
    """Run one optimizer step and give its loss, still on the device."""
    if training.accumulation > 1 or training.scaler or training.delays or training.scheduler:
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


def take_shaped_step(training: Training, mark: Mark) -> torch.Tensor:
    """The same with accumulation, a loss scale, delays or a schedule."""
    num_passes, scaler = training.accumulation, training.scaler
    total: torch.Tensor | None = None
    for number in range(num_passes):
        is_first, is_last = number == 0, number == num_passes - 1
        hold_up(training, "input", is_first)
        batch = next(training.batches)
        mark("input")
        with nullcontext() if is_last else without_sync(training.model):
            hold_up(training, "forward", is_first)
            loss = training.loss(training.model, batch)
            mark("forward")
            hold_up(training, "backward", is_first)
            share = loss / num_passes if num_passes > 1 else loss
            (scaler.scale(share) if scaler else share).backward()
            mark("backward")
        total = share.detach() if total is None else total + share.detach()
    hold_up(training, "optimizer", True)
    if scaler:
        scaler.step(training.optimizer)
        scaler.update()
    else:
        training.optimizer.step()
    training.optimizer.zero_grad()
    if training.scheduler:
        training.scheduler.step()
    mark("optimizer")
    assert total is not None
    return total


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
