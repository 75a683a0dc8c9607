"""Chains of layers that the tests of the lab share: random ones, and lenet that has learnt the digits."""

from __future__ import annotations

import torch
from torch import nn

from scalelab.data.images import load_digits
from scalelab.quantize.capture import capture_network
from scalelab.quantize.lab.chain import LabNetwork, LabSettings, scale_network
from scalelab.quantize.lab.observe import Observed, observe_activations, observe_weights
from scalelab.quantize.network import CapturedNetwork
from scalelab.worker.models.networks import Lenet


def make_plain(bias: bool = True) -> nn.Module:
    """A convolution with all that one can have, a pooling with a border, a ReLU of its own, two dense layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, dilation=2, groups=2, bias=bias),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 8, bias=bias),
        nn.ReLU(),
        nn.Linear(8, 5, bias=bias),
    ).eval()


def make_images(num_images: int = 40, seed: int = 1) -> torch.Tensor:
    return 2 * torch.rand(num_images, 2, 12, 12, generator=torch.Generator().manual_seed(seed)) - 1


def observe(model: nn.Module, images: torch.Tensor) -> tuple[CapturedNetwork, Observed]:
    network = capture_network(model, images[:2])
    return network, observe_weights(network.layers) | observe_activations(model, network.layers, [images])


def make_lab(model: nn.Module, images: torch.Tensor, settings: LabSettings | None = None) -> LabNetwork:
    return scale_network(*observe(model, images), settings or LabSettings())


def load_half(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The digits as lenet sees them: from −1 to 1."""
    digits = load_digits("train" if split == "train" else "test")
    return torch.as_tensor(digits.images).float() / 127.5 - 1, torch.as_tensor(digits.labels).long()


def train_lenet(bias: str) -> nn.Module:
    """Some steps on the digits, until it knows most of them."""
    torch.manual_seed(0)
    model = Lenet(bias)
    images, labels = load_half("train")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(4):
        for chosen in torch.randperm(len(images)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    return model.eval()
