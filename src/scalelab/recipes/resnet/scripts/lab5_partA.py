"""Lab 5 Part A: ResNet-18 on CIFAR-10 with DDP.

    python -m torch.distributed.run --nproc_per_node=1 lab5_partA.py --batch-size 32 --epochs 2
    python -m torch.distributed.run --nproc_per_node=4 lab5_partA.py --batch-size 2048 --epochs 5

--batch-size is per GPU. CIFAR-10 (binary version) is downloaded to ./data unless it is there; --random trains on
random pixels instead. Prints the time, mean training loss and training accuracy of every epoch.
"""

import argparse
import os
import tarfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))  # channels and stride


def parse_flags(words=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--images", type=int, default=50_000, help="fewer, for a quick look")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--random", action="store_true")
    return parser.parse_args(words)


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, source, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(source, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or source != channels:
            conv = nn.Conv2d(source, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, x):
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def make_resnet18():
    """The form for 32 x 32 images: 11,173,962 parameters."""
    layers, width = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()], 64
    for channels, stride in STAGES:
        layers += [Block(width, channels, stride), Block(channels, channels, 1)]
        width = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Images(Dataset):
    """CIFAR-10 in memory; training images are shifted by up to 4 pixels, and half of them mirrored."""

    def __init__(self, flags):
        if flags.random:
            generator = torch.Generator().manual_seed(0)
            self.images = torch.randint(256, (flags.images, 3, 32, 32), generator=generator, dtype=torch.uint8)
            self.labels = torch.randint(10, (flags.images,), generator=generator)
            return
        files = sorted(flags.data.rglob("data_batch_*.bin"))
        rows = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])[: flags.images]
        self.labels = torch.from_numpy(rows[:, 0].astype(np.int64))
        self.images = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy())

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = F.pad(self.images[index].float() / 255, (4, 4, 4, 4))
        top, left = torch.randint(9, (2,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        image = image.flip(2) if torch.rand(()) < 0.5 else image
        return (image - 0.4734) / 0.2516, self.labels[index]


def download(directory):
    """Fetch and unpack CIFAR-10 unless it is there, with a line of progress."""
    if any(directory.rglob("data_batch_*.bin")):
        return
    directory.mkdir(parents=True, exist_ok=True)
    archive = directory / "cifar-10-binary.tar.gz"
    try:
        urllib.request.urlretrieve(URL, archive, lambda n, size, total: print(f"\r{n * size / total:.0%}", end=""))
    except OSError as error:
        raise SystemExit(f"{URL} is out of reach ({error}): put data_batch_*.bin into {directory}, or use --random")
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")


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
    flags = parse_flags()
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if rank == 0 and not flags.random:
        download(flags.data)
    dist.barrier()
    torch.manual_seed(0)
    model = DistributedDataParallel(make_resnet18().to(device), device_ids=[device] if has_gpu else None)
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
