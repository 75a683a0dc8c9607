"""Homework 1, task 1: torch's nn.Transformer on one GPU, 10 epochs of random sequences.

    python pytorch_single_gpu.py

2048 samples of 1 x 512 in and 20 x 512 out, batch 32, Adam. EPOCHS, SAMPLES and D_MODEL in the environment change the
job.
"""

import os
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

EPOCHS = int(os.environ.get("EPOCHS", 10))
SAMPLES = int(os.environ.get("SAMPLES", 2048))
D_MODEL = int(os.environ.get("D_MODEL", 512))
BATCH = 32


def draw_samples():
    """Sources and targets, from one seed."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(SAMPLES, length, D_MODEL, generator=generator) for length in (1, 20)]


def draw_order(epoch):
    """The samples of an epoch, shuffled by seed and epoch alone."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((0, epoch))))
    return torch.from_numpy(generator.permutation(SAMPLES))


def main():
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Transformer(d_model=D_MODEL, batch_first=True).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sources, targets = draw_samples()
    torch.manual_seed(0)  # dropout masks
    start, num_steps = time.time(), 0
    for epoch in range(EPOCHS):
        total, batches = 0.0, draw_order(epoch).split(BATCH)
        for chosen in batches:
            source, target = sources[chosen].to(device), targets[chosen].to(device)
            # The decoder reads the sequence that it should give; torch takes the second axis as classes.
            loss = F.cross_entropy(model(source, target), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
            num_steps += 1
        print(f"[Epoch {epoch + 1}/{EPOCHS}] time={time.time() - start:.2f}s loss={total / len(batches):.9g}")
    print(f"{num_steps} steps on 1 {device.type} device in {time.time() - start:.2f}s")


if __name__ == "__main__":
    main()
