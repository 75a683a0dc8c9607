"""Lab 5 Part A: ResNet-18 on CIFAR-10 with DDP.

    python -m torch.distributed.run --nproc_per_node=1 lab5_partA.py --batch-size 32 --epochs 2
    python -m torch.distributed.run --nproc_per_node=4 lab5_partA.py --batch-size 2048 --epochs 5
    python -m torch.distributed.run --nproc_per_node=2 lab5_partA.py --batch-size 8 --digits --width 4

--batch-size is per GPU. CIFAR-10 (binary version) is downloaded to ./data unless it is there; --digits trains on those
of scikit-learn and --random on random pixels instead. Prints the time, mean training loss and training accuracy of
every epoch.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: loaded by DDP after init, its default arguments would keep the group to the end
from resnet18 import Images, download, make_resnet18
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--data", type=Path, default=Path("data"))
parser.add_argument("--images", type=int, default=50_000, help="fewer, for a quick look")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--digits", action="store_true")
parser.add_argument("--random", action="store_true")
parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
flags = parser.parse_args()


def run_epoch(model, optimizer, loader, device):
    """Full time, time without loading, mean training loss and training accuracy over all ranks."""

    def read_clock():
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    totals = torch.zeros(3, dtype=torch.float64, device=device)  # summed loss, right answers, images
    computing, start = 0.0, read_clock()
    for images, labels in loader:
        begin = read_clock()
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        computing += read_clock() - begin
        right = (logits.argmax(1) == labels).sum()
        totals += torch.stack([loss.detach() * len(labels), right, torch.full_like(right, len(labels))]).double()
    full = read_clock() - start
    dist.all_reduce(totals)
    loss, right, count = totals.tolist()
    return full, computing, loss / count, right / count


def main():
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)  # or barrier() and synchronize() take GPU 0 on every rank
    dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    rank = dist.get_rank()
    if rank == 0 and not (flags.digits or flags.random):
        download(flags.data)
    dist.barrier()
    torch.manual_seed(0)
    model = DistributedDataParallel(make_resnet18(flags.width).to(device), device_ids=[device] if has_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    torch.manual_seed(rank)  # other shifts on every rank
    data = Images(flags)
    sampler = DistributedSampler(data, seed=0, drop_last=True)
    loader = DataLoader(data, flags.batch_size, sampler=sampler, num_workers=flags.workers, drop_last=True)
    epochs = []
    for epoch in range(flags.epochs):
        sampler.set_epoch(epoch)
        epochs.append(run_epoch(model, optimizer, loader, device))
        full, _, loss, accuracy = epochs[-1]
        if rank == 0:
            print(f"[Epoch {epoch + 1}/{flags.epochs}] time={full:.3f}s loss={loss:.4f} acc={accuracy:.4f}", flush=True)
    if rank == 0:
        print("\n=== Lab 5 Part A Summary ===")
        if flags.epochs > 1:
            print(f"Epoch 2 full time (includes data loading; use for Q2 tables): {epochs[1][0]:.3f} s")
            print(f"Epoch 2 compute-only time (excludes data loading; use for Q1): {epochs[1][1]:.3f} s")
        if flags.epochs > 4:
            print(f"Epoch 5 loss/acc (Q4.1): {epochs[4][2]:.4f} / {epochs[4][3]:.4f}")
    del model  # gloo can hang when a DDP model outlives its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
