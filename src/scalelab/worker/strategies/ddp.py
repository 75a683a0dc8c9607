"""`ddp`: every rank holds the whole model, and gradients are averaged bucket by bucket while backward still runs
(Li et al., "PyTorch Distributed", VLDB 2020).

A bucket size that is given holds for all buckets. Without one torch makes the first bucket small (1 MB), so that the
exchange begins early, and the others 25 MB: giving 25 is not the same as giving nothing.

A gradient hook replaces the plain exchange by a compressed one:

    fp16, bf16   gradients travel in 16 bits: half the bytes, and a rounding error in every one of them
    powersgd     every matrix M of gradients travels as two thin ones, M ≈ P·Qᵀ with `powersgd_rank` columns each;
                 what is lost is added to the next step's gradients (Vogels et al. 2019)

On a CPU PowerSGD goes bucket by bucket and does not overlap with backward (`finish_powersgd` says why), and unless a
bucket size is given all gradients are one bucket: with several, one run in five was seen to differ from the others in
the last digit of its losses, for a reason that is not known.

PowerSGD remembers Q and the errors from step to step. They belong to a checkpoint as the optimizer's state does:
`find_hook_state` gives them.
"""

import warnings

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from scalelab.records.settings import Spreading
from scalelab.records.trial import Trial


def apply_ddp(model: nn.Module, device: torch.device, trial: Trial) -> nn.Module:
    """Replicas whose gradients are averaged during backward."""
    spreading = trial.spreading
    with warnings.catch_warnings():
        # A new name for this is on its way, which older versions do not know.
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        replicated = DistributedDataParallel(
            model.to(device),
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=choose_bucket_mb(model, device, spreading),
            static_graph=spreading.static_graph,
            gradient_as_bucket_view=spreading.gradient_as_bucket_view,
            broadcast_buffers=spreading.broadcast_buffers,
            find_unused_parameters=spreading.find_unused_parameters,
        )
    register_gradient_hook(replicated, spreading)
    return replicated


def choose_bucket_mb(model: nn.Module, device: torch.device, spreading: Spreading) -> float | None:
    """The requested bucket size, or torch's default; PowerSGD on a CPU gets one bucket."""
    if spreading.bucket_mb is not None or spreading.gradient_hook != "powersgd" or device.type != "cpu":
        return spreading.bucket_mb
    return 1 + sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20


def register_gradient_hook(model: DistributedDataParallel, spreading: Spreading) -> None:
    """Register the requested communication hook."""
    if spreading.gradient_hook == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    elif spreading.gradient_hook == "bf16":
        # By another name: torch refuses its own without NCCL, but gloo can add numbers of 16 bits too.
        model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    elif spreading.gradient_hook == "powersgd":
        state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=spreading.powersgd_rank,
            start_powerSGD_iter=spreading.powersgd_start,
        )
        is_on_cpu = next(model.parameters()).device.type == "cpu"
        model.register_comm_hook(state, finish_powersgd if is_on_cpu else powerSGD_hook)
        # Assigned around nn.Module, which means attributes to be tensors and modules.
        object.__setattr__(model, "hook_state", state)


# torch reads these annotations, and not as text: hence no `from __future__ import annotations` in this file.
def finish_powersgd(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PowerSGD on one bucket, waited for.

    It exchanges P, and when that has arrived Q. gloo matches messages by the order in which they were begun, and with
    several buckets on their way that order depends on which arrives first: ranks then wait for each other for ever.
    """
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


def find_hook_state(model: nn.Module) -> PowerSGDState | None:
    """What a gradient hook remembers between steps; None if there is nothing. Looks through torch.compile."""
    return getattr(model, "hook_state", None)
