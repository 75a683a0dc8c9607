"""Homework 5, Part B: images, the float network and its training, which the other scripts of Part B import.

python HW5_PartB_0_network.py
DATA=digits python HW5_PartB_0_network.py
"""

# %% [markdown]
# # Homework 5, Part B: a small CNN in int8
#
# Train a float network, then quantize its weights (Q2), its activations (Q4) and its biases (Q5) by hand. A scale is a
# factor: the integer is the number times its scale, rounded and clamped.
# `DATA=cifar10` reads the binary version of CIFAR-10 from `./data`, where it is there; else `DATA=digits` takes the
# digits of scikit-learn, enlarged to the same shape, which need no download, for 8 epochs instead of 2 (Q5: 2).

# %%
import os
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

DATA = os.environ.get("DATA") or ("cifar10" if any(Path("data").rglob("data_batch_*.bin")) else "digits")
EPOCHS = int(os.environ.get("EPOCHS", 2 if DATA == "cifar10" else 8))
LAYERS = ["conv1", "conv2", "fc1", "fc2", "fc3"]


# %%
@cache
def load_images(split):
    """Images in [-1, 1] of 3 x 32 x 32, and their classes."""
    if DATA == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        counts = [np.cumsum(digits.target == label) for label in range(10)]
        number = np.array([counts[label][i] for i, label in enumerate(digits.target)])
        wanted = (number % 5 == 0) == (split == "test")  # every fifth image of a class is a test image
        images = np.rint(digits.images[wanted] * 255 / 16)[:, None].repeat(3, 1).repeat(4, 2).repeat(4, 3)
        labels = digits.target[wanted]
    else:
        files = sorted(Path("data").rglob("data_batch_*.bin" if split == "train" else "test_batch.bin"))
        if not files:
            raise SystemExit("no CIFAR-10 below ./data: unpack its binary version there, or use DATA=digits")
        rows = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
        images, labels = rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]
    pixels = torch.from_numpy(images.astype(np.float32)).div(255).sub(0.5).div(0.5)
    return pixels, torch.from_numpy(labels.astype(np.int64))


class Net(nn.Module):
    """Two convolutions with pooling, three dense layers; a bias on the last layer or none at all."""

    def __init__(self, bias):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5, bias=False), nn.Conv2d(6, 16, 5, bias=False)
        self.fc1, self.fc2 = nn.Linear(400, 120, bias=False), nn.Linear(120, 84, bias=False)
        self.fc3 = nn.Linear(84, 10, bias=bias)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def train(bias):
    """The float network: trained once, then read from its file."""
    torch.manual_seed(0)
    net, file = Net(bias), Path(f"net_{DATA}_{EPOCHS}{'_bias' if bias else ''}.pt")
    if file.exists():
        net.load_state_dict(torch.load(file))
        return net.eval()
    images, labels = load_images("train")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    for epoch in range(min(EPOCHS, 2) if bias else EPOCHS):  # trained longer on digits, a bias decides no image
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((0, epoch))))
        for chosen in torch.from_numpy(generator.permutation(len(labels))).split(4):
            if len(chosen) == 4:
                optimizer.zero_grad()
                F.cross_entropy(net(images[chosen]), labels[chosen]).backward()
                optimizer.step()
    torch.save(net.state_dict(), file)
    return net.eval()


def measure_accuracy(net):
    """Of the test images."""
    images, labels = load_images("test")
    with torch.no_grad():
        right = sum(
            (net(x).argmax(1) == y).sum().item() for x, y in zip(images.split(250), labels.split(250), strict=True)
        )
    return right / len(labels)


if __name__ == "__main__":
    print(f"{DATA}: {len(load_images('train')[1])} training and {len(load_images('test')[1])} test images")
    print(f"Accuracy of the float network: {measure_accuracy(train(bias=False)):.2%}")
