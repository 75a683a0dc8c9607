"""One rank's batches of token shards.

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
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from scalelab.checks import check_at_least
from scalelab.data.shards import Shard
from scalelab.errors import UsageError

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
        """Targets of one step on all ranks together."""
        batch_size, sequence = self._shape
        return batch_size * sequence * self._num_ranks * self._accumulation

    def __len__(self) -> int:
        """Batches of an epoch on this rank."""
        return self._steps_until[-1] * self._accumulation if self._steps_until else 0

    def __iter__(self) -> Iterator[Batch]:
        start, self._start = self._start, 0
        return (self.read_batch(index) for index in range(start, len(self)))

    def seek(self, index: int) -> None:
        """Let the next iteration begin with this batch of the epoch, without reading those before it."""
        if not 0 <= index <= len(self):
            raise UsageError(f"there is no batch {index} in an epoch of {len(self)}: use 0 to {len(self)}")
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
                f"shard {shard.path} is too small: it has {len(shard)} tokens, and one step of {self._num_ranks} ranks"
                f" × {batch_size} sequences × {sequence} tokens{accumulated} needs {self.step_tokens + 1}:"
                " use a smaller batch or a shorter sequence"
            )
        return num_steps
