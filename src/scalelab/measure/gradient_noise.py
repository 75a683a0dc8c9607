"""How much the gradients of samples differ, seen inside a training: two squared norms per step.

A step that accumulates has, after its first pass, the gradient of b samples in `.grad`, and after its last the
gradient of all B. Their squared norms are read where the gradients are, at the marks that every step makes at the end
of a backward pass, so that the training itself is not changed. What they say about the noise is computed from the lines
of the training, in `analysis/noise_scale.py`.

The gradient of the first pass is there divided by the number of passes, and by nothing of other ranks: DDP has not
exchanged it yet. With a loss scale, both are multiplied by it. FSDP's ranks hold pieces, and are refused.
"""

from __future__ import annotations

import math

import torch

from scalelab.errors import UsageError
from scalelab.measure.training import Training
from scalelab.strategies.catalogue import FSDP
from scalelab.trial import Trial


class GradientNoise:
    """The squared norms of a step's gradients, after its first pass and after its last."""

    def __init__(self, trial: Trial, training: Training) -> None:
        if trial.accumulation < 2:
            raise UsageError(
                f"gradient noise is read between the passes of a step, and a step of {trial.batch_per_rank} samples"
                " has one: give it a --micro-batch that is at most half of that"
            )
        if trial.strategy in FSDP:
            raise UsageError(
                f"gradient noise needs whole gradients, and ranks of {trial.strategy} have pieces: use ddp"
            )
        self._training = training
        self._num_passes = 0
        self.small: float | None = None
        """Of the first pass; None where it is no finite number."""
        self.large: float | None = None
        """Of the whole step."""

    def begin(self) -> None:
        """Before a step."""
        self._num_passes = 0
        self.small = self.large = None

    def mark(self, phase: str) -> None:
        """Called where a phase ends."""
        if phase != "backward":
            return
        self._num_passes += 1
        if self._num_passes == 1:
            self.small = self._read_square(self._training.accumulation)
        if self._num_passes == self._training.accumulation:
            self.large = self._read_square(1)

    def _read_square(self, factor: float) -> float | None:
        """The squared norm of what is in `.grad`, multiplied by a factor and without the loss scale."""
        parameters = self._training.model.parameters()
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters if p.grad is not None]
        scale = self._training.scaler.get_scale() if self._training.scaler else 1.0
        square = (float(torch.stack(norms).norm()) * factor / scale) ** 2 if norms else math.nan
        return square if math.isfinite(square) else None
