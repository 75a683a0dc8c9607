"""From the timings of ranks to the time of a call."""

from __future__ import annotations

from dataclasses import replace

from scalelab.analysis.link import group_transfers, read_call_seconds
from scalelab.records.observations import Transfer
from scalelab.records.trial import Status, TrialResult
from tests.exchanges import make_exchange_trial
from tests.records import make_record, make_result


def make_result_of(operation: str, *lines: tuple[int, int, int, int, float], number: int = 1) -> TrialResult:
    """Lines of rank, bytes, repeat, calls and seconds."""
    transfers = tuple(Transfer(r, operation, size, n, calls, 0.0, seconds) for r, size, n, calls, seconds in lines)
    trial = make_exchange_trial(operation, 2, (8, 32), round=number)
    return TrialResult(trial=trial, status=Status.COMPLETED, transfers=transfers)


def test_a_collective_takes_as_long_as_its_slowest_rank_per_call() -> None:
    result = make_result_of("all_reduce", (0, 8, 0, 10, 1.0), (1, 8, 0, 10, 3.0), (0, 8, 1, 5, 2.0), (1, 8, 1, 5, 1.0))
    assert read_call_seconds(result) == {8: [0.3, 0.4]}


def test_a_message_between_two_takes_what_its_sender_waited() -> None:
    result = make_result_of("point_to_point", (0, 8, 0, 2, 1.0), (1, 8, 0, 2, 3.0))
    assert read_call_seconds(result) == {8: [0.5]}


def test_a_timing_that_a_rank_did_not_complete_is_left_out() -> None:
    result = make_result_of("all_reduce", (0, 8, 0, 1, 1.0), (1, 8, 0, 1, 1.0), (0, 32, 0, 1, 1.0))
    assert read_call_seconds(result) == {8: [1.0]}


def test_rounds_keep_their_places_and_what_a_crashed_one_timed_counts() -> None:
    first = make_result_of("all_reduce", (0, 32, 0, 1, 1.0), (1, 32, 0, 1, 1.0))
    third = make_result_of("all_reduce", (0, 8, 0, 4, 4.0), (1, 8, 0, 4, 8.0), number=3)
    series = group_transfers([replace(third, status=Status.CRASHED), first])["all_reduce-2"]
    assert series.seconds == {8: [[], [], [2.0]], 32: [[1.0], [], []]}
    assert list(series.seconds) == [8, 32]
    assert series.num_calls == {8: 4, 32: 1}
    assert series.trial.round == 1


def test_trainings_are_no_exchanges() -> None:
    assert group_transfers([make_result(make_record())]) == {}


def test_the_backend_follows_the_device_unless_it_is_named() -> None:
    trials = [
        make_exchange_trial("broadcast", 2, (8,)),
        make_exchange_trial("broadcast", 2, (8,), device="cuda"),
        make_exchange_trial("broadcast", 2, (8,), backend="mpi"),
    ]
    found = [group_transfers([TrialResult(trial=t, status=Status.COMPLETED)])["broadcast-2"] for t in trials]
    assert [series.backend for series in found] == ["gloo", "nccl", "mpi"]
    assert not any(series.is_measured for series in found)


def test_a_timing_that_took_no_time_is_left_out() -> None:
    result = make_result_of("all_reduce", (0, 8, 0, 1, 0.0), (1, 8, 0, 1, 0.0), (0, 8, 1, 1, 0.0), (1, 8, 1, 1, 0.5))
    assert read_call_seconds(result) == {8: [0.5]}


def test_a_message_between_two_of_four_ranks_is_timed_by_both() -> None:
    trial = make_exchange_trial("point_to_point", 4, (8,))
    timings = [(0, 0, 1.0), (1, 0, 3.0), (0, 1, 2.0)]
    lines = tuple(Transfer(rank, "point_to_point", 8, repeat, 1, 0.0, s) for rank, repeat, s in timings)
    found = read_call_seconds(TrialResult(trial=trial, status=Status.COMPLETED, transfers=lines))
    assert found == {8: [1.0]}, "rank 1 did not complete the second"
