"""Task 5, option B: the global batch grows while the number of ranks stays.

    torchrun --nproc_per_node=4 task5_b.py
    torchrun --nproc_per_node=1 task5_b.py          # for the speedup column

Every run measures all batches, adds its rows to task5_b.csv and prints time, throughput and speedup of all rows so
far. DIM, DEPTH, STEPS and BATCHES in the environment change the job.
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

DIM = int(os.environ.get("DIM", 8192))
DEPTH = int(os.environ.get("DEPTH", 6))
STEPS = int(os.environ.get("STEPS", 30))
BATCHES = [int(batch) for batch in os.environ.get("BATCHES", "32 64 128 256").split()]
WARMUP = 5
RESULTS = Path("task5_b.csv")


def run_steps(batch, rank, world_size, device):
    """The mean time of a step at this global batch, and the last loss of this rank."""
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(DIM, DIM), nn.ReLU())]
    model = DistributedDataParallel(
        nn.Sequential(*layers).to(device), device_ids=[device] if device.type == "cuda" else None
    )
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.Generator().manual_seed(0)
    per_rank = batch // world_size
    mine = slice(rank * per_rank, (rank + 1) * per_rank)
    pairs = [[torch.randn(batch, DIM, generator=generator)[mine].to(device) for _ in "xy"] for _ in range(4)]
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
    rows = {(int(ranks), int(batch)): float(s) for batch, ranks, s in csv.reader(RESULTS.open())}
    print("| #GPUs | Batch | Time/step | Samples/s | Speedup |")
    for (ranks, batch), seconds in sorted(rows.items()):
        one = rows.get((1, batch))
        speedup = f"{one / seconds:.2f}" if one else "run 1 rank first"
        print(f"| {ranks} | {batch} | {1e3 * seconds:.3f} ms | {batch / seconds:.0f} | {speedup} |")


def main():
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)  # or barrier() and synchronize() take GPU 0 on every rank
    dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for batch in BATCHES:
        seconds, loss = run_steps(batch, rank, world_size, device)
        if rank == 0:
            print(f"batch={batch} on {world_size} ranks: time/step={1e3 * seconds:.3f} ms | loss={loss:.9g}")
            with RESULTS.open("a") as file:
                csv.writer(file).writerow([batch, world_size, seconds])
    if rank == 0:
        print_table()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
