"""Starts its ranks itself with mp.spawn, as the first DDP examples did."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, args):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(args.port)
    dist.init_process_group("gloo", rank=rank, world_size=args.world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(args.steps):
        inputs = torch.randn(args.batch_size, 256, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"loss={loss.item()!r} time={time.perf_counter()!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--port", type=int, default=29655)
    arguments = parser.parse_args()
    mp.spawn(train, args=(arguments,), nprocs=arguments.world_size, join=True)
