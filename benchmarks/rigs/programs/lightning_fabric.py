"""Lightning Fabric: the loop is the user's, wrapping and backward are Fabric's."""

import argparse
import os
import time

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()

fabric = Fabric(
    accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp", precision="bf16-mixed"
)
fabric.launch()
fabric.seed_everything(0)
data = TensorDataset(torch.randn(4096, 256), torch.randint(0, 10, (4096,)))
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
loader = fabric.setup_dataloaders(DataLoader(data, args.batch_size, shuffle=True))
for _ in range(100):
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if fabric.global_rank == 0:
            print(f"loss={loss.item()!r} time={time.perf_counter()!r}")
