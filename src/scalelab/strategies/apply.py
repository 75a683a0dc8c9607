"""The strategies by name: `apply_x(model, device, trial) -> model`, one file each.

`single`: the plain loop, the reference that has no process group at all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from scalelab.records.trial import Trial
from scalelab.strategies.ddp import apply_ddp
from scalelab.strategies.dp import apply_dp
from scalelab.strategies.fsdp import apply_fsdp
from scalelab.strategies.fsdp2 import apply_fsdp2


def apply_single(model: nn.Module, device: torch.device, _: Trial) -> nn.Module:
    """The model as it is."""
    return model.to(device)


Apply = Callable[[nn.Module, torch.device, Trial], nn.Module]

APPLY: dict[str, Apply] = {
    "single": apply_single,
    "dp": apply_dp,
    "ddp": apply_ddp,
    "fsdp-full": apply_fsdp,
    "fsdp-grad-op": apply_fsdp,
    "fsdp-none": apply_fsdp,
    "fsdp2": apply_fsdp2,
}
