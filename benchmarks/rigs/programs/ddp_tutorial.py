"""A DDP tutorial: DataLoader, DistributedSampler, epochs, under torchrun with its own argparse."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(2048, 256), torch.randint(0, 10, (2048,)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=1, persistent_workers=True)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if int(os.environ["RANK"]) == 0:
            print(f"loss={loss.item()!r} time={time.perf_counter()!r}")
    schedule.step()
dist.destroy_process_group()
