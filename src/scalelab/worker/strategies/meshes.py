"""`hsdp` and `tp`: ranks arranged in a mesh (`records/strategy.py`), by torch's DeviceMesh and DTensor.

`hsdp` is `fully_shard` on two axes: parameters are sharded inside a group of `fsdp` ranks as by `fsdp2`, and the shards
of gradients are all-reduced between the `dp` groups (Zhao et al. 2023, hybrid sharding).

`tp` splits the matrices of a layer (Shoeybi et al. 2019, Megatron-LM): the first of a pair by columns, the second by
rows, so that only the result of the second is all-reduced in forward, and the gradient of the first one's input in
backward. Which layers pair up is the plan of the model (`plans.py`). Norms, embeddings and what is in no pair stay
whole on every rank, get the same gradients there, and need no communication.

With sequence parallelism a rank has only its piece of every sequence outside split layers (Korthikanti et al. 2022):
activations are gathered before the first layer of a pair, and reduced and scattered after the second.

Async TP (`--async-tp`, on CUDA) lets the compiler cut these gathers and scatters into pieces that are sent while the
matrix product of other pieces is computed, by memory that ranks map into each other (symmetric memory; Wang et al.
2023 for the decomposition).

With a `dp` or `fsdp` axis beside it, `fully_shard` is put around what `tp` has split. On a `dp` axis alone it has
shards of one rank: nothing is gathered, and gradients are all-reduced unit by unit.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from scalelab.records.trial import Trial
from scalelab.worker.strategies.blocks import find_blocks
from scalelab.worker.strategies.plans import check_divisible, split_layers

GROUPS: dict[str, str] = {}
"""The axis of every process group of this rank's mesh, by the group's name."""


def make_device_mesh(trial: Trial, device: torch.device) -> DeviceMesh:
    """The mesh of a trial: the axes that have ranks, and `fsdp` beside `dp`, for torch's hybrid sharding."""
    sizes = {axis: size for axis, size in trial.mesh.sizes.items() if size > 1}
    if "dp" in sizes or not sizes:
        sizes["fsdp"] = trial.mesh.fsdp
    named = {axis: sizes[axis] for axis in trial.mesh.sizes if axis in sizes}
    mesh = init_device_mesh(device.type, tuple(named.values()), mesh_dim_names=tuple(named))
    GROUPS.update({mesh.get_group(axis).group_name: axis for axis in named})
    return mesh


def apply_hsdp(model: nn.Module, device: torch.device, trial: Trial) -> nn.Module:
    """Sharded inside groups, replicated between them."""
    return shard_units(model.to(device), make_device_mesh(trial, device), trial)


def apply_tp(model: nn.Module, device: torch.device, trial: Trial) -> nn.Module:
    """Layers split over the `tp` axis; sharded or replicated over the others."""
    check_divisible(trial)
    model, mesh = model.to(device), make_device_mesh(trial, device)
    if trial.mesh.tp > 1:
        model = split_layers(model, mesh["tp"], trial.workload, trial.spreading.sequence_parallel)
        if trial.spreading.async_tp:
            pipeline_products(mesh.get_group("tp").group_name)
    return shard_units(model, mesh, trial) if trial.num_data_ranks > 1 else model


def pipeline_products(group_name: str) -> None:
    """Let Inductor put communication of this group beside the matrix products that it belongs to."""
    inductor: Any = importlib.import_module("torch._inductor.config")  # here: both import much, for GPUs only
    inductor._micro_pipeline_tp = True
    importlib.import_module("torch.distributed._symmetric_memory").enable_symm_mem_for_group(group_name)


def shard_units(model: nn.Module, mesh: DeviceMesh, trial: Trial) -> nn.Module:
    """`fully_shard` over the data axes: every block, then the rest."""
    places = mesh["dp", "fsdp"] if trial.mesh.dp > 1 else mesh["fsdp"]
    for block in find_blocks(model):
        fully_shard(block, mesh=places, reshard_after_forward=trial.spreading.reshard_after_forward)
    fully_shard(model, mesh=places, reshard_after_forward=False)
    return model
