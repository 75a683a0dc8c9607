"""A model as its trial wants it trained: recomputed, compiled and distributed by the strategy that its record names.

The order matters: synchronized batch norm, activation checkpointing, compiled blocks (strategies that wrap blocks), the
strategy, and the whole compiled around it (the others, because only there can torch.compile cut its graph at the
buckets of DDP).

Backward without gradient all-reduce, for all passes of a step but the last:

    no_sync()     of the model that a strategy returns, as DDP and FSDP have it; entered before forward, where DDP
                  decides whether backward communicates
    fsdp2         `set_requires_gradient_sync(False)`, looked at in backward
    single, dp    nothing is communicated

What stays: sharded strategies still gather parameters. And a sharded rank then holds the gradients of all
parameters, not of its piece, until the next reduce-scatter adds to them, so that no optimizer step can be made without
one: `fsdp-full` and `fsdp-grad-op` raise an error in it, and in `fsdp2` it does nothing, and the gradients that were
held back turn up in a later step. `can_update_without_sync` says where it can.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from scalelab.errors import UsageError
from scalelab.records.launchers import load
from scalelab.records.strategies import STRATEGIES, find_strategy
from scalelab.records.trial import Trial
from scalelab.worker.device import find_driver
from scalelab.worker.strategies.blocks import apply_checkpointing, find_blocks
from scalelab.worker.strategies.sync_batch_norm import apply_sync_batch_norm

Apply = Callable[[nn.Module, torch.device, Trial], nn.Module]
COMPILE_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "cudagraphs": {"backend": "cudagraphs"},
}
CLIP_MARGIN = 1e-6
"""torch's own, against a norm of 0."""


def load_strategy(name: str) -> Apply:
    """The function of a strategy, from the module that its record names."""
    found: Apply = load(STRATEGIES[name].apply)
    return found


def apply_single(model: nn.Module, device: torch.device, _: Trial) -> nn.Module:
    """`single`: the plain loop, the reference without a process group."""
    return model.to(device)


def apply_strategy(model: nn.Module, trial: Trial, device: torch.device) -> nn.Module:
    """The model as the trial wants it trained."""
    check_library(trial.strategy)
    if trial.spreading.sync_batch_norm:
        model = apply_sync_batch_norm(model, device)
    if trial.dtype == "float8":
        convert_linears(model, device)
    apply_checkpointing(model, trial.shape.checkpointing)
    compiles_blocks = find_strategy(trial.strategy).wraps_blocks
    if trial.shape.compile and compiles_blocks:
        for block in find_blocks(model) or [model]:
            block.compile(**COMPILE_OPTIONS[trial.shape.compile_mode])
    distributed = load_strategy(trial.strategy)(model, device, trial)
    if trial.shape.compile and not compiles_blocks:
        compiled: Any = torch.compile(distributed, **COMPILE_OPTIONS[trial.shape.compile_mode])
        whole: nn.Module = compiled
        return whole
    return distributed


def check_library(name: str) -> None:
    """Reject a strategy of a package that is not here."""
    library = STRATEGIES[name].library
    if library and importlib.util.find_spec(library) is None:
        raise UsageError(f"--strategy {name} needs {library}: pip install 'scalelab[{library}]'")


def convert_linears(model: nn.Module, device: torch.device) -> None:
    """Let linear layers multiply in 8 bits, by torchao; layers whose sides are not multiples of 16 stay as they are."""
    driver = find_driver(device)
    if driver is None or not driver.has_float8(device):
        name = "a CPU" if driver is None else driver.name(device.index or 0)
        raise UsageError(f"--dtype float8 needs a GPU that multiplies in 8 bits, and {name} does not: use bfloat16")
    try:
        float8 = importlib.import_module("torchao.float8")
    except ImportError:
        raise UsageError("--dtype float8 needs torchao: pip install 'scalelab[float8]'") from None
    float8.convert_to_float8_training(model, module_filter_fn=has_whole_tiles)


def has_whole_tiles(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0


def without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """A context for forward and backward in which gradients are only accumulated. Looks through torch.compile."""
    plain: Any = getattr(model, "_orig_mod", model)
    if isinstance(plain, FSDPModule):
        return _hold_gradients(plain)
    if hasattr(plain, "no_sync"):
        context: AbstractContextManager[None] = plain.no_sync()
        return context
    return nullcontext()


def can_update_without_sync(model: nn.Module) -> bool:
    """Whether a rank can make an optimizer step without the gradient all-reduce. Looks through torch.compile."""
    plain = getattr(model, "_orig_mod", model)
    if isinstance(plain, FullyShardedDataParallel):
        return plain.sharding_strategy is ShardingStrategy.NO_SHARD
    return not isinstance(plain, FSDPModule)


@torch.no_grad()
def clip_gradients(model: nn.Module, most: float) -> None:
    """Scale all gradients down where their norm, over all parameters and all ranks' shards of them, is larger.

    As `torch.nn.utils.clip_grad_norm_`. Ranks that hold shards add up their squares; FSDP's own method does the same,
    but not in float64.
    """
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    gradients = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in found]
    if not gradients:
        return
    norm = get_total_norm(gradients)
    if not can_update_without_sync(model) and dist.get_world_size() > 1:
        square = norm.to(torch.promote_types(norm.dtype, torch.float32)).square() / count_copies(found[0])
        dist.all_reduce(square)
        norm = square.sqrt()
    torch._foreach_mul_(gradients, (most / (norm + CLIP_MARGIN)).clamp(max=1.0).to(gradients[0].dtype))


def count_copies(gradient: torch.Tensor) -> int:
    """How many ranks hold the same shard of a gradient: the replicas of a mesh."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for place, size in sizes if place.is_replicate())


def looks_for_unused(model: nn.Module) -> bool:
    """Whether DDP notes which parameters a step uses. Looks through torch.compile."""
    return bool(getattr(getattr(model, "_orig_mod", model), "find_unused_parameters", False))


@contextmanager
def _hold_gradients(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
