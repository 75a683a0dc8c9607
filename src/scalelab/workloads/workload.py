"""`Workload`: model, batches, loss and optimizer, as `build` returns them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that one rank needs to train."""

    model: nn.Module
    batches: Iterable[Any]
    """One rank's batches; restarted when they end."""
    loss: Callable[[nn.Module, Any], torch.Tensor]
    """The scalar loss of the model on one batch, or an `nn.Module` such as `nn.CrossEntropyLoss()` that is given
    the model's output for the first element of the batch, and the second element."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    """Makes the optimizer from the parameters; None: Adam with its defaults."""
    shuffle: str = ""
    """How samples are shuffled, if not fully, in words; reports warn about it."""
    test_batches: Iterable[Any] | None = None
    """One rank's test data, iterated once per evaluation; as many batches on every rank."""


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """What `build` receives besides the workload's options."""

    batch_size: int
    """Samples of one forward pass on this rank."""
    rank: int
    num_ranks: int
    seed: int
    device: str
    accumulation: int = 1
    """Batches per optimizer step."""
