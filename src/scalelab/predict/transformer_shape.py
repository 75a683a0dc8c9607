"""A decoder-only transformer by its sizes: parameters, and the operations of its matrix products.

    parameters of a block   attention d(d + 2·d_kv) + d², feed-forward 2·d·f (3·d·f with a gate), biases, two norms;
                            with experts a feed-forward layer each, and a router d·E
    of the model            blocks, token table V·d, positions, last norm; the output matrix V·d where it is not tied
    operations of a token   2 for every weight of a product it goes through, and 4·s·d per block for attention
    of a step               forward once, backward twice (Kaplan et al. 2020, section 2.1), and what is recomputed

Attention is counted as if every token looked at all s of its sequence, as published counts do (Narayanan et al. 2021,
section 5.1, whose 96·B·s·l·d²·(1 + s/6d + V/16ld) is what this gives with everything recomputed). A tied output matrix
saves parameters and no operations.

From a number of parameters alone a shape is chosen as published models have it: width over layers grows slowly, from
about 96 at 1.7 to 200 at 1000 thousand million (Narayanan et al. 2021, table 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from scalelab.checks import check_at_least
from scalelab.errors import UsageError

Checkpointing = Literal["none", "attention", "selective", "full"]
"""What is computed again in backward: nothing; attention between its linear layers (Korthikanti et al. 2022); every
second product and what lies between, as torchtitan does; every block."""

HEAD_WIDTH = 128
"""Of a head in a shape that is chosen; GPT-3 and its successors have it."""
USUAL_VOCABULARY = 51_200
"""GPT-2's 50257, rounded up so that it can be split."""
LEAST_PARAMETERS = 1_000_000


class Product(NamedTuple):
    """A product of matrices: rows × depth by depth × columns, so many times."""

    rows: float
    columns: float
    depth: float
    repeats: float = 1.0

    @property
    def operations(self) -> float:
        return 2 * self.rows * self.columns * self.depth * self.repeats


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The sizes that make a decoder."""

    num_layers: int
    width: int
    num_heads: int
    vocabulary: int
    sequence: int
    """Tokens of one sample."""
    num_kv_heads: int | None = None
    """Heads of keys and values. None: as many as others."""
    feedforward: int | None = None
    """Width inside the feed-forward layer. None: four times the width."""
    num_positions: int | None = None
    """Rows of a learned table of positions; 0: none. None: one per token of a sample."""
    is_gated: bool = False
    """Whether the feed-forward layer has a gate, as in Llama; its norms then have no bias either."""
    has_biases: bool = True
    is_tied: bool = True
    """Whether the output matrix is the token table."""
    num_experts: int = 1
    """Feed-forward layers of a block; a router picks some for every token (Shazeer et al. 2017). 1: no router."""
    experts_per_token: int = 1
    """How many of them a token goes through; with equal shares of tokens for all."""
    shared_experts: int = 0
    """Feed-forward layers besides that every token goes through (DeepSeek-AI 2024)."""

    def __post_init__(self) -> None:
        for name, least in (("num_experts", 1), ("experts_per_token", 1), ("shared_experts", 0)):
            check_at_least(name.removeprefix("num_"), getattr(self, name), least)
        if self.experts_per_token > self.num_experts:
            raise UsageError(
                f"--experts-per-token must be ≤ --experts ({self.num_experts}), got {self.experts_per_token}"
            )
        for name in ("num_layers", "width", "num_heads", "vocabulary", "sequence"):
            check_at_least(name.removeprefix("num_"), getattr(self, name), 1)
        if self.width % self.num_heads:
            raise UsageError(f"--width must be a multiple of --heads ({self.num_heads}), got {self.width}")
        if self.num_heads % self.kv_heads:
            raise UsageError(f"--heads must be a multiple of --kv-heads ({self.num_kv_heads}), got {self.num_heads}")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def kv_width(self) -> int:
        """Of keys, and of values."""
        return self.width // self.num_heads * self.kv_heads

    @property
    def inner(self) -> int:
        return self.feedforward or 4 * self.width

    @property
    def num_ups(self) -> int:
        """Matrices into the feed-forward layer: one, or one and a gate."""
        return 2 if self.is_gated else 1

    @property
    def norm_parameters(self) -> int:
        return self.width if self.is_gated else 2 * self.width

    @property
    def active_experts(self) -> int:
        """Feed-forward layers that a token goes through."""
        return self.experts_per_token + self.shared_experts

    @property
    def expert_parameters(self) -> int:
        """Of one feed-forward layer."""
        biases = self.num_ups * self.inner + self.width if self.has_biases else 0
        return (self.num_ups + 1) * self.width * self.inner + biases

    @property
    def routed_parameters(self) -> int:
        """Of a block, in experts that a router picks from: what expert parallelism splits."""
        return self.num_experts * self.expert_parameters if self.num_experts > 1 else 0

    @property
    def block_parameters(self) -> int:
        into = self.width + 2 * self.kv_width
        weights = self.width * into + self.width**2 + (self.width * self.num_experts if self.num_experts > 1 else 0)
        biases = into + self.width if self.has_biases else 0
        experts = (self.num_experts + self.shared_experts) * self.expert_parameters
        return weights + biases + experts + 2 * self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        """The token table and positions."""
        positions = self.sequence if self.num_positions is None else self.num_positions
        return (self.vocabulary + positions) * self.width

    @property
    def head_parameters(self) -> int:
        """What follows the blocks: the last norm, and the output matrix where it is not tied."""
        return self.norm_parameters + (0 if self.is_tied else self.vocabulary * self.width)

    @property
    def num_parameters(self) -> int:
        return self.embedding_parameters + self.num_layers * self.block_parameters + self.head_parameters

    @property
    def active_parameters(self) -> int:
        """Those that a token goes through, the token table included."""
        unused = self.num_experts - self.experts_per_token
        return self.num_parameters - self.num_layers * unused * self.expert_parameters

    def list_products(self, samples: float, split: int = 1, context: int = 1, expert: int = 1) -> list[Product]:
        """The products of one block's forward on one of `split` × `context` ranks: linear layers, then attention's two.

        Each of `expert` ranks has its share of the experts, and gets as many tokens for them as it sends to others.
        """
        own, width, head = self.sequence / context, self.width, self.width // self.num_heads
        tokens, heads = samples * own, samples * self.num_heads / split
        routed, own_experts = tokens * expert * self.experts_per_token / self.num_experts, self.num_experts / expert
        inner, shared = self.inner / split, self.shared_experts * self.inner / split
        return [
            Product(tokens, (width + 2 * self.kv_width) / split, width),
            Product(tokens, width, width / split),
            Product(routed, self.num_ups * inner, width, own_experts),
            Product(routed, width, inner, own_experts),
            *([Product(tokens, self.num_ups * shared, width), Product(tokens, width, shared)] if shared else []),
            Product(own, self.sequence, head, heads),
            Product(own, head, self.sequence, heads),
        ]

    def output_product(self, samples: float, split: int = 1, context: int = 1) -> Product:
        """The logits."""
        return Product(samples * self.sequence / context, self.vocabulary / split, self.width)

    def count_operations(self, samples: float, checkpointing: Checkpointing = "none") -> float:
        """Of one step, with what is recomputed."""
        products = [product.operations for product in self.list_products(samples)]
        linear, attention = math.fsum(products[:-2]), math.fsum(products[-2:])
        again = {"none": 0.0, "attention": attention, "selective": 0.5 * linear, "full": linear + attention}
        forward = self.num_layers * (linear + attention) + self.output_product(samples).operations
        return 3 * forward + self.num_layers * again[checkpointing]

    @property
    def words(self) -> str:
        experts = f" {self.num_experts} experts, {self.experts_per_token} per token," if self.num_experts > 1 else ""
        return (
            f"{self.num_layers} layers of width {self.width}, {self.num_heads} heads,{experts} vocabulary"
            f" {self.vocabulary}, sequence {self.sequence}"
        )


GPT2_TINY = Transformer(num_layers=4, width=128, num_heads=4, vocabulary=512, sequence=64)
GPT2_SMALL = Transformer(num_layers=12, width=768, num_heads=12, vocabulary=50257, sequence=1024)
GPT2_LARGE = Transformer(num_layers=36, width=1280, num_heads=20, vocabulary=50257, sequence=1024)
LLAMA3_8B = Transformer(
    num_layers=32, width=4096, num_heads=32, num_kv_heads=8, feedforward=14336, vocabulary=128256, sequence=8192,
    num_positions=0, is_gated=True, has_biases=False, is_tied=False,
)  # fmt: skip
LLAMA3_70B = Transformer(
    num_layers=80, width=8192, num_heads=64, num_kv_heads=8, feedforward=28672, vocabulary=128256, sequence=8192,
    num_positions=0, is_gated=True, has_biases=False, is_tied=False,
)  # fmt: skip
LLAMA3_405B = Transformer(
    num_layers=126, width=16384, num_heads=128, num_kv_heads=8, feedforward=53248, vocabulary=128256, sequence=8192,
    num_positions=0, is_gated=True, has_biases=False, is_tied=False,
)  # fmt: skip
MIXTRAL_8X7B = Transformer(
    num_layers=32, width=4096, num_heads=32, num_kv_heads=8, feedforward=14336, vocabulary=32000, sequence=4096,
    num_positions=0, is_gated=True, has_biases=False, is_tied=False, num_experts=8, experts_per_token=2,
)  # fmt: skip
KNOWN_MODELS = {
    "gpt2-tiny": GPT2_TINY, "gpt2-small": GPT2_SMALL, "gpt2-large": GPT2_LARGE, "llama3-8b": LLAMA3_8B,
    "llama3-70b": LLAMA3_70B, "llama3-405b": LLAMA3_405B, "mixtral-8x7b": MIXTRAL_8X7B,
}  # fmt: skip


def choose_shape(num_parameters: float, *, vocabulary: int = USUAL_VOCABULARY, sequence: int = 2048) -> Transformer:
    """A plausible decoder with about so many parameters: layers and width as published models of that size have."""
    if not math.isfinite(num_parameters) or num_parameters < LEAST_PARAMETERS:
        raise UsageError(f"--parameters must be ≥ {LEAST_PARAMETERS:,}, got {num_parameters:g}")
    ratio = 96 * (num_parameters / 1.7e9) ** 0.115
    layers = (num_parameters / (12 * ratio**2)) ** (1 / 3)
    step = 8 if layers >= 24 else 2
    num_layers = max(2, step * round(layers / step))
    guess = math.sqrt(num_parameters / (12 * num_layers))
    for _ in range(20):  # the token table is part of a small model
        guess = math.sqrt(max(num_parameters - (vocabulary + sequence) * guess, num_parameters / 4) / (12 * num_layers))
    unit = HEAD_WIDTH * 8 if guess >= 8 * HEAD_WIDTH * 4 else HEAD_WIDTH
    width = max(unit, unit * round(guess / unit))
    return Transformer(
        num_layers=num_layers, width=width, num_heads=width // HEAD_WIDTH, vocabulary=vocabulary, sequence=sequence
    )
