"""`single`: the plain loop, the reference that has no process group at all."""

from __future__ import annotations

import torch
from torch import nn

from scalelab.trial import Trial


def apply_single(model: nn.Module, device: torch.device, _: Trial) -> nn.Module:
    """The model as it is."""
    return model.to(device)
