"""What a workload is: its options, known without torch, and `Workload`, which `build` makes of them in a rank.

A workload's options are a frozen dataclass whose fields are its flags. It knows its label, parameters and FLOPs without
torch, and whether the options work together. Counts are closed forms that tests compare with torch's modules.

FLOPs are those of matrix products and convolutions, per multiply-add 2 forward and 4 backward (gradients of weights and
input). The first layer needs no input gradient, so a step does slightly less; norms, activations and the optimizer are
not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

if TYPE_CHECKING:
    import torch
    from torch import nn

    Loss = Callable[[nn.Module, Any], torch.Tensor]
    MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


NUM_POOLED_BATCHES = 4
"""Random batches drawn in advance and reused in turn."""
FLOPS_PER_MULTIPLY_ADD = 6.0
"""2 forward, 4 backward."""


@dataclass(frozen=True, kw_only=True)
class Divisible:
    """What of a model an axis of a mesh must divide: how many of it there are, and what it is.

    1: the model has no plan for that axis, and only one rank divides it.
    """

    tp: tuple[int, str] = (1, "plan for tensor parallelism")
    pp: tuple[int, str] = (1, "plan for a pipeline")
    ep: tuple[int, str] = (1, "experts to split")

    def find_obstacle(self, num_pieces: int, num_stages: int, num_parts: int = 1) -> str | None:
        """Why a model cannot be split so, into pieces of layers, stages and parts of the experts; None: it can."""
        for size, axis, (count, what) in (
            (num_pieces, "tp", self.tp),
            (num_stages, "pp", self.pp),
            (num_parts, "ep", self.ep),
        ):
            if count % size:
                stages = "stages" if axis == "pp" else "ranks"
                has = f"{size} {stages} do not divide the {count} {what} of the model" if count > 1 else f"no {what}"
                return f"{axis}={size}: {has}"
        return None


class WorkloadOptions(Protocol):
    """The options of a built-in workload: a frozen dataclass whose fields are its flags."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def label(self) -> str:
        """Its name in tables."""
        ...

    def count_parameters(self) -> int:
        """Trainable parameters."""
        ...

    def flops_per_sample(self) -> float:
        """Floating-point operations of one training step on one sample: 2 forward, 4 backward per multiply-add."""
        ...

    def resolve(self) -> Self:
        """The same with absolute paths, so a run can be resumed from any directory."""
        ...

    def check(self) -> None:
        """Raise `UsageError` for options that do not work together, and for missing data."""
        ...


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
