"""Which operator asked for what a thread ran."""

from __future__ import annotations

from scalelab.trace.collectives import MessageSize
from scalelab.trace.linking import CollectiveCall, CollectiveRun, assign_calls

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
