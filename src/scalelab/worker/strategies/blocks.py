"""The units of a model that are sharded, gathered and recomputed one after the other.

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
"""

from __future__ import annotations

from torch import nn


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
