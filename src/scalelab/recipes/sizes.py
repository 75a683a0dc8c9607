"""The two sizes of every recipe: the published parameters, and the same shape for two CPU cores and a few minutes."""

from __future__ import annotations

from typing import TypeVar

from scalelab.recipes.recipe import Size
from scalelab.studies.study import Sampling

T = TypeVar("T")


def choose(size: Size, *, small: T, full: T) -> T:
    return full if size == "full" else small


def choose_ranks(size: Size, full: int) -> int:
    """Two cores have room for two ranks."""
    return choose(size, small=min(2, full), full=full)


def make_sampling(
    size: Size,
    *,
    rounds: int = 4,
    steps: int = 12,
    comm_free: bool = False,
    phase_steps: int = 4,
    profile_steps: int = 0,
) -> Sampling:
    """Few launches of few steps in small, as told; the control is left to full size."""
    return Sampling(
        rounds=choose(size, small=rounds, full=6),
        steps=choose(size, small=steps, full=30),
        phase_steps=phase_steps if size == "small" else 2 * phase_steps,
        comm_free_steps=choose(size, small=4, full=8) if comm_free else 0,
        profile_steps=profile_steps,
        control=size == "full",
    )
