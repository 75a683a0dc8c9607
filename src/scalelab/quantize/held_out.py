"""The test samples of a quantized model: iterated again for every runtime, never all in memory.

Predictions of two stages are paired, so both must see the same samples in the same order. Labels from the first pass
are compared in every later one: a loader that shuffles its test data is an error, not a bad agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from scalelab.errors import UsageError
from scalelab.quantize.diagnosis import choose_evenly

Predict = Callable[[torch.Tensor], torch.Tensor]
"""From images to logits."""


class HeldOut:
    """Batches of test samples, with labels if they have any."""

    def __init__(self, batches: Iterable[Any], *, told: str = "") -> None:
        """`told`: a description of the samples if they are not the test data."""
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
        """Every batch; raises `UsageError` if the order differs from the first pass."""
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
        """The predicted class of every sample."""
        found: list[int] = []
        with torch.no_grad():
            for images in self.images():
                found += predict(images).argmax(-1).tolist()
        return tuple(found)

    def choose(self, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """So many evenly spaced samples, with their labels."""
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


def take_samples(batches: Iterable[torch.Tensor], count: int) -> Iterator[torch.Tensor]:
    """Batches with `count` samples in total."""
    for images in batches:
        taken = images[:count]
        count -= len(taken)
        if len(taken):
            yield taken
        if count <= 0:
            return


def check_finite(images: torch.Tensor, what: str) -> None:
    if not torch.isfinite(images).all():
        kind = "NaN" if torch.isnan(images).any() else "infinite numbers"
        raise UsageError(f"{what} has {kind}: check how its images are read and normalised")


def split_batch(batch: Any, number: int = 0) -> tuple[torch.Tensor, list[int]]:
    """The images of a batch, and its labels if the second element is a vector of integers."""
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
