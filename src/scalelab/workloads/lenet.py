"""`lenet`: a small convolutional network, the one that is quantised.

Two convolutions with pooling, then three dense layers (after LeCun et al. 1998). It has no biases unless asked for:
integer arithmetic is then products and one scale per layer. A bias on the last layer alone shows what a bias costs.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

from scalelab.workloads.image_options import LenetOptions
from scalelab.workloads.images import NUM_CLASSES, make_image_batches
from scalelab.workloads.workload import BuildContext, Workload


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
