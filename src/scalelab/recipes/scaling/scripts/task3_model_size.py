"""Task 3: a small model (DIM=1024, DEPTH=2) and a large one (DIM=8192, DEPTH=8) on 1, 2 and 4 ranks.

    torchrun --nproc_per_node=1 task3_model_size.py
    torchrun --nproc_per_node=2 task3_model_size.py
    torchrun --nproc_per_node=4 task3_model_size.py

Every run measures both cases, adds its rows to task3.csv and prints the table of all rows so far. Steps inside
no_sync() leave the gradients where they are: the difference to a normal step is the communication that the backward
pass could not hide. SMALL and LARGE (DIM,DEPTH) in the environment change the cases.
"""

import csv
import os
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: loaded by DDP after init, its default arguments would keep the group to the end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CASES = {"Small": os.environ.get("SMALL", "1024,2"), "Large": os.environ.get("LARGE", "8192,8")}
GLOBAL_BATCH = int(os.environ.get("GLOBAL_BATCH", 64))
STEPS = int(os.environ.get("STEPS", 30))
WARMUP = 5
RESULTS = Path("task3.csv")


def time_steps(model, optimizer, pairs, is_synced):
    """The mean time of a step, and the last loss."""
    times = []
    for step in range(STEPS):
        inputs, targets = pairs[step % len(pairs)]
        if inputs.is_cuda:
            torch.cuda.synchronize()
        start = time.time()
        with nullcontext() if is_synced else model.no_sync():
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if inputs.is_cuda:
            torch.cuda.synchronize()
        times.append(time.time() - start)
    return statistics.mean(times[WARMUP:]), loss.item()


def run_case(dim, depth, rank, world_size, device):
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(dim, dim), nn.ReLU())]
    model = DistributedDataParallel(
        nn.Sequential(*layers).to(device), device_ids=[device] if device.type == "cuda" else None
    )
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.Generator().manual_seed(0)
    per_rank = GLOBAL_BATCH // world_size
    mine = slice(rank * per_rank, (rank + 1) * per_rank)
    pairs = [[torch.randn(GLOBAL_BATCH, dim, generator=generator)[mine].to(device) for _ in "xy"] for _ in range(4)]
    seconds, loss = time_steps(model, optimizer, pairs, is_synced=True)
    alone, _ = time_steps(model, optimizer, pairs, is_synced=False)
    return seconds, alone, loss


def print_table():
    rows = {(case, int(ranks)): (float(s), float(alone)) for case, ranks, s, alone in csv.reader(RESULTS.open())}
    print("| Case | #GPUs | Time/step | Speedup | Exposed communication |")
    for case in CASES:
        for (_, ranks), (seconds, alone) in sorted(row for row in rows.items() if row[0][0] == case):
            one = rows.get((case, 1))
            speedup = f"{one[0] / seconds:.2f}" if one else "run 1 rank first"
            exposed = f"{1e3 * max(0.0, seconds - alone):.3f} ms" if ranks > 1 else "-"
            print(f"| {case} | {ranks} | {1e3 * seconds:.3f} ms | {speedup} | {exposed} |")


def main():
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)  # or barrier() and synchronize() take GPU 0 on every rank
    dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for case, shape in CASES.items():
        dim, depth = map(int, shape.split(","))
        seconds, alone, loss = run_case(dim, depth, rank, world_size, device)
        if rank == 0:
            print(f"{case} (DIM={dim}, DEPTH={depth}) on {world_size} ranks: loss={loss:.9g}")
            with RESULTS.open("a") as file:
                csv.writer(file).writerow([case, world_size, seconds, alone])
    if rank == 0:
        print_table()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
