"""Latencies side by side: everybody in every round, each after a call that is not timed, in no fixed order."""

from __future__ import annotations

import pytest
import torch

from scalelab.quantize import sessions
from scalelab.quantize.sessions import one_thread, time_runtimes


def test_every_runtime_is_called_in_every_round_and_warmed_each_time() -> None:
    calls: list[str] = []
    runtimes = {name: lambda name=name: calls.append(name) for name in ("a", "b", "c")}
    timings = time_runtimes(runtimes, batch=4, num_rounds=8)
    assert [one.runtime for one in timings] == ["a", "b", "c"]
    assert {one.batch for one in timings} == {4}
    assert all(len(one.seconds) == 8 and min(one.seconds) >= 0 for one in timings)
    assert all(calls.count(name) >= 3 + 8 * 2 for name in runtimes)


def test_the_order_changes_from_round_to_round_and_is_that_of_the_seed() -> None:
    def list_order(seed: int) -> list[str]:
        calls: list[str] = []
        time_runtimes({name: lambda name=name: calls.append(name) for name in "abc"}, batch=1, num_rounds=6, seed=seed)
        later = calls[9:]
        return [name for name, before in zip(later, ["", *later], strict=False) if name != before]

    assert list_order(1) == list_order(1)
    assert list_order(1) != list_order(2)


def test_a_slow_call_is_timed_once_a_round() -> None:
    assert sessions._count_calls(lambda: torch.ones(500, 500) @ torch.ones(500, 500)) < sessions.MOST_CALLS


@pytest.mark.parametrize(("once", "num_calls"), [(1e-6, 200), (1e-3, 10), (0.1, 1)])
def test_a_timing_has_calls_for_ten_milliseconds_and_at_most_200(
    monkeypatch: pytest.MonkeyPatch, once: float, num_calls: int
) -> None:
    times = iter([0.0, once])
    monkeypatch.setattr(sessions, "perf_counter", lambda: next(times))
    assert sessions._count_calls(lambda: None) == num_calls


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
