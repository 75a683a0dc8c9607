"""Evaluates every fifth step and saves a checkpoint every tenth."""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 1024), nn.Dropout(0.1), nn.ReLU(), nn.Linear(1024, 256)))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
held_out = torch.randn(512, 256)
folder = Path(tempfile.mkdtemp())
for step in range(1, 100_000):
    model.train()
    inputs = torch.randn(args.batch, 256)
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss={loss.item()!r} time={time.perf_counter()!r}")
    if step % 5 == 0:
        model.eval()
        with torch.no_grad():
            score = (model(held_out) - held_out).square().mean()
    if step % 10 == 0 and dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "step": step, "score": score}, folder / "last.pt")
