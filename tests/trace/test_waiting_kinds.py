"""Collectives by kind: counts, latencies, bandwidths."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.trace.collectives import Collective
from scalelab.trace.waiting import summarise_kinds, summarise_transfers
from tests.trace.jobs import reduce_on_time, write_job


def make(kind: str = "all_reduce", us: float = 100, size: int | None = 1_000_000, ranks: int | None = 4) -> Collective:
    end_ns = 5 + round(1000 * us)
    return Collective(kind=kind, start_ns=5, end_ns=end_ns, payload_bytes=size, group_size=ranks)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1),
        ("reduce", 1),
        ("send_recv", 1),
    ],
)
def test_bus_bandwidth_is_that_of_the_algorithm_times_a_factor(kind: str, factor: float) -> None:
    (found,) = summarise_kinds([make(kind)])
    assert found.algorithm_bandwidth == pytest.approx(10e9)
    assert found.bus_bandwidth == pytest.approx(factor * 10e9)


def test_latencies_are_the_mean_the_95th_percentile_and_the_largest() -> None:
    (found,) = summarise_kinds([make(us=n) for n in range(1, 101)])
    assert (found.count, found.mean_ns, found.p95_ns, found.max_ns) == (100, 50_500, pytest.approx(95_050), 100_000)


def test_those_without_a_size_count_for_latency_and_not_for_bandwidth() -> None:
    (found,) = summarise_kinds([make(), make(us=900, size=None)])
    assert (found.count, found.num_sized, found.payload_bytes) == (2, 1, 1_000_000)
    assert found.algorithm_bandwidth == pytest.approx(10e9)
    assert found.mean_ns == 500_000


def test_what_is_unknown_has_no_bandwidth() -> None:
    unsized, other, lone = (summarise_kinds([c])[0] for c in (make(size=None), make("other"), make(ranks=None)))
    assert (unsized.payload_bytes, unsized.algorithm_bandwidth, unsized.bus_bandwidth) == (None, None, None)
    assert (other.algorithm_bandwidth, other.bus_bandwidth) == (pytest.approx(10e9), None)
    assert (lone.algorithm_bandwidth, lone.bus_bandwidth) == (pytest.approx(10e9), None)
    assert summarise_kinds([make(us=0)])[0].algorithm_bandwidth is None
    assert summarise_kinds([]) == []


def test_the_kind_with_the_most_time_comes_first_and_substitutes_are_apart() -> None:
    ran = Collective(kind="reduce_scatter", ran_as="all_reduce", start_ns=0, end_ns=10)
    found = summarise_kinds([ran, make("all_gather"), make(), make()])
    assert [(summary.kind, summary.ran_as) for summary in found] == [
        ("all_reduce", ""),
        ("all_gather", ""),
        ("reduce_scatter", "all_reduce"),
    ]


def test_bandwidth_by_transfer_leaves_waiting_out(tmp_path: Path) -> None:
    job = write_job(tmp_path, reduce_on_time([(0, 150), (150, 0)], transfer_us=50))
    (recorded,) = summarise_kinds(job.ranks[0].collectives)
    matching = job.matching
    assert matching is not None
    (transfer,) = summarise_transfers(matching)
    assert (transfer.count, transfer.mean_ns, transfer.payload_bytes) == (2, 50_000, 2 * 4096)
    assert recorded.mean_ns == 125_000
    assert transfer.bus_bandwidth == pytest.approx(4096 / 50e-6)
    assert recorded.bus_bandwidth == pytest.approx(2 * 4096 / 250e-6)
