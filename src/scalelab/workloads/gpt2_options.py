"""Options of `gpt2`, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from scalelab.checks import check_at_least, check_share, flag
from scalelab.errors import UsageError
from scalelab.records.settings import MaybeInt, MaybePath
from scalelab.workloads.workload import FLOPS_PER_MULTIPLY_ADD, Divisible


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
    "large": Gpt2Shape(num_layers=36, num_heads=20, width=1280, vocabulary=50257, context=1024),
}
OWN_SIZES = {"vocabulary": "vocabulary", "layers": "num_layers", "heads": "num_heads", "width": "width"}
"""Options that replace a field of the shape."""


@dataclass(frozen=True, kw_only=True)
class Gpt2Options:
    """A GPT-2 language model on random tokens or on shards of tokens, AdamW."""

    size: Literal["tiny", "small", "large"] = "tiny"
    """tiny: 4 layers of width 128, context 64; small: 12 layers of width 768, context 1024, 124 M parameters; large: 36
    layers of width 1280, context 1024, 774 M parameters."""
    dropout: float = 0.1
    """Dropout probability."""
    sequence: MaybeInt = None
    """Tokens per sample, at most the context length. None: the context length."""
    vocabulary: MaybeInt = None
    """Vocabulary size. None: 512 for tiny, 50257 for the others."""
    layers: MaybeInt = None
    """Number of blocks. None: as many as the size has."""
    heads: MaybeInt = None
    """Attention heads; must divide the width. None: as many as the size has."""
    width: MaybeInt = None
    """Width of the model. None: that of the size."""
    data: Literal["synthetic", "tokens"] = "synthetic"
    """synthetic: random tokens; tokens: the shards at --data-path."""
    data_path: MaybePath = None
    """Shards to train on: a file, a directory or a pattern with *."""
    test_path: MaybePath = None
    """Shards to evaluate on. None: those at --data-path with _val or _test in their names, left out of training."""

    def __post_init__(self) -> None:
        check_share("dropout", self.dropout)
        for name in ("sequence", *OWN_SIZES):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)

    @property
    def shape(self) -> Gpt2Shape:
        own = {field: getattr(self, name) for name, field in OWN_SIZES.items() if getattr(self, name) is not None}
        return replace(GPT2_SHAPES[self.size], **own)

    @property
    def num_tokens(self) -> int:
        """Tokens of one sample."""
        return self.sequence or self.shape.context

    @property
    def label(self) -> str:
        own = [f"{name} {getattr(self, name)}" for name in ("layers", "heads", "width") if getattr(self, name)]
        return " ".join((f"gpt2 {self.size}", *own))

    @property
    def divisible(self) -> Divisible:
        return Divisible(tp=(self.shape.num_heads, "heads"), pp=(self.shape.num_layers, "blocks"))

    def resolve(self) -> Self:
        return replace(self, data_path=make_absolute(self.data_path), test_path=make_absolute(self.test_path))

    def find_data(self) -> tuple[list[Path], list[Path]]:
        """Training and test shards; raises `UsageError` if there are none."""
        from scalelab.data.shards import find_shards, split_shards  # here: --help needs no numpy

        if not self.data_path:
            raise UsageError("--data tokens needs shards: set --data-path")
        found = find_shards(self.data_path)
        train, test = split_shards(found)
        if self.test_path:
            test = find_shards(self.test_path)
        return train or found, test if train or self.test_path else []

    def check(self) -> None:
        shape = self.shape
        if shape.width % shape.num_heads:
            raise UsageError(
                f"{shape.num_heads} heads do not divide a width of {shape.width}: change --heads or --width"
            )
        if self.num_tokens > shape.context:
            raise UsageError(
                f"--sequence {self.num_tokens} is longer than the context of --size {self.size}: use {shape.context}"
                " or less"
            )
        if self.data == "synthetic":
            for name in ("data_path", "test_path"):
                if getattr(self, name):
                    raise UsageError(f"{flag(name)} {getattr(self, name)} has no effect without --data tokens: add it")
            return
        from scalelab.data.shards import read_largest_token

        for path in (path for paths in self.find_data() for path in paths):
            largest = read_largest_token(path)
            if largest >= shape.vocabulary:
                raise UsageError(
                    f"shard {path} contains token {largest}, but --size {self.size} has a vocabulary of"
                    f" {shape.vocabulary}: use --vocabulary {largest + 1} or more"
                )

    def count_parameters(self) -> int:
        """Embeddings (the head shares the token table), 12·d² + 13·d per block, and the last norm."""
        shape, d = self.shape, self.shape.width
        return (shape.vocabulary + shape.context) * d + shape.num_layers * (12 * d * d + 13 * d) + 2 * d

    def flops_per_sample(self) -> float:
        """Per token 12·d² per block, d·vocabulary in the head, and 2·d per attended position and block.

        Attention is counted as if not causal (Kaplan et al. 2020, table 1; PaLM 2022, appendix B).
        """
        shape, d = self.shape, self.shape.width
        blocks = shape.num_layers * (12 * d * d + 2 * d * self.num_tokens)
        return FLOPS_PER_MULTIPLY_ADD * self.num_tokens * (blocks + d * shape.vocabulary)


def make_absolute(path: str | None) -> str | None:
    """The absolute path; it may be a pattern."""
    return str(Path(path).expanduser().absolute()) if path else path
