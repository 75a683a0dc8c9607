"""Task 5, option C: rank 0 sleeps in every step, and the others wait for it.

    torchrun --nproc_per_node=4 task5_c.py

Measures the same steps without and with the sleep. Every rank times its whole step and its backward pass: the ranks
that do not sleep spend the 20 ms inside backward, where the all-reduce waits for the gradients of rank 0. DIM, DEPTH,
GLOBAL_BATCH, STEPS and SLEEP (seconds) in the environment change the job.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: loaded by DDP after init, its default arguments would keep the group to the end
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DIM = int(os.environ.get("DIM", 8192))
DEPTH = int(os.environ.get("DEPTH", 6))
GLOBAL_BATCH = int(os.environ.get("GLOBAL_BATCH", 64))
STEPS = int(os.environ.get("STEPS", 30))
SLEEP = float(os.environ.get("SLEEP", 0.02))
WARMUP = 5


def run_steps(sleep, rank, world_size, device):
    """Mean step and mean backward pass of this rank, and its last loss."""
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

    def read_clock():
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.time()

    steps, backwards = [], []
    for step in range(STEPS):
        inputs, targets = pairs[step % len(pairs)]
        start = read_clock()
        loss = nn.functional.mse_loss(model(inputs), targets)
        if dist.get_rank() == 0:
            time.sleep(sleep)
        middle = read_clock()
        loss.backward()
        backwards.append(read_clock() - middle)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(read_clock() - start)
    return statistics.mean(steps[WARMUP:]), statistics.mean(backwards[WARMUP:]), loss.item()


def main():
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)  # or barrier() and synchronize() take GPU 0 on every rank
    dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = []
    for sleep in (0.0, SLEEP):
        gathered = [None] * world_size
        dist.all_gather_object(gathered, run_steps(sleep, rank, world_size, device))
        found.append(gathered)
        if rank == 0:
            print(f"rank 0 sleeps {1e3 * sleep:g} ms on {world_size} ranks: loss={gathered[0][2]:.9g}")
    if rank == 0:
        print("| Rank | Time/step | with sleep | Backward | with sleep |")
        for number, (plain, slow) in enumerate(zip(*found, strict=True)):
            cells = [f"{1e3 * one[part]:.3f} ms" for part in (0, 1) for one in (plain, slow)]
            print(f"| {number} | {' | '.join(cells)} |")
        cost = found[1][0][0] - found[0][0][0]
        print(f"A sleep of {1e3 * SLEEP:g} ms on rank 0 makes every step {1e3 * cost:.3f} ms longer, on every rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
