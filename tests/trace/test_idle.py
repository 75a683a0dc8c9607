"""Gaps, launches and queues, against values by hand and slow references."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalelab.trace import launches
from scalelab.trace import launches as queues
from scalelab.trace.idle import LaneCounter, LaneTimes, _Gaps, find_switch_limit
from scalelab.trace.launches import QueueTally
from scalelab.trace.rank_trace import Lane, read_rank
from tests.trace.build import TraceBuilder


def count(builder: TraceBuilder, path: Path, steps: frozenset[int] | None = None) -> LaneTimes:
    file = builder.write(path / "rank0.json")
    (found,) = read_rank(file, counters=[partial(LaneCounter, steps=steps)]).counted
    assert isinstance(found, LaneTimes)
    return found


def run(builder: TraceBuilder, number: int, launch_us: float, start_us: float, dur_us: float, stream: int = 7) -> None:
    """A kernel and its launch, which takes 2 µs."""
    builder.launch("cudaLaunchKernel", launch_us, 2, correlation=number)
    builder.kernel(f"k{number}", start_us, dur_us, stream, correlation=number)


def test_a_gap_has_the_reason_that_its_launch_tells(tmp_path: Path) -> None:
    builder = TraceBuilder()
    run(builder, 1, 0, 10, 10)
    run(builder, 2, 25, 30, 10)  # launched 5 µs after the first had ended
    run(builder, 3, 26, 40.029, 10)  # 29 ns behind
    run(builder, 4, 27, 50.059, 10)  # 30 ns behind
    run(builder, 5, 28, 70.059, 10)  # launched long before
    builder.kernel("unlaunched", 80.06, 1, correlation=999)
    (idle,) = count(builder, tmp_path).idle
    assert (idle.host_wait_ns, idle.kernel_wait_ns, idle.other_ns) == (10_000, 29 + 30, 10_000 + 1)
    assert idle.busy_ns == 51_000
    assert idle.span_ns == 71_060
    assert (idle.lane.thread, idle.num_events) == ("7", 6)


def test_the_most_costly_pairs_come_first_and_name_what_ended_last(tmp_path: Path) -> None:
    builder = TraceBuilder().kernel("a", 0, 10).kernel("b", 12, 1).kernel("a", 20, 10).kernel("b", 33, 1)
    pairs = count(builder, tmp_path).pairs
    assert [(pair.before, pair.after, pair.count, pair.total_ns) for pair in pairs] == [
        ("b", "a", 1, 7_000),
        ("a", "b", 2, 5_000),
    ]
    tied = TraceBuilder()
    for name, start in zip("abaaaca", (0, 14, 17, 19, 21, 26, 29), strict=True):
        tied.kernel(name, start, 10 if start == 0 else 1)
    pairs = count(tied, tmp_path).pairs  # of equal cost, those of the first names come first
    assert [(pair.before + pair.after, pair.count) for pair in pairs] == [
        ("ab", 1), ("ac", 1), ("aa", 2), ("ba", 1), ("ca", 1),
    ]  # fmt: skip
    overlapping = TraceBuilder().kernel("long", 0, 10).kernel("short", 2, 3).kernel("next", 15, 1)
    overlapping.kernel("elsewhere", 0, 12, 8)
    together = TraceBuilder().kernel("a", 0, 10).kernel("short", 15, 1).kernel("long", 15, 9)
    assert [pair.after for pair in count(together, tmp_path).pairs] == ["long"], "of what begins at once, the outer"
    found = count(overlapping, tmp_path)
    assert [(lane.lane.thread, lane.busy_ns) for lane in found.idle] == [("8", 12_000), ("7", 11_000)]
    (pair,) = found.pairs
    assert (pair.before, pair.after, pair.total_ns) == ("long", "next", 5_000)


def test_threads_of_the_host_have_gaps_and_those_that_run_collectives_have_none(tmp_path: Path) -> None:
    builder = TraceBuilder(backend="gloo").operator("aten::linear", 0, 10).operator("aten::addmm", 2, 5)
    builder.operator("aten::relu", 14, 5).annotation("gloo:all_reduce", 0, 3, tid=2).operator("aten::add", 9, 1, tid=2)
    found = count(builder, tmp_path)
    assert [(pair.before, pair.after, pair.total_ns) for pair in found.pairs] == [("aten::linear", "aten::relu", 4_000)]
    assert [lane.idle_ns for lane in found.idle] == [4_000]
    assert not found.launches
    assert not found.queues


def test_gaps_count_in_the_step_in_which_they_end(tmp_path: Path) -> None:
    builder = TraceBuilder().device_annotation("ProfilerStep#1", 0, 10).device_annotation("ProfilerStep#2", 10, 20)
    builder.kernel("a", 0, 5).kernel("b", 7, 1).kernel("c", 12, 1)
    assert count(builder, tmp_path, frozenset({1})).idle[0].idle_ns == 2_000
    assert count(builder, tmp_path, frozenset({2})).idle[0].idle_ns == 4_000


Kernels = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(0, 8), st.integers(0, 20)), min_size=1, max_size=25
)
"""Stream, gap to the one before or overlap with it, length, and how long before its start it was launched."""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=80)
@given(Kernels, st.lists(st.integers(1, 90), max_size=4))
def test_reasons_add_up_to_the_idle_time_of_every_stream(
    tmp_path: Path, kernels: list[tuple[int, int, int, int]], cuts: list[int]
) -> None:
    builder, place = TraceBuilder(), 30
    spans: dict[str, list[tuple[int, int]]] = {}
    for number, (stream, gap, length, lead) in enumerate(kernels, start=1):
        place += gap
        run(builder, number, place - lead, place, length, stream % 2)
        spans.setdefault(str(stream % 2), []).append((place, place + length))
    for number, cut in enumerate(sorted(set(cuts))):
        builder.device_annotation(f"ProfilerStep#{number}", cut, 1)
    found = count(builder, tmp_path)
    assert sum(times.count for times in found.launches) == len(kernels)
    for idle in found.idle:
        own = spans[idle.lane.thread]
        ticks = {tick for start, end in own for tick in range(start, end)}
        assert idle.busy_ns == 1000 * len(ticks)
        assert idle.span_ns == 1000 * (max(end for _, end in own) - own[0][0])
        pairs = [pair.total_ns for pair in found.pairs if pair.lane == idle.lane]
        assert sum(pairs) == idle.idle_ns


def test_launches_are_counted_by_the_name_of_their_call(tmp_path: Path) -> None:
    builder = TraceBuilder()
    run(builder, 1, 0, 10, 1)  # shorter than its call of 2 µs
    run(builder, 2, 5, 125, 50)  # late
    builder.launch("cudaMemcpyAsync", 200, 60, correlation=3).copy(start_us=210, dur_us=70, correlation=3)
    builder.launch("cudaLaunchKernel", 300, 1, correlation=4)  # its kernel is not in the trace
    kernel, copy = count(builder, tmp_path).launches
    assert (kernel.name, kernel.count, kernel.call_ns) == ("cudaLaunchKernel", 2, 4_000)
    assert (kernel.num_short_kernels, kernel.num_long_calls, kernel.num_late_kernels) == (1, 0, 1)
    assert kernel.median_delay_ns == pytest.approx(10_000, rel=0.01)
    assert kernel.p95_delay_ns == pytest.approx(120_000, rel=0.01)
    assert (copy.name, copy.count, copy.num_long_calls) == ("cudaMemcpyAsync", 1, 1)


def test_a_graph_is_launched_once_and_all_its_kernels_know_when(tmp_path: Path) -> None:
    builder = TraceBuilder().kernel("before", 0, 5, correlation=1).launch("cudaGraphLaunch", 10, 5, correlation=2)
    for number in range(4):
        builder.kernel("node", 20 + 10 * number, 5, correlation=2)
    found = count(builder, tmp_path)
    assert [(times.name, times.count) for times in found.launches] == [("cudaGraphLaunch", 1)]
    assert found.queues[0].num_launches == 1
    assert (found.idle[0].host_wait_ns, found.idle[0].kernel_wait_ns) == (15_000, 15_000)
    assert found.launches[0].num_kernels == 4


def test_launches_without_kernels_are_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launches, "MOST_PENDING", 2)
    builder = TraceBuilder().step(1, 0, 50).step(2, 50, 1000)
    for number in range(1, 6):
        builder.launch("cudaLaunchKernel", number, 1, correlation=number)
    builder.kernel("late", 100, 1, correlation=1).kernel("kept", 101, 1, correlation=5)
    assert sum(times.count for times in count(builder, tmp_path).launches) == 1


def follow_queue(launched: list[int], started: list[int], limit: int) -> tuple[int, int, int]:
    """The longest queue, its integral and the time at the limit, moment by moment."""
    lengths = [
        sum(launch <= moment < start for launch, start in zip(launched, started, strict=True))
        for moment in range(max(started))
    ]
    return max(lengths, default=0), sum(lengths), sum(length >= limit for length in lengths)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=40), st.integers(1, 5))
def test_queues_are_those_of_a_slow_reference(steps: list[tuple[int, int]], piece: int) -> None:
    launched = np.cumsum([step for step, _ in steps])
    started = np.maximum.accumulate(launched + np.array([wait for _, wait in steps]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queues, "LIMIT", 3)
        tally = QueueTally([Lane(process="0", thread="7", is_device=True)])
        for low in range(0, len(steps), piece):
            tally.add(0, launched[low : low + piece], started[low : low + piece])
        (queue,) = tally.finish()
    longest, integral, at_limit = follow_queue(launched.tolist(), started.tolist(), 3)
    assert (queue.longest, queue.at_limit_ns) == (longest, at_limit)
    assert queue.mean * queue.span_ns == pytest.approx(integral)
    assert queue.span_ns == started[-1] - launched[0]


@pytest.mark.parametrize(
    ("gaps", "limit"),
    [
        ([], 30),
        ([5, 7], 30),
        ([1_000_000], 10_000),
        ([1_000] * 4, pytest.approx(3_000, rel=0.1)),
        ([29, 100, 400, 400, 400], 300),
        ([100, 100, 400, 400, 400, 400], 300),
    ],
)
def test_a_switch_takes_three_times_the_usual_gap_within_bounds(gaps: list[int], limit: int) -> None:
    found = _Gaps()
    found.add(np.array(gaps, dtype=np.int64))
    assert find_switch_limit([found.count]) == limit
