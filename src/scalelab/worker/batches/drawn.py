"""One rank's batches of a data set whose samples can be fetched by number: held in memory, or stored.

Batch i of an epoch is a global batch: the next `batch_size`·`num_ranks` samples of an order (`order.py`) that is drawn
from seed and epoch. Each rank keeps its slice. So two ranks with half the batch each train on the same samples as one
rank with the whole, and so do two accumulated batches of half the size. What is left over at the end of an epoch, too
little for a whole step of `accumulation` batches, is dropped in training and never in a test: there the last batch is
smaller, and when it would leave a rank with nothing it is made part of the batch before.

What is random about a sample, its augmentation, is drawn for its position in the epoch by a counter-based generator:
four 64-bit words are Philox of (seed, epoch; position) (J. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3,
2011). So it depends neither on the ranks, nor on accumulation, nor on who computes it. Worker processes therefore
give the very same batches; they are torch's DataLoader with the number of a batch as its index, and they live for
all epochs.

Random batches depend neither on how many ranks share them nor on how many passes make a step: the samples of a step are
drawn as one tensor. A step is one or more forward passes; each pass takes the next samples,
and in a pass each rank keeps its slice. So two ranks with half the batch each, or two passes of half the batch, train
on the same samples as one rank with the whole. A few different steps are drawn before the training starts and used in
turn: drawing is not what is measured. They are drawn one after the other, so that no rank ever holds much more than
one global batch beside its own slices.

Images are flipped, cropped and normalised a whole batch at once. The usual augmentation of CIFAR-10: every image is
padded with 4 black pixels on each side, a square of 32 × 32 is cut out of it at random, half of the squares are
mirrored, bytes become numbers in [0, 1], and each channel is normalised by mean and standard deviation. Done image by
image this is dozens of calls per image, and the calls are what it costs. Here the place in the padded image that each
pixel comes from is computed for the whole batch, and one gather moves all bytes; only then do they become floats, so
that a quarter of the memory moves.

The arithmetic is that of the usual pipeline in the same order, (x / 255 − mean) / std in float32, so the results are
equal to the last bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from scalelab.checks import check_at_least
from scalelab.data.images import SIDE, ImageSet
from scalelab.data.order import FullShuffle, Order, draw_order
from scalelab.errors import TooFewSamples, UsageError
from scalelab.workloads.workload import NUM_POOLED_BATCHES, BuildContext

Batch = tuple[torch.Tensor, ...]
Fetch = Callable[[torch.Tensor, torch.Tensor], Batch]
"""The tensors of a batch from the indices of its samples, int64 (n,), and from random words for each of them, int64
(n, 4), uniform from 0 to 2⁶³ − 1. The same arguments must give the same tensors, in whatever process."""

NUM_WORDS = 4
FULL_SHUFFLE = FullShuffle()
StartMethod = Literal["fork", "spawn"]
"""How worker processes begin: as a copy of this one, or anew, for which `Fetch` must be something that is pickled."""
BatchNumber = tuple[int, int]
"""Epoch, and number in the epoch."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Which positions of an epoch are in which batch of which rank."""

    num_samples: int
    batch_size: int
    rank: int
    num_ranks: int
    accumulation: int = 1
    is_test: bool = False

    @property
    def global_batch(self) -> int:
        """Samples of a batch on all ranks together."""
        return self.batch_size * self.num_ranks

    @property
    def num_batches(self) -> int:
        """Batches of an epoch on every rank."""
        if not self.is_test:
            return self.num_samples // (self.global_batch * self.accumulation) * self.accumulation
        whole, rest = divmod(self.num_samples, self.global_batch)
        return max(1, whole + (rest >= self.num_ranks))

    def bounds(self, index: int) -> tuple[int, int]:
        """First position of a batch on this rank, and the one after its last."""
        first = index * self.global_batch
        is_last_test = self.is_test and index == self.num_batches - 1
        size = self.num_samples - first if is_last_test else self.global_batch
        return first + self.rank * size // self.num_ranks, first + (self.rank + 1) * size // self.num_ranks

    def check(self) -> None:
        for name in ("batch_size", "num_ranks", "accumulation"):
            check_at_least(name, getattr(self, name), 1)
        needed = self.num_ranks if self.is_test else self.global_batch * self.accumulation
        if self.num_samples < needed:
            whole = "one sample each" if self.is_test else f"{self.batch_size} samples each"
            accumulated = f" × {self.accumulation} batches" if self.accumulation > 1 and not self.is_test else ""
            raise TooFewSamples(
                f"{self.num_samples} samples are too few: {self.num_ranks} ranks × {whole}{accumulated} need {needed}:"
                " use a smaller batch, fewer ranks or more data",
                self.num_samples // (self.num_ranks * self.accumulation),
            )


class SampleBatches:
    """Batches of one rank; iterating goes through one epoch."""

    def __init__(
        self,
        fetch: Fetch,
        num_samples: int,
        *,
        batch_size: int,
        rank: int,
        num_ranks: int,
        seed: int,
        order: Order = FULL_SHUFFLE,
        workers: int = 0,
        start_method: StartMethod = "fork",
        is_test: bool = False,
        accumulation: int = 1,
    ) -> None:
        check_at_least("workers", workers, 0)
        partition = Partition(
            num_samples=num_samples,
            batch_size=batch_size,
            rank=rank,
            num_ranks=num_ranks,
            accumulation=accumulation,
            is_test=is_test,
        )
        partition.check()
        self._num_batches = partition.num_batches
        self._source = BatchSource(fetch, partition, seed % 2**64, order)
        self._turn = EpochTurn()
        self._workers = workers
        self._start_method: StartMethod = start_method
        self._loader: DataLoader[Batch] | None = None

    def __len__(self) -> int:
        """Batches of an epoch on this rank."""
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        self._turn.numbers = [(self._turn.epoch, index) for index in range(self._turn.start, self._num_batches)]
        self._turn.start = 0
        if self._workers == 0:
            return map(self._source.__getitem__, self._turn.numbers)
        if self._loader is None:
            self._loader = start_workers(self._source, self._turn, self._workers, self._start_method)
        with without_warnings():
            return iter(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Which order and which augmentation the next iteration uses."""
        check_at_least("epoch", epoch, 0)
        self._turn.epoch = epoch

    def seek(self, index: int) -> None:
        """Let the next iteration begin with this batch of the epoch, without fetching those before it."""
        if not 0 <= index <= self._num_batches:
            raise UsageError(
                f"batch {index} is out of range for an epoch of {self._num_batches}: use 0 to {self._num_batches}"
            )
        self._turn.start = index

    def close(self) -> None:
        """End the worker processes; the next iteration starts new ones."""
        self._loader = None


class BatchSource(Dataset[Batch]):
    """Any batch by its number: what the rank itself or a worker process asks."""

    def __init__(self, fetch: Fetch, partition: Partition, seed: int, order: Order) -> None:
        self._fetch = fetch
        self._partition = partition
        self._seed = seed
        self._order = order

    def __getitem__(self, number: BatchNumber) -> Batch:
        epoch, index = number
        first, end = self._partition.bounds(index)
        indices = draw_order(self._order, self._seed, epoch, self._partition.num_samples)[first:end].copy()
        return self._fetch(torch.from_numpy(indices), draw_words(self._seed, epoch, first, end))


class EpochTurn(Sampler[BatchNumber]):
    """The batches that the next iteration asks for; read again by the loader whenever it is iterated."""

    def __init__(self) -> None:
        self.epoch = 0
        self.start = 0
        self.numbers: list[BatchNumber] = []

    def __iter__(self) -> Iterator[BatchNumber]:
        return iter(self.numbers)


def start_workers(source: BatchSource, turn: EpochTurn, workers: int, start_method: StartMethod) -> DataLoader[Batch]:
    """A loader whose worker processes stay for all epochs."""
    with without_warnings():
        return DataLoader(
            source,
            batch_size=None,
            sampler=turn,
            num_workers=workers,
            persistent_workers=True,
            multiprocessing_context=start_method,
            collate_fn=_leave,
            # Without one of its own the loader draws from the global generator, and dropout would depend on workers.
            generator=torch.Generator(),
        )


@contextmanager
def without_warnings() -> Iterator[None]:
    """More workers than cores is something to measure; a fork beside threads is safe for what touches only data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _leave(batch: Any) -> Any:
    return batch


def draw_words(seed: int, epoch: int, first: int, end: int) -> torch.Tensor:
    """Random words (n, 4) of the positions from `first` to before `end`: one count of the generator gives four."""
    generator = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64), counter=first)
    words = generator.random_raw((end - first) * NUM_WORDS).reshape(-1, NUM_WORDS)
    return torch.from_numpy((words >> np.uint64(1)).astype(np.int64))


def draw_batches(
    draw: Callable[[torch.Generator, int], tuple[torch.Tensor, ...]], context: BuildContext
) -> list[tuple[torch.Tensor, ...]]:
    """This rank's batches of a few steps, one for each pass; `draw` makes so many samples."""
    generator = torch.Generator().manual_seed(context.seed)
    per_pass = context.batch_size * context.num_ranks
    batches = []
    for _ in range(NUM_POOLED_BATCHES):
        whole = draw(generator, per_pass * context.accumulation)
        for number in range(context.accumulation):
            first = number * per_pass + context.rank * context.batch_size
            mine = slice(first, first + context.batch_size)
            batches.append(tuple(tensor[mine].clone() for tensor in whole))
    return batches


PADDING = 4
NUM_OFFSETS = 2 * PADDING + 1
"""Places of the cut in each direction."""
PADDED = SIDE + 2 * PADDING


class Changes(NamedTuple):
    """What is done to each image of a batch."""

    flip: torch.Tensor
    """Whether it is mirrored, bool (n,)."""
    top: torch.Tensor
    """First row of the cut in the padded image, int64 (n,) from 0 to 8."""
    left: torch.Tensor
    """First column, likewise."""


class ImageFetch:
    """Batches of an image set by the indices of its samples: images in float32 and labels."""

    def __init__(self, source: ImageSet, *, augment: bool) -> None:
        self._images = torch.from_numpy(source.images)
        self._labels = torch.from_numpy(source.labels)
        self._mean, self._std = source.mean, source.std
        self._augment = augment

    def __call__(self, indices: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self._images[indices], self._labels[indices]
        if self._augment:
            images = flip_and_crop(images, read_changes(words))
        return normalise(images, self._mean, self._std), labels


def read_changes(words: torch.Tensor) -> Changes:
    """The changes that random words (n, 4) stand for; the error of the remainder is below 2⁻⁵⁹."""
    return Changes(flip=words[:, 0] % 2 == 1, top=words[:, 1] % NUM_OFFSETS, left=words[:, 2] % NUM_OFFSETS)


def flip_and_crop(images: torch.Tensor, changes: Changes) -> torch.Tensor:
    """Bytes (n, channels, 32, 32), padded, cut out and mirrored."""
    num_images, num_channels = images.shape[:2]
    padded = images.new_zeros(num_images, num_channels, PADDED, PADDED)
    padded[:, :, PADDING:-PADDING, PADDING:-PADDING] = images
    pixel = torch.arange(SIDE)
    rows = changes.top[:, None] + pixel
    columns = changes.left[:, None] + torch.where(changes.flip[:, None], SIDE - 1 - pixel, pixel)
    places = (rows[:, :, None] * PADDED + columns[:, None, :]).view(num_images, 1, SIDE * SIDE)
    flat = padded.view(num_images, num_channels, PADDED * PADDED)
    return flat.gather(2, places.expand(-1, num_channels, -1)).view_as(images)


def normalise(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Bytes (n, channels, height, width) as float32 with the mean taken off and divided by the deviation."""
    shape = (1, len(mean), 1, 1)
    means, deviations = torch.tensor(mean).view(shape), torch.tensor(std).view(shape)
    return images.to(torch.float32).div_(255).sub_(means).div_(deviations)
