"""GPT-2, its token shards and its learning rate: what the other scripts of this directory import.

Pre-norm blocks, learned positions, GELU, the head shares the token table. Weights are drawn with a standard deviation
of 0.02, positions 0.01, and projections into the residual stream 0.02 / sqrt(2 x layers).
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SHARD = Path(__file__).parent / "shakespeare.bin"  # a text as bytes; --data takes any other shard, such as FineWeb's
SHAPES = {  # layers, heads, width, vocabulary, context
    "tiny": (4, 4, 128, 512, 64),
    "small": (12, 12, 768, 50257, 1024),
    "large": (36, 20, 1280, 50257, 1024),
}


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and around a shortcut."""

    def __init__(self, width, num_heads, dropout, is_checkpointed):
        super().__init__()
        self.num_heads, self.dropout, self.is_checkpointed = num_heads, dropout, is_checkpointed
        self.norm1 = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def compute(self, x):
        x = x + self.drop(self.attend(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))

    def forward(self, x):
        # Activation checkpointing: keep the input of a block, run it again in backward.
        return checkpoint(self.compute, x, use_reentrant=False) if self.is_checkpointed else self.compute(x)


class GPT2(nn.Module):
    """Token indices in, logits of the next token out."""

    def __init__(self, size="small", dropout=0.1, is_checkpointed=False, shard=None):
        super().__init__()
        layers, heads, width, vocabulary, context = SHAPES[size]
        if shard is not None:  # the tiny model has room for bytes: make it for all tokens of a shard
            vocabulary = max(vocabulary, int(shard.max()) + 1)
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, is_checkpointed) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.positions.weight, std=0.01)
        for block in self.blocks:
            for layer in (block.out, block.down):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens, targets):
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def read_shard(path):
    """The tokens of a shard: a header of 256 int32 (magic 20240520, version, count), then uint16."""
    if not Path(path).is_file():
        raise SystemExit(f"no token shard at {path}: use --data PATH")
    header = np.fromfile(path, dtype=np.int32, count=256)
    assert header[0] == 20240520, f"{path} is not a token shard"
    return np.memmap(path, dtype=np.uint16, mode="r", offset=1024, shape=(int(header[2]),))


def take_batch(shard, number, batch, sequence, device):
    """Batch `number`, from the start again at the end: inputs, and the same tokens moved by one as targets."""
    first = number % ((len(shard) - 1) // (batch * sequence)) * batch * sequence
    tokens = torch.from_numpy(shard[first : first + batch * sequence + 1].astype(np.int64)).to(device)
    return tokens[:-1].view(batch, sequence), tokens[1:].view(batch, sequence)


def cosine(step, steps, lowest=0.1):
    """What the learning rate is multiplied by: half a cosine down to `lowest`."""
    return lowest + (1 - lowest) * (1 + math.cos(math.pi * min(1.0, (step + 1) / steps))) / 2
