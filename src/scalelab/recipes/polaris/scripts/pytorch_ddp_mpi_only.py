"""Homework 1, task 2: DDP whose ranks come from MPI alone, without variables of the launcher (PALS).

    mpiexec -n 4 python pytorch_ddp_mpi_only.py
    mpiexec -n 4 python pytorch_ddp_mpi_only.py --local-rank split-type

The local rank is RANK % device_count, or with split-type the rank among the processes of the same node
(COMM_TYPE_SHARED). The first is wrong where nodes have different numbers of ranks or ranks are dealt out in turn; the
second always counts. EPOCHS, SAMPLES and D_MODEL in the environment change the job.
"""

import argparse
import os
import socket
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # now: loaded by DDP after init, its default arguments would keep the group to the end
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

try:
    from mpi4py import MPI
except (ImportError, RuntimeError):  # RuntimeError: no MPI library on LD_LIBRARY_PATH
    raise SystemExit("this script needs mpi4py and an MPI library: pip install mpi4py, then mpiexec -n 4 python ...")

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", choices=["modulo", "split-type"], default="modulo")
flags = parser.parse_args()

EPOCHS = int(os.environ.get("EPOCHS", 10))
SAMPLES = int(os.environ.get("SAMPLES", 2048))
D_MODEL = int(os.environ.get("D_MODEL", 512))
BATCH = 32  # of every rank


def draw_order(epoch):
    """The samples of an epoch, shuffled by seed and epoch alone: every rank draws the same and takes its slices."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((0, epoch))))
    return torch.from_numpy(generator.permutation(SAMPLES))


def find_free_address():
    """An address and a port of rank 0, which all ranks meet at."""
    with socket.socket() as free:
        free.bind(("", 0))
        name = socket.gethostname() if len(set(nodes)) > 1 else "127.0.0.1"
        return name, free.getsockname()[1]


comm = MPI.COMM_WORLD
RANK, WORLD_SIZE = comm.Get_rank(), comm.Get_size()
nodes = comm.allgather(MPI.Get_processor_name())
if flags.local_rank == "split-type":
    LOCAL_RANK = comm.Split_type(MPI.COMM_TYPE_SHARED).Get_rank()
else:
    LOCAL_RANK = RANK % (torch.cuda.device_count() or WORLD_SIZE)


def main():
    cores = sorted(os.sched_getaffinity(0))
    mask = sum(1 << core for core in cores)
    mine = f"rank {RANK} of {WORLD_SIZE}, local rank {LOCAL_RANK}, cores {cores} (mask {mask:#x})"
    for line in comm.gather(mine) or ():
        print(line)
    host, port = comm.bcast(find_free_address() if RANK == 0 else None)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", LOCAL_RANK) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    backend, address = "nccl" if has_gpu else "gloo", f"tcp://{host}:{port}"
    dist.init_process_group(backend, init_method=address, rank=RANK, world_size=WORLD_SIZE)
    torch.manual_seed(0)
    model = nn.Transformer(d_model=D_MODEL, batch_first=True).to(device)
    model = DistributedDataParallel(model, device_ids=[device] if has_gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(RANK)
    data = torch.Generator().manual_seed(0)
    sources, targets = (torch.rand(SAMPLES, length, D_MODEL, generator=data) for length in (1, 20))
    start = time.time()
    for epoch in range(EPOCHS):
        for everyone in draw_order(epoch).split(BATCH * WORLD_SIZE):
            chosen = everyone[RANK * BATCH : (RANK + 1) * BATCH]
            source, target = sources[chosen].to(device), targets[chosen].to(device)
            loss = F.cross_entropy(model(source, target), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if RANK == 0:
            print(f"[Epoch {epoch + 1}/{EPOCHS}] time={time.time() - start:.2f}s loss={loss.item():.9g}", flush=True)
    if RANK == 0:
        print(f"Training on {WORLD_SIZE} ranks completed in {time.time() - start:.2f}s")
    del model  # gloo can hang when a DDP model outlives its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
