"""The strategies by name: `apply_x(model, device, trial) -> model`, one file each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from scalelab.strategies.ddp import apply_ddp
from scalelab.strategies.dp import apply_dp
from scalelab.strategies.fsdp import apply_fsdp
from scalelab.strategies.fsdp2 import apply_fsdp2
from scalelab.strategies.single import apply_single
from scalelab.trial import Trial

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
