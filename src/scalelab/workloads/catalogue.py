"""The workloads by name, without torch, and the options of `mlp`, `moe` and `transformer`.

The parent process makes flags of it, checks values before a launch, and estimates how long a study takes. Only ranks
import the code that builds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from scalelab.checks import check_at_least, check_positive, check_share
from scalelab.errors import UnknownName, UsageError
from scalelab.records.settings import MaybePath
from scalelab.records.trial import Option, from_builtins
from scalelab.workloads.gpt2_options import Gpt2Options, Gpt2Shape
from scalelab.workloads.image_options import LenetOptions, Resnet18Options
from scalelab.workloads.source import (
    OwnWorkload,
    find_module,
    is_in_library,
    read_library_workload,
    read_own_workload,
)
from scalelab.workloads.workload import FLOPS_PER_MULTIPLY_ADD, Divisible, WorkloadOptions


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

    @property
    def divisible(self) -> Divisible:
        pairs = (self.dim, "columns") if self.depth > 1 else Divisible.tp
        return Divisible(tp=pairs, pp=(self.depth, "layers"))

    def resolve(self) -> Self:
        return self

    def check(self) -> None:
        """Every combination works."""

    def count_parameters(self) -> int:
        return self.depth * (self.dim * self.dim + self.dim)

    def flops_per_sample(self) -> float:
        return FLOPS_PER_MULTIPLY_ADD * self.depth * self.dim * self.dim


@dataclass(frozen=True, kw_only=True)
class MoeOptions:
    """A small language model with a mixture of experts in every block, on random tokens, AdamW."""

    layers: int = 2
    """Number of blocks."""
    width: int = 128
    """Width of the model; an expert's hidden layer is four times as wide."""
    heads: int = 4
    """Attention heads; must divide --width."""
    experts: int = 4
    """Experts in every block; each token is sent to one of them."""
    capacity: float = 1.25
    """Slots of all experts over the tokens of a sample; tokens without a slot skip the experts."""
    sequence: int = 64
    """Tokens per sample."""
    vocabulary: int = 512
    """Vocabulary size."""
    dropout: float = 0.1
    """Dropout probability."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "experts", "sequence", "vocabulary"):
            check_at_least(name, getattr(self, name), 1)
        check_positive("capacity", self.capacity)
        check_share("dropout", self.dropout)

    @property
    def shape(self) -> Gpt2Shape:
        return Gpt2Shape(
            num_layers=self.layers,
            num_heads=self.heads,
            width=self.width,
            vocabulary=self.vocabulary,
            context=self.sequence,
        )

    @property
    def num_slots(self) -> int:
        """Tokens of one sample that an expert takes at most."""
        return math.ceil(self.capacity * self.sequence / self.experts)

    @property
    def label(self) -> str:
        return f"moe {self.width}×{self.experts}"

    @property
    def divisible(self) -> Divisible:
        return Divisible(ep=(self.experts, "experts"))

    def resolve(self) -> Self:
        return self

    def check(self) -> None:
        if self.width % self.heads:
            raise UsageError(
                f"--width {self.width} is not divisible by --heads {self.heads}: use a divisor of {self.width}, such as"
                f" --heads {largest_divisor(self.width, self.heads)}"
            )

    def count_parameters(self) -> int:
        """Embeddings (the head shares the token table), per block attention, gate, norms and experts of 8·d²."""
        d = self.width
        block = 4 * d * d + 4 * d + 4 * d + d * self.experts + self.experts * 8 * d * d
        return (self.vocabulary + self.sequence) * d + self.layers * block + 2 * d

    def flops_per_sample(self) -> float:
        """As of gpt2, with 8·d² for every slot, filled or not, instead of every token."""
        d, t = self.width, self.sequence
        block = t * (4 * d * d + 2 * d * t + d * self.experts) + self.experts * self.num_slots * 8 * d * d
        return FLOPS_PER_MULTIPLY_ADD * (self.layers * block + t * d * self.vocabulary)


@dataclass(frozen=True, kw_only=True)
class TransformerOptions:
    """torch's nn.Transformer (encoder and decoder) on random sequences, with its target as input; Adam."""

    samples: int = 2048
    """Sequences in the dataset; every epoch reads all of them, shuffled."""
    src_length: int = 1
    """Length of the encoder's input sequences."""
    tgt_length: int = 20
    """Length of the decoder's input and target sequences."""
    features: int = 512
    """Features per position; must equal --d-model."""
    d_model: int = 512
    """Width of the model."""
    heads: int = 8
    """Attention heads; must divide --d-model."""
    encoder_layers: int = 6
    """Layers of the encoder."""
    decoder_layers: int = 6
    """Layers of the decoder."""
    feedforward: int = 2048
    """Width of the feed-forward layers."""
    dropout: float = 0.1
    """Dropout probability."""
    stored: MaybePath = None
    """Dataset, in any format that scalelab reads, with columns src and tgt. None: random sequences,
    in memory."""
    reader: Literal["lazy", "eager", "naive"] = "lazy"
    """How to read --stored. lazy: each batch when needed. eager: everything at the start. naive: HDF5 with h5py, sample
    by sample."""
    shuffle: Literal["auto", "full", "blocks"] = "auto"
    """How to shuffle --stored when read lazily. auto: fully, or by blocks of chunks if it is too large to
    cache and reading one sample decompresses more than twice its bytes. full, blocks: always that way."""
    workers: int = 0
    """Data loader processes per rank."""

    def __post_init__(self) -> None:
        check_at_least("workers", self.workers, 0)
        for name in ("samples", "src_length", "tgt_length", "features", "d_model", "heads", "feedforward"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("encoder_layers", self.encoder_layers, 1)
        check_at_least("decoder_layers", self.decoder_layers, 1)
        check_share("dropout", self.dropout)

    @property
    def label(self) -> str:
        return f"transformer {self.d_model}"

    @property
    def divisible(self) -> Divisible:
        return Divisible(tp=(self.feedforward, "columns of the feed-forward layers"))

    def resolve(self) -> Self:
        return replace(self, stored=str(Path(self.stored).expanduser().absolute())) if self.stored else self

    def check(self) -> None:
        if self.stored and not Path(self.stored).exists():
            raise UsageError(f"--stored {self.stored}: file not found; `scalelab data convert` writes one")
        if self.features != self.d_model:
            raise UsageError(
                f"--features {self.features} and --d-model {self.d_model} must be equal: nn.Transformer does not"
                f" project its input; use --d-model {self.features} or --features {self.d_model}"
            )
        if self.d_model % self.heads:
            raise UsageError(
                f"--d-model {self.d_model} is not divisible by --heads {self.heads}: use a divisor of"
                f" {self.d_model}, such as --heads {largest_divisor(self.d_model, self.heads)}"
            )

    def count_parameters(self) -> int:
        """Attention 4·d² + 4·d, feed-forward 2·d·f + f + d, norm 2·d; one norm ends each stack."""
        d, f = self.d_model, self.feedforward
        attention, dense, norm = 4 * d * d + 4 * d, 2 * d * f + f + d, 2 * d
        encoder = attention + dense + 2 * norm
        decoder = 2 * attention + dense + 3 * norm
        return self.encoder_layers * encoder + self.decoder_layers * decoder + 2 * norm

    def flops_per_sample(self) -> float:
        """Projections per position, and two products per attending pair of positions."""
        d, s, t = self.d_model, self.src_length, self.tgt_length
        dense = 2 * d * self.feedforward
        encoder = s * (4 * d * d + dense) + 2 * s * s * d
        decoder = t * (6 * d * d + dense) + 2 * s * d * d + 2 * t * (t + s) * d
        return FLOPS_PER_MULTIPLY_ADD * (self.encoder_layers * encoder + self.decoder_layers * decoder)


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`."""
    return next(found for found in range(min(number, most), 0, -1) if number % found == 0)


BUILT_IN: dict[str, type[Any]] = {
    "gpt2": Gpt2Options,
    "lenet": LenetOptions,
    "mlp": MlpOptions,
    "moe": MoeOptions,
    "resnet18": Resnet18Options,
    "transformer": TransformerOptions,
}


def make_options(name: str, options: Mapping[str, Option]) -> WorkloadOptions:
    """The options of a built-in workload, each valid by itself; the others have their defaults."""
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


def resolve_options(name: str, options: Mapping[str, Option]) -> dict[str, Option]:
    """The options as a trial carries them, with absolute paths, so a run can be resumed from any directory.

    Those of a user's workload stay as they are: which of them are paths is unknown.
    """
    if name not in BUILT_IN:
        return dict(options)
    given = make_options(name, options)
    resolved = given.resolve()
    names = [field.name for field in fields(given) if getattr(given, field.name) != getattr(resolved, field.name)]
    return {**options, **{found: getattr(resolved, found) for found in names}}


def find_workload(name: str) -> type[Any] | OwnWorkload:
    """The options class of a built-in workload, or what the user's file declares."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if is_in_library(name):
        return read_library_workload(name)
    if ".py" in name or ":" in name or Path(name).is_file() or find_module(name) is not None:
        return read_own_workload(name)
    raise UnknownName("workload", name, BUILT_IN, "Your own: --workload file.py:build; of a library: hf:gpt2")
