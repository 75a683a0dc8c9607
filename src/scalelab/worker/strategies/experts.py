"""`ep`: expert parallelism: each rank of the `ep` axis holds some of the experts of every layer (Lepikhin et al. 2021).

Ranks have their own samples, as in `ddp`. What a gate assigns to an expert is sent to the rank that holds it, and
the result back: two all-to-alls per layer in forward, and two in backward for their gradients. Capacity is fixed, so
every rank sends as much to each of the others.

The gradient of an expert is complete on its rank, which has seen the tokens of the whole `ep` group; replicas of it on
the `dp` axis add theirs. Everything else is replicated on all ranks, and DDP averages its gradients. Weights are plain
tensors, so that an optimizer does not dispatch through DTensor; `state.py` makes DTensors of them for a checkpoint, so
that it holds whole tensors which any other layout can read.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from scalelab.errors import UsageError
from scalelab.records.trial import Trial
from scalelab.worker.models.moe import Experts
from scalelab.worker.strategies.meshes import make_device_mesh
from scalelab.worker.strategies.plans import check_divisible


def apply_ep(model: nn.Module, device: torch.device, trial: Trial) -> nn.Module:
    """Experts split over the `ep` axis, everything else replicated."""
    found = find_experts(model)
    if not found:
        raise UsageError(f"--workload {trial.workload} has no experts that ep could split: use moe, or --strategy ddp")
    check_divisible(trial)
    model, mesh = model.to(device), make_device_mesh(trial, device)
    for experts in found.values():
        split_experts(experts, mesh, trial.mesh.ep)
    replicated = replicate_rest(model, device, trial)
    weights = [weight for experts in found.values() for weight in experts.parameters()]
    average_experts(weights, replicated, mesh, trial)
    return replicated


def find_experts(model: nn.Module) -> dict[str, Experts]:
    """The experts of every layer, by name."""
    return {name: part for name, part in model.named_modules() if isinstance(part, Experts)}


def split_experts(experts: Experts, mesh: DeviceMesh, num_ranks: int) -> None:
    """Keep this rank's experts; slots of the others are sent to where they are."""
    if num_ranks == 1:
        return
    group, place = mesh.get_group("ep"), mesh.get_local_rank("ep")
    for name, weight in list(experts.named_parameters()):
        piece = weight.detach().chunk(num_ranks)[place].clone()
        setattr(experts, name, nn.Parameter(piece, requires_grad=weight.requires_grad))
    experts.mesh = mesh["ep"]
    experts.exchange = functools.partial(exchange_slots, group=group, num_ranks=num_ranks)


def exchange_slots(slots: torch.Tensor, is_outward: bool, *, group: Any, num_ranks: int) -> torch.Tensor:
    """Slots of all experts to those of this rank's, of all ranks together; or results the other way."""
    own, width = len(slots) // num_ranks, slots.shape[-1]
    if is_outward:
        arrived = send_all(slots.contiguous(), group).view(num_ranks, own, -1, width)
        return arrived.transpose(0, 1).reshape(own, -1, width)
    parted = slots.view(len(slots), num_ranks, -1, width).transpose(0, 1).contiguous()
    return send_all(parted.flatten(0, 1), group)


def send_all(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """An equal share of the rows to every rank; gradients travel back the same way.

    torch's functional collective can be compiled; its wrapped result costs a twentieth of a small step otherwise.
    """
    arrived: torch.Tensor
    if torch.compiler.is_compiling():
        arrived = all_to_all_single_autograd(rows, None, None, group)
    else:
        arrived = SendAll.apply(rows, group)  # type: ignore[no-untyped-call]
    return arrived


class SendAll(torch.autograd.Function):
    """The same without a wrapper."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        arrived = torch.empty_like(rows)
        dist.all_to_all_single(arrived, rows, group=group)
        return arrived

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return SendAll.apply(gradients[0].contiguous(), context.group), None  # type: ignore[no-untyped-call]


def replicate_rest(model: nn.Module, device: torch.device, trial: Trial) -> nn.Module:
    """DDP around everything but the experts.

    On an accelerator it has its own group, so that gradients travel beside tokens; on a CPU a second group's threads
    only take the core that computes.
    """
    ignored = [f"{name}.{part}" for name, experts in find_experts(model).items() for part in ("up", "down")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=None if device.type == "cpu" else dist.new_group(),
        bucket_cap_mb=trial.spreading.bucket_mb,
    )


def average_experts(weights: list[nn.Parameter], model: nn.Module, mesh: DeviceMesh, trial: Trial) -> None:
    """Average the gradients of experts when they are there: a rank has the sum over its `ep` group."""
    group = mesh.get_group("dp") if trial.mesh.dp > 1 else None

    def average(weight: torch.Tensor) -> None:
        if weight.grad is None or not getattr(model, "require_backward_grad_sync", True):
            return
        weight.grad.div_(trial.num_data_ranks)
        if group is not None:
            dist.all_reduce(weight.grad, group=group)

    for weight in weights:
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(average)
