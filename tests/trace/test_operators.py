"""Operators by name: totals, and times themselves that are exact."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalelab.trace.operators import OperatorCounter, OperatorTime
from scalelab.trace.rank_trace import read_rank
from tests.trace.build import TraceBuilder


def count(builder: TraceBuilder, path: Path, steps: frozenset[int] | None = None) -> dict[str, OperatorTime]:
    file = builder.write(path / "rank0.json")
    (found,) = read_rank(file, counters=[partial(OperatorCounter, steps=steps)]).counted
    return {operator.name: operator for operator in found}


def test_an_operator_itself_is_what_its_calls_leave(tmp_path: Path) -> None:
    builder = TraceBuilder().operator("aten::linear", 0, 100).operator("aten::addmm", 10, 50)
    builder.launch("cudaLaunchKernel", 20, 5, correlation=1).kernel("gemm", 30, 60, correlation=1)
    builder.operator("aten::linear", 200, 10, tid=2)
    found = count(builder, tmp_path)
    assert found["aten::linear"] == OperatorTime(
        name="aten::linear", count=2, total_ns=110_000, self_ns=60_000, longest_ns=100_000
    )
    assert found["aten::addmm"].self_ns == 45_000
    assert found["cudaLaunchKernel"].self_ns == 5_000
    assert "gemm" not in found


def test_steps_cut_times_themselves_and_choose_what_is_counted(tmp_path: Path) -> None:
    builder = TraceBuilder(backend="gloo").step(1, 0, 100).step(2, 100, 100)
    builder.operator("aten::a", 50, 100).operator("aten::b", 90, 20).operator("aten::c", 160, 10)
    whole = count(builder, tmp_path)
    assert (whole["aten::a"].self_ns, whole["aten::b"].self_ns) == (80_000, 20_000)
    first = count(builder, tmp_path, frozenset({1}))
    assert (first["aten::a"].self_ns, first["aten::b"].self_ns) == (40_000, 10_000)
    assert first["aten::a"].total_ns == 100_000
    assert "aten::c" not in first
    assert set(count(builder, tmp_path, frozenset({2}))) == {"aten::c"}


def test_of_events_that_overlap_the_one_that_began_last_ends_first(tmp_path: Path) -> None:
    found = count(TraceBuilder().operator("aten::a", 0, 10).operator("aten::b", 5, 6), tmp_path)
    assert (found["aten::a"].self_ns, found["aten::b"].self_ns) == (6_000, 5_000)


Nested = st.recursive(
    st.tuples(st.integers(0, 3), st.just(())),
    lambda inner: st.tuples(st.integers(0, 3), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=12,
)
"""A call: its name, and the calls that it makes."""


def lay_out(
    builder: TraceBuilder, call: tuple[int, tuple[object, ...]], start: int, tid: int, own: dict[str, int]
) -> int:
    """Put a call and what it makes into a trace; returns its end."""
    number, calls = call
    name, place = f"aten::{number}", start + 1 + number
    own[name] = own.get(name, 0) + 1 + number
    event = len(builder.events)
    builder.operator(name, 0, 0, tid)
    for inner in calls:
        place = lay_out(builder, inner, place, tid, own)  # type: ignore[arg-type]
        place += number
        own[name] += number
    builder.events[event] |= {"ts": start, "dur": place - start}
    return place


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.lists(Nested, min_size=1, max_size=4), st.lists(st.integers(1, 60), max_size=4))
def test_times_themselves_are_exact_however_calls_nest_and_windows_cut(
    tmp_path: Path, calls: list[tuple[int, tuple[object, ...]]], cuts: list[int]
) -> None:
    builder, own = TraceBuilder(backend="gloo"), dict[str, int]()
    for tid, call in enumerate(calls):
        lay_out(builder, call, 3 * tid, tid, own)
    for number, cut in enumerate(sorted(set(cuts))):
        builder.step(number, cut, 1, tid=99)
    found = count(builder, tmp_path)
    assert {name: operator.self_ns for name, operator in found.items()} == {n: 1000 * us for n, us in own.items()}
    assert all(operator.self_ns <= operator.total_ns for operator in found.values())


def test_steps_of_operators_are_those_of_the_host_which_runs_ahead(tmp_path: Path) -> None:
    builder = TraceBuilder(num_ranks=1)
    for step in (1, 2):
        builder.step(step, 100 * step, 100).device_annotation(f"ProfilerStep#{step}", 1000 * step, 500)
        builder.operator(f"aten::op{step}", 100 * step + 10, 50).kernel(f"k{step}", 1000 * step, 500)
    path = builder.write(tmp_path / "t.json")
    (found,) = read_rank(path, counters=[partial(OperatorCounter, steps=frozenset({2}))]).counted
    assert [(one.name, one.count, one.self_ns) for one in found] == [("aten::op2", 1, 50_000)]


def test_an_operator_that_reaches_into_a_chosen_step_has_its_time_there(tmp_path: Path) -> None:
    builder = TraceBuilder(num_ranks=1, backend="gloo").step(1, 0, 100).step(2, 100, 100)
    builder.operator("aten::mm", 0, 10).operator("aten::mm", 90, 30).operator("aten::mm", 195, 30)
    path = builder.write(tmp_path / "t.json")
    (found,) = read_rank(path, counters=[partial(OperatorCounter, steps=frozenset({2}))]).counted
    assert [(one.count, one.total_ns, one.self_ns) for one in found] == [(1, 30_000, 25_000)]
