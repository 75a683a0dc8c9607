"""Random batches that do not depend on how many ranks share them.

A global batch is drawn as one tensor and each rank keeps its slice, so that two ranks with half the batch each train
on the same samples as one rank with the whole. A few different batches are drawn before the training starts and
used in turn: drawing is not what is measured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from scalelab.workloads.workload import BuildContext

NUM_POOLED_BATCHES = 4


def draw_batches(
    draw: Callable[[torch.Generator, int], tuple[torch.Tensor, ...]], context: BuildContext
) -> list[tuple[torch.Tensor, ...]]:
    """This rank's slices of a few global batches; `draw` makes a global batch of the given size."""
    generator = torch.Generator().manual_seed(context.seed)
    first = context.rank * context.batch_size
    mine = slice(first, first + context.batch_size)
    pool = []
    for _ in range(NUM_POOLED_BATCHES):
        whole = draw(generator, context.batch_size * context.num_ranks)
        pool.append(tuple(tensor[mine].clone() for tensor in whole))
    return pool
