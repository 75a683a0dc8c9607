"""The optimizer of a training run: the workload's own, or the one that is asked for.

Numbers that are not given stay what they are: those of the workload's own optimizer, or torch's defaults for the one
that is asked for. A number that is given without an optimizer is put into every parameter group of the workload's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from scalelab.checks import flag
from scalelab.errors import UsageError
from scalelab.records.settings import Optimization

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "nesterov": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}

NESTEROV_MOMENTUM = 0.9


def make_optimizer(
    workload_factory: Factory | None, parameters: Iterable[nn.Parameter], optimization: Optimization
) -> torch.optim.Optimizer:
    """The optimizer over these parameters; Adam if the workload has none."""
    if optimization.optimizer is None:
        optimizer = (workload_factory or torch.optim.Adam)(parameters)
        override_group(optimizer, "lr", optimization.lr)
        override_group(optimizer, "weight_decay", optimization.weight_decay)
        return optimizer
    numbers: dict[str, Any] = {"lr": optimization.lr, "weight_decay": optimization.weight_decay}
    if optimization.optimizer in ("sgd", "nesterov"):
        numbers["momentum"] = optimization.momentum
    if optimization.optimizer == "nesterov":
        numbers |= {"nesterov": True, "momentum": optimization.momentum or NESTEROV_MOMENTUM}
    given = {name: value for name, value in numbers.items() if value is not None}
    return OPTIMIZERS[optimization.optimizer](parameters, **given)


def override_group(optimizer: torch.optim.Optimizer, name: str, value: float | None) -> None:
    """Put a number into every parameter group, and into those that may be added later."""
    if value is None:
        return
    for group in optimizer.param_groups:
        if name not in group:
            kind = type(optimizer).__name__
            raise UsageError(f"{flag(name)} {value:g} does not apply to the workload's {kind}: set --optimizer too")
        group[name] = value
    optimizer.defaults[name] = value


def avoid_lists(optimizer: torch.optim.Optimizer) -> None:
    """Update parameters one by one: torch cannot put DTensors and plain tensors in one list (`foreach`)."""
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = False
