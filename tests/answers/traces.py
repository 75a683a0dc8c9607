"""Traces of a device with numbers that can be told by hand."""

from __future__ import annotations

from tests.trace.build import TraceBuilder


def build_rank(rank: int, *, late_us: int = 0, num_ranks: int = 2, num_steps: int = 2) -> TraceBuilder:
    """Every step of 1000 µs: a kernel of 300 µs, later on some ranks, a copy, and an all-reduce that ends at 900."""
    builder = TraceBuilder(rank=rank, num_ranks=num_ranks)
    for step in range(1, num_steps + 1):
        start, number = 1000 * step, 10 * step
        builder.step(step, start, 1000).device_annotation(f"ProfilerStep#{step}", start, 1000)
        builder.operator("aten::linear", start, 80).operator("aten::addmm", start + 10, 50)
        builder.launch("cudaLaunchKernel", start + 20, 5, correlation=number)
        builder.kernel("gemm", start + 100, 300 + late_us, correlation=number)
        builder.launch("cudaMemcpyAsync", start + 30, 5, correlation=number + 1)
        builder.copy(start_us=start + 400 + late_us, dur_us=20, correlation=number + 1)
        begin = start + 420 + late_us
        builder.launch("cudaLaunchKernel", start + 40, 5, correlation=number + 2)
        builder.collective("allreduce", begin, start + 900 - begin, correlation=number + 2, Seq=step)
    return builder
