"""Weights that were trained elsewhere, put into a model before anything else is done with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.settings import Quantization


def load_weights(model: nn.Module, settings: Quantization) -> None:
    """Put trained weights from a file into the model; one that does not fit is refused with what differs."""
    if not settings.weights:
        return
    advice = "give what torch.save(model.state_dict(), …) writes"
    try:
        found: Any = torch.load(settings.weights, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(f"--weights {settings.weights} cannot be read ({type(error).__name__}): {advice}") from error
    state = find_state(found)
    if state is None:
        raise UsageError(f"--weights {settings.weights} holds a {type(found).__name__} that is no state_dict: {advice}")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        words = " ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise UsageError(f"--weights {settings.weights} does not fit the model: {words}") from error


def find_state(found: Any) -> dict[str, torch.Tensor] | None:
    """A state_dict, or the one that a checkpoint of a training has inside; names without DDP's prefix."""
    if not isinstance(found, dict):
        return None
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found.get(key), dict):
            found = found[key]
    if not found or not all(isinstance(value, torch.Tensor) for value in found.values()):
        return None
    return {str(name).removeprefix("module."): value for name, value in found.items()}
