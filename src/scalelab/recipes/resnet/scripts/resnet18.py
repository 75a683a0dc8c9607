"""ResNet-18 and its images (CIFAR-10, digits or random pixels), which lab5_partA.py imports."""

import tarfile
import urllib.request

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
STAGES = ((1, 1), (2, 2), (4, 2), (8, 2))  # channels, in widths of the first stage, and stride


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, source, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(source, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or source != channels:
            conv = nn.Conv2d(source, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, x):
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def make_resnet18(width=64):
    """The form for 32 x 32 images: 11,173,962 parameters with 64 channels in the first stage."""
    layers, channels = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()], width
    for factor, stride in STAGES:
        layers += [Block(channels, factor * width, stride), Block(factor * width, factor * width, 1)]
        channels = factor * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def load_digits():
    """The 1,797 digits of scikit-learn, 8 x 8 and grey, enlarged to 3 x 32 x 32, and their classes."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = np.rint(digits.images * 255 / 16).astype(np.uint8)[:, None].repeat(3, 1).repeat(4, 2).repeat(4, 3)
    return torch.from_numpy(images), torch.from_numpy(digits.target.astype(np.int64))


class Images(Dataset):
    """Images in memory; each is shifted by up to 4 pixels, and half of them mirrored, unless they are digits."""

    def __init__(self, flags):
        self.mirrors = not flags.digits  # a mirrored digit is another shape
        if flags.digits:
            images, labels = load_digits()
        elif flags.random:
            generator = torch.Generator().manual_seed(0)
            images = torch.randint(256, (flags.images, 3, 32, 32), generator=generator, dtype=torch.uint8)
            labels = torch.randint(10, (flags.images,), generator=generator)
        else:
            files = sorted(flags.data.rglob("data_batch_*.bin"))
            rows = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
            images, labels = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32)), torch.from_numpy(rows[:, 0]).long()
        self.images, self.labels = images[: flags.images], labels[: flags.images]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = F.pad(self.images[index].float() / 255, (4, 4, 4, 4))
        top, left = torch.randint(9, (2,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        image = image.flip(2) if self.mirrors and torch.rand(()) < 0.5 else image
        return (image - 0.4734) / 0.2516, self.labels[index]


def show_progress(count, size, total):
    print(f"\r{min(1, count * size / total):.0%} of {total / 1e6:.0f} MB", end="", flush=True)


def download(directory):
    """Fetch and unpack CIFAR-10 unless it is there, with a line of progress."""
    if any(directory.rglob("data_batch_*.bin")):
        return
    directory.mkdir(parents=True, exist_ok=True)
    archive = directory / "cifar-10-binary.tar.gz"
    try:
        urllib.request.urlretrieve(URL, archive, show_progress)
    except OSError as error:
        raise SystemExit(f"{URL} is out of reach ({error}): put data_batch_*.bin into {directory}, or use --digits")
    print()
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")
