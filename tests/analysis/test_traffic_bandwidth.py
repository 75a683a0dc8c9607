"""Bandwidths have nccl-tests' definitions."""

from __future__ import annotations

import pytest

from scalelab.analysis.traffic import KINDS, bus_factor
from scalelab.errors import UnknownName


@pytest.mark.parametrize(
    ("kind", "num_ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 2, 0.5),
        ("all_to_all", 8, 0.875),
        ("gather", 4, 0.75),
        ("scatter", 4, 0.75),
        ("broadcast", 8, 1.0),
        ("reduce", 8, 1.0),
        ("send", 8, 1.0),
        ("recv", 8, 1.0),
        ("point_to_point", 2, 1.0),
        ("barrier", 8, 0.0),
    ],
)
def test_the_factor_is_what_the_cheapest_schedule_sends_over_the_size(kind: str, num_ranks: int, factor: float) -> None:
    assert bus_factor(kind, num_ranks) == factor


def test_one_rank_sends_nothing_to_others() -> None:
    assert [bus_factor(kind, 1) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")] == [0] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_no_factor_exceeds_two(kind: str) -> None:
    assert all(0 <= bus_factor(kind, num_ranks) < 2 for num_ranks in (1, 2, 3, 1000))


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    assert bus_factor("all_reduce", 5) == bus_factor("reduce_scatter", 5) + bus_factor("all_gather", 5)


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"unknown collective 'allreduce'\. Did you mean 'all_reduce'"):
        bus_factor("allreduce", 2)


def test_no_ranks_cannot_communicate() -> None:
    with pytest.raises(ValueError, match="must be ≥ 1, got 0"):
        bus_factor("broadcast", 0)
