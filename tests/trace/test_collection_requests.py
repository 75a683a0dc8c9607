"""Which operator asked for what a thread ran."""

from __future__ import annotations

import numpy as np

from scalelab.trace.collectives import CollectiveRow, CollectiveRows, MessageSize
from scalelab.trace.linking import (
    CollectiveCall,
    CollectiveRun,
    HostCall,
    Requests,
    assign_calls,
    drop_nested,
    find_around,
    find_spans,
)

UNSIZED = MessageSize()


def ran(kind: str, start: int, elements: int | None = None) -> CollectiveRun:
    return CollectiveRun(kind, start, MessageSize(elements, 4))


def call(kind: str, start: int, elements: int | None = None) -> CollectiveCall:
    return CollectiveCall(kind, start, MessageSize(elements, 4))


def test_the_kth_call_is_the_kth_that_runs() -> None:
    calls = [call("all_reduce", 0), call("all_reduce", 1), call("all_reduce", 2)]
    assert assign_calls([ran("all_reduce", 5), ran("all_reduce", 6), ran("all_reduce", 7)], calls) == calls


def test_kinds_are_kept_apart() -> None:
    calls = [call("all_gather", 0), call("broadcast", 1)]
    assert assign_calls([ran("broadcast", 2), ran("all_gather", 3)], calls) == [calls[1], calls[0]]


def test_a_reduce_scatter_runs_as_an_all_reduce_beside_real_ones() -> None:
    calls = [call("all_reduce", 0), call("reduce_scatter", 10), call("all_reduce", 20)]
    assert assign_calls([ran("all_reduce", 1), ran("all_reduce", 11), ran("all_reduce", 21)], calls) == calls


def test_where_a_reduce_scatter_exists_it_is_one() -> None:
    calls = [call("reduce_scatter", 0), call("all_reduce", 1)]
    assert assign_calls([ran("reduce_scatter", 2), ran("all_reduce", 3)], calls) == calls


def test_what_ran_before_the_first_call_has_none() -> None:
    calls = [call("all_reduce", 10), call("all_reduce", 20)]
    runs = [ran("all_reduce", 1), ran("all_reduce", 11), ran("all_reduce", 21)]
    assert assign_calls(runs, calls) == [None, *calls]


def test_a_call_that_never_ran_in_the_trace_is_left_over() -> None:
    calls = [call("all_reduce", 0), call("all_reduce", 10), call("all_reduce", 20)]
    assert assign_calls([ran("all_reduce", 1), ran("all_reduce", 21)], calls) == [calls[0], calls[2]]


def test_sizes_decide_where_counts_differ() -> None:
    calls = [call("all_reduce", 0, 100), call("all_reduce", 1, 200), call("all_reduce", 2, 300)]
    runs = [ran("all_reduce", 5, 100), ran("all_reduce", 6, 200)]
    assert assign_calls(runs, calls) == calls[:2]


def test_nothing_that_ran_and_no_calls() -> None:
    assert assign_calls([], [call("all_reduce", 0)]) == []
    assert assign_calls([ran("all_reduce", 0)], []) == [None]


def make_row(start: int, end: int, thread: int = 0, **fields: int) -> CollectiveRow:
    row = CollectiveRow._make([-1] * len(CollectiveRow._fields))
    return row._replace(start_ns=start, end_ns=end, thread=thread, **fields)


def make_rows(rows: list[CollectiveRow]) -> CollectiveRows:
    found = CollectiveRows()
    for row in rows:
        found.append(row)
    return found


def test_what_runs_inside_another_on_its_thread_is_dropped() -> None:
    rows = [make_row(0, 10), make_row(0, 4), make_row(2, 10), make_row(5, 11), make_row(6, 7, thread=1)]
    assert drop_nested(rows) == [rows[0], rows[3], rows[4]]
    assert drop_nested([make_row(3, 3), make_row(3, 9)]) == [make_row(3, 9)]
    assert drop_nested([make_row(3, 3)]) == [make_row(3, 3)]
    assert drop_nested([rows[0], make_row(2, 3), make_row(4, 9)]) == rows[:1]


def test_the_operator_around_a_record_is_the_last_that_began_before_it() -> None:
    operators = [make_row(0, 100), make_row(10, 20), make_row(30, 40)]
    assert find_around(operators, make_row(30, 40)) == operators[2]
    assert find_around(operators, make_row(29, 30)) is None, "the one before has ended"
    assert find_around(operators, make_row(15, 21)) is None
    assert find_around(operators, make_row(9, 100)) == operators[0]
    assert find_around(operators, make_row(9, 101)) is None
    assert find_around(operators[1:], make_row(9, 12)) is None
    assert find_around([], make_row(0, 1)) is None


def test_requests_around_a_launch_are_those_open_on_its_thread_the_innermost_first() -> None:
    rows = [make_row(20, 30), make_row(0, 50), make_row(0, 60), make_row(5, 9), make_row(20, 25, thread=1)]
    requests = Requests(make_rows(rows))

    def find(start: int, lane: int = 0) -> list[tuple[int, int]]:
        return [(row.start_ns, row.end_ns) for row in requests.find_around(HostCall(start, lane))]

    assert find(25) == find(30) == find(20) == [(20, 30), (0, 50), (0, 60)]
    assert find(31) == find(19) == find(50) == [(0, 50), (0, 60)]
    assert find(51) == [(0, 60)]
    assert find(61) == find(25, lane=2) == []
    assert find(25, lane=1) == [(20, 25)]
    spans = find_spans(make_rows(rows), np.array([0, 1, 4]))
    assert {lane: one.place.tolist() for lane, one in spans.items()} == {0: [1, 0], 1: [4]}
    assert (spans[0].start.tolist(), spans[0].end.tolist()) == ([0, 20], [50, 30])


def test_only_the_64_requests_before_a_launch_are_looked_at() -> None:
    requests = Requests(make_rows([make_row(0, 1000), *(make_row(n, n) for n in range(1, 65))]))
    assert requests.find_around(HostCall(65, 0)) == []
    assert len(requests.find_around(HostCall(63, 0))) == 2
    before = [call("all_reduce", 0, 8), *(call("all_reduce", n, 7) for n in range(1, 64))]
    assert assign_calls([ran("all_reduce", 99, 8)], before) == before[:1]
    assert assign_calls([ran("all_reduce", 99, 8)], [*before, call("all_reduce", 64, 7)]) == [None]


def test_sizes_agree_if_one_is_unknown_or_a_piece() -> None:
    for own, size, may in ((8, 8, True), (8, 7, False), (None, 7, True), (8, None, True)):
        found = assign_calls([ran("all_reduce", 9, own)], [call("all_reduce", 9, size)])
        assert (found != [None]) is may
    piece = CollectiveRun("all_gather", 9, MessageSize(2, 4, True))
    assert assign_calls([piece], [call("all_gather", 1, 8)]) == [call("all_gather", 1, 8)]
    assert assign_calls([ran("all_reduce", 9, 8)], [call("all_reduce", 10, 8)]) == [None], "asked for afterwards"
