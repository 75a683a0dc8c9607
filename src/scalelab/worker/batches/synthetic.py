"""Random batches that do not depend on how many ranks share them, nor on how many passes make a step.

The samples of a step are drawn as one tensor. A step is one or more forward passes; each pass takes the next samples,
and in a pass each rank keeps its slice. So two ranks with half the batch each, or two passes of half the batch, train
on the same samples as one rank with the whole. A few different steps are drawn before the training starts and used in
turn: drawing is not what is measured. They are drawn one after the other, so that no rank ever holds much more than
one global batch beside its own slices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from scalelab.workloads.options import NUM_POOLED_BATCHES
from scalelab.workloads.workload import BuildContext


def draw_batches(
    draw: Callable[[torch.Generator, int], tuple[torch.Tensor, ...]], context: BuildContext
) -> list[tuple[torch.Tensor, ...]]:
    """This rank's batches of a few steps, one for each pass; `draw` makes so many samples."""
    generator = torch.Generator().manual_seed(context.seed)
    per_pass = context.batch_size * context.num_ranks
    batches = []
    for _ in range(NUM_POOLED_BATCHES):
        whole = draw(generator, per_pass * context.accumulation)
        for number in range(context.accumulation):
            first = number * per_pass + context.rank * context.batch_size
            mine = slice(first, first + context.batch_size)
            batches.append(tuple(tensor[mine].clone() for tensor in whole))
    return batches
