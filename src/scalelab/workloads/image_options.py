"""Options of `resnet18` and `lenet` and of their images, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Self

from scalelab.checks import check_at_least
from scalelab.errors import UsageError
from scalelab.workloads.workload import FLOPS_PER_MULTIPLY_ADD

SIDE = 32
"""Pixels."""
NUM_TRAIN_FILES = 5
"""Of CIFAR-10."""
DEFAULT_PATH = "data"
FROM_FILES = ("cifar10", "fashion-mnist")
RESNET18_STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
"""Channels and stride of each stage of two blocks."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The images to train on: 3 × 32 × 32 in ten classes."""

    data: Literal["synthetic", "cifar10", "fashion-mnist", "digits"] = "synthetic"
    """synthetic: random pixels; cifar10, fashion-mnist: the files at --data-path, from scalelab data fetch;
    digits: scikit-learn's, enlarged, no download."""
    data_path: str = DEFAULT_PATH
    """Directory of the dataset's files, or its parent: the --out of scalelab data fetch."""
    train_files: int = NUM_TRAIN_FILES
    """Number of CIFAR-10 training files to read (1 to 5), 10,000 images each."""
    augment: bool = True
    """Shift training images by up to 4 pixels and mirror half of them (digits are not mirrored)."""
    workers: int = 0
    """Data loader processes per rank. 0: the training process loads its own batches."""

    def __post_init__(self) -> None:
        check_at_least("workers", self.workers, 0)
        if not 1 <= self.train_files <= NUM_TRAIN_FILES:
            raise UsageError(f"--train-files must be between 1 and {NUM_TRAIN_FILES}, got {self.train_files}")

    def resolve(self) -> Self:
        if self.data not in FROM_FILES:
            return self
        return replace(self, data_path=str(Path(self.data_path).expanduser().absolute()))

    def check(self) -> None:
        if self.data == "digits" and find_spec("sklearn") is None:
            raise UsageError("--data digits needs scikit-learn: pip install 'scalelab[torch]'")
        directory = Path(self.data_path).expanduser()
        if self.data == "cifar10":
            from scalelab.data.cifar10 import check_cifar10  # here: --help needs no numpy

            check_cifar10(directory, self.train_files)
        elif self.data == "fashion-mnist":
            from scalelab.data.fashion_mnist import check_fashion_mnist

            check_fashion_mnist(directory)
        elif self.data_path != DEFAULT_PATH:
            raise UsageError(f"--data-path {self.data_path} has no effect with --data {self.data}: use --data cifar10")


@dataclass(frozen=True, kw_only=True)
class Resnet18Options(ImageOptions):
    """ResNet-18 for images of 32 × 32, cross-entropy, SGD with momentum."""

    norm: Literal["batch", "none"] = "batch"
    """batch: batch norm after every convolution; none: no normalization."""
    width: int = RESNET18_STAGES[0][0]
    """Channels of the first stage; every later stage has twice those of the one before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("width", self.width, 1)

    @property
    def label(self) -> str:
        narrow = "" if self.width == RESNET18_STAGES[0][0] else f" width {self.width}"
        return f"resnet18{narrow}{'' if self.norm == 'batch' else ' without norm'}"

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """Channels and stride of each stage."""
        return tuple((channels * self.width // RESNET18_STAGES[0][0], stride) for channels, stride in RESNET18_STAGES)

    def count_parameters(self) -> int:
        """Weights, a scale and a shift per channel of every norm, and the last layer's bias."""
        layers = list_resnet18_layers(self.stages)
        weights = sum(size**2 * source * channels for size, source, channels, _ in layers)
        norms = sum(2 * channels for _, _, channels, _ in layers[:-1])
        return weights + 10 + (norms if self.norm == "batch" else 0)

    def flops_per_sample(self) -> float:
        layers = list_resnet18_layers(self.stages)
        return FLOPS_PER_MULTIPLY_ADD * sum(
            (size * side) ** 2 * source * channels for size, source, channels, side in layers
        )


@dataclass(frozen=True, kw_only=True)
class LenetOptions(ImageOptions):
    """A small convolutional network of five layers, cross-entropy, SGD with momentum."""

    bias: Literal["none", "last", "all"] = "none"
    """Layers with a bias: none, the last, or all."""
    augment: bool = False
    """Shift training images by up to 4 pixels and mirror half of them (digits are not mirrored)."""

    @property
    def label(self) -> str:
        return {"none": "lenet", "last": "lenet with last bias", "all": "lenet with biases"}[self.bias]

    def count_parameters(self) -> int:
        biases = {"none": 0, "last": 10, "all": 6 + 16 + 120 + 84 + 10}[self.bias]
        return 25 * 3 * 6 + 25 * 6 * 16 + 400 * 120 + 120 * 84 + 84 * 10 + biases

    def flops_per_sample(self) -> float:
        """The convolutions give 28 × 28 and, after pooling, 10 × 10."""
        convolutions = 28**2 * 25 * 3 * 6 + 10**2 * 25 * 6 * 16
        return FLOPS_PER_MULTIPLY_ADD * (convolutions + 400 * 120 + 120 * 84 + 84 * 10)


def list_resnet18_layers(stages: tuple[tuple[int, int], ...] = RESNET18_STAGES) -> list[tuple[int, int, int, int]]:
    """Kernel size, channels in and out, and output side of every weighted layer."""
    source, side = stages[0][0], SIDE
    layers = [(3, 3, source, side)]
    for channels, stride in stages:
        side //= stride
        layers += [(3, source, channels, side), *[(3, channels, channels, side)] * 3]
        if stride != 1:
            layers.append((1, source, channels, side))
        source = channels
    return [*layers, (1, source, 10, 1)]
