"""When every gradient is ready in backward: what a prediction fills DDP's buckets by.

A hook on each parameter is called when its gradient has been accumulated, before any exchange. The times of a few
steps, from the end of forward on, are taken at their medians; on a GPU by events in the stream of backward. Sharded
models hold no whole parameters, and a step of several passes accumulates in each: nothing is watched there.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from scalelab.measure.step import take_step
from scalelab.measure.training import Training
from scalelab.observations import GradientTimes, RankReport
from scalelab.strategies.synchronization import can_update_without_sync
from scalelab.trial import Trial

NUM_STEPS = 8
SETTLING_STEPS = 2
"""Hooks make the first steps slower."""


class GradientClock:
    """Stamps of one step: the end of forward, every gradient, the end of backward."""

    def __init__(self, parameters: list[torch.nn.Parameter], is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._ready: dict[int, Any] = {}
        self._marks: dict[str, Any] = {}

    def see(self, parameter: torch.Tensor) -> None:
        self._ready[self._numbers[id(parameter)]] = self._stamp()

    def mark(self, phase: str) -> None:
        self._marks[phase] = self._stamp()

    def read(self) -> tuple[list[float | None], float]:
        """Seconds to every gradient after forward, None for those that got none, and to the end of backward."""
        begin = self._marks["forward"]
        ready = [self._ready.get(number) for number in range(len(self._numbers))]
        found = [None if stamp is None else self._between(begin, stamp) for stamp in ready]
        return found, self._between(begin, self._marks["backward"])

    def clear(self) -> None:
        self._ready, self._marks = {}, {}

    def _stamp(self) -> Any:
        if not self._is_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self._is_cuda else float(end - begin)


def watch_gradients(trial: Trial, training: Training, directory: Path, report: RankReport) -> RankReport:  # noqa: ARG001 - an instrument's signature
    """The report with the ready times of gradients; unchanged where there are no whole ones."""
    if not can_update_without_sync(training.model) or training.accumulation > 1:
        return report
    parameters = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
    clock = GradientClock(parameters, is_cuda=any(parameter.is_cuda for parameter in parameters))
    hooks = [parameter.register_post_accumulate_grad_hook(clock.see) for parameter in parameters]
    read, core_seconds = [], []
    try:
        for number in range(SETTLING_STEPS + NUM_STEPS):
            clock.clear()
            busy = process_time()
            take_step(training, clock.mark)
            training.synchronize()
            if number >= SETTLING_STEPS:
                read.append(clock.read())
                core_seconds.append(process_time() - busy)
    finally:
        for hook in hooks:
            hook.remove()
    found = make_gradient_times([parameter.nbytes for parameter in parameters], read)
    if found is not None:
        found = replace(found, core_seconds=statistics.median(core_seconds))
    return replace(report, gradients=found)


def make_gradient_times(sizes: list[int], steps: list[tuple[list[float | None], float]]) -> GradientTimes | None:
    """Medians over steps, of the parameters that got a gradient in all of them; None where there are none."""
    found = []
    for number, size in enumerate(sizes):
        times = [seconds[number] for seconds, _ in steps]
        whole = [time for time in times if time is not None]
        if len(whole) == len(times):
            found.append((statistics.median(whole), size))
    if not found:
        return None
    found.sort()
    return GradientTimes(
        ready_seconds=tuple(seconds for seconds, _ in found),
        payload_bytes=tuple(size for _, size in found),
        backward_seconds=statistics.median(backward for _, backward in steps),
    )
