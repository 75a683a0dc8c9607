"""Trials that exchange messages and train nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalelab.records.tasks import Exchange
from scalelab.records.trial import NO_STRATEGY, Trial


def make_exchange_trial(operation: Any, num_ranks: int, sizes: Sequence[int], **fields: Any) -> Trial:
    """One operation on so many ranks, timed five times a size, however busy the machine is, unless told otherwise."""
    settings = {name: fields.pop(name) for name in ("repeats", "backend", "budget_seconds") if name in fields}
    exchange = Exchange(operation=operation, sizes=tuple(sizes), **({"repeats": 5, "budget_seconds": 60.0} | settings))
    defaults: dict[str, Any] = {
        "configuration": f"{operation}-{num_ranks}",
        "workload": "",
        "strategy": NO_STRATEGY,
        "num_ranks": num_ranks,
        "global_batch": num_ranks,
        "label": f"{operation.replace('_', '-')} × {num_ranks}",
        "timeout_seconds": 60.0,
        "task": exchange,
    }
    return Trial(**(defaults | fields))
