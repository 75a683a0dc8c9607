"""The one timed loop, in its five forms.

Clean steps carry nothing but two clock readings, with the device synchronized at both edges: they give the step times.
The other kinds run as separate blocks of the same launch, between blocks of clean ones, so that the machine's noise
affects all alike. Only the profiled ones come last, because they leave the rank slower for a few steps:

    phases      a clock reading after input, forward, backward and optimizer, and at the last gradient
    free        the device is waited for only before the first step and after the last, so the host runs ahead as in a
                training loop; steps end where their events are in the device's stream. The loss is not read
    comm_free   no gradient all-reduce (`no_sync`); replicas drift apart, so the state from before is restored
    profiled    torch's profiler

The loss is read after the last clock reading, when the device has finished anyway. Only numbers are kept: keeping
tensors would cost a percent of a millisecond step in memory and garbage collection. `perf_counter` is the host's
monotonic clock on Linux, the same for all ranks of a host.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from scalelab.records.trial import PHASES, Block, StepKind, StepSample
from scalelab.worker.batches.stream import BatchStream
from scalelab.worker.device import find_driver_of, list_activities
from scalelab.worker.failure import is_out_of_memory
from scalelab.worker.group import is_so_everywhere
from scalelab.worker.instruments.profiles import let_threads_finish
from scalelab.worker.memory.limit import has_room_for
from scalelab.worker.randomness import read_random_state, restore_random_state
from scalelab.worker.step import mark_nothing, take_step
from scalelab.worker.strategies.apply import can_update_without_sync, looks_for_unused, without_sync
from scalelab.worker.training import Training

SCHEDSTAT = "/proc/thread-self/schedstat"


class StallClock:
    """How long this thread was runnable while the kernel ran others on its core; a context manager with an open file.

    A phase that takes longer on one rank may only have been interrupted there. Linux counts for every thread the time
    it waited for a core (`/proc/thread-self/schedstat`, the second number, in nanoseconds;
    Documentation/scheduler/sched-stats.rst). What remains is computing, sleeping and waiting. Only the training thread
    is seen: a stall of another torch thread, or of the hypervisor, counts as computing. Nothing is read on a GPU.
    """

    def __init__(self, *, is_wanted: bool = True) -> None:
        self._file: int | None = None
        if is_wanted:
            try:
                self._file = os.open(SCHEDSTAT, os.O_RDONLY)
            except OSError:  # not Linux, or a kernel that does not count
                self._file = None

    def __enter__(self) -> StallClock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def read(self) -> float | None:
        """Seconds since the thread started; None: not counted on this system."""
        if self._file is None:
            return None
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9


class ReadyClock:
    """When a rank has computed its last gradient: the rest of backward is communication and waiting.

    A hook on a parameter is called when its gradient has been accumulated, before DDP puts it into a bucket. The first
    watched step has a hook on every parameter and finds the last one; later steps keep only that hook, so they are
    hardly slower than clean ones. On a GPU the hook records an event in the stream of backward. Sharded strategies
    have no whole parameters to hook on and communicate in forward too: nothing is watched. A context manager: it
    removes its hooks.
    """

    def __init__(self, model: nn.Module, stalls: StallClock | None = None) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad] if can_update_without_sync(model) else []
        self._driver = find_driver_of(self._parameters)
        self._hooks: list[Any] = []
        self._last: nn.Parameter | None = None
        self._stamp: float | None = None
        self._stalls = stalls
        self._stall_stamp: float | None = None
        self._begin: Any = None
        self._event: Any = None

    def __enter__(self) -> ReadyClock:
        self._watch(self._parameters)
        return self

    def __exit__(self, *_: object) -> None:
        self._unwatch()

    def begin(self) -> None:
        """Start of the step."""
        self._stamp = self._stall_stamp = None
        if self._driver is not None:
            self._begin, self._event = self._driver.make_event(), self._driver.make_event()
            self._begin.record()

    def read(self, start: float) -> float | None:
        """Seconds from `start`, the clock's reading at the beginning, to the last gradient; None: nothing was seen."""
        if self._stamp is None:
            return None
        if len(self._hooks) > 1 and self._last is not None:
            self._unwatch()
            self._watch([self._last])
        if self._driver is not None:
            self._event.synchronize()
            return float(self._begin.elapsed_time(self._event)) / 1e3
        return self._stamp - start

    def read_stall(self, start: float | None) -> float | None:
        """Seconds of stalls from `start`, their reading at the beginning, to the last gradient; None: unknown."""
        return None if start is None or self._stall_stamp is None else self._stall_stamp - start

    def _watch(self, parameters: list[nn.Parameter]) -> None:
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._see) for parameter in parameters]

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _see(self, parameter: torch.Tensor) -> None:
        self._stamp = perf_counter()
        if self._stalls is not None:
            self._stall_stamp = self._stalls.read()
        self._last = parameter  # type: ignore[assignment]
        if self._driver is not None:
            self._event.record()


class SavedState:
    """Parameters, buffers, optimizer, learning rate, loss scale and random state, to restore after other steps.

    Copies stay in the host's memory, where there is more of it.
    """

    def __init__(
        self, modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], others: Iterable[Any] = ()
    ) -> None:
        self._optimizers = list(optimizers)
        self._keys = {parameter: set(state) for one in self._optimizers for parameter, state in one.state.items()}
        every = [tensor for one in modules for tensor in (*one.parameters(), *one.buffers())]
        every += [one for optimizer in self._optimizers for group in optimizer.param_groups for one in group["params"]]
        self._tensors = list({id(tensor): tensor for tensor in every}.values())  # a parameter may be in no module
        self._tensors += [value for _, _, value in self._optimizer_values() if isinstance(value, torch.Tensor)]
        if not has_room_for(sum(tensor.nbytes for tensor in self._tensors)):
            raise MemoryError("the memory limit leaves no room for a copy of the model state")
        self._copies = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]
        self._scalars = [
            (state, key, copy.deepcopy(value))
            for state, key, value in self._optimizer_values()
            if not isinstance(value, torch.Tensor)
        ]
        groups = [group for one in self._optimizers for group in one.param_groups]
        self._groups = [(group, {key: group[key] for key in group if key != "params"}) for group in groups]
        self._others = [(part, part.state_dict()) for part in others if part]
        self._random = read_random_state()

    @classmethod
    def copy_of(
        cls, modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], others: Iterable[Any] = ()
    ) -> SavedState | None:
        """The state now; None when there is no memory for a copy."""
        try:
            return cls(modules, optimizers, others)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return None
            raise

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, saved in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(saved)
        for state, key, value in self._scalars:
            state[key] = value
        for optimizer in self._optimizers:
            for parameter, state in list(optimizer.state.items()):
                for key in state.keys() - self._keys.get(parameter, set()):
                    del state[key]
                if parameter not in self._keys:
                    del optimizer.state[parameter]
        for group, settings in self._groups:
            group.update(settings)
        for part, kept in self._others:
            part.load_state_dict(kept)
        restore_random_state(self._random)

    def _optimizer_values(self) -> list[tuple[dict[str, Any], str, Any]]:
        states = [state for one in self._optimizers for state in one.state.values()]
        return [(state, key, state[key]) for state in states for key in state]


class RawStep(NamedTuple):
    """Two clock readings, the loss, and the phases' seconds where they were timed."""

    start: float
    end: float
    loss: float | None
    phases: dict[str, float] | None = None
    ready: float | None = None
    """Seconds until the last gradient was computed."""
    stalls: dict[str, float | None] | None = None
    """Seconds in which the core ran something else: by phase, and until the last gradient."""


def run_block(training: Training, block: Block, rank: int, trace: Path, samples: list[StepSample]) -> None:
    """Run one block and extend `samples` by its steps; by those that were completed when one raises an error."""
    raw: list[RawStep] = []
    first_step = samples[-1].step + 1 if samples else 0
    try:
        if block.kind is StepKind.PHASES:
            run_phase_steps(training, block.num_steps, raw)
        elif block.kind is StepKind.FREE:
            run_free_steps(training, block.num_steps, raw)
        elif block.kind is StepKind.COMM_FREE:
            run_comm_free_steps(training, block.num_steps, raw)
        elif block.kind is StepKind.PROFILED:
            run_profiled_steps(training, block.num_steps, raw, trace)
        else:
            run_clean_steps(training, block.num_steps, raw)
    finally:
        samples += [make_sample(rank, first_step + i, block.kind, readings) for i, readings in enumerate(raw)]


def run_clean_steps(training: Training, num_steps: int, raw: list[RawStep]) -> None:
    synchronize, gives_loss = training.synchronize, training.gives_loss
    for _ in range(num_steps):
        synchronize()
        start = perf_counter()
        loss = take_step(training, mark_nothing)
        synchronize()
        raw.append(RawStep(start, perf_counter(), loss.item() if gives_loss else None))


def run_free_steps(training: Training, num_steps: int, raw: list[RawStep]) -> None:
    """Steps between which nothing is waited for; on a CPU they are clean ones whose loss is not read."""
    driver = find_driver_of(training.model.parameters())
    training.synchronize()
    start = perf_counter()
    if driver is None:
        for _ in range(num_steps):
            take_step(training, mark_nothing)
            end = perf_counter()
            raw.append(RawStep(start, end, None))
            start = end
        return
    marks = [driver.make_event() for _ in range(num_steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        take_step(training, mark_nothing)
        mark.record()
    training.synchronize()
    for begin, end_mark in itertools.pairwise(marks):
        end = start + float(begin.elapsed_time(end_mark)) / 1e3
        raw.append(RawStep(start, end, None))
        start = end


def run_phase_steps(training: Training, num_steps: int, raw: list[RawStep]) -> None:
    is_on_cpu = next(training.model.parameters()).device.type == "cpu"
    watched = nn.Module() if training.turns else training.model  # of several turns there is no one last gradient
    with StallClock(is_wanted=is_on_cpu) as stalls, ReadyClock(watched, stalls) as ready:
        for _ in range(num_steps):
            training.synchronize()
            clock = PhaseClock(training.synchronize, stalls.read)
            ready.begin()
            loss = take_step(training, clock.mark)
            stalled = clock.stalls | {"ready": ready.read_stall(clock.start_stall)}
            value = loss.item() if training.gives_loss else None
            raw.append(RawStep(clock.start, clock.last, value, clock.seconds, ready.read(clock.start), stalled))


class PhaseClock:
    """Adds up the time of each phase over the passes of a step, with the device synchronized at every mark.

    `read_stall` gives the time so far in which the core was given to others; it is added up by phase as well.
    """

    def __init__(
        self,
        synchronize: Callable[[], None],
        read_stall: Callable[[], float | None],
        phases: Iterable[str] = PHASES,
    ) -> None:
        self._synchronize = synchronize
        self._read_stall = read_stall
        self.seconds = dict.fromkeys(phases, 0.0)
        self.stalls: dict[str, float | None] = dict.fromkeys(self.seconds)
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
    """Steps without gradient all-reduce; the first one settles after saving the state and is dropped.

    If any rank has no memory for a copy of its state, all ranks skip the block: an instrument must not make a trial run
    out of memory. They also skip it if a rank has only a shard of the gradients and cannot update without
    communication.
    """
    if not all(map(can_update_without_sync, training.parts)):
        return
    others = [*(turn.scheduler for turn in training.list_turns()), training.scaler]
    saved = SavedState.copy_of([training.model], training.optimizers, others)
    device = next(training.model.parameters()).device
    if not is_so_everywhere(saved is not None, device):
        return
    assert saved is not None
    is_done = True
    try:
        with ExitStack() as held:
            for part in training.parts:
                held.enter_context(without_sync(part))
            run_clean_steps(training, 1, [])
            run_clean_steps(training, num_steps, raw)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        is_done = False
        for optimizer in training.optimizers:
            optimizer.zero_grad()
    is_done = is_so_everywhere(is_done, device)
    if not is_done:
        raw.clear()
    if any(map(looks_for_unused, training.parts)):
        settle_reducer(training)
    saved.restore()


def settle_reducer(training: Training) -> None:
    """One step with communication: DDP has noted which parameters were used without it, and wants their gradients.

    On the last batch again, so that later steps have the batches that they would have had.
    """
    assert isinstance(training.batches, BatchStream)
    last = training.batches.last
    again = replace(training, batches=itertools.repeat(training.move(last) if training.move else last))
    for parameter in training.model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    run_clean_steps(again, 1, [])


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
