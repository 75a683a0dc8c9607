"""Which step a kernel belongs to, and what the host asked for where it launched it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.trace import linking, windows
from scalelab.trace.job_trace import read_ranks
from scalelab.trace.linking import StepBasis
from scalelab.trace.operators import KernelCounter
from scalelab.trace.rank_trace import read_rank
from tests.trace.build import TraceBuilder


def lag(num_steps: int = 3) -> TraceBuilder:
    """A device that works on a step long after the host has left it; its marks cover one kernel of three."""
    builder = TraceBuilder(num_ranks=1)
    for step in range(num_steps):
        builder.step(step, 100 * step, 100)
        for number in range(3):
            correlation = 10 * step + number + 1
            builder.launch("cudaLaunchKernel", 100 * step + 10 * number, 5, correlation)
            builder.kernel(f"k{number}", 1000 * (step + 1) + 300 * number, 200, correlation=correlation)
        builder.device_annotation(f"ProfilerStep#{step}", 1000 * (step + 1), 200)
    return builder


@pytest.mark.parametrize("piece_records", [1 << 17, 4])
def test_a_kernel_belongs_to_the_step_that_launched_it(
    tmp_path: Path, piece_records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "PIECE_RECORDS", piece_records)
    trace = read_rank(lag().write(tmp_path / "t.json"))
    assert trace.tables.step_basis is StepBasis.LAUNCHES
    assert {step: parts.span_ns for step, parts in trace.breakdown.by_step.items()} == dict.fromkeys(range(3), 800_000)
    assert {parts.compute_ns for parts in trace.breakdown.by_step.values()} == {600_000}


def test_steps_of_a_device_may_overlap(tmp_path: Path) -> None:
    builder = lag(2).launch("cudaMemcpyAsync", 150, 5, 99).copy("Memcpy HtoD", 1100, 50, 9, correlation=99)
    trace = read_rank(
        builder.write(tmp_path / "t.json"), counters=[lambda tables: KernelCounter(tables, steps=frozenset({1}))]
    )
    assert [(step.start, step.end) for step in trace.tables.steps] == [(1_000_000, 1_800_000), (1_100_000, 2_800_000)]
    assert [parts.span_ns for parts in trace.breakdown.by_step.values()] == [800_000, 1_700_000]
    assert {kernel.name: kernel.count for kernel in trace.counted[0]} == {"k0": 1, "k1": 1, "k2": 1, "Memcpy HtoD": 1}


def test_what_was_launched_before_the_recording_is_in_no_step(tmp_path: Path) -> None:
    builder = lag().kernel("earlier", 10, 500, correlation=7777)
    job = read_ranks([builder.write(tmp_path / "t.json")])
    assert [parts.span_ns for parts in job.ranks[0].breakdown.by_step.values()] == [800_000] * 3
    assert (job.ranks[0].tables.unlinked_share, job.doubts) == (0.0, ())


def test_a_launch_without_a_number_launched_no_kernel_without_one(tmp_path: Path) -> None:
    builder = lag().launch("cudaLaunchKernel", 150, 5, 0).kernel("from elsewhere", 9000, 500, correlation=0)
    trace = read_rank(builder.write(tmp_path / "t.json"))
    assert [parts.span_ns for parts in trace.breakdown.by_step.values()] == [800_000] * 3
    assert trace.tables.unlinked_share == 0.1


def test_steps_without_launches_say_what_they_rest_on(tmp_path: Path) -> None:
    builder = lag()
    builder.events = [event for event in builder.events if event["cat"] != "cuda_runtime"]
    job = read_ranks([builder.write(tmp_path / "t.json")])
    assert job.ranks[0].tables.step_basis is StepBasis.DEVICE_MARKS
    assert [doubt.kind for doubt in job.doubts] == ["unlinked-steps"]
    builder.events = [event for event in builder.events if event["cat"] != "gpu_user_annotation"]
    job = read_ranks([builder.write(tmp_path / "t.json")])
    assert job.ranks[0].tables.step_basis is StepBasis.HOST_MARKS
    assert "run ahead" in job.doubts[0].message


@pytest.mark.parametrize("piece_records", [1, 2, 3, 4, 5, 1 << 17])
def test_many_kernels_without_a_launch_are_doubted(
    tmp_path: Path, piece_records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "PIECE_RECORDS", piece_records)
    builder = lag()
    for number in range(3):
        builder.kernel("from elsewhere", 4000 + number, 1, correlation=9000 + number)
    (doubt,) = read_ranks([builder.write(tmp_path / "t.json")]).doubts
    assert doubt.message.startswith("25 % of the device's events")


def test_only_the_latest_launches_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "MOST_LAUNCHES", 6)
    steps = read_rank(lag().write(tmp_path / "t.json")).tables.steps
    assert [step.number for step in steps] == [1, 2]


def test_an_annotation_around_the_launch_says_what_a_kernel_does(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[6144]], "Input type": ["float"]}
    builder = (
        TraceBuilder(num_ranks=8).operator("c10d::alltoall_base_", 0, 20).annotation("nccl:all_to_all", 2, 10, **shapes)
    )
    builder.launch("cudaLaunchKernel", 5, 2, 41).kernel(
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t()", 50, 9, correlation=41
    )
    builder.operator("record_param_comms", 30, 5, **{"External id": 41, "Collective name": "broadcast"})
    (found,) = read_rank(builder.write(tmp_path / "t.json")).collectives
    assert (found.kind, found.ran_as, found.payload_bytes) == ("all_to_all", "", 4 * 6144)


@pytest.mark.parametrize(("num_kernels", "is_announced"), [(1, True), (4, True), (5, False)])
def test_an_annotation_that_stays_open_does_not_make_everything_in_it_communication(
    tmp_path: Path, num_kernels: int, is_announced: bool
) -> None:
    """As on MTIA, where one `hccl:all_to_all` encloses the whole forward pass."""
    builder = TraceBuilder(num_ranks=8).annotation("hccl:all_to_all", 0, 10_000)
    for number in range(num_kernels):
        builder.launch("cudaLaunchKernel", 10 * number + 5, 2, number + 1)
        builder.kernel("fc-dtype_Float", 100 * number + 50, 90, correlation=number + 1)
    assert len(read_rank(builder.write(tmp_path / "t.json")).collectives) == (num_kernels if is_announced else 0)


def test_a_request_on_another_thread_is_not_that_of_the_kernel(tmp_path: Path) -> None:
    builder = TraceBuilder().annotation("nccl:all_to_all", 2, 10, tid=5).launch("cudaLaunchKernel", 5, 2, 41, tid=1)
    builder.kernel("ncclKernel_SendRecv()", 50, 9, correlation=41)
    (found,) = read_rank(builder.write(tmp_path / "t.json")).collectives
    assert found.kind == "send_recv"


def test_a_collective_belongs_to_the_step_of_its_launch(tmp_path: Path) -> None:
    builder = lag(2).launch("cudaLaunchKernel", 150, 5, 41).collective("allreduce", 1500, 9, correlation=41)
    (found,) = read_rank(builder.write(tmp_path / "t.json")).collectives
    assert found.step == 1
