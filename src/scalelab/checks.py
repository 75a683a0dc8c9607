"""Values that cannot work, refused with the flag, the value and what to do instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from scalelab.errors import UsageError

T = TypeVar("T")


def flag(name: str) -> str:
    """The flag that a field is set by."""
    return "--" + name.replace("_", "-")


def check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{flag(name)} {value} is too small: use {least} or more")


def check_positive(name: str, value: float) -> None:
    if not value > 0 or math.isinf(value):
        raise UsageError(f"{flag(name)} {value:g} cannot be: use a finite number above 0")


def check_not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise UsageError(f"{flag(name)} {value:g} cannot be: use a finite number of 0 or more")


def check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UsageError(f"{flag(name)} {value:g} cannot be: use 0 or more and less than 1")


def check_one_of(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise UsageError(f"{flag(name)} {value!r} is not known: use one of {', '.join(known)}")


def check_divisible(global_batch: int, num_ranks: int) -> None:
    """Every rank must get the same number of samples, or the comparison is not of like with like."""
    if global_batch % num_ranks:
        below, above = global_batch // num_ranks * num_ranks, (global_batch // num_ranks + 1) * num_ranks
        options = f"{below} or {above}" if below else f"{above}"
        raise UsageError(f"--global-batch {global_batch} cannot be divided over {num_ranks} ranks: use {options}")


def read_flag(name: str, text: str, parse: Callable[[str], T]) -> T:
    """The value of a flag; a text that cannot be read is refused with the flag's name."""
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{flag(name)} {error}") from None
