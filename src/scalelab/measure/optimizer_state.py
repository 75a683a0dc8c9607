"""What an optimizer keeps between steps: momenta, averages of squares, counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def count_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in its state, of this rank's piece where they are sharded."""
    return sum(tensor.nbytes for state in optimizer.state.values() for tensor in find_tensors(state))


def find_tensors(state: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nest of dicts, lists and tuples."""
    if isinstance(state, DTensor):
        yield state.to_local()
    elif isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for part in state.values():
            yield from find_tensors(part)
    elif isinstance(state, list | tuple):
        for part in state:
            yield from find_tensors(part)
