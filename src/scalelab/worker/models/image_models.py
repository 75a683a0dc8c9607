"""The batches that `resnet18` and `lenet` are trained and tested on.

Random pixels are drawn once and carry nothing to learn. Real images are held in memory as bytes; each
batch is augmented, if asked for, and normalised when it is fetched. A mirrored digit is another shape or none, so
digits are shifted only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from scalelab.data.cifar10 import load_cifar10
from scalelab.data.fashion_mnist import load_fashion_mnist
from scalelab.data.images import NUM_CHANNELS, SIDE, ImageSet, load_digits
from scalelab.data.order import Sequential
from scalelab.worker.batches.augment import ImageFetch
from scalelab.worker.batches.drawn import Fetch, SampleBatches
from scalelab.worker.batches.synthetic import draw_batches
from scalelab.workloads.image_options import ImageOptions
from scalelab.workloads.workload import BuildContext

NUM_CLASSES = 10


def make_image_batches(
    options: ImageOptions, context: BuildContext, half: bool = False
) -> tuple[Iterable[Any], Iterable[Any] | None]:
    """Batches to train on and, for real images, batches to test on.

    `half`: normalise by 0.5 and 0.5, to values from −1 to 1, instead of by the mean and deviation of the set.
    """
    if options.data == "synthetic":
        return draw_batches(draw_images, context), None
    train, test = load_images(options, "train"), load_images(options, "test")
    if half:
        train, test = normalise_by_half(train), normalise_by_half(test)
    return (
        SampleBatches(
            make_fetch(train, options),
            len(train),
            batch_size=context.batch_size,
            rank=context.rank,
            num_ranks=context.num_ranks,
            seed=context.seed,
            workers=options.workers,
            accumulation=context.accumulation,
        ),
        SampleBatches(
            ImageFetch(test, augment=False),
            len(test),
            batch_size=context.batch_size,
            rank=context.rank,
            num_ranks=context.num_ranks,
            seed=context.seed,
            order=Sequential(),
            is_test=True,
        ),
    )


def draw_images(generator: torch.Generator, num_samples: int) -> tuple[torch.Tensor, ...]:
    """Random pixels, then random classes."""
    images = torch.randn(num_samples, NUM_CHANNELS, SIDE, SIDE, generator=generator)
    return images, torch.randint(NUM_CLASSES, (num_samples,), generator=generator)


def load_images(options: ImageOptions, split: Literal["train", "test"]) -> ImageSet:
    if options.data == "digits":
        return load_digits(split)
    directory = Path(options.data_path).expanduser()
    if options.data == "fashion-mnist":
        return load_fashion_mnist(directory, split)
    return load_cifar10(directory, split, options.train_files)


def normalise_by_half(images: ImageSet) -> ImageSet:
    half = (0.5,) * NUM_CHANNELS
    return replace(images, mean=half, std=half)


def make_fetch(images: ImageSet, options: ImageOptions) -> Fetch:
    """How a training batch is fetched."""
    fetch = ImageFetch(images, augment=options.augment)
    return fetch_unmirrored(fetch) if options.data == "digits" else fetch


def fetch_unmirrored(fetch: Fetch) -> Fetch:
    """The same without mirroring, which an odd first word asks for."""

    def fetch_upright(indices: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fetch(indices, torch.cat([torch.zeros_like(words[:, :1]), words[:, 1:]], dim=1))

    return fetch_upright
