"""A stream without a length: an IterableDataset that batches by itself, read by a worker process."""

import itertools
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

batch = int(sys.argv[1])


class Stream(IterableDataset):
    def __iter__(self):
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        for number in itertools.islice(itertools.count(), rank, None, size):
            generator = torch.Generator().manual_seed(number)
            images = torch.randn(batch, 3, 16, 16, generator=generator)
            yield {"image": images, "label": images.mean((1, 2, 3)).gt(0).long()}


dist.init_process_group("gloo")
torch.manual_seed(0)
network = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(8192, 2))
network = DistributedDataParallel(network, broadcast_buffers=False)
optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, nesterov=True)
for record in DataLoader(Stream(), batch_size=None, num_workers=1):
    loss = nn.functional.cross_entropy(network(record["image"]), record["label"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss={loss.item()!r} time={time.perf_counter()!r}")
