"""Batches of a set on disk, whichever format it is in: what `SampleBatches` fetches with.

The set is opened by the process that first fetches from it and is pickled closed (`formats/stored.py`), so workers may
be forked or spawned. In which order, and what is kept for it, is told by `stored_order.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scalelab.data.formats.stored import StoredSet
from scalelab.errors import UsageError


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
