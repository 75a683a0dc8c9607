"""In the style of nanoGPT: key=value arguments, batches drawn by hand, accumulation with DDP's sync switched off."""

import math
import os
import sys
import time
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

batch_size, block_size, accumulation, max_iters, compile_model = 4, 32, 4, 100_000, 0
for word in sys.argv[1:]:
    key, value = word.removeprefix("--").split("=")
    globals()[key] = int(value)

ddp = int(os.environ.get("WORLD_SIZE", "1")) > 1
rank = int(os.environ.get("RANK", "0"))
if ddp:
    torch.distributed.init_process_group("gloo")
    accumulation //= torch.distributed.get_world_size()
torch.manual_seed(1337 + rank)
text = torch.randint(0, 65, (100_000,), generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, dim=128, depth=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(65, dim), nn.Embedding(block_size, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 65, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x, y):
        x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def get_batch():
    starts = torch.randint(len(text) - block_size, (batch_size,))
    x = torch.stack([text[i : i + block_size] for i in starts])
    return x, torch.stack([text[i + 1 : i + 1 + block_size] for i in starts])


model = Gpt()
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
if compile_model:
    model = torch.compile(model)
if ddp:
    model = DistributedDataParallel(model)
X, Y = get_batch()
for iteration in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * min(1.0, iteration / 1000)))
    for micro_step in range(accumulation):
        if ddp:
            model.require_backward_grad_sync = micro_step == accumulation - 1
        with nullcontext():
            logits, loss = model(X, Y)
            loss = loss / accumulation
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        print(f"loss={loss.item() * accumulation!r} time={time.perf_counter()!r}")
