"""Invalid values: the error names the flag, the value and what to use instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from scalelab.errors import UsageError

T = TypeVar("T")


FLAGS = {
    "batch_per_rank": "batch-size-per-rank",
    "bucket_mb": "bucket-cap-mb",
    "checkpointing": "activation-checkpointing",
    "global_batch": "global-batch-size",
    "gradient_hook": "comm-hook",
}
"""Fields whose flag has torch's name instead of their own."""


def flag(name: str) -> str:
    """The flag that sets a field."""
    return f"--{FLAGS.get(name, name.replace('_', '-'))}"


def check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{flag(name)} must be at least {least}, got {value}")


def check_positive(name: str, value: float) -> None:
    if not value > 0 or math.isinf(value):
        raise UsageError(f"{flag(name)} must be a finite number > 0, got {value:g}")


def check_not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise UsageError(f"{flag(name)} must be a finite number ≥ 0, got {value:g}")


def check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UsageError(f"{flag(name)} must be at least 0 and less than 1, got {value:g}")


def check_one_of(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise UsageError(f"{flag(name)} must be one of {', '.join(known)}, got {value!r}")


def check_divisible(global_batch: int, num_ranks: int) -> None:
    """Every rank must get the same number of samples: otherwise they do different work."""
    if global_batch % num_ranks:
        below, above = global_batch // num_ranks * num_ranks, (global_batch // num_ranks + 1) * num_ranks
        options = f"{below} or {above}" if below else f"{above}"
        raise UsageError(f"{flag('global_batch')} {global_batch} is not divisible by {num_ranks} ranks: use {options}")


def read_flag(name: str, text: str, parse: Callable[[str], T]) -> T:
    """The value of a flag; the error for text that `parse` rejects names the flag."""
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{flag(name)} {error}") from None
