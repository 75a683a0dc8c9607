from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from scalelab.trace.files import pieces
from scalelab.trace.files.events import MOST_OPEN_EVENTS, Event, OpenEvents, pair_events, read_header, repair_events
from scalelab.trace.files.reader import TraceFile
from tests.trace.build import TraceBuilder

_decode = msgspec.json.Decoder(Event).decode


def repair(text: str) -> Event:
    (event,), num_odd = repair_events(f"[{text}]".encode(), _decode)
    assert num_odd == 0
    return event


def test_an_event_that_needs_no_repair_stays_as_it_is() -> None:
    text = '{"ph": "X", "name": "a", "ts": 1.5, "dur": 2, "args": {"Input Dims": [[2, 3]], "stream": 7}}'
    assert repair(text) == _decode(text)


def test_numbers_that_are_texts_become_numbers() -> None:
    event = repair('{"ts": "1.25", "dur": 1, "args": {"stream": "7", "correlation": 5.0, "device": "x"}}')
    assert event.ts == Decimal("1.25")
    assert (event.args.stream, event.args.correlation, event.args.device) == (7, 5, -1)


@pytest.mark.parametrize("value", ["18446744073709551615", "1e30", '"1e999999"', "1e999999", "true", "[]", '"NaN"'])
def test_an_argument_that_fits_no_array_is_unknown(value: str) -> None:
    assert repair(f'{{"ts": 1, "args": {{"correlation": {value}}}}}').args.correlation == -1


@pytest.mark.parametrize("value", ["[0, [1], 0]", "{}", "true", '"Infinity"', '"sNaN"', "1e99999999999999999999"])
def test_what_is_no_time_is_none(value: str) -> None:
    assert repair(f'{{"ts": {value}, "dur": "x"}}').ts is None


def test_sizes_survive_the_repair_of_something_else() -> None:
    event = repair('{"ts": 1, "args": {"stream": "7", "Input Dims": [[2, 3], []], "Input type": ["float", ""]}}')
    assert msgspec.json.decode(event.args.input_dims) == [[2, 3], []]
    assert msgspec.json.decode(event.args.input_types) == ["float", ""]


def test_labels_may_be_anything() -> None:
    event = repair('{"pid": 1.5, "tid": null, "ph": 5, "cat": [], "name": {}}')
    assert (event.pid, event.tid, event.ph, event.cat, event.name) == ("1.5", "None", "", "", "")


def test_beginnings_and_ends_are_paired_per_thread_and_nested() -> None:
    def make(phase: str, name: str, thread: int, time: float) -> Event:
        return Event(ph=phase, name=name, tid=thread, ts=time)

    begun: OpenEvents = {}
    first = pair_events([make("B", "outer", 1, 0), make("B", "inner", 1, 2), make("B", "other", 2, 3)], begun)
    rest = pair_events([make("E", "", 1, 4), make("E", "", 2, 5), make("E", "", 1, 9), make("E", "", 1, 10)], begun)
    assert first == []
    assert [(event.name, event.ts, event.dur) for event in rest] == [("inner", 2, 2), ("other", 3, 2), ("outer", 0, 9)]
    assert begun == {}


def test_beginnings_without_end_are_bounded() -> None:
    begun: OpenEvents = {}
    pair_events([Event(ph="B", ts=1.0)] * (MOST_OPEN_EVENTS + 5), begun)
    assert len(begun[(0, 0)]) == MOST_OPEN_EVENTS


@pytest.mark.parametrize("piece", [60, 1 << 20])
def test_a_pair_may_begin_before_times_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
    builder = TraceBuilder().event({"ph": "B", "name": "a", "pid": 1, "tid": 1, "ts": 8796093022207.125})
    builder.event({"ph": "E", "pid": 1, "tid": 1, "ts": 8796093022209.5}).event({"ph": "E", "ts": "1e999999"})
    batches = list(TraceFile(builder.write(tmp_path / "t.json")).batches())
    lengths = [int(end - start) for b in batches for start, end in zip(b.start_ns, b.end_ns, strict=True)]
    assert lengths == [2375]


def test_beginnings_without_an_end_are_counted_as_unusable(tmp_path: Path) -> None:
    builder = TraceBuilder().event({"ph": "B", "name": "a", "pid": 1, "tid": 1, "ts": 5}).operator("aten::mm", 0, 1)
    file = TraceFile(builder.write(tmp_path / "t.json"))
    assert [event.name for batch in file.batches() for event in batch.events] == ["aten::mm"]
    assert file.num_unusable == 1


def test_a_header_that_is_no_object_is_no_header() -> None:
    with pytest.raises(msgspec.DecodeError):
        read_header(b"[]")
    assert read_header(b'{"distributedInfo": []}').distributed is None
    assert read_header(b'{"host_name": "a"}').distributed is None
    half = read_header(b'{"distributedInfo": {"rank": 3, "pg_config": 5}}').distributed
    assert half is not None
    assert (half.rank, half.pg_config) == (3, [])
