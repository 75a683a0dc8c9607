from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalelab.errors import TraceUnreadable
from scalelab.trace.files import pieces
from scalelab.trace.files.pieces import Pieces, find_cut, replace_no_text
from scalelab.trace.files.reader import TraceFile
from tests.trace.build import TraceBuilder

ALIKE = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ARGUMENTS = st.recursive(
    st.none() | st.integers(-5, 5) | st.text('},{[]"\\ a\n', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('ab"}{,', max_size=3), inner, max_size=3),
    max_leaves=12,
)


def read_items(path: Path) -> list[Any]:
    return [item for items in Pieces(path, decode_anything) for item in items]


def decode_anything(text: bytes) -> list[Any]:
    import msgspec

    found: list[Any] = msgspec.json.decode(text, type=list[Any])
    return found


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refuse(path: Path) -> str:
    """The one sentence that reading ends with."""
    with pytest.raises(TraceUnreadable) as caught:
        list(TraceFile(path).batches())
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@given(
    items=st.lists(st.dictionaries(st.sampled_from(["args", "name"]), ARGUMENTS, max_size=2), max_size=12),
    piece=st.integers(1, 80),
    separator=st.sampled_from([",", ", ", " ,\r\n  ", ",\n"]),
    is_object=st.booleans(),
)
@ALIKE
def test_no_piece_size_changes_what_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    items: list[Any],
    piece: int,
    separator: str,
    is_object: bool,
) -> None:
    listed = "[" + separator.join(json.dumps(item) for item in items) + "]"
    tail = ', "after": [{"a": 1}, {"b": "}, {"}], "host_name": "h"}'
    text = f'{{"before": "traceEvents", "traceEvents": {listed}{tail}' if is_object else listed
    path = write(tmp_path / "t.json", text)
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
    assert read_items(path) == items


@given(text=st.text('[]{},"\\: a1', max_size=60), piece=st.integers(1, 20), is_object=st.booleans())
@ALIKE
def test_no_text_whatsoever_ends_in_another_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, piece: int, is_object: bool
) -> None:
    path = write(tmp_path / "t.json", ('{"traceEvents": [' if is_object else "[") + text)
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
    try:
        whole = json.loads(path.read_text())
    except ValueError:
        whole = None
    try:
        found = read_items(path)
    except TraceUnreadable:
        assert whole is None or not isinstance(whole["traceEvents"] if is_object else whole, list)
    else:
        if whole is not None:
            assert found == (whole["traceEvents"] if is_object else whole)


@pytest.mark.parametrize("piece", [7, 64, 1000, 1 << 20])
@pytest.mark.parametrize(
    "text",
    [
        '\ufeff{"traceEvents": [{"a": 1}]}',
        ' \r\n\t[{"a": 1}]\r\n',
        '[{"a": 1},\n',
        '[{"a": 1}',
        '{"traceEvents"  :  [{"a": 1}]}',
        '{"x": {"traceEvents": [{"b": 2}]}, "y": "\\"traceEvents\\": [", "traceEvents": [{"a": 1}], "z": [1]}',
    ],
    ids=["byte order mark", "bare list", "open list and comma", "open list", "blanks", "inner lists of that name"],
)
def test_the_shapes_that_tools_write_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, piece: int
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
    assert read_items(write(tmp_path / "t.json", text)) == [{"a": 1}]


@pytest.mark.parametrize("piece", [7, 64, 1 << 20])
@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("hello", "not a trace"),
        ('{"a": 1}', "not a trace"),
        ('{"traceEvents": {"a": 1}}', "not a trace"),
        ('{"traceEvents": [{"a": 1}', "truncated"),
        ('{"traceEvents": [{"a": 1}]', "truncated"),
        ('{"traceEvents": [{"a": "b', "truncated"),
        ('{"traceEvents": [{"a": 1}], "b": [1', "truncated"),
        ('[{"a": 1}, {"b', "truncated"),
        ('[{"a": 1}] {"b": 2}', "unexpected bytes"),
        ('{"traceEvents": [{"a": NaN}, {"b": 1}]}', "not valid JSON"),
        ('{"traceEvents": [{"a": 1}}, {"b": 1}, {"c": 1}]}', "not valid JSON"),
        ('{"traceEvents": [{"a": 1} {"b": 1}, {"c": 1}]}', "not valid JSON"),
        ('{"traceEvents": [{"a": 1}]]}', "not valid JSON"),
        ('{"traceEvents": [{"a": 1}], "b" 1}', "not valid JSON"),
        ('{"traceEvents": [{"a": 1}]} x', "not valid JSON"),
    ],
)
def test_what_is_no_trace_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, word: str, piece: int
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
    assert word in refuse(write(tmp_path / "t.json", text))


@pytest.mark.parametrize("place", ["header", "event", "tail"])
def test_lists_nested_without_end_are_refused(tmp_path: Path, place: str) -> None:
    deep = "[" * 100_000
    texts = {"header": f'{{"a": {deep}, "traceEvents": [', "event": f'{{"traceEvents": [{{"a": {deep}'}
    text = texts.get(place, f'{{"traceEvents": [], "b": {deep}')
    assert "nested" in refuse(write(tmp_path / "t.json", text))


def test_an_event_whose_lists_hold_many_objects_is_cut_rightly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [{"args": {"frames": [{"line": line} for line in range(200)]}, "name": str(n)} for n in range(20)]
    path = write(tmp_path / "t.json", json.dumps({"traceEvents": items}))
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(pieces, "LARGEST_EVENT_BYTES", 20_000)
    assert read_items(path) == items


def test_an_event_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(pieces, "LARGEST_EVENT_BYTES", 20_000)
    assert "is longer than" in refuse(write(tmp_path / "t.json", '{"traceEvents": [{"name": "' + "x" * 100_000))
    assert "not a trace" in refuse(write(tmp_path / "t.json", '{"name": "' + "x" * 100_000))
    assert "longer" in refuse(write(tmp_path / "t.json", '{"traceEvents": [{},{},{}], "name": "' + "x" * 100_000))


def test_many_lists_of_that_name_do_not_take_quadratic_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0
    monkeypatch.setattr(pieces, "MOST_HEADERS", 5)
    original = Pieces._take_header

    def count(self: Pieces[Any], text: bytes) -> None:
        nonlocal tried
        tried += 1
        original(self, text)

    monkeypatch.setattr(Pieces, "_take_header", count)
    text = '{"x": {' + ", ".join(['"traceEvents": [1]'] * 1000) + "}}"
    assert "not a trace" in refuse(write(tmp_path / "t.json", text))
    assert tried <= 6


def test_a_compressed_file_is_read_whatever_its_name(tmp_path: Path) -> None:
    builder = TraceBuilder().kernel("k", 1, 2)
    path = builder.write(tmp_path / "trace.json", gz=True)
    (batch,) = TraceFile(path).batches()
    assert batch.events[0].name == "k"


def test_damaged_compressed_data_are_refused(tmp_path: Path) -> None:
    data = gzip.compress(TraceBuilder().kernel("k", 1, 2).text.encode())
    assert "compressed" in refuse(write(tmp_path / "a.gz", data[:-20]))
    assert "compressed" in refuse(write(tmp_path / "b.gz", data[:30] + b"\xff" * 30 + data[60:]))
    assert "compressed" in refuse(write(tmp_path / "c.gz", data[:-6] + b"\0" * 6))
    assert "compressed" in refuse(write(tmp_path / "d.gz", data[:5]))


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    assert "No such file" in refuse(tmp_path / "none.json")
    assert "directory" in refuse(tmp_path)


def test_the_header_is_taken_from_both_sides_of_the_events(tmp_path: Path) -> None:
    text = '{"host_name": "a", "traceEvents": [{}], "baseTimeNanoseconds": 7, "distributedInfo": {"rank": "1"}}'
    file = TraceFile(write(tmp_path / "t.json", text))
    assert [batch.events for batch in file.batches()] == [[]]
    assert (file.header.host_name, file.header.base_ns) == ("a", 7)
    assert file.header.distributed is not None
    assert file.header.distributed.rank == 1


def test_a_field_of_the_wrong_kind_costs_only_itself(tmp_path: Path) -> None:
    info = {"rank": 3, "world_size": 4, "pg_config": "none", "backend": ["x"]}
    text = json.dumps({"distributedInfo": info, "host_name": 5, "traceEvents": []})
    file = TraceFile(write(tmp_path / "t.json", text))
    list(file.batches())
    assert file.header.distributed is not None
    assert (file.header.distributed.rank, file.header.distributed.world_size) == (3, 4)


def test_find_cut_sees_only_commas_between_values() -> None:
    assert find_cut(b'{"a": [1, {}]}, {"b": "}, {"}, {"c"') == (29, False)
    assert find_cut(b'{"a": [1, {}') == (None, False)
    assert find_cut(b'{"a": 1}, {"b": 2} ] , "x": [1, 2') == (19, True)
    assert find_cut(b'{"a": "\\", {"') == (None, False)


def test_text_that_is_none_keeps_its_length() -> None:
    assert replace_no_text(b"a\xff\xc3\xa9\xc3(") == b"a?\xc3\xa9?("


def test_a_name_that_is_no_text_is_read(tmp_path: Path) -> None:
    text = b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k\xff", "ts": 1, "dur": 2}], "host_name": "\xfe"}'
    (batch,) = TraceFile(write(tmp_path / "t.json", text)).batches()
    assert batch.events[0].name == "k?"
