"""Blocks of steps in a script: what is switched on for them, between two steps, and off again.

    phases      input, forward, backward and optimizer are timed; the rest of the step is other
    comm_free   DDP leaves out its gradient all-reduce; the state from before is restored
    profiled    torch's profiler records

Forward begins with a trained module and lasts until backward begins, so that it includes the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerAction
from torch.utils.data.dataloader import _BaseDataLoaderIter

from scalelab.records.trial import PHASES
from scalelab.worker.instruments.profiles import let_threads_finish, list_activities
from scalelab.worker.loop import ReadyClock, StallClock
from scalelab.worker.script.watch import TrainingWatch, replaced

OTHER = "other"


class PhaseBlock:
    """Times the phases of every step while it is entered."""

    def __init__(self, watch: TrainingWatch, synchronize: Callable[[], None]) -> None:
        self._watch, self._synchronize = watch, synchronize
        self._stack = ExitStack()
        self._current = OTHER
        self._last = 0.0
        self._seconds: dict[str, float] = {}
        self._stall_seconds: dict[str, float | None] = {}

    def __enter__(self) -> PhaseBlock:
        stack = self._stack
        is_on_cpu = all(p.device.type == "cpu" for module in self._watch.trained for p in module.parameters())
        self._stalls = stack.enter_context(StallClock(is_wanted=is_on_cpu))
        model = find_replicated(self._watch.trained)
        self._ready = stack.enter_context(ReadyClock(model, self._stalls)) if model is not None else None
        stack.enter_context(replaced(_BaseDataLoaderIter, "__next__", self._wrap_loader))
        for module in self._watch.trained:
            stack.callback(module.register_forward_pre_hook(self._before_forward).remove)
        self._watch.on_phase = self.switch
        stack.callback(self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        """Start of a step."""
        self._seconds = dict.fromkeys((*PHASES, OTHER), 0.0)
        self._stall_seconds = dict.fromkeys((*PHASES, OTHER))
        self._current = OTHER
        self._last_stall = self._start_stall = self._stalls.read()
        if self._ready is not None:
            self._ready.begin()
        self._start = self._last = perf_counter()

    def switch(self, phase: str) -> None:
        """The time so far belongs to the phase that ends here."""
        self._synchronize()
        now, stall = perf_counter(), self._stalls.read()
        self._seconds[self._current] += now - self._last
        if stall is not None and self._last_stall is not None:
            self._stall_seconds[self._current] = (self._stall_seconds[self._current] or 0.0) + stall - self._last_stall
        self._current, self._last, self._last_stall = phase, now, stall

    def read(self) -> tuple[dict[str, float], float | None, dict[str, float | None]]:
        """Seconds by phase, seconds until the last gradient, and stalls by phase, of the step that just ended."""
        ready = self._ready.read(self._start) if self._ready is not None else None
        until_ready = self._ready.read_stall(self._start_stall) if self._ready is not None else None
        return self._seconds, ready, self._stall_seconds | {"ready": until_ready}

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled() and self._current == OTHER:
            self.switch("forward")

    def _wrap_loader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(iterator: Any) -> Any:
            before = self._current
            self.switch("input")
            try:
                return original(iterator)
            finally:
                self.switch(before if before != "input" else OTHER)

        return load

    def _stop(self) -> None:
        self._watch.on_phase = None


def find_replicated(trained: Sequence[nn.Module]) -> nn.Module | None:
    """The model that DDP replicates; None: there is none, or several."""
    found = [module for module in map(strip_compiled, trained) if isinstance(module, DistributedDataParallel)]
    return found[0] if len(found) == 1 else None


def strip_compiled(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


@contextmanager
def without_all_reduce(trained: Sequence[nn.Module]) -> Iterator[None]:
    """DDP only accumulates gradients on each rank, whatever the script sets in the meantime.

    A property of the class hides the attribute that `no_sync` and scripts set; its value at the step's end returns.
    """
    name = "require_backward_grad_sync"
    replicas = [one for module in trained for one in module.modules() if isinstance(one, DistributedDataParallel)]
    before = [bool(getattr(one, name)) for one in replicas]
    setattr(DistributedDataParallel, name, property(lambda _: False, lambda *_: None))
    try:
        yield
    finally:
        delattr(DistributedDataParallel, name)
        for one, value in zip(replicas, before, strict=True):
            setattr(one, name, value)


class ProfiledBlock:
    """torch's profiler over whole steps; the trace is written when the block ends."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace
        self._profile = torch.profiler.profile(
            activities=list_activities(), record_shapes=True, schedule=lambda _: ProfilerAction.RECORD
        )

    def __enter__(self) -> ProfiledBlock:
        self._profile.start()
        return self

    def step(self) -> None:
        self._profile.step()

    def __exit__(self, *_: object) -> None:
        let_threads_finish()
        self._profile.stop()
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._trace))
