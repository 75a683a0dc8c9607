"""Quantiles in a fixed amount of memory, and launches and queues added up by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelab.trace.kinds import Kind
from scalelab.trace.launches import (
    EXACT_BELOW,
    LIMIT,
    NO_LAUNCH,
    NUM_BINS,
    DelayHistogram,
    LaunchMatcher,
    LaunchTally,
    LaunchTimes,
    Queue,
    QueueTally,
    find_bins,
)
from scalelab.trace.rank_trace import Lane
from scalelab.trace.windows import RECORD, Records


@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=50), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_a_quantile_is_at_most_one_percent_off(times: list[int], share: float) -> None:
    histogram = DelayHistogram()
    histogram.add(np.array(times, dtype=np.int64))
    exact = float(np.quantile(times, share, method="inverted_cdf"))
    assert histogram.find_quantile(share) == pytest.approx(exact, rel=0.008)
    assert histogram.count == len(times)


def test_short_times_are_exact() -> None:
    histogram = DelayHistogram()
    histogram.add(np.arange(EXACT_BELOW))
    assert [histogram.find_quantile((n + 1) / EXACT_BELOW) for n in range(EXACT_BELOW)] == list(range(EXACT_BELOW))


def test_any_time_has_a_bin_and_longer_times_no_lower_one() -> None:
    times = np.array([0, 1, 127, 128, 129, 2**31, 2**52, 2**62], dtype=np.int64)
    bins = find_bins(times)
    assert (np.diff(bins) >= 0).all()
    assert bins[-1] < NUM_BINS


def test_nothing_has_no_quantile() -> None:
    assert DelayHistogram().find_quantile(0.5) is None


def test_a_bin_is_a_64th_of_its_power_of_two_and_its_middle_is_the_quantile() -> None:
    assert (EXACT_BELOW, NUM_BINS) == (128, 128 + 57 * 64)
    assert find_bins(np.array([127, 128, 129, 130, 255, 256, 259, 260, 2**40])).tolist() == [
        127, 128, 128, 129, 191, 192, 192, 193, 128 + 33 * 64,
    ]  # fmt: skip
    for time, middle in ((128, 128.5), (255, 254.5), (256, 257.5), (1000, 1003.5), (1007, 1003.5), (1008, 1011.5)):
        histogram = DelayHistogram()
        histogram.add(np.array([time]))
        assert histogram.find_quantile(0.5) == middle
    histogram.add(np.array([5, 5, 7]))
    assert [histogram.find_quantile(share) for share in (0, 0.25, 0.5, 0.51, 0.75, 0.76)] == [5, 5, 5, 7, 7, 1011.5]


def make_records(rows: list[tuple[int, int, int, int, Kind]]) -> Records:
    """Of start, end, name, correlation number and kind."""
    found = np.zeros(len(rows), dtype=RECORD)
    for place, name in enumerate(("start", "end", "name", "correlation", "kind")):
        found[name] = [row[place] for row in rows]
    return found


GRAPH, PLAIN, GEMM = range(3)
NAMES = ("cudaGraphLaunch", "cudaLaunchKernel", "gemm")


def test_a_kernel_has_the_launch_of_its_number_and_a_graph_is_launched_once() -> None:
    calls = make_records([
        (10, 20, PLAIN, 1, Kind.LAUNCH), (30, 45, GRAPH, 2, Kind.LAUNCH), (50, 60, PLAIN, 0, Kind.LAUNCH),
        (70, 80, PLAIN, 4, Kind.RUNTIME),
    ])  # fmt: skip
    kernels = make_records([(100 + n, 200, GEMM, number, Kind.COMPUTE) for n, number in enumerate((1, 2, 2, 1, 0, 4))])
    matcher = LaunchMatcher(NAMES)
    found = matcher.match(calls, kernels)
    assert found.start.tolist() == [10, 30, 30, NO_LAUNCH, NO_LAUNCH, NO_LAUNCH]
    assert found.end.tolist() == [20, 45, 45, NO_LAUNCH, NO_LAUNCH, NO_LAUNCH]
    assert found.name.tolist() == [PLAIN, GRAPH, GRAPH, NO_LAUNCH, NO_LAUNCH, NO_LAUNCH]
    assert found.is_first.tolist() == [True, True, False, False, False, False]
    later = matcher.match(calls[:0], kernels[1:2])
    assert (later.start.tolist(), later.is_first.tolist()) == ([30], [False])


def test_calls_are_added_up_by_name_with_their_bounds() -> None:
    """A call over 50 µs is long, a kernel over 100 µs after its launch late, one shorter than its call short."""
    calls = make_records([
        (0, 50_000, PLAIN, 1, Kind.LAUNCH), (100_000, 150_001, PLAIN, 2, Kind.LAUNCH), (200_000, 200_010, PLAIN, 3,
        Kind.LAUNCH), (300_000, 300_040, GRAPH, 4, Kind.LAUNCH), (400_000, 400_010, PLAIN, 5, Kind.LAUNCH),
    ])  # fmt: skip
    kernels = make_records([
        (100_000, 150_000, GEMM, 1, Kind.COMPUTE), (200_001, 250_001, GEMM, 2, Kind.COMPUTE),
        (199_990, 200_000, GEMM, 3, Kind.COMPUTE), (300_064, 300_103, GEMM, 4, Kind.COMPUTE),
        (300_200, 300_300, GEMM, 4, Kind.COMPUTE), (400_100, 400_200, GEMM, 5, Kind.COMPUTE),
        (500_000, 500_100, GEMM, 9, Kind.COMPUTE),
    ])  # fmt: skip
    tally = LaunchTally(NAMES)
    matches = LaunchMatcher(NAMES).match(calls, kernels)
    tally.add(kernels, matches, np.array([True] * 5 + [False, True]))
    plain = LaunchTimes(
        name="cudaLaunchKernel", count=3, num_kernels=3, call_ns=100_011, median_delay_ns=99_839.5,
        p95_delay_ns=99_839.5, num_short_kernels=1, num_long_calls=1, num_late_kernels=1,
    )  # fmt: skip
    graph = LaunchTimes(
        name="cudaGraphLaunch", count=1, num_kernels=2, call_ns=40, median_delay_ns=64, p95_delay_ns=64,
        num_short_kernels=1, num_long_calls=0, num_late_kernels=0,
    )  # fmt: skip
    assert list(tally.finish()) == [plain, graph]


def test_a_kernel_that_seems_to_begin_before_its_launch_has_no_delay() -> None:
    tally, calls = LaunchTally(NAMES), make_records([(10, 20, PLAIN, 1, Kind.LAUNCH)])
    kernels = make_records([(5, 40, GEMM, 1, Kind.COMPUTE)])
    tally.add(kernels, LaunchMatcher(NAMES).match(calls, kernels), np.array([True]))
    (found,) = tally.finish()
    assert (found.median_delay_ns, found.p95_delay_ns, found.call_ns, found.num_short_kernels) == (0, 0, 10, 0)


LANE = Lane(process="0", thread="7", is_device=True)


def test_a_queue_is_followed_over_pieces() -> None:
    """Four launches at 0, 1, 2 and 10; kernels start at 3, 5, 7 and 11: up to three wait."""
    tally = QueueTally([LANE])
    tally.add(0, np.array([0, 1]), np.array([3, 5]))
    tally.add(0, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    tally.add(0, np.array([2, 10]), np.array([7, 11]))
    (found,) = tally.finish()
    assert found == Queue(lane=LANE, num_launches=4, longest=3, mean=(3 + 4 + 5 + 1) / 11, span_ns=11, at_limit_ns=0)


def test_a_launch_after_its_kernel_or_before_the_last_one_waits_from_there() -> None:
    tally = QueueTally([LANE, LANE])
    tally.add(1, np.array([5, 3, 9]), np.array([6, 7, 8]))
    (found,) = tally.finish()
    assert (found.longest, found.mean, found.span_ns) == (2, (1 + 2 + 0) / 3, 3)
    alone = QueueTally([LANE])
    alone.add(0, np.array([5]), np.array([5]))
    assert list(alone.finish()) == [Queue(lane=LANE, num_launches=1, longest=0, mean=0.0, span_ns=0, at_limit_ns=0)]


@pytest.mark.parametrize("piece", [LIMIT - 1, LIMIT, 5000])
def test_a_driver_takes_1024_launches(piece: int) -> None:
    """1026 launches at 0, 1, 2 …, and kernels from 10,000 on every 100 ns: two launches too many."""
    tally, number = QueueTally([LANE]), np.arange(LIMIT + 2)
    for low in range(0, len(number), piece):
        own = number[low : low + piece]
        tally.add(0, own, 10_000 + 100 * own)
    (found,) = tally.finish()
    assert (found.longest, found.num_launches) == (LIMIT + 2, LIMIT + 2)
    assert found.at_limit_ns == (10_000 - 1023) + 100 + 100
