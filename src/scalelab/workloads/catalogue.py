"""The workloads by name and their options, without torch.

The parent process reads this to make flags, to check values before anything is launched and to estimate how long a
study takes. The code that builds them stands in one file each, which only ranks import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from scalelab.checks import check_at_least, check_share
from scalelab.errors import UnknownName, UsageError
from scalelab.trial import Option, from_builtins
from scalelab.workloads.source import OwnWorkload, read_own_workload


class WorkloadOptions(Protocol):
    """The options of a built-in workload: a frozen dataclass whose fields are its flags."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def label(self) -> str:
        """How tables call it."""
        ...

    def count_parameters(self) -> int:
        """Trainable parameters."""
        ...

    def flops_per_sample(self) -> float:
        """Floating-point operations of one training step on one sample: 2 forward, 4 backward per multiply-add."""
        ...

    def check(self) -> None:
        """Refuse options that cannot work together, and data that is not there."""
        ...


@dataclass(frozen=True, kw_only=True)
class MlpOptions:
    """DEPTH × (Linear(DIM, DIM) + ReLU), mean squared error on random data, Adam."""

    dim: int = 8192
    """Width of every layer."""
    depth: int = 6
    """Number of layers."""

    def __post_init__(self) -> None:
        check_at_least("dim", self.dim, 1)
        check_at_least("depth", self.depth, 1)

    @property
    def label(self) -> str:
        return f"mlp {self.dim}×{self.depth}"

    def check(self) -> None:
        """Every combination works."""

    def count_parameters(self) -> int:
        return self.depth * (self.dim * self.dim + self.dim)

    def flops_per_sample(self) -> float:
        return 6.0 * self.depth * self.dim * self.dim


@dataclass(frozen=True, kw_only=True)
class Gpt2Shape:
    """The sizes that make a GPT-2 model."""

    num_layers: int
    num_heads: int
    width: int
    vocabulary: int
    context: int


GPT2_SHAPES = {
    "tiny": Gpt2Shape(num_layers=4, num_heads=4, width=128, vocabulary=512, context=64),
    "small": Gpt2Shape(num_layers=12, num_heads=12, width=768, vocabulary=50257, context=1024),
}


@dataclass(frozen=True, kw_only=True)
class Gpt2Options:
    """A GPT-2 language model on random tokens, AdamW."""

    size: Literal["tiny", "small"] = "tiny"
    """tiny: 4 layers of width 128, context 64; small: 12 layers of width 768, context 1024 (124 M parameters)."""
    dropout: float = 0.1
    """Share of activations dropped while training."""

    def __post_init__(self) -> None:
        check_share("dropout", self.dropout)

    @property
    def shape(self) -> Gpt2Shape:
        return GPT2_SHAPES[self.size]

    @property
    def label(self) -> str:
        return f"gpt2 {self.size}"

    def check(self) -> None:
        """Every combination works."""

    def count_parameters(self) -> int:
        """Embeddings (the head shares the token table), blocks of 12·d² + 13·d, and the last norm."""
        shape, d = self.shape, self.shape.width
        return (shape.vocabulary + shape.context) * d + shape.num_layers * (12 * d * d + 13 * d) + 2 * d

    def flops_per_sample(self) -> float:
        """6 per parameter and token, and 12·layers·width·context per token for attention (Kaplan et al. 2020)."""
        shape = self.shape
        weights = self.count_parameters() - shape.context * shape.width
        attention = 12.0 * shape.num_layers * shape.width * shape.context
        return shape.context * (6.0 * weights + attention)


BUILT_IN: dict[str, type[Any]] = {"mlp": MlpOptions, "gpt2": Gpt2Options}


def make_options(name: str, options: Mapping[str, Option]) -> WorkloadOptions:
    """The options of a built-in workload, checked; those that are not given have their defaults."""
    kind = BUILT_IN[name]
    known = [field.name for field in fields(kind)]
    for option in options:
        if option not in known:
            raise UnknownName(f"option of {name}", option, known)
    try:
        made: WorkloadOptions = from_builtins(dict(options), kind)
    except ValueError as error:
        raise UsageError(f"--workload {name}: {error}") from error
    return made


def find_workload(name: str) -> type[Any] | OwnWorkload:
    """The options class of a built-in workload, or what the user's own file declares."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ".py" in name or ":" in name or Path(name).is_file():
        return read_own_workload(name)
    raise UnknownName("workload", name, BUILT_IN, "Your own: --workload file.py:build")
