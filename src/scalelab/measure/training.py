"""What the timed loop needs, made from a trial: model, loss, optimizer and an endless stream of batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from scalelab.measure.batches import BatchStream, make_mover
from scalelab.strategies.apply import APPLY
from scalelab.trial import Trial
from scalelab.workloads.load import load_workload

Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Training:
    """One rank's share of the job, ready to step."""

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    batches: Iterator[Any]
    synchronize: Callable[[], None]
    """Waits for the device; on CPU there is nothing to wait for."""


def build_training(trial: Trial, rank: int, device: torch.device) -> Training:
    """Build the workload from the trial's seed and put the strategy around it."""
    seed_everything(trial.seed)
    workload = load_workload(trial, rank)
    dtype = getattr(torch, trial.dtype)
    model = APPLY[trial.strategy](workload.model.to(dtype).train(), device, trial)
    optimizer = (workload.optimizer or torch.optim.Adam)(model.parameters())
    move = None
    if device.type != "cpu" or dtype is not torch.float32:
        move = make_mover(device, dtype)
    # Ranks draw the same weights and different dropout masks.
    seed_everything(trial.seed + rank)
    return Training(
        model=model,
        loss=as_loss(workload.loss.to(device, dtype) if isinstance(workload.loss, nn.Module) else workload.loss),
        optimizer=optimizer,
        batches=BatchStream(workload.batches, move, trial.batch_per_rank),
        synchronize=torch.cuda.synchronize if device.type == "cuda" else _nothing_to_wait_for,
    )


def seed_everything(seed: int) -> None:
    """torch on every device, NumPy and Python: a user's `build` may draw from any of them."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def as_loss(loss: Loss | nn.Module) -> Loss:
    """A criterion such as `nn.MSELoss()` becomes a loss of model and batch."""
    if not isinstance(loss, nn.Module):
        return loss
    criterion = loss

    def loss_of_pair(model: nn.Module, batch: Any) -> torch.Tensor:
        result: torch.Tensor = criterion(model(batch[0]), batch[1])
        return result

    return loss_of_pair


def _nothing_to_wait_for() -> None:
    """A CPU has finished its work when the call returns."""
