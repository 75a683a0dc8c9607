"""Task 1: a DDP benchmark that can be repeated. Rank 0 prints the time of every step.

    torchrun --nproc_per_node=2 task1_ddp.py

DIM, DEPTH, GLOBAL_BATCH and STEPS in the environment change the job, as in `DIM=1024 DEPTH=2 torchrun ...`.
The model is DEPTH x (Linear(DIM, DIM) + ReLU), the data are random, the loss is the mean squared error.
"""

import os
import statistics
import time

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
WARMUP = 5  # steps that are run and not counted


def make_model():
    layers = []
    for _ in range(DEPTH):
        layers += [nn.Linear(DIM, DIM), nn.ReLU()]
    return nn.Sequential(*layers)


def make_batches(rank, world_size, device):
    """Four batches of the whole job, drawn from one seed on every rank; each rank keeps its slice."""
    generator = torch.Generator().manual_seed(0)
    per_rank = GLOBAL_BATCH // world_size
    mine = slice(rank * per_rank, (rank + 1) * per_rank)
    batches = []
    for _ in range(4):
        inputs = torch.randn(GLOBAL_BATCH, DIM, generator=generator)
        targets = torch.randn(GLOBAL_BATCH, DIM, generator=generator)
        batches.append((inputs[mine].to(device), targets[mine].to(device)))
    return batches


def main():
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)  # or barrier() and synchronize() take GPU 0 on every rank
    dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model().to(device), device_ids=[device] if has_gpu else None)
    optimizer = torch.optim.Adam(model.parameters())
    loss_fn = nn.MSELoss()
    batches = make_batches(rank, world_size, device)

    times = []
    for step in range(STEPS):
        inputs, targets = batches[step % len(batches)]
        if has_gpu:
            torch.cuda.synchronize()  # kernels run behind the CPU: wait, or the clock reads launches
        start = time.time()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if has_gpu:
            torch.cuda.synchronize()
        times.append(time.time() - start)
        if rank == 0:
            note = " (warm-up)" if step < WARMUP else ""
            print(f"step={step} | time={1e3 * times[-1]:.3f} ms | loss={loss.item():.9g}{note}", flush=True)

    kept = times[WARMUP:]
    if rank == 0:
        mean, deviation = statistics.mean(kept), statistics.stdev(kept)
        print(f"{world_size} ranks, global batch {GLOBAL_BATCH}, DIM={DIM}, DEPTH={DEPTH}: {len(kept)} steps")
        print(f"time/step: mean={1e3 * mean:.3f} ms, std={1e3 * deviation:.3f} ms, variance={1e6 * deviation**2:.4f}")
        if has_gpu:
            print(f"peak memory of GPU {device.index}: {torch.cuda.max_memory_allocated() / 2**20:.2f} MB")
    del model  # gloo can hang when a DDP model outlives its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
