"""Where the rows of a study run that compares something else than ranks: one number of ranks, one strategy."""

from __future__ import annotations

from typing import Annotated

import tyro

from scalelab.checks import check_at_least
from scalelab.strategies.catalogue import Strategy

MaybeStrategy = Annotated[Strategy | None, tyro.conf.arg(metavar="NAME")]


def choose_strategy(strategy: str | None, num_ranks: int) -> str:
    """The one that was asked for; otherwise the plain loop on one rank and ddp on more."""
    return strategy or ("single" if num_ranks == 1 else "ddp")


def check_placement(num_ranks: int, batch_per_rank: int) -> None:
    check_at_least("ranks", num_ranks, 1)
    check_at_least("batch_per_rank", batch_per_rank, 1)


def describe_placement(strategy: str | None, num_ranks: int) -> str:
    """For the line that says what was measured."""
    chosen = choose_strategy(strategy, num_ranks)
    return "plain loop" if chosen == "single" else f"{chosen} × {num_ranks}"
