"""`fsdp2`: `fully_shard`, the second form of fully sharded data parallelism.

Every parameter is a DTensor cut over the ranks along its first dimension, instead of a piece of a flat tensor, and
the model keeps its class and its names. Blocks are gathered one by one as in `fsdp-full`; with
`reshard_after_forward` off they stay gathered until their backward, as in `fsdp-grad-op`. The root is needed first
in backward and is never given back in between.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scalelab.records.trial import Trial
from scalelab.strategies.blocks import find_blocks


def apply_fsdp2(model: nn.Module, device: torch.device, trial: Trial) -> nn.Module:
    """The model with its parameters sharded one by one, gathered block by block."""
    model = model.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    reshard = trial.spreading.reshard_after_forward
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model
