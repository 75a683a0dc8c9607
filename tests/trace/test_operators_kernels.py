"""Kernels by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from scalelab.trace.operators import KernelCounter, KernelTime
from scalelab.trace.rank_trace import read_rank
from tests.trace.build import TraceBuilder


def test_kernels_add_up_by_name_and_kind(tmp_path: Path) -> None:
    builder = TraceBuilder().kernel("gemm", 0, 10).kernel("gemm", 20, 30, stream=8).copy(start_us=50, dur_us=5)
    builder.collective("allreduce", 5, 100).operator("aten::mm", 0, 1000)
    (found,) = read_rank(builder.write(tmp_path / "rank0.json"), counters=[KernelCounter]).counted
    assert [kernel.kind for kernel in found] == ["communication", "compute", "copy"]
    assert found[1] == KernelTime(name="gemm", kind="compute", count=2, total_ns=40_000, longest_ns=30_000)
    assert found[1].mean_ns == 20_000


def test_a_kernel_counts_in_the_step_in_which_it_begins(tmp_path: Path) -> None:
    builder = TraceBuilder().device_annotation("ProfilerStep#1", 0, 10).device_annotation("ProfilerStep#2", 10, 10)
    builder.kernel("first", 5, 10).kernel("second", 15, 2)
    counter = partial(KernelCounter, steps=frozenset({1}))
    (found,) = read_rank(builder.write(tmp_path / "rank0.json"), counters=[counter]).counted
    assert [(kernel.name, kernel.total_ns) for kernel in found] == [("first", 10_000)]


def test_a_trace_without_a_device_has_no_kernels(tmp_path: Path) -> None:
    builder = TraceBuilder(backend="gloo").operator("aten::mm", 0, 5).annotation("gloo:all_reduce", 1, 2, tid=2)
    (found,) = read_rank(builder.write(tmp_path / "rank0.json"), counters=[KernelCounter]).counted
    assert not found
