"""The units of a model that are sharded, gathered and recomputed one after the other; and how they are recomputed.

Deep models keep their repeated parts in an `nn.ModuleList` or an `nn.Sequential`. So a block is an element, with
parameters, of the outermost such containers that are met on the way down from the model. A block is not searched
further: what is inside belongs to it. An element that is a list itself has no forward of its own, so its elements
are the blocks.

    mlp           every Linear
    transformer   every encoder and decoder layer
    gpt2          every transformer block
    resnet18      every basic block

What is in no block (embeddings, the stem, the head) belongs to the root. A model without such containers has no
blocks: it is one unit.

Activation checkpointing: recompute in backward what forward would have kept (Chen et al. 2016).

    none        every activation that backward needs is kept
    full        of every block only its inputs are kept; backward runs the block once more
    selective   besides, the results of matrix products, convolutions and attention are kept, which are costly to
                compute; norms, activation functions and dropout, which are cheap and large, are run again

Forward is run again with the random state that it had, so that the same activations are dropped: losses are
bit-equal in all three. A batch norm that runs again must not count the same samples twice: its running statistics
stand still meanwhile.

A block gets a subclass of its own class whose forward is checkpointed. So its type, its names in the state dict and
its copies are what they were, and a strategy that is put around it afterwards gathers its parameters once for
backward, not once more for the second forward.

Limits: `selective` refuses a model that changes a kept result in place, such as `ReLU(inplace=True)` right behind a
convolution; torch says so in the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, in the order in which they are registered, each once."""
    found: dict[nn.Module, None] = {}
    _collect(model, found)
    return list(found)


def _collect(module: nn.Module, found: dict[nn.Module, None]) -> None:
    for child in module.children():
        is_block = isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList)
        if not is_block:
            _collect(child, found)
        elif next(child.parameters(), None) is not None:
            found[child] = None


CheckpointingMode = Literal["none", "selective", "full"]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What forward runs under, and what running it again does."""

KEPT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""ATen's matrix products, convolutions and fused attention; everything else is made of them or is cheap."""

KEPT = {getattr(torch.ops.aten, name).default for name in KEPT_NAMES if hasattr(torch.ops.aten, name)}


def apply_checkpointing(model: nn.Module, mode: CheckpointingMode) -> nn.Module:
    """Checkpoint every block of the model, in place; the whole model where it has no blocks."""
    if mode != "none":
        for block in find_blocks(model) or [model]:
            _checkpoint_forward(block, mode)
    return model


def _checkpoint_forward(block: nn.Module, mode: CheckpointingMode) -> None:
    """Give a block a class whose forward is checkpointed."""
    plain = type(block)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(plain.forward, self)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=True, **choose(self), **kwargs)

    def choose(module: nn.Module) -> dict[str, Any]:
        norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
        context_fn = choose_contexts(mode, norms)
        return {} if context_fn is None else {"context_fn": context_fn}

    block.__class__ = type(f"Checkpointed{plain.__name__}", (plain,), {"forward": forward, "__module__": __name__})


def choose_contexts(mode: CheckpointingMode, norms: list[_BatchNorm]) -> Callable[[], Contexts] | None:
    """What forward and its repetition run under; None if that is nothing, so that torch.compile can see it."""
    make = make_selective_contexts if mode == "selective" else None
    if not norms:
        return make

    def make_contexts() -> Contexts:
        first, again = make() if make else (nullcontext(), nullcontext())
        return first, _nest(hold_running_statistics(norms), again)

    return make_contexts


@contextmanager
def _nest(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def make_selective_contexts() -> Contexts:
    """Keep the results of costly operations, run the others again."""
    contexts: Contexts = create_selective_checkpoint_contexts(choose_policy)
    return contexts


def choose_policy(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def hold_running_statistics(norms: list[_BatchNorm]) -> Iterator[None]:
    """Batch norms see a batch again without taking notice of it: they count it on a copy of their counter."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
