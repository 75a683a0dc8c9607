"""A Llama-like model as large pretraining codes train it: FSDP2 per block, checkpointed activations, a token stream
without length, a metrics logger of its own, distributed checkpoints."""

import math
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset


@dataclass
class JobConfig:
    local_batch_size: int = 4
    seq_len: int = 32
    dim: int = 128
    n_layers: int = 2
    steps: int = 10_000
    warmup_steps: int = 20
    lr: float = 8e-4
    max_norm: float = 1.0
    checkpoint_interval: int = 12

    @classmethod
    def parse(cls, words):
        kinds = {f.name: type(f.default) for f in fields(cls)}
        pairs = dict(zip((w.removeprefix("--training.") for w in words[::2]), words[1::2], strict=True))
        return cls(**{name: kinds[name](value) for name, value in pairs.items()})


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w2, self.w3 = (
            nn.Linear(*s, bias=False) for s in ((dim, 2 * dim), (2 * dim, dim), (dim, 2 * dim))
        )

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.wqkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.wo(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    def __init__(self, config, vocab=512):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, config.dim)
        self.layers = nn.ModuleDict({str(n): Block(config.dim) for n in range(config.n_layers)})
        self.norm, self.output = RMSNorm(config.dim), nn.Linear(config.dim, vocab, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


class TokenStream(IterableDataset):
    def __init__(self, seq_len, rank):
        self.seq_len, self.rank = seq_len, rank

    def __iter__(self):
        generator = torch.Generator().manual_seed(1234 + self.rank)
        while True:
            tokens = torch.randint(512, (self.seq_len + 1,), generator=generator)
            yield {"input": tokens[:-1]}, tokens[1:]


class MetricsProcessor:
    def __init__(self):
        self.values = defaultdict(list)

    def log(self, step, loss, grad_norm):
        self.values["grad_norm"].append(grad_norm)
        if dist.get_rank() == 0:
            print(f"step: {step:4} loss={loss!r} time={time.perf_counter()!r}", flush=True)


class Trainer:
    def __init__(self, config):
        self.config, self.step = config, 0
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        torch.manual_seed(0)
        model = Transformer(config)
        for name, block in model.layers.items():
            model.layers[name] = fully_shard(checkpoint_wrapper(block), mesh=mesh)
        self.model_parts = [fully_shard(model, mesh=mesh)]
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=config.lr, foreach=True) for m in self.model_parts]
        schedule = lambda n: min(1.0, (n + 1) / config.warmup_steps)  # noqa: E731
        self.schedulers = [torch.optim.lr_scheduler.LambdaLR(o, schedule) for o in self.optimizers]
        self.metrics = MetricsProcessor()
        self.dataloader = DataLoader(TokenStream(config.seq_len, dist.get_rank()), batch_size=config.local_batch_size)
        self.folder = tempfile.mkdtemp() if dist.get_rank() == 0 else None

    def train_step(self, batches):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        inputs, labels = next(batches)
        (model,) = self.model_parts
        loss = nn.functional.cross_entropy(model(inputs["input"]).flatten(0, 1), labels.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), self.config.max_norm)
        for one in (*self.optimizers, *self.schedulers):
            one.step()
        self.metrics.log(self.step, loss.item(), float(norm.full_tensor()))

    def save(self):
        places = [self.folder]
        dist.broadcast_object_list(places)
        state, of_optimizer = get_state_dict(self.model_parts[0], self.optimizers)
        dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=f"{places[0]}/step")

    def train(self):
        batches = iter(self.dataloader)
        while self.step < self.config.steps:
            self.step += 1
            self.train_step(batches)
            if self.step % self.config.checkpoint_interval == 0:
                self.save()
        assert math.isfinite(self.metrics.values["grad_norm"][-1])

    def close(self):
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    trainer = Trainer(JobConfig.parse(sys.argv[1:]))
    try:
        trainer.train()
    finally:
        trainer.close()
