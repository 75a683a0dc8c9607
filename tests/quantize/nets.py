"""Small networks that the tests of quantization share, with the ways in which people write such modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Two 3×3 convolutions around a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.act = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        result: torch.Tensor = self.act(hidden + self.shortcut(x))
        return result


class Resnet20(nn.Module):
    """The residual network of 20 layers for images of 32 × 32 (He et al. 2016)."""

    def __init__(self, num_blocks: int = 3, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks, channels_in = [], width
        for factor, stride in ((1, 1), (2, 2), (4, 2)):
            for number in range(num_blocks):
                blocks.append(Block(channels_in, factor * width, stride if number == 0 else 1))
                channels_in = factor * width
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels_in, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.flatten(self.pool(self.blocks(self.stem(images))), 1))
        return logits


class Small(nn.Module):
    """A residual network of a few thousand weights, with everything that capture knows: for tests that run it often."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.drop = nn.Dropout(0.5)
        self.conv3 = nn.Conv2d(8, 16, 3, stride=2, dilation=2, bias=False)
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.norm1(self.conv1(images))), 2)
        x = torch.relu(self.conv2(x) + x)
        x = functional.relu(functional.avg_pool2d(self.conv3(self.drop(x)), 2))
        logits: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def make_net(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    """A network in eval mode with the weights of a seed; its batch norms have statistics that are not 0 and 1."""
    torch.manual_seed(seed)
    model = kind()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


def draw_images(num_samples: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_samples, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
