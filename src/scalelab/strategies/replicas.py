"""What data parallelism in one process is made of: replicas of a model, batches cut and joined, threads.

`dp.py` says what for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

Tensor = torch.Tensor
Cores = tuple[tuple[int, ...], ...]
T = TypeVar("T")
R = TypeVar("R")


def scatter(leaves: Sequence[Any], num_pieces: int) -> list[list[Any]]:
    """The leaves of every replica: tensors cut along their first dimension, everything else as it is."""
    cut = {i: leaf.chunk(num_pieces) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim()}
    num_used = min((len(parts) for parts in cut.values()), default=1)
    return [[cut[i][piece] if i in cut else leaf for i, leaf in enumerate(leaves)] for piece in range(num_used)]


def gather(parts: Sequence[Tensor]) -> Tensor:
    """The outputs of all replicas as one tensor."""
    return torch.stack(list(parts)) if parts[0].dim() == 0 else torch.cat(list(parts))


def replicate(module: nn.Module, num_replicas: int) -> list[nn.Module]:
    """Replicas with parameters of their own; the first shares its storage, and its buffers, with the module."""
    return [_copy_module(module, {}, is_first=index == 0) for index in range(num_replicas)]


def _copy_module(module: nn.Module, made: dict[Any, Any], *, is_first: bool) -> nn.Module:
    """One replica; what the module holds twice, such as tied weights, the replica holds twice too."""
    if module in made:
        found: nn.Module = made[module]
        return found
    replica: nn.Module = module._replicate_for_data_parallel()
    made[module] = replica
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else _copy_module(child, made, is_first=is_first)
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else _copy_parameter(parameter, made, is_first=is_first))
    for name, buffer in module._buffers.items():
        if buffer is not None and not is_first:
            replica._buffers[name] = made.setdefault(buffer, buffer.clone())
    return replica


def _copy_parameter(parameter: nn.Parameter, made: dict[Any, Any], *, is_first: bool) -> nn.Parameter:
    if parameter not in made:
        data = parameter.detach() if is_first else parameter.detach().clone()
        made[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    copied: nn.Parameter = made[parameter]
    return copied


@dataclass(frozen=True)
class ThreadState:
    """What torch keeps for each thread, as the caller has it."""

    num_threads: int
    is_grad_enabled: bool
    is_inference: bool
    is_autocast: bool
    autocast_dtype: torch.dtype
    cores: Cores = ()
    """Where each thread runs; empty: wherever the process may. Not the caller's."""
    seconds: memoryview[float] | None = None
    """Where the processor time of each thread is added up; None: nowhere."""

    @classmethod
    def of_caller(cls, cores: Cores = (), seconds: memoryview[float] | None = None) -> ThreadState:
        return cls(
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            cores,
            seconds,
        )

    def run_in_threads(self, function: Callable[[T], R], work: Sequence[T]) -> list[R]:
        """The results in order; an error is raised as it was, once all threads have ended."""

        def run(index: int, item: T) -> R:
            if self.cores:
                os.sched_setaffinity(0, self.cores[index])  # of this thread alone
            with (
                torch.inference_mode(self.is_inference),
                torch.set_grad_enabled(self.is_grad_enabled),
                torch.autocast("cpu", self.autocast_dtype, enabled=self.is_autocast),
            ):
                result = function(item)
            if self.seconds is not None:
                self.seconds[index] += time.thread_time()  # the thread is new, and so is its clock
            return result

        with ThreadPoolExecutor(len(work), "replica", torch.set_num_threads, (self.num_threads,)) as pool:
            return list(pool.map(run, range(len(work)), work))
