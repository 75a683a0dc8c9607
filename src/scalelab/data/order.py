"""The order of an epoch's samples: as stored, shuffled, or shuffled by blocks.

An order depends only on seed, epoch and number of samples. Ranks take slices of the same order, so they are disjoint
and complete for any world size, and a training run resumes in the middle of an epoch by arithmetic.

A full shuffle of a chunked, compressed file inflates a chunk for nearly every sample. The block shuffle draws chunks in
random order, takes `window_chunks` at a time, and shuffles the samples within such a window. A reader with room for one
window inflates every chunk once per epoch; one that sorts a batch's samples needs two windows where a batch spans both,
and four always suffice. Every process has its own cache. `stored_order.py` measures what this costs in randomness.
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
"""Bytes inflated per byte used up to which a full shuffle is worth it."""
BUFFER_BYTES = 64 * 2**20
"""Default cache of inflated chunks per process."""


class Order(Protocol):
    """A frozen record that can be compared, stored and sent to workers."""

    def draw(self, seed: int, epoch: int, num_samples: int) -> Numbers:
        """All sample indices in the epoch's order."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Sequential:
    """As stored, in every epoch."""

    def draw(self, seed: int, epoch: int, num_samples: int) -> Numbers:  # noqa: ARG002
        return np.arange(num_samples, dtype=np.int64)


@dataclass(frozen=True)
class FullShuffle:
    """A uniform permutation."""

    def draw(self, seed: int, epoch: int, num_samples: int) -> Numbers:
        return make_generator(seed, epoch).permutation(num_samples)


@dataclass(frozen=True, kw_only=True)
class BlockShuffle:
    """Random windows of chunks, shuffled within."""

    chunk_samples: int
    """Samples per chunk; the last may have fewer."""
    window_chunks: int
    """Chunks shuffled together; the reader needs room for them."""

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
            generator.shuffle(window)  # a view, shuffled in place
        return order


def choose_order(
    *, amplification: float, chunk_samples: int, chunk_bytes: int, buffer_bytes: int = BUFFER_BYTES
) -> Order:
    """A full shuffle where single samples are cheap, otherwise the widest windows of which two fit the buffer.

    `amplification`: bytes inflated per byte of a sample read alone; `chunk_bytes`: of an inflated chunk.
    """
    if amplification <= MOST_AMPLIFICATION:
        return FullShuffle()
    check_at_least("chunk_bytes", chunk_bytes, 1)
    return BlockShuffle(chunk_samples=chunk_samples, window_chunks=max(1, buffer_bytes // (2 * chunk_bytes)))


@lru_cache(maxsize=4)
def draw_order(order: Order, seed: int, epoch: int, num_samples: int) -> Numbers:
    """The order of an epoch, read-only, drawn once for all its batches."""
    numbers = order.draw(seed, epoch, num_samples)
    numbers.flags.writeable = False
    return numbers


def make_generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch))))
