"""A small convolutional network on handwritten digits, as one would write it without scalelab.

scalelab train --workload examples/convnet.py:build --ranks 2 --epochs 10
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def build(batch_size, rank, num_ranks, seed, channels=16):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(seed))
    sampler = DistributedSampler(train, num_ranks, rank, seed=seed) if num_ranks > 1 else None
    return {
        "model": nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * channels, 10),
        ),
        "batches": DataLoader(train, batch_size, shuffle=sampler is None, sampler=sampler, drop_last=True),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        "test_batches": DataLoader(test, batch_size),
    }
