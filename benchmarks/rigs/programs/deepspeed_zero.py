"""DeepSpeed with ZeRO stage 1: its engine owns backward and step."""

import argparse
import time

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch", type=int, default=16)
args = parser.parse_args()

deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
config = {
    "train_micro_batch_size_per_gpu": args.micro_batch,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
}
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config)
generator = torch.Generator().manual_seed(engine.global_rank)
kept = 0.0
for _ in range(100_000):
    inputs = torch.randn(args.micro_batch, 256, generator=generator).bfloat16()
    loss = nn.functional.mse_loss(engine(inputs).float(), inputs.float())
    engine.backward(loss)
    kept += loss.item() / 2
    is_step = engine.is_gradient_accumulation_boundary()
    engine.step()
    if is_step:
        if engine.global_rank == 0:
            print(f"loss={kept!r} time={time.perf_counter()!r}")
        kept = 0.0
