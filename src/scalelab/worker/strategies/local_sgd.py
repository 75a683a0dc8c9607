"""`local-sgd`: every rank updates its own replica, and parameters are averaged every few steps (Stich 2019).

With `averaging_warmup` the first steps all-reduce gradients, as `ddp` does, before replicas train alone (post-local
SGD, Lin et al. 2020): DDP with torch's own hook for it. Parameters are averaged after the first step that was taken
alone and then once per `averaging_period` steps, as torch's PeriodicModelAverager counts.

Parameters of one data type lie in one piece of memory, which is averaged in place by one all-reduce. torch's averager
would copy them into a new piece each time and leave them there: a reference to the old storage would no longer be the
parameter.

What an optimizer remembers (momentum, moments) stays a rank's own. With a period of 1 and plain SGD the replicas are
those of `ddp`, up to rounding; with any other the losses are not those of one rank, by design.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

from scalelab.records.trial import Trial
from scalelab.worker.optimizers import Factory


def apply_local_sgd(model: nn.Module, device: torch.device, trial: Trial) -> nn.Module:
    """Replicas whose gradients are averaged only while warming up."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)  # as in ddp.py
        replicated = DistributedDataParallel(
            model.to(device),
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=trial.spreading.bucket_mb,
            broadcast_buffers=False,
        )
    alone = PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=trial.spreading.averaging_warmup,
        post_local_gradient_allreduce=False,
    )
    replicated.register_comm_hook(alone, post_localSGD_hook)
    return replicated


class PeriodicAverage:
    """Averages parameters after every so many steps of their optimizer."""

    def __init__(self, parameters: list[nn.Parameter], period: int, warmup: int) -> None:
        alike: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            alike.setdefault(parameter.dtype, []).append(parameter)
        self._pieces = [join_storage(members) for members in alike.values()]
        self._period, self._warmup = period, warmup
        self.num_steps = 0

    @property
    def is_next(self) -> bool:
        """Whether the step that comes averages."""
        return self.num_steps >= self._warmup and (self.num_steps - self._warmup) % self._period == 0

    def __call__(self, *_: Any) -> None:
        is_due, self.num_steps = self.is_next, self.num_steps + 1
        if not is_due:
            return
        for piece in self._pieces:
            dist.all_reduce(piece.div_(dist.get_world_size()))


@torch.no_grad()
def join_storage(parameters: list[nn.Parameter]) -> torch.Tensor:
    """One piece of memory that the parameters then lie in, each with its strides."""
    piece = torch.empty(sum(one.numel() for one in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, part in zip(parameters, piece.split([one.numel() for one in parameters]), strict=True):
        dense = torch.empty_like(parameter, device="meta")  # strides of a slice would leave gaps
        moved = part.as_strided(dense.shape, dense.stride())
        parameter.data = moved.copy_(parameter)
    return piece


def average_after_steps(make: Factory, model: nn.Module, trial: Trial) -> torch.optim.Optimizer:
    """The optimizer that `make` gives; it averages its parameters over ranks where a period ends."""
    every = list(model.parameters())
    optimizer = make(every)
    trained = [parameter for parameter in every if parameter.requires_grad]
    average = PeriodicAverage(trained, trial.spreading.averaging_period, trial.spreading.averaging_warmup)
    optimizer.register_step_post_hook(average)
    optimizer.average = average  # type: ignore[attr-defined]
    return optimizer
