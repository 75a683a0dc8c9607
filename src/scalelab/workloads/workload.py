"""`Workload`: model, batches, loss and what else `build` may say of a training run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    Loss = Callable[[nn.Module, Any], torch.Tensor]
    MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that one rank needs to train."""

    model: nn.Module
    batches: Iterable[Any]
    """One rank's batches, restarted when they end; or a map-style dataset or its `DataLoader`, which ranks share."""
    loss: Loss | Mapping[str, Loss] | None = None
    """The scalar loss of the model on one batch, or an `nn.Module` such as `nn.CrossEntropyLoss()` that is given
    the model's output for the first element of the batch, and the second element. By names of submodules: they take
    turns, each with its own loss and optimizer, as in a GAN. None: the model returns its loss."""
    optimizer: MakeOptimizer | Mapping[str, MakeOptimizer] | None = None
    """Makes the optimizer from the parameters; None: Adam with its defaults."""
    shuffle: str = ""
    """How samples are shuffled, if not fully, in words; reports warn about it."""
    test_batches: Iterable[Any] | None = None
    """One rank's test data, iterated once per evaluation; as many batches on every rank."""
    evaluate: Callable[[nn.Module, Any], float | Mapping[str, float]] | None = None
    """The loss of the model on one test batch, or several numbers by name; None: the loss, and accuracy."""
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    """Makes the learning-rate schedule of an optimizer, which is stepped after every step."""
    clip_norm: float | None = None
    """The largest norm of all gradients together; larger ones are scaled down. None: not clipped."""
    accumulation: int = 1
    """Batches per step, whose gradients are accumulated; a batch then has `batch_size // accumulation` samples."""
    batch_dim: int = 0
    """The dimension of a batch's tensors that counts samples: 1 where the sequence comes first."""
    tokens_per_sample: float | None = None
    """For tokens per second; None: samples have none."""
    flops_per_sample: float | None = None
    """Floating-point operations of one step per sample; None: counted, where a study shows them."""


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
