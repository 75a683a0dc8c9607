"""The critical path: exact against a slow reference, and what it says of steps with known answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scalelab.answers.trace.critical import CriticalStep, find_critical_step, summarise_critical
from scalelab.answers.trace.view import TraceView, make_counters
from scalelab.trace.critical_path import CriticalCounter, Graph, StepPiece, StepRecords, StepTiming
from scalelab.trace.files.reader import find_trace_files
from scalelab.trace.job_trace import read_ranks
from scalelab.trace.rank_trace import read_rank
from tests.trace.build import TraceBuilder
from tests.trace.real import TRACES, needs_traces

Edge = tuple[int, int, int, str]
"""Source, target, nanoseconds and name."""


def draw_graph(rng: np.random.Generator) -> tuple[Graph, list[Edge], list[int]]:
    """A random graph in a random order of its moments, its edges, and the delay of every moment."""
    count = int(rng.integers(2, 14))
    names = [0, *(1 + rng.permutation(count - 1)).tolist()]
    edges = [
        (names[source], names[target], int(rng.integers(0, 9)), str(rng.integers(3)))
        for target in range(1, count)
        for source in rng.choice(target, size=int(rng.integers(1, min(target, 3) + 1)), replace=False).tolist()
    ]
    delays = [0, *(rng.integers(0, 4, count - 1) * rng.integers(0, 2, count - 1)).tolist()]
    edges = [edges[place] for place in rng.permutation(len(edges)).tolist()]
    graph = build_graph([time_slowly(edges, delays, moment, "") for moment in range(count)], edges)
    return graph, edges, delays


def build_graph(times: list[int], edges: list[Edge]) -> Graph:
    graph = Graph(times=times)
    for source, target, nanoseconds, name in edges:
        graph.join(source, target, nanoseconds, graph.number(StepPiece.COMPUTE, name))
    return graph


def time_slowly(edges: list[Edge], delays: list[int], moment: int, free: str) -> int:
    """Over all ways to a moment, one by one."""
    ways = [
        time_slowly(edges, delays, source, free) + (0 if name == free else nanoseconds)
        for source, target, nanoseconds, name in edges
        if target == moment
    ]
    return max(ways, default=0) + delays[moment]


def test_a_thousand_random_graphs_are_timed_as_all_their_ways_say() -> None:
    rng = np.random.default_rng(0)
    for _ in range(1000):
        graph, edges, delays = draw_graph(rng)
        timing = StepTiming(graph)
        assert timing.delays == delays
        assert timing.retime() == graph.times
        slow = [time_slowly(edges, delays, moment, "1") for moment in range(len(graph.times))]
        assert timing.retime(lambda label: label.name == "1") == slow
        assert timing.measure_without(lambda label: label.name == "1") == max(slow)
        assert sum(piece.nanoseconds for piece in timing.walk()) == timing.span_ns == max(graph.times)


def test_a_circle_is_refused() -> None:
    graph = build_graph([0, 1, 2], [(0, 1, 1, ""), (1, 2, 1, ""), (2, 1, 1, "")])
    with pytest.raises(ValueError, match="circle"):
        StepTiming(graph)


def find(builders: list[TraceBuilder], directory: Path) -> CriticalStep:
    paths = [builder.write(directory / f"rank{builder.rank}.json") for builder in builders]
    found = find_critical_step(TraceView(job=read_ranks(paths, counters=make_counters(None))))
    assert found is not None
    return found


COMPUTE, HOST, LAUNCH, OTHER = StepPiece.COMPUTE, StepPiece.HOST, StepPiece.LAUNCH, StepPiece.OTHER


def list_path(builder: TraceBuilder, directory: Path) -> list[tuple[StepPiece, str, float]]:
    """The critical path from its begin, in microseconds."""
    return [(one.piece, one.name, one.nanoseconds / 1000) for one in reversed(find([builder], directory).path)]


def launch(builder: TraceBuilder, name: str, called: int, start: float, length: float, stream: int = 7) -> TraceBuilder:
    """A kernel and the call that launches it."""
    number = len(builder.events) + 1
    builder.launch("cudaLaunchKernel", called, 2, number)
    return builder.kernel(name, start, length, stream=stream, correlation=number)


@pytest.mark.parametrize(("start", "waits"), [(1030, True), (1031, False)])
def test_a_kernel_within_20_us_of_the_end_of_one_on_another_stream_waited_for_it(
    tmp_path: Path, start: int, waits: bool
) -> None:
    builder = launch(TraceBuilder(num_ranks=1), "first", 0, 10, 1000)
    launch(builder, "second", 15, start, 50, stream=8)
    before = [(LAUNCH, "", 10), (COMPUTE, "first", 1000)] if waits else [(HOST, "", 15), (LAUNCH, "", 10)]
    assert list_path(builder, tmp_path) == [*before, (OTHER, "", 20 if waits else start - 25), (COMPUTE, "second", 50)]


def test_a_kernel_that_follows_its_launch_at_once_did_not_wait_for_another_stream(tmp_path: Path) -> None:
    builder = launch(TraceBuilder(num_ranks=1), "first", 0, 10, 1000)
    builder.launch("cudaEventRecord", 905, 2, 99)  # without it, the host would seem to poll
    launch(builder, "second", 1005, 1015, 50, stream=8)
    path = [(HOST, "", 905), (HOST, "", 100), (LAUNCH, "", 10), (COMPUTE, "second", 50)]
    assert list_path(builder, tmp_path) == path


@pytest.mark.parametrize(("start", "is_ahead"), [(100, False), (101, True)])
def test_a_host_is_ahead_if_the_first_kernel_begins_100_us_after_its_launch(
    tmp_path: Path, start: int, is_ahead: bool
) -> None:
    builder = launch(launch(TraceBuilder(num_ranks=1), "one", 0, start, 50), "two", 5, start + 50, 50)
    kernels = [(COMPUTE, "one", 50), (COMPUTE, "two", 50)]
    assert list_path(builder, tmp_path) == (kernels if is_ahead else [(LAUNCH, "", 100), *kernels])


@pytest.mark.parametrize(("called", "polls"), [(449, False), (450, True), (520, True), (521, False)])
def test_a_host_polls_from_the_last_tenth_of_a_kernel_to_20_us_after_it(
    tmp_path: Path, called: int, polls: bool
) -> None:
    builder = launch(TraceBuilder(num_ranks=1), "one", 0, 0, 500)
    launch(builder, "two", called, called + 30, 50, stream=8)
    path = list_path(builder, tmp_path)
    assert ((HOST, "", called) in path) is not polls
    assert sum(time for *_, time in path) == called + 80


def test_a_host_that_polls_late_in_a_step_still_spends_its_own_time(tmp_path: Path) -> None:
    builder = launch(TraceBuilder(num_ranks=1), "zero", 0, 10, 20)
    launch(builder, "one", 5000, 5010, 490)
    launch(builder, "two", 5495, 5510, 50)
    found = find([builder], tmp_path)
    rest = [(LAUNCH, "", 10), (OTHER, "", 5), (COMPUTE, "two", 50)]
    assert list_path(builder, tmp_path) == [(HOST, "", 5000), (LAUNCH, "", 10), (COMPUTE, "one", 485), *rest]
    assert {one.change: one.span_ns for one in found.what_ifs}["one took no time"] == 5_560_000 - 485_000


def test_a_host_whose_pause_is_no_longer_than_100_us_does_not_poll(tmp_path: Path) -> None:
    for called, polls in ((102, False), (103, True)):  # the first call returned at 2
        builder = launch(launch(TraceBuilder(num_ranks=1), "one", 0, 1, called - 1), "two", called, called + 30, 50)
        assert ((COMPUTE, "one", called - 1) in list_path(builder, tmp_path)) is polls


@pytest.mark.parametrize(("length", "is_slow"), [(100, False), (101, True)])
def test_a_launch_of_over_100_us_whose_kernel_begins_after_it_is_time_of_the_host(
    tmp_path: Path, length: int, is_slow: bool
) -> None:
    builder = launch(TraceBuilder(num_ranks=1), "one", 0, 10, 20)
    builder.launch("cudaLaunchKernel", 50, length, 9).kernel("two", 160, 20, correlation=9)
    host = 50 + length if is_slow else 50
    assert list_path(builder, tmp_path) == [
        (HOST, "", host),
        (LAUNCH, "", 9 if is_slow else 10),
        *([] if is_slow else [(OTHER, "", 100)]),
        (COMPUTE, "two", 20),
    ]


def test_the_usual_latency_is_that_of_the_quickest_twentieth(tmp_path: Path) -> None:
    """Of 41 launches, the third: two are quicker."""
    builder = TraceBuilder(num_ranks=1)
    for number in range(41):
        launch(builder, "gemm", 100 * number, 100 * number + (5, 6, 9)[min(number, 2)], 3)
    assert list_path(builder, tmp_path)[-2:] == [(LAUNCH, "", 9), (COMPUTE, "gemm", 3)]
    launch(builder, "late", 4100, 4150, 3)
    assert list_path(builder, tmp_path)[-3:] == [(LAUNCH, "", 9), (OTHER, "", 41), (COMPUTE, "late", 3)]


def test_a_host_that_synchronizes_waits_for_the_last_kernel_that_ended_before_it_returned(tmp_path: Path) -> None:
    builder = launch(launch(TraceBuilder(num_ranks=1), "one", 0, 10, 500), "two", 5, 15, 300, stream=8)
    builder.launch("cudaDeviceSynchronize", 20, 500, 77)
    launch(builder, "three", 530, 540, 100)
    path = [(LAUNCH, "", 10), (COMPUTE, "one", 500), (HOST, "", 10), (HOST, "", 10), (LAUNCH, "", 10)]
    assert list_path(builder, tmp_path) == [*path, (COMPUTE, "three", 100)]


def test_a_busy_device_is_decided_by_its_kernels(tmp_path: Path) -> None:
    builder = TraceBuilder(num_ranks=1)
    for number in range(4):
        builder.launch("cudaLaunchKernel", 10 * number, 2, number + 1)
        builder.kernel("gemm", 100 + 500 * number, 500, correlation=number + 1)
    found = find([builder], tmp_path)
    assert found.span_ns == 2_100_000
    assert found.sum_by_piece() == {StepPiece.COMPUTE: (4, 2_000_000), StepPiece.LAUNCH: (1, 100_000)}
    assert {one.change: one.span_ns for one in found.what_ifs} == {
        "the host launched in no time": 2_000_000,
        "gemm took no time": 130_000,
    }


@pytest.mark.parametrize("overlap", [0.021, 0.9, 30])
def test_kernels_that_seem_to_begin_before_the_last_one_on_their_stream_ends_follow_it(
    tmp_path: Path, overlap: float
) -> None:
    builder = TraceBuilder(num_ranks=1)
    for number in range(4):
        builder.launch("hipModuleLaunchKernel", 10 * number, 2, number + 1)
        builder.kernel("gemm", 100 + 500 * number, 500 + overlap * (number % 2), correlation=number + 1)
    found = find([builder], tmp_path)
    assert StepPiece.OTHER not in found.sum_by_piece()
    assert found.sum_by_piece()[StepPiece.COMPUTE][1] == found.span_ns - 100_000


def test_kernels_that_run_beside_each_other_on_a_stream_do_not_follow_each_other(tmp_path: Path) -> None:
    builder = TraceBuilder(num_ranks=1)
    for number, start in enumerate((100, 300)):
        builder.launch("cudaLaunchKernel", start - 20, 2, number + 1)
        builder.kernel(f"gemm {number}", start, 500, correlation=number + 1)
    found = find([builder], tmp_path)
    assert [one.name for one in found.path if one.piece is StepPiece.COMPUTE] == ["gemm 1"]


def test_a_step_whose_host_is_ahead_begins_with_its_first_kernel(tmp_path: Path) -> None:
    builder = TraceBuilder(num_ranks=1)
    for number in range(4):
        builder.launch("cudaLaunchKernel", 10 * number, 2, number + 1)
        builder.kernel("gemm", 9000 + 500 * number, 500, correlation=number + 1)
    found = find([builder], tmp_path)
    assert found.sum_by_piece() == {StepPiece.COMPUTE: (4, 2_000_000)}
    assert found.span_ns == 2_000_000


def test_a_late_host_decides_the_step(tmp_path: Path) -> None:
    builder = TraceBuilder(num_ranks=1)
    for number in range(4):
        builder.launch("cudaLaunchKernel", 500 * number, 2, number + 1)
        builder.kernel("gemm", 500 * number + 10, 100, correlation=number + 1)
    found = find([builder], tmp_path)
    assert found.sum_by_piece()[StepPiece.HOST] == (3, 1_500_000)
    spans = {one.change: one.span_ns for one in found.what_ifs}
    assert spans["the host launched in no time"] == 400_000
    assert spans["gemm took no time"] == found.span_ns - 100_000
    (finding,) = summarise_critical(found)
    assert finding.subject == "host"


def test_a_host_that_polls_a_kernel_waits_for_it(tmp_path: Path) -> None:
    """As DeepEP's dispatch does: the host reads the number of tokens from memory until the kernel has written it."""
    builder = TraceBuilder(num_ranks=1).launch("cudaLaunchKernel", 0, 2, 1).kernel("gemm", 10, 4000, correlation=1)
    builder.launch("cudaLaunchKernel", 20, 2, 2).kernel("notify", 4012, 500, correlation=2)
    builder.launch("cudaLaunchKernel", 4490, 2, 3).kernel("dispatch", 4520, 300, correlation=3)
    found = find([builder], tmp_path)
    pieces = found.sum_by_piece()
    assert pieces[StepPiece.COMPUTE][1] > 4_700_000
    assert pieces.get(StepPiece.HOST, (0, 0))[1] < 10_000
    assert {one.change: one.span_ns for one in found.what_ifs}["gemm took no time"] < 900_000


def test_a_host_that_is_late_for_another_reason_does_not_poll(tmp_path: Path) -> None:
    builder = TraceBuilder(num_ranks=1).launch("cudaLaunchKernel", 0, 2, 1).kernel("gemm", 10, 4000, correlation=1)
    builder.launch("cudaLaunchKernel", 4490, 2, 2).kernel("gemm", 4500, 300, correlation=2)
    assert find([builder], tmp_path).sum_by_piece()[StepPiece.HOST] == (1, 4_490_000)


def test_a_launch_that_loads_its_kernel_is_time_of_the_host(tmp_path: Path) -> None:
    """As on MI250: one hipLaunchKernel of 6.5 ms, whose kernel begins when it returns."""
    builder = TraceBuilder(num_ranks=1).launch("hipLaunchKernel", 0, 5, 1).kernel("gemm", 10, 20, correlation=1)
    builder.launch("hipLaunchKernel", 50, 6500, 2).kernel("add", 6560, 20, correlation=2)
    builder.launch("hipLaunchKernel", 6600, 5, 3).kernel("add", 6610, 20, correlation=3)
    found = find([builder], tmp_path)
    assert found.sum_by_piece()[StepPiece.HOST][1] == 6_600_000
    assert {one.change: one.span_ns for one in found.what_ifs}["the host launched in no time"] < 100_000


def test_a_host_that_copies_blocking_waits_for_the_device(tmp_path: Path) -> None:
    """As in a decode on MI300: the stream waits for something unrecorded, and the host in its copy for the stream."""
    builder = TraceBuilder(num_ranks=1).launch("hipLaunchKernel", 0, 5, 1).kernel("add", 10, 20, correlation=1)
    builder.launch("hipLaunchKernel", 40, 5, 2).kernel("resolve", 9000, 20, stream=8, correlation=2)
    builder.launch("hipMemcpyWithStream", 60, 9000, 3)
    builder.copy("Memcpy DtoH (Device -> Host)", 9030, 10, stream=8, correlation=3)
    builder.launch("hipLaunchKernel", 9080, 5, 4).kernel("add", 9090, 20, correlation=4)
    pieces = find([builder], tmp_path).sum_by_piece()
    assert next(iter(pieces)) is StepPiece.OTHER
    assert pieces[StepPiece.OTHER][1] > 8_800_000
    assert pieces[StepPiece.HOST][1] < 100_000


def test_a_path_among_others_that_are_nearly_as_long_is_named_so(tmp_path: Path) -> None:
    builder = TraceBuilder(num_ranks=1)
    for number in range(10):  # one stream is always busy, the host launches the last kernel of the other late
        builder.launch("cudaLaunchKernel", number, 1, number + 1)
        builder.kernel("gemm", 10 + 100 * number, 100, correlation=number + 1)
    builder.launch("cudaLaunchKernel", 950, 1, 20).kernel("add", 960, 60, stream=8, correlation=20)
    (finding,) = summarise_critical(find([builder], tmp_path))
    assert finding.subject == "host"
    assert (
        "93 % host, but other chains are nearly as long: without it, the step would be only 1.0 % shorter"
        in finding.text
    )


@pytest.mark.parametrize("base_ns", [0, 7_000_000_000])
def test_the_path_crosses_to_the_rank_that_comes_last(tmp_path: Path, base_ns: int) -> None:
    builders = [TraceBuilder(rank=rank) for rank in range(2)]
    builders[1].base_ns = base_ns
    for rank, builder in enumerate(builders):
        for number, begin in enumerate((0, 1330, 2790)):
            work = 400 + 500 * rank
            builder.launch("cudaLaunchKernel", begin, 1, 10 * number + 1)
            builder.launch("cudaLaunchKernel", begin + 2, 1, 10 * number + 2)
            builder.kernel(f"gemm of {rank}", begin + 5, work, correlation=10 * number + 1)
            start, stop = begin + 5 + work, begin + 5 + 900 + 100
            builder.collective("allreduce", start, stop - start, stream=7, correlation=10 * number + 2, Seq=number)
    found = find(builders, tmp_path)
    names = {piece.name: (piece.nanoseconds, count) for piece, count in found.sum_by_name()}
    assert (found.num_ranks, found.span_ns) == (2, 3_795_000)
    assert names["gemm of 1"][0] > 0
    assert "gemm of 0" not in names
    assert names["all_reduce"] == (100_000, 1)
    spans = {one.change: one.span_ns for one in found.what_ifs}
    assert spans["all_reduce took no time"] == found.span_ns - 100_000
    assert sum(piece.nanoseconds for piece in found.path) == found.span_ns


@needs_traces
def test_paths_of_real_steps_add_up_and_no_change_makes_them_longer() -> None:
    for name in ("dlrm_8rank", "tracelens_mi300_resnet_ddp8"):
        job = read_ranks(find_trace_files([TRACES / name]), counters=make_counters(None))
        found = find_critical_step(TraceView(job=job))
        assert found is not None
        assert sum(piece.nanoseconds for piece in found.path) == found.span_ns
        assert all(0 <= one.span_ns <= found.span_ns for one in found.what_ifs)


def test_calls_belong_to_the_middle_step_from_its_begin_to_before_its_end(tmp_path: Path) -> None:
    builder = TraceBuilder(num_ranks=1)
    for step in range(3):
        builder.step(step, 100 * step, 100)
        for number, called in enumerate((0, 50, 99)):
            launch(builder, "gemm", 100 * step + called, 100 * step + called + 0.5 + number, 0.25)
    found = read_rank(builder.write(tmp_path / "t.json"), counters=[CriticalCounter]).counted[0]
    assert isinstance(found, StepRecords)
    assert (found.step, found.is_whole) == (1, True)
    assert found.calls["start"].tolist() == [100_000, 150_000, 199_000]
    assert found.kernels["start"].tolist() == [100_500, 151_500, 201_500]
