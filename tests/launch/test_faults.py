"""What can go wrong with real ranks, and what the result says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from scalelab.errors import StorageFull
from scalelab.launch.local import LocalLauncher
from scalelab.records.trial import Status, StepKind, StepPlan
from tests.worker.trials import launch, make_trial, write_step_workload, write_workload

pytestmark = pytest.mark.ranks


def test_a_killed_rank_is_a_crash_that_names_it_and_keeps_the_samples(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_step_workload(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", rank=1, step=4)
    result = launch(launcher, make_trial(workload=spec), tmp_path / "t")
    assert result.status is Status.CRASHED
    assert "rank 1 was killed by SIGKILL" in result.reason
    # Blocks are written when they end: lead-in and clean steps were complete, the block of the fifth step was not.
    assert {s.step for s in result.samples if s.rank == 1} == {0, 1, 2, 3}
    assert launch(launcher, make_trial(), tmp_path / "u").status is Status.COMPLETED


def test_a_rank_that_hangs_times_out_with_every_stack_in_the_logs(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_step_workload(tmp_path, "time.sleep(3600)", rank=1, step=2)
    result = launch(launcher, make_trial(workload=spec, timeout_seconds=9.0), tmp_path / "t")
    assert result.status is Status.TIMED_OUT
    assert "not finished after 9 s" in result.reason
    assert "rank 0 waits in all_reduce" in result.reason
    assert "which rank 1 has not called" in result.reason
    stuck, waiting = ((tmp_path / f"t/rank{rank}.log").read_text() for rank in (1, 0))
    assert "own.py" in stuck
    assert "in endless" in stuck
    assert "backward" in waiting


def test_a_rank_out_of_memory_is_told_from_every_other_failure(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_step_workload(tmp_path, "hoard = torch.ones(400_000_000)", rank=1, step=3)
    trial = make_trial(workload=spec, memory_limit_bytes=500_000_000)
    result = launch(launcher, trial, tmp_path / "t")
    assert result.status is Status.OUT_OF_MEMORY, result.reason
    assert result.reason.startswith("rank 1 ran out of memory")
    assert launch(launcher, make_trial(workload=spec), tmp_path / "u").status is Status.COMPLETED


def test_a_model_too_large_for_its_limit_is_out_of_memory(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = make_trial(options={"dim": 4096, "depth": 4}, memory_limit_bytes=300_000_000)
    assert launch(launcher, trial, tmp_path).status is Status.OUT_OF_MEMORY


def test_a_model_that_does_not_fit_its_data_is_invalid_with_the_users_own_frames(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    spec = write_workload(
        tmp_path, "model = nn.Linear(5, 3)\ndef loss(model, batch):\n    return model(batch[0]).sum()"
    )
    result = launch(launcher, make_trial(workload=spec), tmp_path / "t")
    assert result.status is Status.INVALID
    assert "shapes cannot be multiplied" in result.reason
    lines = result.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "own.py" in lines[1]
    assert "return model(batch[0]).sum()" in lines[2]
    assert "scalelab" not in result.traceback


def test_an_error_in_build_is_the_users_own_traceback(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_workload(tmp_path, "nothing_of_the_sort")
    result = launch(launcher, make_trial(workload=spec), tmp_path / "t")
    assert result.status is Status.INVALID
    assert result.reason == "NameError: name 'nothing_of_the_sort' is not defined"
    assert len(result.traceback.splitlines()) <= 5


def test_an_error_after_the_first_step_is_a_crash(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_step_workload(tmp_path, "raise ValueError('a bad sample')", rank=0, step=5)
    result = launch(launcher, make_trial(workload=spec), tmp_path / "t")
    assert result.status is Status.CRASHED
    assert "rank 0 raised an error" in result.reason
    assert "ValueError: a bad sample" in result.reason


def test_batches_that_end_are_explained(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_workload(tmp_path, "batches = (batch for batch in batches)")
    result = launch(launcher, make_trial(workload=spec), tmp_path / "t")
    assert "infinite generator" in result.reason


def test_a_batch_of_the_wrong_size_is_invalid(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_workload(tmp_path, "batches = [(torch.ones(7, 4), torch.zeros(7, 3))]")
    result = launch(launcher, make_trial(workload=spec), tmp_path / "t")
    assert result.status is Status.INVALID
    assert "a batch of 7 samples" in result.reason
    assert 'add "batch_dim": 1' in result.reason  # its second dimension has the wanted size


def test_a_loss_that_is_not_finite_is_kept_and_named(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_workload(tmp_path, "def loss(model, batch):\n    return (model(batch[0]).sum() * float('nan')).sum()")
    result = launch(launcher, make_trial(workload=spec), tmp_path / "t")
    assert result.status is Status.COMPLETED
    bad = result.first_non_finite_loss
    assert bad is not None
    assert (bad.rank, bad.step) == (0, 0)


def test_processes_that_a_rank_started_end_with_it(launcher: LocalLauncher, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    spec = write_workload(
        tmp_path,
        f"""
        if rank == 0:
            import subprocess
            child = subprocess.Popen(["sleep", "3600"])
            open({str(pid_file)!r}, "w").write(str(child.pid))
        """,
    )
    assert launch(launcher, make_trial(workload=spec), tmp_path / "t").status is Status.COMPLETED
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid_file.read_text())).wait(timeout=10)


def test_a_killed_server_kills_its_ranks_and_the_next_trial_starts_another(tmp_path: Path) -> None:
    with LocalLauncher() as own:
        spec = write_step_workload(tmp_path, "os.kill(os.getppid(), signal.SIGKILL)", rank=0, step=3)
        result = launch(own, make_trial(workload=spec), tmp_path / "t")
        assert result.status is Status.CRASHED
        assert "the process that started rank" in result.reason
        assert launch(own, make_trial(), tmp_path / "u").status is Status.COMPLETED


def test_a_full_disk_is_no_failure_of_the_trial(
    launcher: LocalLauncher, tmp_path: Path, make_small_disk: Callable[[int], Path]
) -> None:
    full_disk = make_small_disk(256_000)
    spec = write_workload(
        tmp_path,
        f"""
        try:
            with open({str(full_disk / "ballast")!r} + str(rank), "wb", buffering=0) as ballast:
                while True:
                    ballast.write(b"x" * 4096)
        except OSError:
            pass
        """,
    )
    with pytest.raises(StorageFull, match="resume"):
        launch(launcher, make_trial(workload=spec), full_disk / "t")
    assert launch(launcher, make_trial(), tmp_path / "u").step_seconds(StepKind.CLEAN)


def test_the_comm_free_instrument_never_runs_a_trial_out_of_memory(launcher: LocalLauncher, tmp_path: Path) -> None:
    plan = StepPlan(lead_in_steps=2, clean_steps=2, phase_steps=0, comm_free_steps=2)
    trial = make_trial(options={"dim": 2048, "depth": 4}, memory_limit_bytes=530_000_000, plan=plan)
    result = launch(launcher, trial, tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    assert result.step_seconds(StepKind.CLEAN)
    assert not result.step_seconds(StepKind.COMM_FREE)


def test_a_parameter_without_a_gradient_is_invalid_under_ddp(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_workload(
        tmp_path, "model.unused = nn.Linear(2, 2)\nloss = lambda model, batch: model(batch[0]).square().mean()"
    )
    result = launch(launcher, make_trial(workload=spec), tmp_path / "t")
    assert result.status is Status.INVALID
    assert "get no gradient: add --find-unused-parameters" in result.reason


def test_a_file_that_exits_is_invalid(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_workload(tmp_path, "raise SystemExit(2)")
    result = launch(launcher, make_trial(workload=spec), tmp_path / "t")
    assert result.status is Status.INVALID
    assert "SystemExit: 2" in result.reason


def test_a_time_limit_shorter_than_a_launch_is_a_result(launcher: LocalLauncher, tmp_path: Path) -> None:
    assert launch(launcher, make_trial(timeout_seconds=0.001), tmp_path).status is Status.TIMED_OUT


def test_an_error_in_a_loaders_worker_is_told_in_its_own_words(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_workload(
        tmp_path,
        """
        class Broken(torch.utils.data.Dataset):
            def __len__(self):
                return 64
            def __getitem__(self, index):
                raise ValueError("bad record 17")
        batches = torch.utils.data.DataLoader(Broken(), batch_size=batch_size, num_workers=1)
        """,
    )
    result = launch(launcher, make_trial(workload=spec), tmp_path / "t")
    assert result.status is Status.INVALID
    assert "ValueError: bad record 17" in result.reason
