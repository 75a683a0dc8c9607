from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalelab.trace import windows as spool
from scalelab.trace.files import pieces
from scalelab.trace.rank_time import Parts
from scalelab.trace.rank_trace import read_rank
from tests.trace.build import TraceBuilder
from tests.trace.sweep import Span, sweep

NAMES = {"compute": "gemm", "communication": "ncclDevKernel_AllReduce", "copy": "Memcpy DtoD"}
ALIKE = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SPANS = st.lists(
    st.builds(
        lambda kind, start, length: Span(kind, start, start + length),
        st.sampled_from(list(NAMES)),
        st.integers(0, 60_000),
        st.sampled_from([0, 1, 999]) | st.integers(0, 20_000),
    ),
    min_size=1,
    max_size=25,
)
STEPS = st.lists(st.tuples(st.integers(0, 70_000), st.integers(1, 25_000)), max_size=4)


def reckon(spans: list[Span], low: int, high: int) -> Parts:
    """The parts by going through every stretch of time."""
    return Parts(
        span_ns=high - low,
        compute_ns=sweep(spans, low, high, lambda running: "compute" in running),
        overlapped_ns=sweep(spans, low, high, lambda running: {"compute", "communication"} <= running),
        exposed_ns=sweep(spans, low, high, lambda r: "communication" in r and "compute" not in r),
        copy_ns=sweep(spans, low, high, lambda running: running == {"copy"}),
        idle_ns=sweep(spans, low, high, lambda running: not running),
    )


def build(spans: list[Span], steps: list[tuple[int, int]]) -> TraceBuilder:
    builder = TraceBuilder()
    for number, (start, length) in enumerate(steps):
        builder.step(number, start / 1000, length / 1000)
    for index, span in enumerate(spans):
        add = builder.copy if span.kind == "copy" else builder.kernel
        add(NAMES[span.kind], span.start / 1000, (span.end - span.start) / 1000, stream=7 + index % 3)
    return builder


def arrange(steps: list[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Steps in order, none reaching into the next."""
    ordered = sorted((start, start + length, number) for number, (start, length) in enumerate(steps))
    limits = [start for start, _, _ in ordered[1:]] + [2**62]
    return {number: (start, min(end, limit)) for (start, end, number), limit in zip(ordered, limits, strict=False)}


@given(spans=SPANS, steps=STEPS, is_tiny=st.booleans())
@ALIKE
def test_parts_are_those_of_a_slow_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spans: list[Span], steps: list[tuple[int, int]], is_tiny: bool
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 300 if is_tiny else 1 << 20)
    monkeypatch.setattr(spool, "PIECE_RECORDS", 3 if is_tiny else 1 << 17)
    breakdown = read_rank(build(spans, steps).write(tmp_path / "t.json")).breakdown
    low, high = min(span.start for span in spans), max(span.end for span in spans)
    assert breakdown.whole == reckon(spans, low, high)
    for number, (start, end) in arrange(steps).items():
        assert breakdown.by_step.get(number, Parts()) == reckon(spans, start, end)


@given(spans=SPANS, steps=STEPS)
@ALIKE
def test_parts_add_up_to_the_span(tmp_path: Path, spans: list[Span], steps: list[tuple[int, int]]) -> None:
    breakdown = read_rank(build(spans, steps).write(tmp_path / "t.json")).breakdown
    for parts in (breakdown.whole, *breakdown.by_step.values()):
        assert parts.span_ns == parts.compute_ns + parts.exposed_ns + parts.copy_ns + parts.idle_ns
        assert parts.communication_ns == parts.overlapped_ns + parts.exposed_ns


def test_a_known_device_trace_has_known_parts(tmp_path: Path) -> None:
    builder = TraceBuilder().kernel("gemm", 10, 20).kernel("ncclDevKernel_AllReduce", 20, 30, stream=20)
    builder.copy("Memcpy HtoD", 45, 15, stream=8).step(0, 0, 40).step(1, 40, 60)
    breakdown = read_rank(builder.write(tmp_path / "t.json")).breakdown
    expected = {"span_ns": 50_000, "compute_ns": 20_000, "overlapped_ns": 10_000, "exposed_ns": 20_000}
    assert breakdown.whole == Parts(**expected, copy_ns=10_000, idle_ns=0)
    assert breakdown.by_step[0].idle_ns == 10_000
    assert breakdown.by_step[1].idle_ns == 40_000


def test_without_a_device_the_host_is_looked_at(tmp_path: Path) -> None:
    builder = TraceBuilder(backend="gloo").operator("aten::mm", 0, 10).annotation("gloo:all_reduce", 5, 15, tid=2)
    builder.operator("c10d::allreduce_", 12, 50)
    whole = read_rank(builder.write(tmp_path / "t.json")).breakdown.whole
    assert (whole.span_ns, whole.compute_ns, whole.overlapped_ns, whole.exposed_ns) == (20_000, 10_000, 5_000, 10_000)


def test_a_trace_of_no_events_has_no_time(tmp_path: Path) -> None:
    assert read_rank(TraceBuilder().write(tmp_path / "t.json")).breakdown.whole == Parts()


def test_times_of_the_far_past_and_future_do_not_overflow(tmp_path: Path) -> None:
    builder = TraceBuilder().kernel("a", -2.9e15, 2.9e15).kernel("b", 0, 2.9e15).kernel("c", 2.9e15, 2.9e15)
    whole = read_rank(builder.write(tmp_path / "t.json")).breakdown.whole
    assert whole.span_ns == whole.compute_ns == 8_700_000_000_000_000_000


def test_what_a_thread_computes_inside_a_collective_is_part_of_it(tmp_path: Path) -> None:
    builder = TraceBuilder(backend="gloo").annotation("gloo:all_gather", 10, 20, tid=2).step(0, 0, 15).step(1, 15, 25)
    builder.operator("aten::copy_", 10, 5, tid=2).operator("aten::copy_", 12, 18, tid=2)
    builder.operator("aten::mm", 25, 10).operator("aten::mm", 28, 7, tid=2)
    breakdown = read_rank(builder.write(tmp_path / "t.json")).breakdown
    expected = {"span_ns": 25_000, "compute_ns": 10_000, "overlapped_ns": 5_000, "exposed_ns": 15_000}
    assert breakdown.whole == Parts(**expected)
    assert breakdown.by_step[0] == Parts(span_ns=15_000, exposed_ns=5_000, idle_ns=10_000)
    assert breakdown.by_step[1].overlapped_ns == 5_000


HOST_SPANS = st.lists(
    st.tuples(st.booleans(), st.integers(1, 3), st.integers(0, 40), st.integers(0, 25)), min_size=1, max_size=20
)


@given(spans=HOST_SPANS, is_tiny=st.booleans())
@ALIKE
def test_parts_of_collectives_are_found_on_every_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spans: list[tuple[bool, int, int, int]], is_tiny: bool
) -> None:
    monkeypatch.setattr(spool, "PIECE_RECORDS", 3 if is_tiny else 1 << 17)
    builder, kept = TraceBuilder(backend="gloo"), []
    for is_collective, thread, start, length in spans:
        add = builder.annotation if is_collective else builder.operator
        add("gloo:all_reduce" if is_collective else "aten::mm", start, length, tid=thread)
        is_part = not is_collective and any(
            other and thread == tid and begin <= start and start + length <= begin + lasts
            for other, tid, begin, lasts in spans
        )
        if not is_part:
            kind = "communication" if is_collective else "compute"
            kept.append(Span(kind, 1000 * start, 1000 * (start + length)))
    whole = read_rank(builder.write(tmp_path / "t.json")).breakdown.whole
    low, high = min(span.start for span in kept), max(span.end for span in kept)
    assert whole == reckon(kept, low, high)


def test_an_operator_that_waits_for_a_collective_does_not_compute(tmp_path: Path) -> None:
    builder = TraceBuilder(backend="gloo").annotation("gloo:all_reduce", 2, 10, tid=2)
    builder.operator("aten::empty_like", 0, 20).operator("_c10d_functional::wait_tensor", 3, 12)
    whole = read_rank(builder.write(tmp_path / "t.json")).breakdown.whole
    expected = {"compute_ns": 8_000, "overlapped_ns": 1_000, "exposed_ns": 9_000, "idle_ns": 3_000}
    assert whole == Parts(span_ns=20_000, **expected)


@given(spans=HOST_SPANS, is_tiny=st.booleans())
@ALIKE
def test_waits_are_cut_out_of_their_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spans: list[tuple[bool, int, int, int]], is_tiny: bool
) -> None:
    monkeypatch.setattr(spool, "PIECE_RECORDS", 3 if is_tiny else 1 << 17)
    builder = TraceBuilder(backend="gloo").operator("aten::mm", 0, 1, tid=9).operator("aten::mm", 70, 1, tid=9)
    computing = {0, 70}
    for thread in (1, 2, 3):
        at: dict[bool, set[int]] = {True: set(), False: set()}
        for is_wait, tid, start, length in spans:
            if tid == thread:
                name = "_c10d_functional::wait_tensor" if is_wait else "aten::mm"
                builder.operator(name, start, length, tid=tid)
                at[is_wait].update(range(start, start + length))
        computing |= at[False] - at[True]
    whole = read_rank(builder.write(tmp_path / "t.json")).breakdown.whole
    assert (whole.compute_ns, whole.span_ns) == (1000 * len(computing), 71_000)
