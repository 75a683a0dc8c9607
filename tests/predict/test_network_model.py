"""What collectives cost, by ring and tree, on one level and on two."""

from dataclasses import replace

import pytest

from scalelab.analysis.link import LineFit
from scalelab.errors import UsageError
from scalelab.predict.network_model import (
    Bucket,
    Gradient,
    LinkSpeed,
    NetworkModel,
    fill_buckets,
    find_hop,
    read_link,
    share_cores,
)

LINK = LinkSpeed(latency_seconds=1e-5, bytes_per_second=1e9)


def test_one_rank_sends_nothing():
    assert NetworkModel(inside=LINK).cost("all_reduce", 1, 1e9) == 0


def test_two_ranks_send_a_message_each_way():
    assert NetworkModel(inside=LINK).cost("all_reduce", 2, 1e9) == pytest.approx(1 + 2e-5)


def test_many_ranks_send_twice_the_message():
    assert NetworkModel(inside=LINK).cost("all_reduce", 1000, 1e9) == pytest.approx(2 * 0.999, rel=1e-3)


def test_small_messages_take_the_tree():
    assert NetworkModel(inside=LINK).cost("all_reduce", 1024, 4) == pytest.approx(20 * 1e-5, rel=1e-3)


def test_a_gather_is_half_of_an_all_reduce():
    network = NetworkModel(inside=LINK)
    halves = network.cost("all_gather", 8, 1e8) + network.cost("reduce_scatter", 8, 1e8)
    assert halves == pytest.approx(network.cost("all_reduce", 8, 1e8))


def test_gloo_goes_around_the_ring_and_scatters_by_reducing_all():
    gloo = NetworkModel(inside=LINK, is_gloo=True)
    assert gloo.cost("all_reduce", 8, 4) == pytest.approx(14 * 1e-5, rel=1e-3)
    assert gloo.cost("all_gather", 8, 4) == pytest.approx(7 * 1e-5, rel=1e-3)
    assert gloo.cost("reduce_scatter", 8, 1e8) == gloo.cost("all_reduce", 8, 1e8)


def test_half_of_a_share_waits_in_an_all_gather_of_gloo():
    free = LinkSpeed(latency_seconds=0.0, bytes_per_second=1e9)
    gloo, nccl = NetworkModel(inside=free, is_gloo=True), NetworkModel(inside=free)
    assert gloo.cost("all_gather", 2, 1e9) == pytest.approx(1.5 * nccl.cost("all_gather", 2, 1e9))
    assert gloo.cost("all_gather", 4, 1e9) == pytest.approx(7 / 6 * nccl.cost("all_gather", 4, 1e9))
    slow = replace(gloo, between=LinkSpeed(latency_seconds=0.0, bytes_per_second=1e8), ranks_per_node=2)
    inside, between = 0.5, 5.0
    assert slow.cost("all_gather", 4, 1e9) == pytest.approx(inside + between + 1.25)


def test_hops_of_gloo_on_a_host_take_turns_where_cores_are_shared():
    gloo = NetworkModel(inside=LINK, is_gloo=True, cores=2, hop_core_seconds=5e-6)
    assert gloo.crowd(2) == gloo
    assert gloo.crowd(8).cost("all_reduce", 2, 4) == pytest.approx(2 * (1e-5 + 3 * 5e-6), rel=1e-3)
    own = NetworkModel(inside=LINK, is_gloo=True, hop_core_seconds=5e-6)
    assert own.crowd(8) == own


def test_between_nodes_the_slow_link_rules():
    slow = LinkSpeed(latency_seconds=0, bytes_per_second=1e8)
    network = NetworkModel(inside=LINK, between=slow, ranks_per_node=4)
    assert network.cost("all_reduce", 4, 1e8) == pytest.approx(NetworkModel(inside=LINK).cost("all_reduce", 4, 1e8))
    assert network.cost("all_reduce", 8, 1e8) == pytest.approx(1.0 + 0.15, rel=1e-3)


def test_bytes_of_ranks_that_share_cores_take_turns():
    shared = NetworkModel(inside=LINK, byte_core_seconds=1e-9, cores=2)
    alone = NetworkModel(inside=LINK)
    assert shared.cost("all_reduce", 2, 1e9) == alone.cost("all_reduce", 2, 1e9)
    assert shared.cost("all_reduce", 8, 1e9) == pytest.approx(1.75 * 4)


@pytest.mark.parametrize(
    ("text", "rate", "latency"),
    [("25GB/s,5us", 25e9, 5e-6), ("100gbit", 12.5e9, 0), ("1gbit/s, 50us", 1.25e8, 5e-5), ("600GB/s", 6e11, 0)],
)
def test_a_link_is_read_as_it_is_typed(text, rate, latency):
    link = read_link(text)
    assert link.bytes_per_second == pytest.approx(rate)
    assert link.latency_seconds == pytest.approx(latency)


@pytest.mark.parametrize("text", ["", "fast", "25GB", "0GB/s", "5us", "25GB/s,soon", "-1GB/s"])
def test_a_link_that_carries_nothing_is_refused(text):
    with pytest.raises(UsageError):
        read_link(text)


@pytest.mark.parametrize(("two_seconds", "per_byte"), [(1.5, 0.5 / 1000), (0.9, 0.0), (9.0, 1 / 500)])
def test_what_two_ranks_take_more_is_the_core_time_of_their_bytes_up_to_the_link(two_seconds, per_byte):
    link = LinkSpeed(latency_seconds=0.1, bytes_per_second=500.0)
    found = share_cores(link, 2, 1.0, two_seconds, 1000.0)
    assert (found.byte_core_seconds, found.cores, found.inside) == (pytest.approx(per_byte), 2, link)


@pytest.mark.parametrize(("num_ranks", "waiting"), [(2, 0.5 * 1000 / 2 / 1e3), (4, 0.5 * 1000 / 4 / 1e2)])
def test_half_a_share_of_gloos_all_gather_waits_on_the_slowest_link(num_ranks, waiting):
    """Two ranks are on one node, four on two."""
    inside, between = (LinkSpeed(latency_seconds=0, bytes_per_second=rate) for rate in (1e3, 1e2))
    plain = NetworkModel(inside=inside, between=between, ranks_per_node=2)
    gathers = [network.cost("all_gather", num_ranks, 1000) for network in (plain, replace(plain, is_gloo=True))]
    assert gathers[1] - gathers[0] == pytest.approx(waiting)


def test_nothing_costs_nothing_and_a_byte_two_hops():
    network = NetworkModel(inside=LINK)
    assert network.cost("all_reduce", 2, 0) == 0
    assert network.cost("all_reduce", 2, 1) == pytest.approx(2e-5 + 1e-9)
    assert network.cost("send", 2, 1) == pytest.approx(1e-5 + 1e-9)


def test_ranks_with_a_core_each_do_not_take_turns():
    shared = NetworkModel(inside=LINK, byte_core_seconds=1e-8, cores=2)
    assert shared.cost("all_reduce", 2, 1e9) == pytest.approx(1.0 + 2e-5)
    assert shared.cost("all_reduce", 3, 1e9) == pytest.approx(2 * 2 / 3 * 10 * 3 / 2)
    assert shared.cost("all_gather", 3, 1e9) == pytest.approx(2 / 3 * 10 * 3 / 2)


@pytest.mark.parametrize(("latency", "hop"), [(4e-5, 2e-5), (-1e-6, 0.0)])
def test_a_hop_is_half_of_an_all_reduce_on_two_ranks(latency, hop):
    line = LineFit(
        latency_seconds=None, byte_seconds=None, half_bytes=None, fitted_latency_seconds=latency,
        fitted_byte_seconds=2.0**-31, residual_ratio=0.0, misfits=(), smallest_bytes=4, largest_bytes=8,
    )  # fmt: skip
    assert find_hop(line) == LinkSpeed(latency_seconds=hop, bytes_per_second=2.0**31)


def test_a_link_has_a_half_bandwidth_size_and_is_scaled():
    assert LINK.half_bytes == pytest.approx(1e4)
    assert LINK.words.endswith("/s, 10 µs")
    assert LINK.scale(latency=3.0, bandwidth=0.5) == LinkSpeed(latency_seconds=1e-5 * 3, bytes_per_second=5e8)
    assert LINK.scale() == LINK


@pytest.mark.parametrize(
    ("rate", "latency"), [(0.0, 0.0), (-1.0, 0.0), (float("inf"), 0.0), (1.0, -1e-9), (1.0, float("nan"))]
)
def test_a_link_that_cannot_be_is_refused(rate, latency):
    with pytest.raises(UsageError, match="link"):
        LinkSpeed(latency_seconds=latency, bytes_per_second=rate)


def test_a_node_has_a_rank_at_least():
    assert NetworkModel(inside=LINK, ranks_per_node=1).ranks_per_node == 1
    with pytest.raises(UsageError, match="--ranks-per-node must be ≥ 1, got 0"):
        NetworkModel(inside=LINK, ranks_per_node=0)


def test_buckets_close_at_their_size_and_are_ready_with_their_last_gradient():
    mebibyte = 2**20
    gradients = [Gradient(3.0, 1), Gradient(1.0, mebibyte), Gradient(2.0, 25 * mebibyte - 1), Gradient(2.5, 1)]
    assert fill_buckets(gradients) == [Bucket(1.0, mebibyte), Bucket(2.5, 25 * mebibyte), Bucket(3.0, 1)]
    small = [Gradient(1.0, 4), Gradient(2.0, 6), Gradient(3.0, 9), Gradient(4.0, 1), Gradient(5.0, 5)]
    assert fill_buckets(small, 10) == [Bucket(2.0, 10), Bucket(4.0, 10), Bucket(5.0, 5)]
    assert fill_buckets([]) == []
