"""Task 5, option A: an artificial delay before backward, on every rank.

    torchrun --nproc_per_node=1 task5_a.py
    torchrun --nproc_per_node=2 task5_a.py
    torchrun --nproc_per_node=4 task5_a.py

Every run measures all delays, adds its rows to task5_a.csv and prints speedups of all rows so far, beside what
Amdahl's law predicts: the delay d does not shrink with ranks, so speedup(d) = (T1 + d) / (TN + d), with T1 and TN
measured without delay. DIM, DEPTH, GLOBAL_BATCH, STEPS and DELAYS (seconds) in the environment change the job.
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
GLOBAL_BATCH = int(os.environ.get("GLOBAL_BATCH", 64))
STEPS = int(os.environ.get("STEPS", 30))
DELAYS = [float(delay) for delay in os.environ.get("DELAYS", "0 0.005 0.01 0.02 0.04").split()]
WARMUP = 5
RESULTS = Path("task5_a.csv")


def run_steps(delay, rank, world_size, device):
    """The mean time of a step with this delay, and the last loss of this rank."""
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(DIM, DIM), nn.ReLU())]
    model = DistributedDataParallel(
        nn.Sequential(*layers).to(device), device_ids=[device] if device.type == "cuda" else None
    )
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.Generator().manual_seed(0)
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
        if device.type == "cuda":
            torch.cuda.synchronize()  # or the GPU computes forward while the CPU sleeps
        time.sleep(delay)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.time() - start)
    return statistics.mean(times[WARMUP:]), loss.item()


def print_table():
    rows = {(float(delay), int(ranks)): float(s) for delay, ranks, s in csv.reader(RESULTS.open())}
    print("| Delay | #GPUs | Time/step | Speedup | Amdahl |")
    for (delay, ranks), seconds in sorted(rows.items()):
        base, one, plain = rows.get((delay, 1)), rows.get((0.0, 1)), rows.get((0.0, ranks))
        speedup = f"{base / seconds:.2f}" if base else "run 1 rank first"
        amdahl = f"{(one + delay) / (plain + delay):.2f}" if one and plain else "-"
        print(f"| {1e3 * delay:g} ms | {ranks} | {1e3 * seconds:.3f} ms | {speedup} | {amdahl} |")


def main():
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)  # or barrier() and synchronize() take GPU 0 on every rank
    dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for delay in DELAYS:
        seconds, loss = run_steps(delay, rank, world_size, device)
        if rank == 0:
            print(f"delay={1e3 * delay:g} ms on {world_size} ranks: time/step={1e3 * seconds:.3f} ms | loss={loss:.9g}")
            with RESULTS.open("a") as file:
                csv.writer(file).writerow([delay, world_size, seconds])
    if rank == 0:
        print_table()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
