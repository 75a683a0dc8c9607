"""`transformer`: torch's own nn.Transformer on random sequences.

The decoder reads the sequence that it should give, and the loss is a cross-entropy with soft targets: of model(src,
tgt) against tgt, both of (batch, length, width). torch takes the second axis as the classes, so the softmax runs over
positions. That is a load, not a language model: nothing is to be learned. All sequences are drawn at once and every
epoch goes through them in a new order. They may also come from a stored set, in whatever format; one that is read by
chunks and too large to be kept is shuffled by blocks of them (`data/stored_order.py`).

Batches of a set on disk, whichever format it is in: what `SampleBatches` fetches with.

The set is opened by the process that first fetches from it and is pickled closed (`formats/stored.py`), so workers may
be forked or spawned. `stored_order.py` decides the order and what is kept for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from scalelab.data.formats.columns import SampleField
from scalelab.data.formats.stored import NaiveHdf5, StoredSet
from scalelab.data.stored_order import StoredOrder, choose_stored_order
from scalelab.errors import UsageError
from scalelab.worker.batches.drawn import Fetch, SampleBatches
from scalelab.workloads.catalogue import TransformerOptions
from scalelab.workloads.workload import BuildContext, Workload


@dataclass(frozen=True)
class StoredFetch:
    """The tensors of a batch from a stored set, one for every column; nothing about them is random."""

    samples: StoredSet
    columns: tuple[int, ...] = ()
    """Which columns a batch consists of, and in which order; none named: all, as they are stored."""

    def __call__(self, indices: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG002
        tensors = tuple(map(torch.from_numpy, self.samples.__getitems__(indices.numpy())))
        return tuple(tensors[number] for number in self.columns) if self.columns else tensors


def fetch_columns(samples: StoredSet, names: Sequence[str]) -> StoredFetch:
    """A fetch of the columns with these names, in this order, such as images and then labels."""
    known = [field.name for field in samples.fields]
    for name in names:
        if name not in known:
            raise UsageError(f"{samples.path} has no column {name!r}: it has {', '.join(known)}")
    return StoredFetch(samples, tuple(map(known.index, names)))


def build_transformer(options: TransformerOptions, context: BuildContext) -> Workload:
    sequences = read_sequences(options) if options.stored else hold_sequences(options, context.seed)
    stored, num_samples = sequences.stored_order, sequences.num_samples
    return Workload(
        model=make_transformer(options),
        shuffle=stored.describe(context.seed, num_samples, context.batch_size * context.num_ranks),
        batches=SampleBatches(
            sequences.fetch,
            num_samples,
            batch_size=context.batch_size,
            rank=context.rank,
            num_ranks=context.num_ranks,
            seed=context.seed,
            order=stored.order,
            workers=options.workers,
            accumulation=context.accumulation,
        ),
        loss=soft_target_loss,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
    )


@dataclass(frozen=True)
class Sequences:
    """What batches are fetched from, and in which order."""

    fetch: Fetch
    num_samples: int
    stored_order: StoredOrder = field(default_factory=StoredOrder)


def hold_sequences(options: TransformerOptions, seed: int) -> Sequences:
    """Sequences drawn at once and held in memory."""
    sequences = draw_sequences(options, seed)

    def fetch(indices: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[indices] for tensor in sequences)

    return Sequences(fetch, options.samples)


def read_sequences(options: TransformerOptions) -> Sequences:
    """Sequences of a dataset, which must have the lengths and width of the options."""
    assert options.stored is not None
    path = Path(options.stored)
    lengths = {"src": options.src_length, "tgt": options.tgt_length}
    if options.reader == "naive":
        naive = NaiveHdf5(path, list(lengths))

        def fetch(indices: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(map(torch.from_numpy, naive.__getitems__(indices.tolist())))

        return Sequences(fetch, len(naive))
    expected = [SampleField(name, np.dtype("float32"), (length, options.features)) for name, length in lengths.items()]
    if options.reader == "eager":
        loaded = StoredSet(path, eager=True, expected=expected)
        return Sequences(fetch_columns(loaded, list(lengths)), len(loaded))
    chosen = choose_stored_order(path, kind=options.shuffle)
    stored = StoredSet(path, options=chosen.options, expected=expected)
    return Sequences(fetch_columns(stored, list(lengths)), len(stored), chosen)


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
