"""Which cores a rank owns: as many as it asked for, its own where there are enough."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.launch.ranks.placement import assign_cores, bind_cores, default_threads_per_rank, is_oversubscribed

counts = st.integers(1, 40)
core_sets = st.sets(st.integers(0, 255), min_size=1, max_size=40).map(sorted)


@given(counts, counts, core_sets)
@settings(deadline=None)
def test_every_rank_gets_the_cores_it_asked_for_as_far_as_there_are_any(
    num_ranks: int, threads: int, cores: list[int]
) -> None:
    assigned = assign_cores(num_ranks, threads, cores)
    assert len(assigned) == num_ranks
    for own in assigned:
        assert len(set(own)) == len(own) == min(threads, len(cores))
        assert set(own) <= set(cores)
        assert list(own) == sorted(own)


@given(counts, counts, core_sets)
@settings(deadline=None)
def test_ranks_share_cores_only_where_they_do_not_fit(num_ranks: int, threads: int, cores: list[int]) -> None:
    uses = Counter(core for own in assign_cores(num_ranks, threads, cores) for core in own)
    width = min(threads, len(cores))
    assert (max(uses.values()) > 1) == (num_ranks * width > len(cores))
    assert max(uses.values()) - min(uses[core] for core in cores) <= 1


@given(counts, st.integers(1, 255))
@settings(deadline=None)
def test_the_default_number_of_threads_fits_where_anything_does(num_ranks: int, num_cores: int) -> None:
    threads = default_threads_per_rank(num_ranks, num_cores)
    assert threads >= 1
    assert is_oversubscribed(num_ranks, threads, num_cores) == (num_ranks > num_cores)
    assert is_oversubscribed(num_ranks, threads + 1, num_cores)


def test_neighbouring_cores_go_to_the_same_rank() -> None:
    assert assign_cores(2, 2, (0, 1, 4, 5)) == ((0, 1), (4, 5))


def test_cores_are_handed_out_again_from_the_first() -> None:
    assert assign_cores(3, 2, (0, 1, 2, 3)) == ((0, 1), (2, 3), (0, 1))
    assert assign_cores(3, 2, (0, 1, 2)) == ((0, 1), (0, 2), (1, 2))


def test_a_rank_that_wants_more_than_there_is_gets_all() -> None:
    assert assign_cores(2, 64, (3, 7)) == ((3, 7), (3, 7))
    assert is_oversubscribed(1, 64, 2)


SOCKETS = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}


def test_unbound_ranks_have_all_cores() -> None:
    assert bind_cores("none", 2, 1, (3, 1), SOCKETS) == ((1, 3), (1, 3))


def test_binding_to_cores_knows_no_numa_node() -> None:
    assert bind_cores("cores", 3, 2, range(8), SOCKETS) == ((0, 1), (2, 3), (4, 5))


def test_binding_by_numa_node_spreads_ranks_evenly() -> None:
    assert bind_cores("numa", 2, 2, range(8), SOCKETS) == ((0, 1), (4, 5))
    assert bind_cores("numa", 4, 2, range(8), SOCKETS) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert bind_cores("numa", 1, 8, range(8), SOCKETS) == ((0, 1, 2, 3),), "no rank reaches beyond its node"


def test_binding_by_numa_node_keeps_to_the_cores_there_are() -> None:
    assert bind_cores("numa", 2, 2, (1, 2, 3), SOCKETS) == ((1, 2), (1, 3))
    assert bind_cores("numa", 2, 1, (0, 1), {}) == ((0,), (1,)), "where no NUMA node is known, as without"


def test_ranks_go_where_their_devices_are_if_all_are_known() -> None:
    assert bind_cores("numa", 2, 2, range(8), SOCKETS, wanted=(1, 0)) == ((4, 5), (0, 1))
    assert bind_cores("numa", 2, 2, range(8), SOCKETS, wanted=(1, None)) == ((0, 1), (4, 5))


@given(counts, counts, core_sets)
@settings(deadline=None)
def test_every_binding_gives_every_rank_some_of_the_cores(num_ranks: int, threads: int, cores: list[int]) -> None:
    nodes = {node: tuple(range(64 * node, 64 * node + 64)) for node in range(4)}
    for bind in ("none", "cores", "numa"):
        bound = bind_cores(bind, num_ranks, threads, cores, nodes)
        assert len(bound) == num_ranks
        assert all(own and set(own) <= set(cores) for own in bound)
