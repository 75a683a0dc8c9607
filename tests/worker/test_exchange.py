"""Communication alone, on real ranks: every operation right and timed, every failure told."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import psutil
import pytest
import torch

from scalelab.analysis.link import read_call_seconds
from scalelab.errors import ScalelabError, UsageError
from scalelab.launch.agreement import transfers_file
from scalelab.launch.local import LocalLauncher
from scalelab.records.store import RunStore
from scalelab.records.tasks import Exchange, Operation
from scalelab.records.trial import Status, Trial
from scalelab.worker.exchange import (
    CALLS,
    FEWEST_REPEATS,
    MOST_CALLS,
    MessageBuffers,
    check_result,
    expect_result,
    make_messages,
    plan_timings,
    return_ping_pong,
)
from tests.cli.commands import wait_until
from tests.exchanges import make_exchange_trial
from tests.records import make_environment
from tests.worker.trials import launch

CPU = torch.device("cpu")


def make_message(operation: Operation, num_numbers: int = 8, rank: int = 0) -> MessageBuffers:
    exchange = Exchange(operation=operation, sizes=(4 * num_numbers,))
    return make_messages(exchange, rank, 2, CPU)[0]


def put_expected(message: MessageBuffers, operation: str) -> None:
    """What a backend would do."""
    for segment in expect_result(message, operation):
        ramp = torch.arange(segment.first, segment.first + len(segment.tensor)) % 1021
        segment.tensor.copy_(ramp * segment.factor + segment.shift)


def test_every_operation_has_its_call() -> None:
    assert set(CALLS) == set(get_args(Operation))


@pytest.mark.parametrize("operation", get_args(Operation))
@pytest.mark.parametrize("num_numbers", [2, 4096])
def test_the_right_result_passes_and_one_wrong_number_does_not(operation: Operation, num_numbers: int) -> None:
    message = make_message(operation, num_numbers, rank=1)

    def spoil(message: MessageBuffers) -> None:
        put_expected(message, operation)
        expect_result(message, operation)[-1].tensor[-1] += 1

    check_result(message, lambda message: put_expected(message, operation), operation)
    with pytest.raises(ScalelabError, match=rf"{operation} of {4 * num_numbers} bytes returned wrong data on rank 1"):
        check_result(message, spoil, operation)


@pytest.mark.parametrize("operation", sorted({*get_args(Operation)} - {"all_reduce"}))
def test_a_call_that_moves_nothing_is_noticed(operation: Operation) -> None:
    with pytest.raises(ScalelabError, match="returned wrong data"):
        check_result(make_message(operation, rank=1), lambda _: None, operation)


def test_a_ping_that_does_not_come_back_is_noticed_by_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.send", lambda *_: None)
    monkeypatch.setattr("torch.distributed.recv", lambda *_: None)
    with pytest.raises(ScalelabError, match="point_to_point of 32 bytes returned wrong data on rank 0"):
        check_result(make_message("point_to_point"), return_ping_pong, "point_to_point")


def test_sizes_are_views_of_one_buffer() -> None:
    small, large = make_messages(Exchange(operation="all_to_all", sizes=(8, 64)), 0, 2, CPU)
    assert small.whole.data_ptr() == large.whole.data_ptr()
    assert (small.payload_bytes, len(small.other), large.payload_bytes) == (8, 2, 64)


def test_a_message_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UsageError, match="4 bytes do not split into whole float32 values over 2 ranks"):
        make_message("all_gather", 1)


def test_short_calls_are_timed_together_and_long_ones_less_often() -> None:
    exchange = Exchange(operation="all_reduce", sizes=(4,), repeats=40, budget_seconds=0.5)
    assert plan_timings(1e-5, exchange) == (10, 40)
    assert plan_timings(1e-3, exchange) == (1, 40)
    assert plan_timings(0.025, exchange) == (1, 10)
    assert plan_timings(2.0, exchange) == (1, FEWEST_REPEATS)
    assert plan_timings(0.0, exchange).num_calls == MOST_CALLS


@pytest.mark.ranks
@pytest.mark.parametrize("operation", get_args(Operation))
def test_every_operation_runs_on_two_ranks(operation: Operation, launcher: LocalLauncher, tmp_path: Path) -> None:
    sizes = (8, 1024, 1 << 20)
    result = launch(launcher, make_exchange_trial(operation, 2, sizes), tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    assert {line.operation for line in result.transfers} == {operation}
    assert {line.rank for line in result.transfers} == {0, 1}
    found = read_call_seconds(result)
    assert tuple(found) == sizes
    assert all(len(times) == 5 for times in found.values())
    assert result.samples == ()
    assert list(tmp_path.glob("rank*.csv")) == []


@pytest.mark.ranks
@pytest.mark.parametrize("operation", get_args(Operation))
def test_three_ranks_get_the_right_numbers_too(operation: Operation, launcher: LocalLauncher, tmp_path: Path) -> None:
    result = launch(launcher, make_exchange_trial(operation, 3, (12, 12 * 4096), repeats=1), tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    assert {line.rank for line in result.transfers} == ({0, 1} if operation == "point_to_point" else {0, 1, 2})


@pytest.mark.ranks
def test_a_result_with_transfers_is_the_same_read_back(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = make_exchange_trial("all_reduce", 2, (8, 64))
    store = RunStore.create(tmp_path, study="collectives", fields={}, trials=[trial], environment=make_environment())
    result = launcher.launch(trial, store.trial_directory(trial.name))
    store.save_result(result)
    assert result.transfers
    assert store.result(trial.name) == result


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("backend", "words"),
    [("mpi", "--backend mpi is not built into torch"), ("nccl", "--backend nccl is not built into torch")],
)
def test_a_backend_that_torch_has_not_is_refused_by_its_flag(
    backend: str, words: str, launcher: LocalLauncher, tmp_path: Path
) -> None:
    if torch.distributed.is_backend_available(backend):
        pytest.skip(f"this torch has {backend}")
    result = launch(launcher, make_exchange_trial("all_reduce", 2, (8,), backend=backend), tmp_path)
    assert result.status is Status.INVALID
    assert result.reason.startswith(words)
    assert "use --backend gloo" in result.reason


def find_rank(directory: Path, rank: int) -> int | None:
    """The process that writes a rank's timings."""
    wanted = str(transfers_file(directory, rank).resolve())
    for process in psutil.Process().children(recursive=True):
        try:
            if any(file.path == wanted for file in process.open_files()):
                return process.pid
        except psutil.Error:
            continue
    return None


def kill_rank(directory: Path, rank: int, is_due: Callable[[], bool]) -> None:
    wait_until(is_due)
    pid = find_rank(directory, rank)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@pytest.mark.ranks
def test_a_rank_that_is_killed_midway_is_a_crash_that_keeps_what_was_timed(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    trial: Trial = make_exchange_trial("all_reduce", 2, (8, 1 << 20), repeats=1_000_000, budget_seconds=3600.0)
    file = transfers_file(tmp_path, 1)
    killer = threading.Thread(
        target=kill_rank,
        args=(tmp_path, 1, lambda: file.is_file() and len(file.read_text().splitlines()) > 20),
    )
    killer.start()
    result = launch(launcher, trial, tmp_path)
    killer.join()
    assert result.status is Status.CRASHED
    assert "rank 1 was killed by SIGKILL" in result.reason
    found = read_call_seconds(result)
    assert min(len(times) for times in found.values()) >= 5
    assert list(tmp_path.glob("rank*.csv")) == []
