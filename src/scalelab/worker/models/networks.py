"""`mlp`: the same layer DEPTH times, so parameters, communication and FLOPs grow together.

For this model bytes per step (4·P) and operations per step (6·P·batch) are both proportional to its parameters P:
making it larger does not by itself make it compute-bound; making the batch larger does.

`lenet`: a small convolutional network, the one that is quantised.

Two convolutions with pooling, then three dense layers (after LeCun et al. 1998). It has no biases unless asked for:
integer arithmetic is then products and one scale per layer. A bias on the last layer alone shows what a bias costs.

`resnet18`: the residual network for images of 32 × 32, as DDP on CIFAR-10 is taught with.

The form for small images (He et al. 2016): a 3×3 stem without pooling, then four stages of two blocks with 64, 128,
256 and 512 channels, each but the first halving the image. Where a block changes the shape, a 1×1 convolution brings
the shortcut to it. What DDP exchanges are the gradients of 11,173,962 parameters (44,695,848 bytes), and before every
forward rank 0's batch-norm buffers: 9,600 floats and 20 counters. Without the norms neither these buffers nor their
9,600 parameters exist, and nothing else differs.

Random pixels are drawn once and carry nothing to learn. Real images are held in memory as bytes; each batch is
augmented, if asked for, and normalised when it is fetched. A mirrored digit is another shape or none, so digits are
shifted only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from scalelab.data.cifar10 import load_cifar10
from scalelab.data.fashion_mnist import load_fashion_mnist
from scalelab.data.images import NUM_CHANNELS, SIDE, ImageSet, load_digits
from scalelab.data.order import Sequential
from scalelab.worker.batches.drawn import Fetch, ImageFetch, SampleBatches, draw_batches
from scalelab.workloads.catalogue import MlpOptions
from scalelab.workloads.image_options import RESNET18_STAGES, ImageOptions, LenetOptions, Resnet18Options
from scalelab.workloads.workload import BuildContext, Workload

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


def build_mlp(options: MlpOptions, context: BuildContext) -> Workload:
    def draw(generator: torch.Generator, num_samples: int) -> tuple[torch.Tensor, ...]:
        shape = (num_samples, options.dim)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    return Workload(
        model=make_mlp(options),
        batches=draw_batches(draw, context),
        loss=nn.MSELoss(),
        optimizer=torch.optim.Adam,
    )


def make_mlp(options: MlpOptions) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(options.depth):
        layers += [nn.Linear(options.dim, options.dim), nn.ReLU()]
    return nn.Sequential(*layers)


class Lenet(nn.Module):
    """Images of 3 × 32 × 32 in, logits of ten classes out."""

    def __init__(self, bias: str = "none") -> None:
        super().__init__()
        everywhere, at_end = bias == "all", bias != "none"
        self.conv1 = nn.Conv2d(3, 6, 5, bias=everywhere)
        self.conv2 = nn.Conv2d(6, 16, 5, bias=everywhere)
        self.fc1 = nn.Linear(16 * 5 * 5, 120, bias=everywhere)
        self.fc2 = nn.Linear(120, 84, bias=everywhere)
        self.fc3 = nn.Linear(84, NUM_CLASSES, bias=at_end)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2).flatten(1)
        x = functional.relu(self.fc1(x))
        x = functional.relu(self.fc2(x))
        logits: torch.Tensor = self.fc3(x)
        return logits


def build_lenet(options: LenetOptions, context: BuildContext) -> Workload:
    batches, test_batches = make_image_batches(options, context, half=True)
    return Workload(
        model=Lenet(options.bias),
        batches=batches,
        loss=nn.CrossEntropyLoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.001, momentum=0.9),
        test_batches=test_batches,
    )


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int, has_norm: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = make_norm(channels, has_norm)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = make_norm(channels, has_norm)
        self.projects = stride != 1 or channels_in != channels
        if self.projects:
            self.projection = nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False)
            self.norm3 = make_norm(channels, has_norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.norm1(self.conv1(x)))
        shortcut = self.norm3(self.projection(x)) if self.projects else x
        return functional.relu(self.norm2(self.conv2(hidden)) + shortcut)


class Resnet18(nn.Module):
    """Images of 3 × 32 × 32 in, logits of ten classes out."""

    def __init__(self, has_norm: bool = True, stages: tuple[tuple[int, int], ...] = RESNET18_STAGES) -> None:
        super().__init__()
        width = stages[0][0]
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = make_norm(width, has_norm)
        for number, (channels, stride) in enumerate(stages, 1):
            first, second = BasicBlock(width, channels, stride, has_norm), BasicBlock(channels, channels, 1, has_norm)
            self.add_module(f"stage{number}", nn.Sequential(first, second))
            width = channels
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.stem(images)))
        for number in range(1, len(RESNET18_STAGES) + 1):
            x = self.get_submodule(f"stage{number}")(x)
        logits: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def make_norm(channels: int, has_norm: bool) -> nn.Module:
    return nn.BatchNorm2d(channels) if has_norm else nn.Identity()


def build_resnet18(options: Resnet18Options, context: BuildContext) -> Workload:
    batches, test_batches = make_image_batches(options, context)
    return Workload(
        model=Resnet18(options.norm == "batch", options.stages),
        batches=batches,
        loss=nn.CrossEntropyLoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4),
        test_batches=test_batches,
    )
