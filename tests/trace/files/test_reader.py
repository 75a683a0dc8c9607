from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalelab.trace import windows as spool
from scalelab.trace.files import pieces
from scalelab.trace.files.events import LARGEST_NS, Batch, needs_decimals
from scalelab.trace.files.reader import TraceFile
from scalelab.trace.rank_trace import read_rank
from tests.trace.build import TraceBuilder

ALIKE = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read_all(path: Path, ns_per_tick: int = 1000) -> tuple[list[tuple[str, int, int]], TraceFile]:
    file = TraceFile(path, ns_per_tick)
    batches: list[Batch] = list(file.batches())
    found = [
        (event.name, int(start), int(end))
        for batch in batches
        for event, start, end in zip(batch.events, batch.start_ns, batch.end_ns, strict=True)
    ]
    return found, file


def read_times(tmp_path: Path, *times: tuple[Any, Any], ns_per_tick: int = 1000) -> list[tuple[int, int]]:
    """What becomes of starts and durations that are written so."""
    events = ", ".join(f'{{"ph": "X", "name": "e", "ts": {start}, "dur": {length}}}' for start, length in times)
    path = tmp_path / "t.json"
    path.write_text(f'{{"traceEvents": [{events}]}}')
    return [(start, end) for _, start, end in read_all(path, ns_per_tick)[0]]


@given(
    start=st.integers(0, 2**43 * 1000 - 1) | st.integers(0, 2_000_000_000_000_000_000),
    length=st.integers(0, 10**12),
)
@ALIKE
def test_no_nanosecond_is_lost(tmp_path: Path, start: int, length: int) -> None:
    text = [f"{value // 1000}.{value % 1000:03d}" for value in (start, length)]
    assert read_times(tmp_path, (text[0], text[1])) == [(start, start + length)]


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [
        ("5", "3", (5000, 8000)),
        ("5.0", "0", (5000, 5000)),
        ('"5.5"', '"0.001"', (5500, 5501)),
        ("1.5e3", "1E0", (1_500_000, 1_501_000)),
        ("-2.001", "1", (-2001, -1001)),
        ("1712345678901234", "7", (1712345678901234000, 1712345678901241000)),
        ("1712345678901234.567", "0.001", (1712345678901234567, 1712345678901234568)),
        ('"1712345678901234.567"', "1", (1712345678901234567, 1712345678901235567)),
    ],
)
def test_times_are_read_however_they_are_written(
    tmp_path: Path, start: str, length: str, expected: tuple[int, int]
) -> None:
    assert read_times(tmp_path, (start, length)) == [expected]


def test_nanoseconds_since_1970_are_exact(tmp_path: Path) -> None:
    assert read_times(tmp_path, (1712345678901234567, 1), ns_per_tick=1) == [(1712345678901234567, 1712345678901234568)]


@pytest.mark.parametrize("value", ["null", '"x"', "[]", "{}", "true", "1e300", "1e400", f"{LARGEST_NS}", '"NaN"', "-1"])
def test_an_event_without_a_usable_duration_is_left_out_and_counted(tmp_path: Path, value: str) -> None:
    path = tmp_path / "t.json"
    good = '{"ph": "X", "name": "good", "ts": 1, "dur": 2}'
    path.write_text(f'{{"traceEvents": [{good}, {{"ph": "X", "name": "bad", "ts": 1, "dur": {value}}}, {good}]}}')
    found, file = read_all(path)
    assert [name for name, _, _ in found] == ["good", "good"]
    assert file.num_unusable == 1


@pytest.mark.parametrize(
    "bad", [("1", '"NaN"'), ('"NaN"', "1"), ("1", "1e400"), ("1", "null"), ("null", "1"), ("1", "-1")]
)
def test_so_it_is_among_exact_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[str, str]) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 100)
    late = ("1712345678901234.567", "1")
    assert read_times(tmp_path, *[late] * 9, bad, late) == [(1712345678901234567, 1712345678901235567)] * 10


def test_whole_microseconds_need_no_decimals_below_2_to_the_53() -> None:
    assert [needs_decimals([2**53 - 1, 1]), needs_decimals([2**53]), needs_decimals([])] == [False, True, False]
    assert [needs_decimals([2.0**43]), needs_decimals([2.0**43 - 1]), needs_decimals([2**43, 0.5])] == [
        True,
        False,
        True,
    ]


def test_readings_of_memory_are_those_of_devices(tmp_path: Path) -> None:
    def make(held: int, kind: int, name: str = "[memory]", time: str = "2") -> str:
        args = f'{{"Total Allocated": {held}, "Total Reserved": {held + 5}, "Device Type": {kind}}}'
        return f'{{"ph": "i", "name": "{name}", "ts": {time}, "args": {args}}}'

    events = [make(0, 1), make(7, 1), make(-1, 1), make(7, 0), make(7, 1, "other"), make(7, 1, time="null"), make(9, 2)]
    path = tmp_path / "t.json"
    path.write_text(f'{{"traceEvents": [{", ".join(events)}]}}')
    _, file = read_all(path)
    assert file.memory.tolist() == [[2000, 0, 5], [2000, 7, 12], [2000, 9, 14]]


def test_items_that_are_no_events_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [1, "x", null, [], {"ph": "X", "name": "e", "ts": 0, "dur": 1}, {}, {"ph": 5}]}')
    found, file = read_all(path)
    assert found == [("e", 0, 1000)]
    assert file.num_unusable == 4


def test_other_phases_are_no_events(tmp_path: Path) -> None:
    builder = TraceBuilder().kernel("k", 1, 2).flow(3, 1, 2).event({"ph": "M", "name": "m"})
    builder.event({"ph": "i", "name": "i", "ts": 1}).event({"ph": "C", "name": "c", "ts": 1, "args": {"v": 1}})
    found, file = read_all(builder.write(tmp_path / "t.json"))
    assert found == [("k", 1000, 3000)]
    assert file.num_unusable == 0


def test_arguments_are_read_as_kineto_writes_them(tmp_path: Path) -> None:
    builder = TraceBuilder().collective("_allgather_base", 1, 2, in_elements=8, out_elements=16, correlation=5, Seq=9)
    (batch,) = TraceFile(builder.write(tmp_path / "t.json")).batches()
    args = batch.events[0].args
    assert (args.collective, args.in_elements, args.out_elements) == ("_allgather_base", 8, 16)
    assert (args.group_size, args.group_name, args.element_type, args.sequence) == (2, "0", "Float", 9)
    assert (args.stream, args.correlation, args.device) == (20, 5, 0)


@pytest.mark.parametrize("piece", [100, 1 << 20])
def test_exactness_holds_from_the_first_late_time_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
    times = [("0", "1"), ("1.001", "1"), *[(f"17123456789012{n:02d}.567", "1.001") for n in range(30)]]
    expected = [(0, 1000), (1001, 2001)]
    expected += [((1712345678901200 + n) * 1000 + 567, (1712345678901200 + n) * 1000 + 1568) for n in range(30)]
    assert read_times(tmp_path, *times) == expected


def test_a_compressed_and_a_plain_file_are_the_same(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for index in range(50):
        builder.kernel(f"k{index}", index + 0.125, 0.5)
    plain, compressed = builder.write(tmp_path / "a.json"), builder.write(tmp_path / "b.json.gz", gz=True)
    assert read_all(plain)[0] == read_all(compressed)[0]


def write_long_trace(path: Path, num_kernels: int) -> Path:
    builder = TraceBuilder()
    for step in range(5):
        builder.step(step, 4 * num_kernels * step, 4 * num_kernels)
    for index in range(num_kernels):
        builder.operator("aten::mm", 20 * index, 15, **{"Input Dims": [[64, 64], [64, 64]]})
        builder.launch("cudaLaunchKernel", 20 * index + 1, 2, index)
        builder.kernel(f"gemm{index % 40}", 20 * index + 5, 18.5, correlation=index)
    return builder.write(path)


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 50_000)
    monkeypatch.setattr(spool, "PIECE_RECORDS", 1000)
    peaks, sizes = [], []
    for num_kernels in (600, 4800):
        path = write_long_trace(tmp_path / "t.json", num_kernels)
        sizes.append(path.stat().st_size)
        tracemalloc.start()
        whole = read_rank(path).breakdown.whole
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert whole.compute_ns == num_kernels * 18_500
    assert sizes[1] > 7.5 * sizes[0]
    assert peaks[1] < 1.3 * peaks[0]


def test_the_first_event_of_a_real_recording_is_where_it_was(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::t", "pid": 1, "tid": 1, "ts": 3956753253899.888, "dur": 35.282}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [event]}))
    assert read_all(path)[0] == [("aten::t", 3956753253899888, 3956753253935170)]
