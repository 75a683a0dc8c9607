"""Task 2: strong scaling. The global batch stays 64 while the number of ranks grows.

    torchrun --nproc_per_node=1 task2_strong_scaling.py
    torchrun --nproc_per_node=2 task2_strong_scaling.py
    torchrun --nproc_per_node=4 task2_strong_scaling.py

Every run adds its row to task2.csv and prints the table of all rows so far. DIM, DEPTH, GLOBAL_BATCH and STEPS in
the environment change the job; delete task2.csv before another one.
"""

import csv
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: loaded by DDP after init, its default arguments would keep the group to the end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
torch.cuda.manual_seed_all(0)

DIM = int(os.environ.get("DIM", 8192))
DEPTH = int(os.environ.get("DEPTH", 6))
GLOBAL_BATCH = int(os.environ.get("GLOBAL_BATCH", 64))
STEPS = int(os.environ.get("STEPS", 30))
WARMUP = 5
RESULTS = Path("task2.csv")


def run_steps(rank, world_size, device):
    """The mean time of a step, and the last loss of this rank."""
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(DIM, DIM), nn.ReLU())]
    model = DistributedDataParallel(
        nn.Sequential(*layers).to(device), device_ids=[device] if device.type == "cuda" else None
    )
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.Generator().manual_seed(0)  # the same data on every rank, of which each takes its slice
    per_rank = GLOBAL_BATCH // world_size
    mine = slice(rank * per_rank, (rank + 1) * per_rank)
    pairs = [[torch.randn(GLOBAL_BATCH, DIM, generator=generator)[mine].to(device) for _ in "xy"] for _ in range(4)]
    times = []
    for step in range(STEPS):
        inputs, targets = pairs[step % len(pairs)]
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.time()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.time() - start)
    return statistics.mean(times[WARMUP:]), loss.item()


def print_table():
    rows = {int(ranks): float(seconds) for ranks, seconds, _ in csv.reader(RESULTS.open())}
    one = rows.get(1)
    print("| #GPUs | Time/step | Speedup | Efficiency |")
    for ranks, seconds in sorted(rows.items()):
        speedup = f"{one / seconds:.2f} | {one / seconds / ranks:.0%}" if one else "run 1 rank first | "
        print(f"| {ranks} | {1e3 * seconds:.3f} ms | {speedup} |")


def main():
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)  # or barrier() and synchronize() take GPU 0 on every rank
    dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seconds, loss = run_steps(rank, world_size, device)
    if rank == 0:
        print(f"{world_size} ranks: time/step={1e3 * seconds:.3f} ms | loss={loss:.9g}")
        with RESULTS.open("a") as file:
            csv.writer(file).writerow([world_size, seconds, loss])
        print_table()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
