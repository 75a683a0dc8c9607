"""`fsdp-full`, `fsdp-grad-op`, `fsdp-none`: FullyShardedDataParallel (Zhao et al. 2023).

Every block is its own unit and the rest of the model one more. The parameters of a unit lie in one flat
tensor that is cut over the ranks, so that each rank keeps and optimises only its piece.

    FULL_SHARD      a unit is gathered before its forward and again before its backward: least memory
    SHARD_GRAD_OP   a unit stays gathered between its forward and its backward: one gathering less
    NO_SHARD        nothing is cut: DDP's exchange by FSDP's machinery

Every rank has drawn the same weights, so none needs to send them. `use_orig_params` keeps the model's own
parameters visible: an optimizer may treat them differently, and frozen ones may stand beside others.

On one rank there is nothing to cut: torch turns to NO_SHARD and says so, and it calls NO_SHARD deprecated, which a
comparison with it is not. Both messages are left out.

`fsdp2`: `fully_shard`, the second form of fully sharded data parallelism.

Every parameter is a DTensor cut over the ranks along its first dimension, instead of a piece of a flat tensor, and
the model keeps its class and its names. Blocks are gathered one by one as in `fsdp-full`; with
`reshard_after_forward` off they stay gathered until their backward, as in `fsdp-grad-op`. The root is needed first
in backward and is never given back in between.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy

from scalelab.records.trial import Trial
from scalelab.worker.strategies.blocks import find_blocks


def apply_full_shard(model: nn.Module, device: torch.device, _: Trial) -> nn.Module:
    return wrap_units(model.to(device), device, ShardingStrategy.FULL_SHARD)


def apply_shard_grad_op(model: nn.Module, device: torch.device, _: Trial) -> nn.Module:
    return wrap_units(model.to(device), device, ShardingStrategy.SHARD_GRAD_OP)


def apply_no_shard(model: nn.Module, device: torch.device, _: Trial) -> nn.Module:
    return wrap_units(model.to(device), device, ShardingStrategy.NO_SHARD)


def wrap_units(model: nn.Module, device: torch.device, sharding: ShardingStrategy) -> nn.Module:
    """The model with its blocks and the remainder sharded."""
    blocks = set(find_blocks(model))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*NO_SHARD.*")
        return FullyShardedDataParallel(
            model,
            sharding_strategy=sharding,
            auto_wrap_policy=CustomPolicy(lambda module: module in blocks),
            device_id=device,
            use_orig_params=True,
        )


def apply_fsdp2(model: nn.Module, device: torch.device, trial: Trial) -> nn.Module:
    """The model with its parameters sharded one by one, gathered block by block."""
    model = model.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    reshard = trial.spreading.reshard_after_forward
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model
