"""Homework 1, task 5: the same training run from seven formats of the data.

    torchrun --nproc_per_node=4 pytorch_ddp_io_comparison.py

Samples are read one by one, in random order, from files in ./io_data. A chunk of compressed HDF5 is inflated whole for
every sample; .npz is inflated once, when it is opened. Without h5py the two HDF5 rows are left out.
"""

import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # now: loaded by DDP after init, its default arguments would keep the group to the end
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

try:
    import h5py
except ImportError:
    h5py = None

EPOCHS = int(os.environ.get("EPOCHS", 5))
SAMPLES = int(os.environ.get("SAMPLES", 2048))
D_MODEL = int(os.environ.get("D_MODEL", 512))
BATCH, PLACE = 32, Path("io_data")


def write_files(arrays):
    PLACE.mkdir(exist_ok=True)
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, PLACE / "data.pt")
    np.savez(PLACE / "plain.npz", **arrays)
    np.savez_compressed(PLACE / "compressed.npz", **arrays)
    for name, array in arrays.items():
        np.save(PLACE / f"{name}.npy", array)
    for file, compression in (("plain.h5", None), ("compressed.h5", "gzip")) if h5py else ():
        with h5py.File(PLACE / file, "w") as opened:
            for name, array in arrays.items():
                opened.create_dataset(name, data=array, compression=compression)


def open_formats(arrays):
    """By name: what gives source and target, each indexed by the number of a sample."""
    yield "in-memory", list(arrays.values())
    if h5py:
        for title, file in (("HDF5 compressed", "compressed.h5"), ("HDF5 uncompressed", "plain.h5")):
            opened = h5py.File(PLACE / file)
            yield title, [opened[name] for name in arrays]
    yield "PyTorch .pt", [tensor.numpy() for tensor in torch.load(PLACE / "data.pt").values()]
    for title, file in (("NumPy .npz compressed", "compressed.npz"), ("NumPy .npz uncompressed", "plain.npz")):
        yield title, list(np.load(PLACE / file).values())
    yield "NumPy .npy", [np.load(PLACE / f"{name}.npy", mmap_mode="r") for name in arrays]


def train(columns, rank, world_size, device):
    torch.manual_seed(0)
    model = nn.Transformer(d_model=D_MODEL, batch_first=True).to(device)
    model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)  # other dropout masks on every rank
    start = time.time()
    for epoch in range(EPOCHS):
        # shuffled by seed and epoch alone: every rank draws the same order and takes its slices
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((0, epoch))))
        for everyone in torch.from_numpy(generator.permutation(SAMPLES)).split(BATCH * world_size):
            chosen = everyone[rank * BATCH : (rank + 1) * BATCH].tolist()
            source, target = (torch.from_numpy(np.stack([part[i] for i in chosen])).to(device) for part in columns)
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
    data = torch.Generator().manual_seed(0)
    arrays = {name: torch.rand(SAMPLES, n, D_MODEL, generator=data).numpy() for name, n in (("src", 1), ("tgt", 20))}
    if rank == 0:
        write_files(arrays)
    dist.barrier()
    for name, columns in open_formats(arrays):
        seconds, loss = train(columns, rank, world_size, device)
        if rank == 0:
            print(f"{name}: {seconds:.2f}s, loss={loss:.9g}", flush=True)
    for file in sorted(PLACE.iterdir()) if rank == 0 else ():
        print(f"{file}: {file.stat().st_size / 2**20:.0f} MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
