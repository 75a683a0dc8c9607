"""Backward without gradient all-reduce, for all passes of a step but the last.

    ddp, fsdp-*   `no_sync()`, which must be entered before forward: DDP decides there whether backward exchanges
    fsdp2         `set_requires_gradient_sync(False)`, looked at in backward
    single, dp    there is no exchange

What stays: sharded strategies still gather parameters. And a sharded rank then holds the gradients of all
parameters, not of its piece, until the next exchange adds to them, so that no optimizer step can be made without one:
`fsdp-full` and `fsdp-grad-op` raise an error in it, and in `fsdp2` it does nothing, and the gradients that were held
back turn up in a later step. `can_update_without_sync` tells where it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel


def without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """A context for forward and backward in which gradients are only accumulated. Looks through torch.compile."""
    plain = getattr(model, "_orig_mod", model)
    if isinstance(plain, DistributedDataParallel | FullyShardedDataParallel):
        context: AbstractContextManager[None] = plain.no_sync()
        return context
    if isinstance(plain, FSDPModule):
        return _hold_gradients(plain)
    return nullcontext()


def can_update_without_sync(model: nn.Module) -> bool:
    """Whether a rank can make an optimizer step without the gradient all-reduce. Looks through torch.compile."""
    plain = getattr(model, "_orig_mod", model)
    if isinstance(plain, FullyShardedDataParallel):
        return plain.sharding_strategy is ShardingStrategy.NO_SHARD
    return not isinstance(plain, FSDPModule)


@contextmanager
def _hold_gradients(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
