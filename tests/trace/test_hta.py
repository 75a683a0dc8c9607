"""Our figures by their definitions against traceinsight itself, and against a sweep microsecond by microsecond."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalelab.errors import TraceUnreadable
from scalelab.trace.files import pieces
from scalelab.trace.hta import COMMUNICATION, COMPUTE, OTHER, HtaBreakdown, find_type, read_hta
from tests.trace.build import TraceBuilder
from tests.trace.sweep import Span, sweep

NAMES = {
    "gemm": COMPUTE,
    "void at::native::elementwise_kernel<4>(int)": COMPUTE,
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": COMMUNICATION,
    "void ncclKernel_Broadcast": COMMUNICATION,
    "hipMemcpyAsync": COMMUNICATION,
    "Memcpy HtoD (Pinned -> Device)": OTHER,
    "Memset (Device)": OTHER,
    "Stream Wait Event": OTHER,
    "Event Sync": OTHER,
    "cudaLaunchKernel": OTHER,
}
BASES = (0, 100_000, 3_956_753_253_473)
"""Small numbers are kept in narrower columns over there, and sorted otherwise."""


@dataclass(frozen=True)
class Kernel:
    """A kernel and its launch, in ticks."""

    name: str
    launch: int
    delay: int
    length: int
    stream: int
    num_launches: int


@dataclass(frozen=True)
class Job:
    """What is written to the file."""

    kernels: tuple[Kernel, ...]
    steps: tuple[int, ...]
    """Where they begin; each lasts until the next."""
    device_delay: int | None
    """How much later than the host the device begins a step; None: it does not say."""
    ticks_per_us: int
    base_us: int
    has_missing: bool

    def write(self, path: Path) -> Path:
        builder = TraceBuilder().event({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}})
        if not self.has_missing:
            builder.events[0]["ts"] = self.base_us
        for number, start in enumerate(self.steps):
            builder.step(number, self._at(start), self._length(20 * self.ticks_per_us))
            if self.device_delay is not None:
                builder.device_annotation(f"ProfilerStep#{number}", self._at(start + self.device_delay), 9)
        for number, kernel in enumerate(self.kernels):
            for _ in range(kernel.num_launches):
                builder.launch("cudaLaunchKernel", self._at(kernel.launch), 1, number)
            start = self._at(kernel.launch + kernel.delay)
            builder.kernel(kernel.name, start, self._length(kernel.length), kernel.stream, number)
        return builder.write(path)

    def _at(self, ticks: int) -> float | int:
        return self.base_us + ticks if self.ticks_per_us == 1 else round(self.base_us + ticks / self.ticks_per_us, 3)

    def _length(self, ticks: int) -> float | int:
        return ticks if self.ticks_per_us == 1 else ticks / self.ticks_per_us


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    ticks = draw(st.sampled_from([1, 1000]))
    times = st.integers(0, 60 * ticks)
    kernels = st.builds(
        Kernel,
        name=st.sampled_from(list(NAMES)),
        launch=times,
        delay=st.integers(0, 20 * ticks),
        length=st.integers(0, ticks) | st.integers(0, 20 * ticks),
        stream=st.sampled_from([0, 7, 20]),
        num_launches=st.sampled_from([0, 1, 1, 1, 1, 2]),
    )
    return Job(
        kernels=tuple(draw(st.lists(kernels, min_size=1, max_size=20))),
        steps=tuple(draw(st.lists(times, max_size=3, unique=True).map(sorted))),
        device_delay=draw(st.none() | st.integers(0, 20 * ticks)),
        ticks_per_us=ticks,
        base_us=draw(st.sampled_from(BASES)),
        has_missing=draw(st.booleans()),
    )


@pytest.fixture
def quiet() -> Iterator[None]:
    """traceinsight logs every file it reads, and divides by nothing if there is no communication."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def ask_traceinsight(path: Path) -> HtaBreakdown | None:
    """Its figures; None if it gives none."""
    pytest.importorskip("hta", reason="needs traceinsight: make setup")
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent))
    try:
        parts = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    except (AssertionError, IndexError):
        return None
    overlap = float(analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"])
    return HtaBreakdown(
        idle_us=float(parts["idle_time(us)"]),
        compute_us=float(parts["compute_time(us)"]),
        non_compute_us=float(parts["non_compute_time(us)"]),
        kernel_us=float(parts["kernel_time(us)"]),
        overlap=overlap / 100 if math.isfinite(overlap) else None,
    )


@given(job=jobs())
@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_figures_are_those_of_traceinsight(tmp_path: Path, quiet: None, job: Job) -> None:
    path = job.write(tmp_path / "trace.json")
    ours, theirs = read_hta(path), ask_traceinsight(path)
    if theirs is None:
        # It stops where no kernel is left, and where kernels of −1 µs make a part negative.
        assert ours.kernel_us == 0 or ours.non_compute_us < 0 or ours.idle_us > ours.kernel_us
        return
    for name in ("idle_us", "compute_us", "non_compute_us", "kernel_us"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-6), name
    assert (ours.overlap is None) == (theirs.overlap is None)
    assert ours.overlap is None or ours.overlap == pytest.approx(theirs.overlap, abs=0.000051)


@given(job=jobs(), piece=st.sampled_from([200, 1 << 20]))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whole_microseconds_without_steps_are_a_plain_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Job, piece: int
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
    job = Job(job.kernels, job.steps[:1], None, 1, job.base_us, job.has_missing)
    ours = read_hta(job.write(tmp_path / "trace.json"))
    spans = [
        Span(str(NAMES[kernel.name]), kernel.launch + kernel.delay, kernel.launch + kernel.delay + kernel.length)
        for kernel in job.kernels
    ]
    low, high = min(span.start for span in spans), max(span.end for span in spans)
    both = {str(COMPUTE), str(COMMUNICATION)}
    communication = sweep(spans, low, high, lambda running: str(COMMUNICATION) in running)
    overlapped = sweep(spans, low, high, lambda running: both <= running)
    assert ours.kernel_us == high - low
    assert ours.idle_us == sweep(spans, low, high, lambda running: not running)
    assert ours.compute_us == sweep(spans, low, high, lambda running: str(COMPUTE) in running)
    assert ours.kernel_us == ours.idle_us + ours.compute_us + ours.non_compute_us
    assert ours.overlap == (pytest.approx(overlapped / communication) if communication else None)


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_the_type_of_a_kernel_goes_by_its_name(name: str, expected: int) -> None:
    assert find_type(name) == expected


def test_the_last_step_is_dropped_by_the_launch_not_by_the_kernel(tmp_path: Path) -> None:
    builder = TraceBuilder().step(0, 0, 100).step(1, 100, 100)
    builder.launch("cudaLaunchKernel", 99, 5, 1).kernel("late", 150, 10, correlation=1)
    builder.launch("cudaLaunchKernel", 100, 5, 2).kernel("dropped", 120, 100, correlation=2)
    builder.kernel("without a launch", 10, 5, correlation=3)
    found = read_hta(builder.write(tmp_path / "t.json"))
    assert (found.kernel_us, found.compute_us, found.num_kernels, found.num_dropped) == (10, 10, 1, 2)


def test_fractions_are_rounded_inwards(tmp_path: Path) -> None:
    builder = TraceBuilder().kernel("a", 0.5, 2.0).kernel("b", 10.0, 1.75)
    found = read_hta(builder.write(tmp_path / "t.json"))
    assert (found.kernel_us, found.compute_us, found.idle_us) == (10, 2, 8)


def test_a_trace_without_kernels_has_no_time(tmp_path: Path) -> None:
    path = TraceBuilder(backend="gloo").operator("aten::mm", 1, 2).write(tmp_path / "t.json")
    assert read_hta(path) == HtaBreakdown()


def test_odd_events_do_not_disturb(tmp_path: Path) -> None:
    builder = TraceBuilder().kernel("a", 1, 2).event({"ph": "X", "cat": 5, "ts": "x"}).event(7)
    builder.event({"ph": "X", "cat": "kernel", "name": "b", "ts": 1e308, "dur": 1, "args": {"stream": "7"}})
    builder.event({"ph": "X", "cat": "kernel", "name": "c", "ts": 2**70, "dur": 1, "args": {"stream": 2**80}})
    assert read_hta(builder.write(tmp_path / "t.json")).compute_us == 2


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("{}")
    with pytest.raises(TraceUnreadable, match="not a trace"):
        read_hta(path)
