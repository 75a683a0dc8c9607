"""Loss and accuracy: on the training's own batches where that is free, and on the test data.

The model's output is taken from where it comes out, by a forward hook, so that this works for any loss of model and
batch. In training only outputs of one row per sample are kept until the line is written: those of a language model
are as large as everything else together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scalelab.errors import UsageError
from scalelab.measure.batches import count_samples, list_parts
from scalelab.measure.loop import is_so_everywhere
from scalelab.measure.randomness import untouched_randomness
from scalelab.measure.training import Training

NO_BATCH = object()


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well the model does, over all ranks."""

    loss: float
    accuracy: float | None
    """The share of right answers; None where the output has no classes."""


class OutputTap:
    """Keeps the output of the model's last forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.output: torch.Tensor | None = None
        self._handle = model.register_forward_hook(self._keep)

    def _keep(self, model: nn.Module, _: Any, output: Any) -> None:
        is_small = isinstance(output, torch.Tensor) and output.ndim == 2
        self.output = output.detach() if isinstance(output, torch.Tensor) and (is_small or not model.training) else None

    def close(self) -> None:
        self.output = None
        self._handle.remove()


def count_right(output: torch.Tensor | None, batch: Any) -> tuple[int, int]:
    """Right answers and all answers, where the batch is a pair and its second part holds classes; else two zeros."""
    parts = list_parts(batch)
    if output is None or len(parts) != 2 or not isinstance(parts[1], torch.Tensor):
        return 0, 0
    target = parts[1].to(output.device)
    if target.is_floating_point() or output.ndim != target.ndim + 1 or output.shape[:-1] != target.shape:
        return 0, 0
    return int((output.argmax(-1) == target).sum()), target.numel()


def score_step(training: Training, loss: float, tap: OutputTap, batch: Any) -> Score:
    """The loss of a step, the mean over ranks, and the accuracy of its last pass."""
    return gather_score(training, [loss, 1.0, *count_right(tap.output, batch)])


def evaluate(training: Training, tap: OutputTap) -> Score:
    """Loss and accuracy on the test data; leaves neither the model nor the random state changed."""
    totals = [0.0, 0.0, 0.0, 0.0]
    move = training.move or (lambda batch: batch)
    with untouched_randomness(), eval_mode(training.model), torch.no_grad():
        for raw in take_together(training):
            batch = move(raw)
            num_samples = count_samples(batch) or 1
            loss = training.loss(training.model, batch).item()
            right, answers = count_right(tap.output, batch)
            for index, value in enumerate((loss * num_samples, num_samples, right, answers)):
                totals[index] += value
        tap.output = None
    return gather_score(training, totals)


def take_together(training: Training) -> Iterator[Any]:
    """This rank's test batches; raises `UsageError` on all ranks where one has more of them than another.

    A forward pass of a sharded model is done by all ranks or none, so this is agreed on before every batch.
    """
    assert training.test_batches is not None
    iterator, num_taken = iter(training.test_batches), 0
    while True:
        batch = next(iterator, NO_BATCH)
        if not is_so_everywhere(batch is not NO_BATCH, training):
            break
        num_taken += 1
        yield batch
    if not is_so_everywhere(batch is NO_BATCH, training):
        raise UsageError(
            f"some ranks have only {num_taken} test batches and others more: let build() give every rank as many"
        )
    if not num_taken:
        raise UsageError("there are no test batches: let build() return a list or a DataLoader as test_batches")


def gather_score(training: Training, totals: list[float]) -> Score:
    """Sum over ranks: weighted losses, weights, right answers, answers."""
    if dist.is_initialized():
        device = next(training.model.parameters()).device
        summed = torch.tensor(totals, dtype=torch.float64, device=device)
        dist.all_reduce(summed)
        totals = summed.tolist()
    loss, weight, right, answers = totals
    return Score(loss=loss / weight if weight else float("nan"), accuracy=right / answers if answers else None)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()
