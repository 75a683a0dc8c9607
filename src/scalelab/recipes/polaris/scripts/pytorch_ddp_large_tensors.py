"""Homework 1, task 3: larger tensors, and the memory of a rank.

    torchrun --nproc_per_node=4 pytorch_ddp_large_tensors.py

Trains the baseline (samples, 1, 512), then 1024 features: with nn.Transformer's default d_model of 512, which torch
refuses, and with a model as wide as its input. EPOCHS, SAMPLES and FEATURES in the environment change the job.
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

EPOCHS = int(os.environ.get("EPOCHS", 5))
SAMPLES = int(os.environ.get("SAMPLES", 2048))
FEATURES = int(os.environ.get("FEATURES", 512))
BATCH = 32


def draw_order(epoch):
    """The samples of an epoch, shuffled by seed and epoch alone: every rank draws the same and takes its slices."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((0, epoch))))
    return torch.from_numpy(generator.permutation(SAMPLES))


def read_memory(device):
    """The peak of a rank in GB: of torch's allocator on a GPU, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def train(features, d_model, rank, world_size, device):
    """Seconds of all epochs, and the last loss of this rank."""
    torch.manual_seed(0)
    model = nn.Transformer(d_model=d_model, batch_first=True).to(device)
    model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    sources, targets = (torch.rand(SAMPLES, length, features, generator=generator) for length in (1, 20))
    torch.manual_seed(rank)  # other dropout masks on every rank
    start = time.time()
    for epoch in range(EPOCHS):
        for everyone in draw_order(epoch).split(BATCH * world_size):
            chosen = everyone[rank * BATCH : (rank + 1) * BATCH]
            source, target = sources[chosen].to(device), targets[chosen].to(device)
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
    for features, d_model in ((FEATURES, FEATURES), (2 * FEATURES, FEATURES), (2 * FEATURES, 2 * FEATURES)):
        shape = f"({SAMPLES}, 1, {features}) with d_model {d_model}"
        if has_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            seconds, loss = train(features, d_model, rank, world_size, device)
        except RuntimeError as error:
            if rank == 0:
                print(f"{shape}: failed: {error}")
            continue
        if rank == 0:
            print(f"{shape}: {seconds:.2f}s, {read_memory(device):.2f} GB, loss={loss:.9g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
