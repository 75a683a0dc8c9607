"""Homework 1, task 6: longer sequences in float32, float16 and bfloat16, and wider features.

    torchrun --nproc_per_node=4 pytorch_ddp_large_dtype_comparison.py

The weights themselves have the type, so parameters, gradients and moments halve with it. Features of 4 and 8 times
D_MODEL are refused by torch. EPOCHS, SAMPLES, D_MODEL and LENGTHS in the environment change the job.
"""

import os
import resource
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # now: loaded by DDP after init, its default arguments would keep the group to the end
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

EPOCHS = int(os.environ.get("EPOCHS", 3))
SAMPLES = int(os.environ.get("SAMPLES", 2048))
D_MODEL = int(os.environ.get("D_MODEL", 512))
LENGTHS = [int(length) for length in os.environ.get("LENGTHS", "20 50 100").split()]
DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
BATCH = 16


def draw_order(epoch):
    """The samples of an epoch, shuffled by seed and epoch alone: every rank draws the same and takes its slices."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((0, epoch))))
    return torch.from_numpy(generator.permutation(SAMPLES))


def train(length, dtype, rank, world_size, device, features=D_MODEL):
    """Seconds of all epochs, and the last loss of this rank."""
    torch.manual_seed(0)
    model = nn.Transformer(d_model=D_MODEL, batch_first=True).to(device, dtype)
    model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    sources, targets = (torch.rand(SAMPLES, rows, features, generator=generator) for rows in (1, length))
    torch.manual_seed(rank)  # other dropout masks on every rank
    start = time.time()
    for epoch in range(EPOCHS):
        for everyone in draw_order(epoch).split(BATCH * world_size):
            chosen = everyone[rank * BATCH : (rank + 1) * BATCH]
            source, target = sources[chosen].to(device, dtype), targets[chosen].to(device, dtype)
            loss = F.cross_entropy(model(source, target), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return time.time() - start, loss.item()


def main():
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)  # or barrier() and synchronize() take GPU 0 on every rank
    dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number, length in enumerate(LENGTHS):
        name = "Baseline" if number == 0 else f"Large_Seq_{length}"
        for dtype_name, dtype in DTYPES.items():
            if has_gpu:
                torch.cuda.reset_peak_memory_stats()
            seconds, loss = train(length, dtype, rank, world_size, device)
            if has_gpu:
                memory = f"{torch.cuda.max_memory_allocated() / 1e9:.2f}GB"
            else:  # of the process, and never less than in the rows before: a GPU is needed to compare
                memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9:.2f}GB of the process"
            if rank == 0:
                print(f"{name} {dtype_name}: {seconds:.2f}s, {memory}, loss={loss:.9g}", flush=True)
    for features in (4 * D_MODEL, 8 * D_MODEL):
        try:
            train(LENGTHS[0], torch.float32, rank, world_size, device, features)
        except RuntimeError as error:
            if rank == 0:
                print(f"Large_Features_{features} FP32: failed: {error}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
