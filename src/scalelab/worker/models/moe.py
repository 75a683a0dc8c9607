"""`moe`: a small language model whose feed-forward layers are mixtures of experts, on random tokens.

Every block is one of GPT-2, with several feed-forward layers (experts) instead of one. A gate sends each token to the
expert that it rates highest (Fedus et al. 2021, Switch Transformer), and the expert's result is scaled by that rate.

Capacity is fixed: an expert takes at most C tokens of one sample, in their order, with

    C = ⌈capacity · tokens / experts⌉

slots; a token that finds none passes by on the shortcut. Shapes therefore do not depend on values, and what is dropped
does not depend on how samples are distributed over ranks (GShard's groups, Lepikhin et al. 2021, with a sample as the
group): losses are those of one rank. So is the loss that keeps experts balanced, the mean over samples of
experts · Σ (share of tokens) · (mean rate).

The experts of a layer lie in two tensors, one matrix for each, and compute by one batched product. `exchange` sends
slots to the ranks that hold their experts; `ep` sets it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from scalelab.worker.batches.drawn import draw_batches
from scalelab.worker.models.gpt2 import Attention, draw_tokens, initialise_weights
from scalelab.workloads.catalogue import MoeOptions
from scalelab.workloads.workload import BuildContext, Workload

BALANCE_WEIGHT = 0.01
"""Of the balancing loss, as Fedus et al. 2021 chose it."""


class Experts(nn.Module):
    """Feed-forward layers side by side: slots in, experts × slots × width, and results in the same shape."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(num_experts, width, 4 * width))
        self.down = nn.Parameter(torch.empty(num_experts, 4 * width, width))
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.down, std=0.02)
        self.exchange: Callable[[torch.Tensor, bool], torch.Tensor] | None = None
        """Sends slots to the ranks of their experts, or results back; None: all experts are here."""
        self.mesh: DeviceMesh | None = None
        """Of the ranks that the experts are split over."""

    def forward(self, slots: torch.Tensor) -> torch.Tensor:
        here = slots if self.exchange is None else self.exchange(slots, True)
        hidden = functional.gelu(torch.bmm(here, self.up), approximate="tanh")
        found = torch.bmm(hidden, self.down).to(slots.dtype)
        return found if self.exchange is None else self.exchange(found, False)


class MoeBlock(nn.Module):
    """Attention, then the experts, each behind a norm and around a shortcut."""

    def __init__(self, options: MoeOptions) -> None:
        super().__init__()
        self.num_experts, self.num_slots = options.experts, options.num_slots
        self.norm1 = nn.LayerNorm(options.width)
        self.attention = Attention(options.shape, options.dropout)
        self.norm2 = nn.LayerNorm(options.width)
        self.gate = nn.Linear(options.width, options.experts, bias=False)
        self.experts = Experts(options.experts, options.width)
        self.drop = nn.Dropout(options.dropout)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.drop(self.attention(self.norm1(x)))
        mixed, balance = self.mix(self.norm2(x))
        return x + self.drop(mixed), balance

    def mix(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the experts make of every token, and how unevenly each sample uses them."""
        num_samples, _, width = x.shape
        rates = self.gate(x).float().softmax(-1)
        rate, chosen = rates.max(-1)
        is_chosen = chosen.unsqueeze(-1) == torch.arange(self.num_experts, device=x.device)
        before = (is_chosen.long().cumsum(1) * is_chosen).sum(-1) - 1
        last = self.num_experts * self.num_slots  # one row more, for what finds no slot
        slot = torch.where(before < self.num_slots, chosen * self.num_slots + before, last)
        places = slot.unsqueeze(-1).expand(-1, -1, width)
        filled = x.new_zeros(num_samples, last + 1, width).scatter(1, places, x)[:, :last]
        grouped = filled.view(num_samples, self.num_experts, self.num_slots, width).transpose(0, 1)
        found = self.experts(grouped.reshape(self.num_experts, -1, width)).view_as(grouped).transpose(0, 1)
        padded = functional.pad(found.reshape(num_samples, last, width), (0, 0, 0, 1))
        mixed = padded.gather(1, places) * rate.unsqueeze(-1).to(x.dtype)
        balance = self.num_experts * (is_chosen.float().mean(1) * rates.mean(1)).sum(-1)
        return mixed, balance


class Moe(nn.Module):
    """Token indices in; logits of the next token out, and how unevenly each sample uses the experts."""

    def __init__(self, options: MoeOptions) -> None:
        super().__init__()
        self.tokens = nn.Embedding(options.vocabulary, options.width)
        self.positions = nn.Embedding(options.sequence, options.width)
        self.drop = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(MoeBlock(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.apply(initialise_weights)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(places))
        total = x.new_zeros(len(x), dtype=torch.float32)
        for block in self.blocks:
            x, balance = block(x)
            total = total + balance
        return functional.linear(self.norm(x), self.tokens.weight), total


def balanced_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, targets = batch
    logits, balance = model(tokens)
    entropy = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    total: torch.Tensor = entropy + BALANCE_WEIGHT * balance.mean()
    return total


def build_moe(options: MoeOptions, context: BuildContext) -> Workload:
    return Workload(
        model=Moe(options),
        batches=draw_batches(functools.partial(draw_tokens, options.vocabulary, options.sequence), context),
        loss=balanced_loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1),
    )
