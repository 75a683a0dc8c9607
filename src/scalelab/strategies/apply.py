"""The strategies by name: `apply_x(model, device, trial) -> model`, one file each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scalelab.trial import Trial

Apply = Callable[[nn.Module, torch.device, Trial], nn.Module]


def apply_single(model: nn.Module, device: torch.device, _: Trial) -> nn.Module:
    """The model as it is: the reference that has no process group at all."""
    return model.to(device)


def apply_ddp(model: nn.Module, device: torch.device, _: Trial) -> nn.Module:
    """Replicas whose gradients are averaged bucket by bucket while backward still runs (Li et al. 2020)."""
    return DistributedDataParallel(model.to(device), device_ids=[device] if device.type == "cuda" else None)


APPLY: dict[str, Apply] = {"single": apply_single, "ddp": apply_ddp}
