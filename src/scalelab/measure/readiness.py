"""When a rank has computed its last gradient: what comes after it in backward is exchange and waiting.

A hook on a parameter is called when its gradient has been accumulated, before DDP takes it into a bucket. Which
parameter is the last is learnt in the first watched step, with a hook on each; later steps carry one hook only, so that
they are hardly slower than clean ones. On a GPU the hook records an event in the stream of backward.

Sharded strategies hold no whole parameters to hook on, and their ranks exchange in forward too: nothing is watched
there.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import nn

from scalelab.measure.stalls import StallClock
from scalelab.strategies.synchronization import can_update_without_sync


class ReadyClock:
    """Watches the gradients of a model. Use as a context manager: hooks must be taken off again."""

    def __init__(self, model: nn.Module, stalls: StallClock | None = None) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad] if can_update_without_sync(model) else []
        self._is_cuda = any(parameter.is_cuda for parameter in self._parameters)
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
        """The step begins now."""
        self._stamp = self._stall_stamp = None
        if self._is_cuda:
            self._begin, self._event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._begin.record()

    def read(self, start: float) -> float | None:
        """Seconds from `start`, the clock's reading at the beginning, to the last gradient; None: nothing was seen."""
        if self._stamp is None:
            return None
        if len(self._hooks) > 1 and self._last is not None:
            self._unwatch()
            self._watch([self._last])
        if self._is_cuda:
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
        if self._is_cuda:
            self._event.record()
