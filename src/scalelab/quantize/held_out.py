"""The test samples of a quantized model: iterated again for every runtime, never in memory all at once.

Predictions of two stages can be paired only if both saw the same samples in the same order. The classes are what tells:
they are read in the first pass and compared in every later one, so that a loader that shuffles its test data is an
error and not a bad agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from scalelab.errors import UsageError
from scalelab.quantize.diagnosis import choose_evenly

Predict = Callable[[torch.Tensor], torch.Tensor]
"""From images to logits, a row for every sample."""


class HeldOut:
    """Batches of test samples, with their classes where they have some."""

    def __init__(self, batches: Iterable[Any], *, told: str = "") -> None:
        """`told`: which samples these are, in words, where they are not the test data."""
        self._batches = batches
        self.told = told
        labels: list[int] = []
        self.num_samples = 0
        for number, (images, classes) in enumerate(self._split()):
            check_finite(images, f"test batch {number}")
            labels += classes
            self.num_samples += len(images)
        self.labels = tuple(labels)
        if self.labels and len(self.labels) != self.num_samples:
            raise UsageError(
                f"{len(self.labels)} of {self.num_samples} test samples have labels: make all test_batches pairs, or"
                " none"
            )
        if not self.num_samples:
            raise UsageError("there are no test samples: return a list or a DataLoader as test_batches from build()")

    def _split(self) -> Iterator[tuple[torch.Tensor, list[int]]]:
        for number, batch in enumerate(self._batches):
            images, labels = split_batch(batch, number)
            yield images, labels

    def images(self) -> Iterator[torch.Tensor]:
        """Every batch, in the same order each time; raises `UsageError` where the data does not keep to that."""
        place = 0
        for images, labels in self._split():
            expected = list(self.labels[place : place + len(images)])
            place += len(images)
            if labels and labels != expected:
                raise UsageError("test_batches differ between passes: do not shuffle or augment test data")
            yield images
        if place != self.num_samples:
            raise UsageError(f"test_batches returned {self.num_samples} samples at first and {place} later: use a list")

    def predict(self, predict: Predict) -> tuple[int, ...]:
        """The class that every sample is put into."""
        found: list[int] = []
        with torch.no_grad():
            for images in self.images():
                found += predict(images).argmax(-1).tolist()
        return tuple(found)

    def choose(self, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """So many samples at even distances, with their classes."""
        wanted = choose_evenly(self.num_samples, min(count, self.num_samples))
        images = torch.cat(list(_pick(self.images(), wanted)))
        labels = torch.tensor([self.labels[index] for index in wanted]) if self.labels else None
        return images, labels


def _pick(batches: Iterable[torch.Tensor], wanted: Sequence[int]) -> Iterator[torch.Tensor]:
    start = 0
    for images in batches:
        inside = [index - start for index in wanted if start <= index < start + len(images)]
        start += len(images)
        if inside:
            yield images[inside]


def check_finite(images: torch.Tensor, what: str) -> None:
    """Numbers, or everything after them is none."""
    if not torch.isfinite(images).all():
        kind = "NaN" if torch.isnan(images).any() else "infinite numbers"
        raise UsageError(f"{what} has {kind}: check how its images are read and normalised")


def split_batch(batch: Any, number: int = 0) -> tuple[torch.Tensor, list[int]]:
    """The images of a batch, and their classes where its second part is a row of integers."""
    parts = list(batch) if isinstance(batch, tuple | list) else [batch]
    images = parts[0] if parts else None
    if not isinstance(images, torch.Tensor) or not images.is_floating_point():
        kind = str(images.dtype) if isinstance(images, torch.Tensor) else type(images).__name__
        raise UsageError(
            f"batch {number} starts with a {kind}: quantizing needs images as a float tensor, or pairs that start with"
            " one"
        )
    labels = parts[1] if len(parts) > 1 else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.shape != images.shape[:1]:
        return images, []
    return images, [int(label) for label in labels]
