"""Host wait and the longest queue against traceinsight, which reads the same file."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalelab.trace.idle import LaneCounter, LaneTimes
from scalelab.trace.rank_trace import read_rank
from tests.trace.build import TraceBuilder


@pytest.fixture(autouse=True)
def quiet_peer() -> Iterator[None]:
    """What it says and warns of is its own business."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def build_streams(seed: int) -> TraceBuilder:
    """Kernels on two streams in whole microseconds, some launched early and some late."""
    builder, rng, time = TraceBuilder(num_ranks=1), random.Random(seed), 10
    free = {7: 20, 20: 20}
    for number in range(1, 301):
        stream, length = rng.choice((7, 7, 20)), rng.randint(1, 40)
        time += rng.randint(3, 30)
        builder.launch("cudaLaunchKernel", time, rng.randint(1, 60), number)
        start = max(free[stream] + rng.choice((0, 0, 1, 5)), time + rng.randint(2, 9))
        builder.kernel(f"k{number % 5}", start, length, stream, number)
        free[stream] = start + length
    return builder


@pytest.mark.parametrize("seed", range(3))
def test_host_wait_and_the_longest_queue_are_those_of_traceinsight(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("hta", reason="needs traceinsight: make setup")
    from hta.trace_analysis import TraceAnalysis

    path = build_streams(seed).write(tmp_path / "rank0.json")
    (found,) = read_rank(path, counters=[LaneCounter]).counted
    assert isinstance(found, LaneTimes)
    analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(tmp_path))
    idle = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
    idle = idle[0] if isinstance(idle, tuple) else idle
    queues = analysis.get_queue_length_summary(ranks=[0])
    for lane in found.idle:
        own = idle[idle["stream"] == int(lane.lane.thread)]
        assert lane.host_wait_ns == 1000 * own[own["idle_category"] == "host_wait"]["idle_time"].sum()
        assert lane.idle_ns == 1000 * own["idle_time"].sum()
    for queue in found.queues:
        assert queue.longest == queues.loc[(0, int(queue.lane.thread))][("queue_length", "max")]
