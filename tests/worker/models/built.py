"""Built-in workloads for tests: built for one rank of a small job."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scalelab.worker.models.load import BUILDERS
from scalelab.workloads.catalogue import make_options
from scalelab.workloads.workload import BuildContext, Workload


def make_context(**fields: Any) -> BuildContext:
    defaults: dict[str, Any] = {"batch_size": 2, "rank": 0, "num_ranks": 1, "seed": 0, "device": "cpu"}
    return BuildContext(**(defaults | fields))


def build(name: str, options: dict[str, Any], **context: Any) -> Workload:
    """Build as a rank does: without the checks of the parent."""
    return BUILDERS[name](make_options(name, options), make_context(**context))


def compute_loss(workload: Workload, batch: Any) -> torch.Tensor:
    if isinstance(workload.loss, nn.Module):
        result: torch.Tensor = workload.loss(workload.model(batch[0]), batch[1])
        return result
    return workload.loss(workload.model, batch)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
