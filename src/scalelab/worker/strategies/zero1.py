"""`zero1`: DDP with a sharded optimizer state, by torch's ZeroRedundancyOptimizer (Rajbhandari et al. 2020, stage 1).

Gradients are all-reduced as by `ddp`. Each rank then updates whole parameters, as many as its share, and broadcasts
them: an all-reduce in backward and as many bytes again after the update, for an N-th of the optimizer state.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from scalelab.records.trial import Trial
from scalelab.worker.optimizers import Factory


def shard_optimizer(make: Factory, model: nn.Module, _: Trial) -> torch.optim.Optimizer:
    """The optimizer that `make` gives, of this rank's share of the parameters, under torch's wrapper.

    torch's package of distributed optimizers is loaded here: every rank would carry it otherwise.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)  # of optimizers beside it in the package
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def make_own(groups: Any, **__: Any) -> torch.optim.Optimizer:
        return make(groups)

    kind: Any = make_own
    sharded = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind)
    sharded.state = sharded.optim.state  # the wrapper's own is empty
    return sharded
