"""The one timed loop, in its four forms.

Clean steps carry nothing but two clock readings, with the device synchronised at both edges: they give the step
times. The other kinds run as separate blocks of the same launch, between blocks of clean ones, so that the machine's
noise falls on all alike:

    phases      a clock reading after input, forward, backward and optimizer
    comm_free   no gradient exchange (`no_sync`); replicas drift apart in it, so the state from before is restored
    profiled    torch's profiler

The loss is read after the last clock reading, when the device has finished anyway. Only numbers are kept: holding on
to tensors would cost a percent of a millisecond step in memory and garbage collection.
`perf_counter` is the host's monotonic clock on Linux, the same for all ranks of a host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from scalelab.measure.failure import is_out_of_memory
from scalelab.measure.state import SavedState
from scalelab.measure.training import Training
from scalelab.trial import Block, StepKind, StepSample

RawStep = tuple[float, ...]
"""The clock readings of a step, first to last, and then its loss."""


def run_block(training: Training, block: Block, rank: int, trace: Path, samples: list[StepSample]) -> None:
    """Run one block and extend `samples` by its steps; by those that were completed when one raises an error."""
    raw: list[RawStep] = []
    first_step = samples[-1].step + 1 if samples else 0
    try:
        if block.kind is StepKind.PHASES:
            run_phase_steps(training, block.num_steps, raw)
        elif block.kind is StepKind.COMM_FREE:
            run_comm_free_steps(training, block.num_steps, raw)
        elif block.kind is StepKind.PROFILED:
            run_profiled_steps(training, block.num_steps, raw, trace)
        else:
            run_clean_steps(training, block.num_steps, raw)
    finally:
        samples += [_make_sample(rank, first_step + i, block.kind, readings) for i, readings in enumerate(raw)]


def run_clean_steps(training: Training, num_steps: int, raw: list[RawStep]) -> None:
    model, loss_of, optimizer = training.model, training.loss, training.optimizer
    batches, synchronize = training.batches, training.synchronize
    for _ in range(num_steps):
        synchronize()
        start = perf_counter()
        loss = loss_of(model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        raw.append((start, perf_counter(), loss.item()))


def run_phase_steps(training: Training, num_steps: int, raw: list[RawStep]) -> None:
    model, loss_of, optimizer = training.model, training.loss, training.optimizer
    batches, synchronize = training.batches, training.synchronize
    for _ in range(num_steps):
        synchronize()
        start = perf_counter()
        batch = next(batches)
        synchronize()
        after_input = perf_counter()
        loss = loss_of(model, batch)
        synchronize()
        after_forward = perf_counter()
        loss.backward()
        synchronize()
        after_backward = perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        raw.append((start, after_input, after_forward, after_backward, perf_counter(), loss.item()))


def run_comm_free_steps(training: Training, num_steps: int, raw: list[RawStep]) -> None:
    """Steps without the gradient exchange; the first one settles after the saving and is not kept.

    Where any rank has no memory for a copy of its state, or none left beside it, all leave the block out: an
    instrument must not be what a trial runs out of memory by.
    """
    saved = SavedState.copy_of(training)
    if not is_so_everywhere(saved is not None, training):
        return
    assert saved is not None
    no_sync = getattr(training.model, "no_sync", nullcontext)
    context: AbstractContextManager[None] = no_sync()
    is_done = True
    try:
        with context:
            run_clean_steps(training, 1, [])
            run_clean_steps(training, num_steps, raw)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        is_done = False
        training.optimizer.zero_grad()
    saved.restore()
    del saved
    if not is_so_everywhere(is_done, training):
        raw.clear()


def is_so_everywhere(is_so: bool, training: Training) -> bool:
    """Whether something holds on every rank."""
    if not dist.is_initialized():
        return is_so
    device = next(training.model.parameters()).device
    votes = torch.tensor(int(is_so), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def run_profiled_steps(training: Training, num_steps: int, raw: list[RawStep], trace: Path) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(num_steps):
            run_clean_steps(training, 1, raw)
            profiler.step()
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))


def _make_sample(rank: int, step: int, kind: StepKind, readings: RawStep) -> StepSample:
    *times, loss = readings
    phases = [after - before for before, after in pairwise(times)] if kind is StepKind.PHASES else [None] * 4
    input_, forward, backward, optimizer = phases
    return StepSample(rank, step, kind, times[0], times[-1] - times[0], input_, forward, backward, optimizer, loss)
