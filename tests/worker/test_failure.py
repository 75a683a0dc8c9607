"""Errors on a rank are told apart: memory, a lost peer, what cannot work, what broke later."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scalelab.errors import UsageError
from scalelab.records.trial import Cause, Status
from scalelab.worker.failure import Failure, classify, describe, format_own_frames

ALLOCATOR = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
SHAPES = "mat1 and mat2 shapes cannot be multiplied (8x4 and 5x3)"


def fail(error: BaseException, num_steps_done: int = 0, workload: str = "mlp") -> Failure:
    return classify(error, rank=3, num_steps_done=num_steps_done, workload=workload)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(ALLOCATOR),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."),
        RuntimeError("std::bad_alloc"),
        RuntimeError("unable to mmap 4096 bytes from file: Cannot allocate memory (12)"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("num_steps_done", [0, 7])
def test_want_of_memory_is_out_of_memory_at_any_time(error: BaseException, num_steps_done: int) -> None:
    failure = fail(error, num_steps_done)
    assert failure.status is Status.OUT_OF_MEMORY
    assert failure.reason.startswith("rank 3 ran out of memory")
    assert failure.cause is not Cause.LOST_PEER


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(SHAPES),
        RuntimeError("shape '[3, 4]' is invalid for input of size 10"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        RuntimeError("Expected all tensors to be on the same device"),
        ValueError("memory_efficient must be True: out of memory otherwise"),
        KeyError("std::bad_alloc"),
        IndexError("index 512 is out of bounds"),
    ],
    ids=repr,
)
def test_an_error_of_another_sort_is_never_out_of_memory(error: Exception) -> None:
    assert fail(error, 0).status is Status.INVALID
    assert fail(error, 7).status is Status.CRASHED
    assert fail(error, 7).cause is not Cause.LOST_PEER


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("NCCL communicator was aborted"),
        dist.DistNetworkError("failed to recv, got 0 bytes"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5"),
        RuntimeError("Connection reset by peer"),
        RuntimeError("Broken pipe"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("num_steps_done", [0, 7])
def test_a_lost_peer_is_a_crash_that_another_rank_is_to_blame_for(error: Exception, num_steps_done: int) -> None:
    failure = fail(error, num_steps_done)
    assert failure.status is Status.CRASHED
    assert failure.cause is Cause.LOST_PEER
    assert failure.reason.startswith("rank 3 lost another rank: ")


@pytest.mark.parametrize("error", [ConnectionRefusedError("no data server"), ConnectionResetError(), TimeoutError()])
def test_a_connection_of_the_users_own_that_fails_is_no_lost_peer(error: Exception) -> None:
    failure = fail(error, 0)
    assert failure.status is Status.INVALID
    assert failure.cause is not Cause.LOST_PEER


def test_an_error_in_the_first_step_would_come_again_and_a_later_one_need_not() -> None:
    assert fail(ValueError("x"), 0) == Failure(status=Status.INVALID, cause=Cause.RAISED, reason="ValueError: x")
    reason = "rank 3 raised an error after 1 steps: ValueError: x"
    later = Failure(status=Status.CRASHED, cause=Cause.RAISED, reason=reason)
    assert fail(ValueError("x"), 1) == later


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError("\n\n  first  \nsecond"), "ValueError: first"),
        (ValueError(), "ValueError"),
        (UsageError("--dim must be at least 1, got 0"), "--dim must be at least 1, got 0"),
    ],
)
def test_an_error_is_described_in_one_line(error: Exception, words: str) -> None:
    assert describe(error) == words


def test_a_message_of_megabytes_is_cut(tmp_path: Path) -> None:
    assert describe(ValueError("y" * 10_000)) == f"ValueError: {'y' * 2000} … (10000 letters in all)"
    assert describe(ValueError("y" * 2000)) == f"ValueError: {'y' * 2000}"
    error = raise_from(tmp_path / "own.py", "raise ValueError('y' * 10_000_000)\n")
    assert len(format_own_frames(error, f"{tmp_path}/own.py:build")) < 3000


def raise_from(path: Path, text: str) -> BaseException:
    """The error that running a file raises, with its traceback."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the file raises
        runpy.run_path(str(path))
    frames = caught.value.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return caught.value.with_traceback(frames)


def test_a_built_in_workload_has_no_frames_of_the_users(tmp_path: Path) -> None:
    assert format_own_frames(raise_from(tmp_path / "own.py", "1 / 0\n"), "mlp") == ""


def test_only_frames_of_the_users_own_code_are_shown(tmp_path: Path) -> None:
    text = "def loss():\n    return 1 / 0\n\nloss()\n"
    shown = format_own_frames(raise_from(tmp_path / "own.py", text), f"{tmp_path}/own.py:build")
    assert shown.splitlines()[0] == "Traceback (most recent call last):"
    assert shown.count("  File ") == 2
    assert "runpy" not in shown
    assert "return 1 / 0" in shown
    assert shown.endswith("ZeroDivisionError: division by zero")


def test_frames_of_libraries_are_counted(tmp_path: Path) -> None:
    text = "import json\njson.loads('{')\n"
    shown = format_own_frames(raise_from(tmp_path / "own.py", text), f"{tmp_path}/own.py:build")
    assert shown.count("  File ") == 1
    assert "… 3 frames outside your code" in shown


def test_code_in_another_directory_that_is_not_installed_is_the_users_too(tmp_path: Path) -> None:
    error = raise_from(tmp_path / "elsewhere" / "model.py", "1 / 0\n")
    assert "elsewhere/model.py" in format_own_frames(error, f"{tmp_path}/mine/own.py:build")


def test_unused_parameters_are_named_with_the_flag_that_cures_them() -> None:
    numbers = "Parameter indices which did not receive grad for rank 3: 1 2 3 4 5"
    error = RuntimeError(f"Expected to have finished reduction in the prior iteration.\n{numbers}")
    used = nn.Linear(2, 2, bias=False)
    model = nn.Module()
    model.module = nn.Sequential(used, nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    found = classify(error, rank=3, num_steps_done=1, workload="own.py:build", model=model)
    assert found.cause is Cause.UNUSED_PARAMETERS
    assert found.reason == (
        "parameters 1.weight, 1.bias, 2.weight and 2 more get no gradient: add --find-unused-parameters, or freeze them"
        " (requires_grad_(False))"
    )


def test_a_function_of_tensors_as_the_loss_is_told_what_to_write() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError) as caught:
        torch.dot(model, torch.ones(2))  # type: ignore[arg-type]
    found = classify(caught.value, rank=0, num_steps_done=0, workload="own.py:build", model=model)
    assert found.reason == (
        "a function of tensors got a Linear: a loss is called as loss(model, batch): return lambda model, batch:"
        " f(model(batch[0]), batch[1])"
    )


def test_another_wrong_argument_keeps_torchs_words() -> None:
    with pytest.raises(TypeError) as caught:
        torch.dot(None, torch.ones(2))  # type: ignore[arg-type]
    found = classify(caught.value, rank=0, num_steps_done=0, workload="own.py:build", model=nn.Linear(2, 2))
    assert found.reason.startswith("TypeError: dot(): argument")


def test_packages_installed_below_the_users_directory_are_not_the_users_own(tmp_path: Path) -> None:
    error = raise_from(tmp_path / ".venv" / "lib" / "site-packages" / "other.py", "1 / 0\n")
    assert format_own_frames(error, f"{tmp_path}/own.py:build") == ""


def test_want_of_memory_needs_no_traceback_and_an_own_error_has_one(tmp_path: Path) -> None:
    workload = f"{tmp_path}/own.py:build"
    assert fail(raise_from(tmp_path / "own.py", "raise MemoryError\n"), workload=workload).traceback == ""
    assert "own.py" in fail(raise_from(tmp_path / "own.py", "raise KeyError\n"), workload=workload).traceback
