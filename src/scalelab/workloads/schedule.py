"""The learning rate of every step.

Linear scaling multiplies the rate by the growth of the global batch: k small steps in one direction are about one step
k times as large. Early in training directions change too fast for that, so the rate warms up (Goyal et al. 2017,
"Accurate, Large Minibatch SGD", sections 2.1 and 2.2). Then it is constant or follows half a cosine (Loshchilov and
Hutter 2017, SGDR, without restarts).

Step k, counted from 0, uses

    k < W      base · (k + 1) / W
    k ≥ W      base                                                     constant
               lr_min + (base − lr_min) · (1 + cos(π·p)) / 2            cosine, p = (k + 1 − W) / (T − W), at most 1

with W warm-up steps and T steps in total, warm-up included. The last warm-up step uses the full rate, the last cosine
step `lr_min`. Everything is a factor of the base rate, so parameter groups keep their ratios.
"""

from __future__ import annotations

import math

from scalelab.errors import UsageError
from scalelab.records.settings import Optimization


def scale_learning_rate(lr: float, optimization: Optimization, num_ranks: int, global_batch: int) -> float:
    """The learning rate, scaled with ranks or global batch if requested."""
    if optimization.lr_scaling == "ranks":
        return lr * num_ranks
    if optimization.lr_scaling == "batch" and optimization.lr_base_batch is not None:
        return lr * global_batch / optimization.lr_base_batch
    return lr


def count_warmup_steps(optimization: Optimization, steps_per_epoch: int | None) -> int:
    """Warm-up steps; `steps_per_epoch` is None for endless data."""
    epochs = optimization.lr_warmup_epochs
    if not epochs:
        return optimization.lr_warmup
    if steps_per_epoch is None:
        raise UsageError(f"--lr-warmup-epochs {epochs:g} needs batches with a len(): use --lr-warmup (steps)")
    return optimization.lr_warmup + round(epochs * steps_per_epoch)


def check_schedule(optimization: Optimization, base_lr: float) -> None:
    """Reject a cosine that ends above the (scaled) base rate."""
    if optimization.schedule == "cosine" and optimization.lr_min > base_lr:
        raise UsageError(f"--lr-min must be at most the learning rate {base_lr:g}, got {optimization.lr_min:g}")


def learning_rate_factor(
    step: int, optimization: Optimization, total_steps: int, steps_per_epoch: int | None, base_lr: float
) -> float:
    """The factor on the (scaled) base rate at a step, counted from 0."""
    warmup = count_warmup_steps(optimization, steps_per_epoch)
    if step < warmup:
        return (step + 1) / warmup
    if optimization.schedule == "constant":
        return 1.0
    end = optimization.schedule_steps or total_steps
    progress = min(1.0, (step + 1 - warmup) / (end - warmup)) if end > warmup else 1.0
    floor = optimization.lr_min / base_lr if base_lr else 1.0
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
