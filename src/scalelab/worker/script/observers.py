"""The instruments of a trial in a script: each takes a few further steps after the measured ones.

The same as `worker/instruments`, but the script owns the loop, so an observer is told where steps and phases end.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scalelab.analysis.memory import BEGIN
from scalelab.records.observations import Instrument, RankReport
from scalelab.records.trial import Trial
from scalelab.worker.instruments.instruments import (
    NUM_COUNTED_STEPS,
    NUM_TIMED_STEPS,
    SETTLING_STEPS,
    USUAL_SAMPLE_RATE,
    GradientClock,
    make_counters,
    make_gradient_times,
)
from scalelab.worker.instruments.messages import CallRecorder, count_messages, describe_basis
from scalelab.worker.memory.allocator import open_recording
from scalelab.worker.memory.recording import account_memory, map_storages, name_kept
from scalelab.worker.script.instrumented import OTHER, PhaseHooks, find_replicated, is_all_replicated, name_strategy
from scalelab.worker.script.passes import ModuleHook, leave_outermost
from scalelab.worker.script.watch import TrainingWatch
from scalelab.worker.strategies.apply import can_update_without_sync


class CannotObserve(Exception):
    """The instrument does not apply to this script; the message says why."""


class Observer(PhaseHooks):
    """One instrument: `begin` and `end` are called around each of its steps, `complete` after the last."""

    num_steps = 1

    def __enter__(self) -> Observer:
        self.follow()
        return self

    def begin(self) -> None:
        """Start of a step."""
        self._current = self._outer

    def end(self) -> None:
        """End of a step."""

    def end_phase(self, phase: str) -> None:
        """Most look at whole steps only."""

    def complete(self, report: RankReport) -> RankReport:
        raise NotImplementedError


class GradientObserver(Observer):
    """When every gradient is ready in backward: in the last of the passes that a step accumulates."""

    num_steps = SETTLING_STEPS + NUM_TIMED_STEPS

    def __init__(self, watch: TrainingWatch, num_passes: int | None, num_batches: int) -> None:
        """`num_batches`: batches that one step accumulates."""
        super().__init__(watch)
        if num_passes is None or num_passes != num_batches:
            raise CannotObserve(
                f"{num_passes or 'no'} backward passes per batch of a step; gradient-ready times need one"
                if num_batches == 1
                else f"{num_passes} backward passes for {num_batches} batches of a step"
            )
        model = join_models(watch.trained)
        if len(leave_outermost(watch.trained)) != 1 or not can_update_without_sync(model):
            raise CannotObserve("gradient-ready times need one trained model that is not sharded")
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._clock = GradientClock(self._parameters)
        self._read: list[tuple[list[float | None], float]] = []
        self._core_seconds: list[float] = []
        self._num_seen = 0

    def __enter__(self) -> Observer:
        for parameter in self._parameters:
            self._stack.callback(parameter.register_post_accumulate_grad_hook(self._clock.see).remove)
        return super().__enter__()

    def begin(self) -> None:
        super().begin()
        self._clock.clear()
        self._busy = process_time()

    def end_phase(self, phase: str) -> None:
        if phase == "backward":
            self._clock.mark(phase)

    def switch(self, phase: str) -> None:
        super().switch(phase)
        if phase == "backward":
            self._clock.mark("forward")

    def end(self) -> None:
        self._num_seen += 1
        if self._num_seen > SETTLING_STEPS:
            with suppress(KeyError):  # a step without a backward pass
                self._read.append(self._clock.read())
                self._core_seconds.append(process_time() - self._busy)

    def complete(self, report: RankReport) -> RankReport:
        if not self._read:
            return report
        found = make_gradient_times([parameter.nbytes for parameter in self._parameters], self._read)
        if found is not None:
            found = replace(found, core_seconds=statistics.median(self._core_seconds))
        return replace(report, gradients=found)


class CounterObserver(Observer):
    """DDP's own clocks; what it says after a step is about the step before."""

    num_steps = NUM_COUNTED_STEPS + 1

    def __init__(self, watch: TrainingWatch) -> None:
        super().__init__(watch)
        model = find_replicated(watch.trained)
        if not isinstance(model, DistributedDataParallel):
            raise CannotObserve("DDP's counters need exactly one DDP model")
        self._model = model
        self._said: list[dict[str, Any]] = []

    def __enter__(self) -> Observer:
        self._model._set_ddp_runtime_logging_sample_rate(1)
        self._stack.callback(self._model._set_ddp_runtime_logging_sample_rate, USUAL_SAMPLE_RATE)
        return self

    def end(self) -> None:
        self._said.append(self._model._get_ddp_logging_data())

    def complete(self, report: RankReport) -> RankReport:
        return replace(report, counters=make_counters(self._said[1:]))


class MessageObserver(Observer):
    """Every collective of one step, with its bytes."""

    def __init__(self, watch: TrainingWatch) -> None:
        super().__init__(watch)
        if not dist.is_initialized():
            raise CannotObserve("the script has no process group: it sends nothing")
        if watch.has_whole_graph:
            raise CannotObserve("torch.compile(fullgraph=True) does not let messages be recorded")
        self._recorder = CallRecorder()

    def __enter__(self) -> Observer:
        super().__enter__()
        self._stack.enter_context(self._recorder)
        return self

    def end_phase(self, phase: str) -> None:
        self._recorder.end_phase(phase)

    def end(self) -> None:
        self.end_phase(self._current)

    def complete(self, report: RankReport) -> RankReport:
        trained = self._watch.trained
        messages = count_messages(self._recorder.by_phase, name_strategy(trained))
        return replace(report, messages=messages, message_basis=describe_basis(join_models(trained)))


class MemoryObserver(Observer):
    """Every byte that torch's allocator gives out in a step; the step before fills the memory as later ones find it."""

    num_steps = 2

    def __init__(self, watch: TrainingWatch, trial: Trial, directory: Path, rank: int) -> None:
        super().__init__(watch)
        if not watch.trained:
            raise CannotObserve("no trained module was seen")
        state = {key: value for one in watch.optimizers for key, value in one.state.items()}
        self._batches = SimpleNamespace(last=None)
        self._training: Any = SimpleNamespace(
            model=join_models(watch.trained), optimizers=[SimpleNamespace(state=state)], batches=self._batches
        )
        self._storages = map_storages(self._training)
        self._recording = open_recording(trial, directory, rank)
        self._directory = directory
        self._num_seen = 0

    def __enter__(self) -> Observer:
        for module in self._watch.trained:
            self._stack.callback(module.register_forward_hook(ModuleHook(self._see_output)).remove)
        self._recording.start()
        self._stack.callback(self._recording.stop)
        return super().__enter__()

    def _see_output(self, _: object, __: object, output: Any) -> None:
        if self._current == "forward":
            self._recording.record("model", dict.fromkeys(self._storages.outputs(output), "output"))

    def end_phase(self, phase: str) -> None:
        self._batches.last = self.last_batch
        if phase != OTHER:
            self._recording.record(phase, name_kept(phase, self._storages))

    def end(self) -> None:
        self._num_seen += 1
        if self._num_seen == 1:
            self._recording.record(BEGIN, {})

    def complete(self, report: RankReport) -> RankReport:
        return account_memory(self._training, self._storages, self._recording, self._directory, report)


def join_models(trained: list[nn.Module]) -> nn.Module:
    """The trained modules as one: the DDP model itself, where a library or torch.compile has wrapped it."""
    if is_all_replicated(trained) and (model := find_replicated(trained)) is not None:
        return model
    inner = [getattr(module, "_orig_mod", module) for module in trained]
    return inner[0] if len(inner) == 1 else nn.ModuleList(inner)


def choose_observer(
    name: Instrument,
    watch: TrainingWatch,
    passes: tuple[int | None, int],
    trial: Trial,
    directory: Path,
    rank: int,
) -> Observer | None:
    """The observer of an instrument; None for those that are recorded elsewhere. Raises `CannotObserve`.

    `passes`: backward passes of a step, and the batches that it accumulates.
    """
    made: dict[str, Callable[[], Observer]] = {
        "gradients": lambda: GradientObserver(watch, *passes),
        "counters": lambda: CounterObserver(watch),
        "messages": lambda: MessageObserver(watch),
        "memory": lambda: MemoryObserver(watch, trial, directory, rank),
    }
    return made[name]() if name in made else None
