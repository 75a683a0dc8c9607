"""Ctrl-C, kill -9, a full disk, two at once: nothing that was measured is lost and no process is left."""

from __future__ import annotations

import mmap
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cli.commands import QUICK, answer, finished_trials, start_scalelab, wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("shared_ranks")]

STUDY = ["run", "strong-scaling", *QUICK, "--profile-steps", "0", "--ranks", "1", "2", "--rounds"]
"""Three trials in every round; how many rounds is left open."""
LONG = [*STUDY, "4"]
NUM_TRIALS = 12
"""Of the long one."""


def stop_after(num_trials: int, how: signal.Signals, cwd: Path) -> tuple[int, str]:
    """Start a long study, stop it when some trials are done, and see that every process of it ends."""
    command = start_scalelab(*LONG, cwd=cwd)
    wait_until(lambda: len(finished_trials(cwd / "runs")) >= num_trials)
    family = psutil.Process(command.pid).children(recursive=True)
    assert family, "the ranks' server should be running"
    command.send_signal(how)
    _, errors = command.communicate(timeout=30)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, f"left behind: {alive}"
    return command.returncode, errors


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_stopped_run_is_resumed_without_repeating_a_trial(tmp_path: Path, how: signal.Signals, code: int) -> None:
    returncode, errors = stop_after(2, how, tmp_path)
    assert returncode == code
    if how is not signal.SIGKILL:
        assert "scalelab resume" in errors
        assert "Traceback" not in errors
    assert "interrupted" in answer("list", cwd=tmp_path).stdout
    before = {trial: (trial / "result.json").stat().st_mtime_ns for trial in finished_trials(tmp_path / "runs")}
    assert 2 <= len(before) < NUM_TRIALS
    shown = answer("show", cwd=tmp_path)
    assert shown.returncode == 0
    assert "trials have not run yet" in " ".join(shown.stdout.split())

    resumed = answer("resume", "last", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr.count("(measured before)") == len(before)
    assert len(finished_trials(tmp_path / "runs")) == NUM_TRIALS
    assert all((trial / "result.json").stat().st_mtime_ns == when for trial, when in before.items())
    assert "complete" in answer("list", cwd=tmp_path).stdout


def test_two_runs_started_in_the_same_second_do_not_touch_each_other(tmp_path: Path) -> None:
    commands = [start_scalelab(*STUDY, "1", cwd=tmp_path) for _ in range(2)]
    outputs = [command.communicate(timeout=120) for command in commands]
    assert [command.returncode for command in commands] == [0, 0], outputs
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 2
    assert all(len(list(run.glob("trials/*/result.json"))) == 3 for run in runs)


def test_a_run_that_is_being_executed_cannot_be_resumed(tmp_path: Path) -> None:
    # Long enough to outlive the two commands on any machine; it is interrupted after them.
    command = start_scalelab(*STUDY, "200", cwd=tmp_path)
    try:
        wait_until(lambda: bool(finished_trials(tmp_path / "runs")))
        refused = answer("resume", "last", cwd=tmp_path)
        listed = answer("list", cwd=tmp_path)
    finally:
        command.send_signal(signal.SIGINT)
        command.communicate(timeout=30)
    assert refused.returncode == 1
    assert f"process {command.pid} on " in refused.stderr
    assert "running" in listed.stdout


def test_a_full_disk_ends_the_run_and_resume_goes_on_when_there_is_space(
    tmp_path: Path, make_small_disk: Callable[[int], Path]
) -> None:
    # In pages: three for the run, one for each of 12 planned trials, three for the ranks' files while they run, and
    # two for each trial that is done. There is room for about four of them.
    num_pages, num_free = 100, 3 + 12 + 3 + 4 * 2
    small_disk = make_small_disk(num_pages * mmap.PAGESIZE)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes((num_pages - num_free) * mmap.PAGESIZE))
    full = answer(*STUDY, "4", "--runs-dir", small_disk / "runs", cwd=tmp_path)
    assert full.returncode == 1, full.stdout
    assert "resume" in full.stderr.splitlines()[-1]
    assert "Traceback" not in full.stderr
    kept = finished_trials(small_disk / "runs")
    assert 0 < len(kept) < 12

    ballast.unlink()
    resumed = answer("resume", "last", "--runs-dir", small_disk / "runs", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr.count("(measured before)") == len(kept)
