"""What the timed loop needs, made from a trial: model, loss, optimizer and an endless stream of batches."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from scalelab.errors import UsageError
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


class BatchStream:
    """Batches without end, on the device: started again when they run out, the first one checked for its size."""

    def __init__(self, batches: Iterable[Any], move: Callable[[Any], Any] | None, batch_size: int) -> None:
        self._batches = batches
        self._move = move
        self._batch_size = batch_size
        self._epoch = 0
        self._iterator = iter(batches)
        self._is_checked = False

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            batch = self._start_again()
        if not self._is_checked:
            self._check_size(batch)
        return batch if self._move is None else self._move(batch)

    def _start_again(self) -> Any:
        self._epoch += 1
        set_epoch = getattr(getattr(self._batches, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._epoch)
        self._iterator = iter(self._batches)
        try:
            return next(self._iterator)
        except StopIteration:
            raise UsageError(
                "the batches ended and cannot be started again: let build() return a list, a DataLoader or an"
                " endless generator"
            ) from None

    def _check_size(self, batch: Any) -> None:
        self._is_checked = True
        found = count_samples(batch)
        if found is not None and found != self._batch_size:
            raise UsageError(
                f"build() gave a batch of {found} samples where this trial needs {self._batch_size} on each rank:"
                " let build() take batch_size and use it"
            )


def build_training(trial: Trial, rank: int, device: torch.device) -> Training:
    """Build the workload from the trial's seed and put the strategy around it."""
    seed_everything(trial.seed)
    workload = load_workload(trial, rank)
    dtype = getattr(torch, trial.dtype)
    model = APPLY[trial.strategy](workload.model.to(dtype), device)
    optimizer = (workload.optimizer or torch.optim.Adam)(model.parameters())
    move = None
    if device.type != "cpu" or dtype is not torch.float32:
        move = make_mover(device, dtype)
    # Ranks draw the same weights and different dropout masks.
    seed_everything(trial.seed + rank)
    return Training(
        model=model,
        loss=as_loss(workload.loss),
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


def count_samples(batch: Any) -> int | None:
    """The leading dimension of the first tensor in a batch; None when there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else None
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    for part in parts:
        found = count_samples(part)
        if found is not None:
            return found
    return None


def make_mover(device: torch.device, dtype: torch.dtype) -> Callable[[Any], Any]:
    """A function that brings a nest of tensors to the device, and its floating-point ones to the dtype."""

    def move(batch: Any) -> Any:
        if isinstance(batch, torch.Tensor):
            wanted = dtype if batch.is_floating_point() else batch.dtype
            return batch.to(device, wanted, non_blocking=True)
        if isinstance(batch, dict):
            return {key: move(value) for key, value in batch.items()}
        if isinstance(batch, list | tuple):
            moved = [move(value) for value in batch]
            return batch._make(moved) if hasattr(batch, "_make") else type(batch)(moved)
        return batch

    return move


class SavedState:
    """Parameters, buffers, optimizer and random state, to undo steps that must leave no trace."""

    def __init__(self, training: Training) -> None:
        self._optimizer = training.optimizer
        self._keys = {parameter: set(state) for parameter, state in self._optimizer.state.items()}
        self._tensors = [*training.model.parameters(), *training.model.buffers()]
        self._tensors += [value for _, _, value in self._optimizer_values() if isinstance(value, torch.Tensor)]
        self._copies = [tensor.detach().clone() for tensor in self._tensors]
        self._scalars = [
            (state, key, copy.deepcopy(value))
            for state, key, value in self._optimizer_values()
            if not isinstance(value, torch.Tensor)
        ]
        self._rng = torch.get_rng_state()
        self._cuda_rng = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, saved in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(saved)
        for state, key, value in self._scalars:
            state[key] = value
        for parameter, state in list(self._optimizer.state.items()):
            for key in state.keys() - self._keys.get(parameter, set()):
                del state[key]
            if parameter not in self._keys:
                del self._optimizer.state[parameter]
        torch.set_rng_state(self._rng)
        if self._cuda_rng is not None:
            torch.cuda.set_rng_state(self._cuda_rng)

    def _optimizer_values(self) -> list[tuple[dict[str, Any], str, Any]]:
        return [(state, key, state[key]) for state in self._optimizer.state.values() for key in state]


def _nothing_to_wait_for() -> None:
    """A CPU has finished its work when the call returns."""
