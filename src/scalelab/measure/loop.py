"""The one timed loop, in its four forms.

Clean steps carry nothing but two clock readings, with the device synchronised at both edges: they give the step
times. The other kinds run as separate blocks of the same launch, between blocks of clean ones, so that the machine's
noise falls on all alike; only the profiled ones come last, for they leave the rank slower for a few steps:

    phases      a clock reading after input, forward, backward and optimizer, and at the last gradient
    comm_free   no gradient exchange (`no_sync`); replicas drift apart in it, so the state from before is restored
    profiled    torch's profiler

The loss is read after the last clock reading, when the device has finished anyway. Only numbers are kept: holding on
to tensors would cost a percent of a millisecond step in memory and garbage collection.
`perf_counter` is the host's monotonic clock on Linux, the same for all ranks of a host.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from scalelab.measure.failure import is_out_of_memory
from scalelab.measure.profiles import let_threads_finish, list_activities
from scalelab.measure.readiness import ReadyClock
from scalelab.measure.stalls import StallClock
from scalelab.measure.state import SavedState
from scalelab.measure.step import mark_nothing, take_step
from scalelab.measure.training import Training
from scalelab.strategies.synchronization import can_update_without_sync, without_sync
from scalelab.trial import PHASES, Block, StepKind, StepSample


class RawStep(NamedTuple):
    """Two clock readings, the loss, and the phases' seconds where they were timed."""

    start: float
    end: float
    loss: float
    phases: dict[str, float] | None = None
    ready: float | None = None
    """Seconds until the last gradient was computed."""
    stalls: dict[str, float | None] | None = None
    """Seconds in which the core was given to others: by phase, and until the last gradient."""


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
        samples += [make_sample(rank, first_step + i, block.kind, readings) for i, readings in enumerate(raw)]


def run_clean_steps(training: Training, num_steps: int, raw: list[RawStep]) -> None:
    synchronize = training.synchronize
    for _ in range(num_steps):
        synchronize()
        start = perf_counter()
        loss = take_step(training, mark_nothing)
        synchronize()
        raw.append(RawStep(start, perf_counter(), loss.item()))


def run_phase_steps(training: Training, num_steps: int, raw: list[RawStep]) -> None:
    is_on_cpu = next(training.model.parameters()).device.type == "cpu"
    with StallClock(is_wanted=is_on_cpu) as stalls, ReadyClock(training.model, stalls) as ready:
        for _ in range(num_steps):
            training.synchronize()
            clock = PhaseClock(training.synchronize, stalls.read)
            ready.begin()
            loss = take_step(training, clock.mark)
            stalled = clock.stalls | {"ready": ready.read_stall(clock.start_stall)}
            raw.append(RawStep(clock.start, clock.last, loss.item(), clock.seconds, ready.read(clock.start), stalled))


class PhaseClock:
    """Adds up the time of each phase over the passes of a step, with the device synchronised at every mark.

    `read_stall` gives the time so far in which the core was given to others; it is added up by phase as well.
    """

    def __init__(self, synchronize: Callable[[], None], read_stall: Callable[[], float | None]) -> None:
        self._synchronize = synchronize
        self._read_stall = read_stall
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.stalls: dict[str, float | None] = dict.fromkeys(PHASES)
        self.start_stall = self._last_stall = read_stall()
        self.start = self.last = perf_counter()

    def mark(self, phase: str) -> None:
        self._synchronize()
        now = perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now
        stall = self._read_stall()
        if stall is not None and self._last_stall is not None:
            self.stalls[phase] = (self.stalls[phase] or 0.0) + stall - self._last_stall
        self._last_stall = stall


def run_comm_free_steps(training: Training, num_steps: int, raw: list[RawStep]) -> None:
    """Steps without the gradient exchange; the first one settles after the saving and is not kept.

    Where any rank has no memory for a copy of its state, or none left beside it, all leave the block out: an
    instrument must not be what a trial runs out of memory by. So they do where a rank holds only a piece of the
    gradients and cannot update without the exchange.
    """
    if not can_update_without_sync(training.model):
        return
    saved = SavedState.copy_of(training)
    if not is_so_everywhere(saved is not None, training):
        return
    assert saved is not None
    is_done = True
    try:
        with without_sync(training.model):
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
    with torch.profiler.profile(activities=list_activities(), record_shapes=True) as profiler:
        for number in range(num_steps):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                run_clean_steps(training, 1, raw)
            profiler.step()
        let_threads_finish()
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))


def make_sample(rank: int, step: int, kind: StepKind, raw: RawStep) -> StepSample:
    """A step as it is stored."""
    phases: dict[str, float | None] = {f"{name}_seconds": raw.phases[name] for name in PHASES} if raw.phases else {}
    if raw.stalls:
        phases |= {f"{name}_stall_seconds": raw.stalls[name] for name in ("input", "forward", "ready", "optimizer")}
    seconds = raw.end - raw.start
    return StepSample(rank, step, kind, raw.start, seconds, loss=raw.loss, ready_seconds=raw.ready, **phases)
