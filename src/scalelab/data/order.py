"""In which order the samples of an epoch are read: as they are stored, shuffled, or shuffled by blocks.

An order is a function of seed, epoch and the number of samples, and of nothing else. Ranks cut the same order into
slices (`sample_batches.py`), so that it is disjoint, complete and the same however many they are, and a training goes
on in the middle of an epoch by arithmetic.

A full shuffle of a file in compressed chunks inflates a chunk for nearly every sample. The block shuffle draws the
chunks in random order, takes `window_chunks` of them at a time, and shuffles all samples of such a window among each
other. Whoever reads the order from front to back with room for one window inflates every chunk once in an epoch. A
reader that sorts the samples of a batch asks for two windows at once where a batch lies across both, and wants room for
two; where batches are nearly as large as windows, room for four is what always suffices. Every process that reads, rank
or worker, has a cache of its own and inflates for itself.

What that costs in randomness is measured in `randomness.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scalelab.checks import check_at_least

Numbers = npt.NDArray[np.int64]

MOST_AMPLIFICATION = 2.0
"""Up to here a full shuffle is worth what it costs: bytes inflated for every byte that is used."""
BUFFER_BYTES = 64 * 2**20
"""Default size of a process's cache of decompressed chunks."""


class Order(Protocol):
    """A frozen record, which can be compared, stored and sent to workers."""

    def draw(self, seed: int, epoch: int, num_samples: int) -> Numbers:
        """The numbers of all samples, in the order of the epoch."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Sequential:
    """As the samples are stored, in every epoch."""

    def draw(self, seed: int, epoch: int, num_samples: int) -> Numbers:  # noqa: ARG002
        return np.arange(num_samples, dtype=np.int64)


@dataclass(frozen=True)
class FullShuffle:
    """Every order is as likely as every other."""

    def draw(self, seed: int, epoch: int, num_samples: int) -> Numbers:
        return make_generator(seed, epoch).permutation(num_samples)


@dataclass(frozen=True, kw_only=True)
class BlockShuffle:
    """Windows of chunks that are drawn at random, all samples of a window shuffled among each other."""

    chunk_samples: int
    """Samples of a chunk: what is inflated as a whole. The last chunk may have fewer."""
    window_chunks: int
    """Chunks that are mixed with each other, and that the reader must have room for."""

    def __post_init__(self) -> None:
        check_at_least("chunk_samples", self.chunk_samples, 1)
        check_at_least("window_chunks", self.window_chunks, 1)

    def draw(self, seed: int, epoch: int, num_samples: int) -> Numbers:
        generator = make_generator(seed, epoch)
        chunks = generator.permutation(-(-num_samples // self.chunk_samples))
        order = np.add.outer(chunks * self.chunk_samples, np.arange(self.chunk_samples)).ravel()
        ends = np.add.reduceat(
            np.minimum(self.chunk_samples, num_samples - chunks * self.chunk_samples),
            np.arange(0, len(chunks), self.window_chunks),
        ).cumsum()
        order = order[order < num_samples]
        for window in np.split(order, ends[:-1]):
            generator.shuffle(window)  # a view: it is shuffled in its place
        return order


def choose_order(
    *, amplification: float, chunk_samples: int, chunk_bytes: int, buffer_bytes: int = BUFFER_BYTES
) -> Order:
    """A full shuffle where single samples cost little, and otherwise the widest windows of which two fit the buffer.

    `amplification` is what is inflated for a sample that is read alone, as a multiple of its bytes; `chunk_bytes` is
    what a chunk takes once it is inflated.
    """
    if amplification <= MOST_AMPLIFICATION:
        return FullShuffle()
    check_at_least("chunk_bytes", chunk_bytes, 1)
    return BlockShuffle(chunk_samples=chunk_samples, window_chunks=max(1, buffer_bytes // (2 * chunk_bytes)))


@lru_cache(maxsize=4)
def draw_order(order: Order, seed: int, epoch: int, num_samples: int) -> Numbers:
    """The order of an epoch; drawn once for all of its batches, and not to be written to."""
    numbers = order.draw(seed, epoch, num_samples)
    numbers.flags.writeable = False
    return numbers


def make_generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch))))
