"""`gpt2`: a GPT-2 language model on random tokens or on shards of tokens.

Pre-norm blocks, learned positions, tanh-approximated GELU, the output head sharing the token table; weights drawn
with standard deviation 0.02, positions 0.01, and the projections into the residual stream scaled down by
1/sqrt(2·layers) (Radford et al. 2019).

One rank's batches of token shards.

Rank r of n reads the B·T + 1 tokens from `pos + r·B·T` on: B sequences of T, and the same moved by one as targets.
Then all ranks advance by n·B·T. So the ranks of a batch lie side by side, no target is read twice, and n ranks with
B/n each read what one rank with B reads. The next shard begins when the current one has not enough left for a whole
step, and the epoch ends with the last shard: what a shard holds beyond its last whole step is not read. A step is
`accumulation` batches; they are never split over two shards, so that accumulating does not change what a step reads.

All of this is arithmetic on lengths. Where batch i lies is known without reading those before it, and every epoch
is the same. The tokens themselves are not looked at: whether a model has a row for each is checked once, before any
rank is started (`read_largest_token`).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from scalelab.checks import check_at_least
from scalelab.data.shards import Shard, open_shard
from scalelab.errors import UsageError
from scalelab.worker.batches.drawn import draw_batches
from scalelab.workloads.gpt2_options import Gpt2Options, Gpt2Shape
from scalelab.workloads.workload import BuildContext, Workload

Batch = tuple[torch.Tensor, torch.Tensor]


class TokenBatches:
    """Inputs and targets, int64 of `batch_size` × `sequence`; iterating goes through one epoch."""

    def __init__(
        self,
        shards: Sequence[Shard],
        batch_size: int,
        sequence: int,
        rank: int,
        num_ranks: int,
        accumulation: int = 1,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("sequence", sequence), ("accumulation", accumulation)):
            check_at_least(name, value, 1)
        self._shards = list(shards)
        self._shape = (batch_size, sequence)
        self._rank, self._num_ranks, self._accumulation = rank, num_ranks, accumulation
        self._steps_until = list(itertools.accumulate(self._count_steps(shard) for shard in self._shards))
        self._start = 0

    @property
    def step_tokens(self) -> int:
        """Target tokens of one step over all ranks."""
        batch_size, sequence = self._shape
        return batch_size * sequence * self._num_ranks * self._accumulation

    def __len__(self) -> int:
        """Batches of an epoch on this rank."""
        return self._steps_until[-1] * self._accumulation if self._steps_until else 0

    def __iter__(self) -> Iterator[Batch]:
        start, self._start = self._start, 0
        return (self.read_batch(index) for index in range(start, len(self)))

    def seek(self, index: int) -> None:
        """Start the next iteration at this batch of the epoch, without reading earlier ones."""
        if not 0 <= index <= len(self):
            raise UsageError(f"batch {index} is out of range for an epoch of {len(self)}: use 0 to {len(self)}")
        self._start = index

    def read_batch(self, index: int) -> Batch:
        """Batch `index` of the epoch."""
        step, part = divmod(index, self._accumulation)
        number = bisect.bisect_right(self._steps_until, step)
        first_step = self._steps_until[number - 1] if number else 0
        batch_size, sequence = self._shape
        size = batch_size * sequence
        first = (step - first_step) * self.step_tokens + (part * self._num_ranks + self._rank) * size
        tokens = torch.from_numpy(self._shards[number].tokens[first : first + size + 1].astype(np.int64))
        return tokens[:-1].view(self._shape), tokens[1:].view(self._shape)

    def _count_steps(self, shard: Shard) -> int:
        """Whole steps in a shard; the last target needs one token more than there are targets."""
        num_steps = (len(shard) - 1) // self.step_tokens
        if num_steps == 0:
            batch_size, sequence = self._shape
            accumulated = f" × {self._accumulation} batches" if self._accumulation > 1 else ""
            raise UsageError(
                f"shard {shard.path} is too small: it has {len(shard)} tokens, but one step of {self._num_ranks} ranks"
                f" × {batch_size} sequences × {sequence} tokens{accumulated} needs {self.step_tokens + 1}:"
                " use a smaller batch or a shorter sequence"
            )
        return num_steps


MOST_TEST_BATCHES = 20
"""Of one evaluation: enough to see the loss fall, few enough not to wait for."""


class Attention(nn.Module):
    """Causal self-attention, all heads in one matrix product."""

    def __init__(self, shape: Gpt2Shape, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_size = shape.num_heads, shape.width // shape.num_heads
        self.dropout = dropout
        self.num_pieces = 1
        """Ranks by whose heads the rows of q, k and v are ordered."""
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.qkv(x)
        batch, length, _ = packed.shape
        heads = packed.view(batch, length, 3, self.num_heads, self.head_size)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        merged: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return merged


class TransformerBlock(nn.Module):
    """Attention, then a feed-forward layer four times as wide, each behind a norm and around a shortcut."""

    def __init__(self, shape: Gpt2Shape, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape, dropout)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        hidden = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        result: torch.Tensor = x + self.drop(self.down(hidden))
        return result


class Gpt2(nn.Module):
    """Token indices in, logits of the next token out."""

    def __init__(self, shape: Gpt2Shape, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(TransformerBlock(shape, dropout) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(initialise_weights)
        nn.init.normal_(self.positions.weight, std=0.01)
        residual_std = 0.02 / math.sqrt(2 * shape.num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=residual_std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def initialise_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def next_token_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, targets = batch
    logits = model(tokens)
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build_gpt2(options: Gpt2Options, context: BuildContext) -> Workload:
    if options.data == "tokens":
        batches, test_batches = read_batches(options, context)
    else:
        draw = functools.partial(draw_tokens, options.shape.vocabulary, options.num_tokens)
        batches, test_batches = draw_batches(draw, context), None
    return Workload(
        model=Gpt2(options.shape, options.dropout),
        batches=batches,
        loss=next_token_loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1),
        test_batches=test_batches,
    )


def draw_tokens(
    vocabulary: int, length: int, generator: torch.Generator, num_samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens, and the same moved by one."""
    tokens = torch.randint(vocabulary, (num_samples, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def read_batches(options: Gpt2Options, context: BuildContext) -> tuple[Iterable[Any], Iterable[Any] | None]:
    """Batches of the shards to train on and, where there are shards to test on, the first few of those."""
    train, test = ([open_shard(path) for path in paths] for paths in options.find_data())
    read = functools.partial(TokenBatches, sequence=options.num_tokens, rank=context.rank, num_ranks=context.num_ranks)
    batches = read(train, batch_size=context.batch_size, accumulation=context.accumulation)
    if not test:
        return batches, None
    # What is held back is often little: a test batch is then smaller than one that is trained on.
    most = (min(map(len, test)) - 1) // (options.num_tokens * context.num_ranks)
    tests = read(test, batch_size=max(1, min(context.batch_size, most)))
    return batches, [tests.read_batch(index) for index in range(min(MOST_TEST_BATCHES, len(tests)))]
