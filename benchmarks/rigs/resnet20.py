"""The residual network of 20 layers for images of 32 × 32 (He et al. 2016), as a workload: 272,000 weights.

Small enough to be trained on a processor, and with all that makes int8 harder than in `lenet`: batch norms to be
folded, additions of two branches with different scales, and twenty layers in which errors pile up.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from scalelab.worker.models.networks import NUM_CLASSES, make_image_batches
from scalelab.workloads.image_options import ImageOptions
from scalelab.workloads.workload import BuildContext, Workload

WIDTH = 16
BLOCKS_PER_STAGE = 3
STAGES = ((WIDTH, 1), (2 * WIDTH, 2), (4 * WIDTH, 2))
"""Channels and stride."""


class Block(nn.Module):
    """Two convolutions and a shortcut, which is a convolution too where the shape changes."""

    def __init__(self, source: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(source, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels))
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels))
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(source, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


class Resnet20(nn.Module):
    """Images of 3 × 32 × 32 in, logits of ten classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU())
        blocks, source = [], WIDTH
        for channels, stride in STAGES:
            for number in range(BLOCKS_PER_STAGE):
                blocks.append(Block(source, channels, 1 if number else stride))
                source = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(source, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return logits


def build(options: ImageOptions, context: BuildContext) -> Workload:
    batches, test_batches = make_image_batches(options, context)
    return Workload(
        model=Resnet20(),
        batches=batches,
        loss=nn.CrossEntropyLoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4),
        test_batches=test_batches,
    )
