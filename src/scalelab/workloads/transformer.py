"""`transformer`: torch's own nn.Transformer on random sequences.

The decoder reads the sequence that it should give, and the loss is a cross-entropy with soft targets: of model(src,
tgt) against tgt, both of (batch, length, width). torch takes the second axis as the classes, so the softmax runs over
positions. That is a load, not a language model: nothing is to be learned. All sequences are drawn at once and every
epoch goes through them in a new order.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

from scalelab.data.sample_batches import SampleBatches
from scalelab.workloads.options import TransformerOptions
from scalelab.workloads.workload import BuildContext, Workload


def build_transformer(options: TransformerOptions, context: BuildContext) -> Workload:
    sequences = draw_sequences(options, context.seed)

    def fetch(indices: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[indices] for tensor in sequences)

    return Workload(
        model=make_transformer(options),
        batches=SampleBatches(
            fetch,
            options.samples,
            batch_size=context.batch_size,
            rank=context.rank,
            num_ranks=context.num_ranks,
            seed=context.seed,
            accumulation=context.accumulation,
        ),
        loss=soft_target_loss,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
    )


def make_transformer(options: TransformerOptions) -> nn.Transformer:
    return nn.Transformer(
        d_model=options.d_model,
        nhead=options.heads,
        num_encoder_layers=options.encoder_layers,
        num_decoder_layers=options.decoder_layers,
        dim_feedforward=options.feedforward,
        dropout=options.dropout,
        batch_first=True,
    )


def draw_sequences(options: TransformerOptions, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All source sequences, then all target sequences."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (options.src_length, options.tgt_length)
    src, tgt = (torch.rand(options.samples, length, options.features, generator=generator) for length in lengths)
    return src, tgt


def soft_target_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    src, tgt = batch
    return functional.cross_entropy(model(src, tgt), tgt)
