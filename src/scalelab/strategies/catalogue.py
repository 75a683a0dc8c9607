"""The strategies by name, without torch."""

from __future__ import annotations

STRATEGIES = {
    "single": "the plain loop with no process group, on one rank",
    "ddp": "DistributedDataParallel: every rank holds the model, gradients are averaged during backward",
}
