"""`mlp`: the same layer DEPTH times, so that parameters, bytes to exchange and operations grow together.

For this model bytes per step (4·P) and operations per step (6·P·batch) are both proportional to its parameters P:
making it larger does not by itself make it compute-bound; making the batch larger does.
"""

from __future__ import annotations

import torch
from torch import nn

from scalelab.workloads.options import MlpOptions
from scalelab.workloads.synthetic import draw_batches
from scalelab.workloads.workload import BuildContext, Workload


def build_mlp(options: MlpOptions, context: BuildContext) -> Workload:
    def draw(generator: torch.Generator, num_samples: int) -> tuple[torch.Tensor, ...]:
        shape = (num_samples, options.dim)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    return Workload(
        model=make_mlp(options),
        batches=draw_batches(draw, context),
        loss=nn.MSELoss(),
        optimizer=torch.optim.Adam,
    )


def make_mlp(options: MlpOptions) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(options.depth):
        layers += [nn.Linear(options.dim, options.dim), nn.ReLU()]
    return nn.Sequential(*layers)
