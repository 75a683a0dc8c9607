"""Two traces name by name."""

from __future__ import annotations

import pytest

from scalelab.trace.operators import Amount, OperatorChange, Side, compare_operators


def make_side(num_ranks: int = 1, num_steps: int | None = 1, **times_ns: int) -> Side:
    amounts = [Amount(name=name, count=2, total_ns=time) for name, time in times_ns.items()]
    return Side(amounts=amounts, num_ranks=num_ranks, num_steps=num_steps)


def test_a_trace_does_not_differ_from_itself() -> None:
    side = make_side(mm=1000, add=500)
    assert {found.change for found in compare_operators(side, side).differences} == {OperatorChange.SAME}


def test_names_are_added_removed_slower_and_faster_with_the_largest_change_first() -> None:
    a, b = make_side(gone=10, mm=1000, add=500, same=100), make_side(new=70, mm=1900, add=300, same=101)
    found = compare_operators(a, b)
    assert [(one.name, one.change) for one in found.differences] == [
        ("mm", OperatorChange.SLOWER),
        ("add", OperatorChange.FASTER),
        ("new", OperatorChange.ADDED),
        ("gone", OperatorChange.REMOVED),
        ("same", OperatorChange.SAME),
    ]
    assert [one.name for one in found.list_changed(OperatorChange.ADDED, OperatorChange.REMOVED)] == ["new", "gone"]
    assert found.differences[0].more_seconds == pytest.approx(900e-9)


def test_ranks_and_steps_are_divided_by() -> None:
    a = Side(amounts=[Amount(name="mm", count=6, total_ns=600)] * 2, num_ranks=2, num_steps=3)
    found = compare_operators(a, make_side(mm=200, num_steps=1))
    assert found.is_per_step
    assert found.differences[0].change is OperatorChange.SAME
    assert (found.differences[0].count_a, found.differences[0].count_b) == (2, 2)


def test_without_steps_on_one_side_whole_traces_are_compared() -> None:
    found = compare_operators(make_side(mm=200, num_steps=None), make_side(mm=200, num_steps=4))
    assert not found.is_per_step
    assert found.differences[0].change is OperatorChange.SAME
