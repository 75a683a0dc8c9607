"""Ctrl-C, kill -9, a full disk, two at once: nothing that was measured is lost and no process is left."""

from __future__ import annotations

import json
import mmap
import signal
import subprocess
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


def stop(command: subprocess.Popen[str], how: signal.Signals) -> tuple[int, str]:
    """Stop a study that has measured some trials and see that every process of it ends."""
    family = psutil.Process(command.pid).children(recursive=True)
    assert family, "the ranks' server should be running"
    command.send_signal(how)
    _, errors = command.communicate(timeout=30)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, f"left behind: {alive}"
    return command.returncode, errors


def resume_without_repeating(run: Path) -> None:
    """Show what a stopped run has, then measure the rest of it."""
    cwd = run.parent.parent
    before = {trial: (trial / "result.json").stat().st_mtime_ns for trial in run.glob("trials/*") if is_done(trial)}
    assert 2 <= len(before) < NUM_TRIALS
    shown = answer("show", run.name, cwd=cwd)
    assert shown.returncode == 0
    assert "trials have not run yet" in " ".join(shown.stdout.split())

    resumed = answer("resume", run.name, cwd=cwd)
    assert resumed.returncode == 0, resumed.stderr
    assert f"note: {NUM_TRIALS - len(before)} of {NUM_TRIALS} trials to run" in resumed.stderr
    assert resumed.stderr.count("(measured before)") == len(before)
    assert sum(map(is_done, run.glob("trials/*"))) == NUM_TRIALS
    assert all((trial / "result.json").stat().st_mtime_ns == when for trial, when in before.items())


def is_done(trial: Path) -> bool:
    return (trial / "result.json").exists()


def list_states(cwd: Path) -> dict[str, str]:
    lines = map(json.loads, answer("list", "--json", cwd=cwd).stdout.splitlines())
    return {line["name"]: line["state"] for line in lines}


def test_a_run_is_held_while_it_executes_and_resumed_after_an_interrupt(tmp_path: Path) -> None:
    command = start_scalelab(*LONG, "--delay", "20ms", cwd=tmp_path)
    wait_until(lambda: len(finished_trials(tmp_path / "runs")) >= 2)
    refused, states = answer("resume", "last", cwd=tmp_path), list_states(tmp_path)
    code, errors = stop(command, signal.SIGINT)
    assert refused.returncode == 1
    assert f"process {command.pid} on " in refused.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert states == {run.name: "running"}
    assert code == 130
    assert "scalelab resume" in errors
    assert "Traceback" not in errors
    assert list_states(tmp_path) == {run.name: "interrupted"}
    resume_without_repeating(run)
    assert list_states(tmp_path) == {run.name: "complete"}


def test_two_runs_of_the_same_second_are_killed_and_resumed_without_touching_each_other(tmp_path: Path) -> None:
    signals = (signal.SIGTERM, signal.SIGKILL)
    commands = {start_scalelab(*LONG, "--delay", "20ms", cwd=tmp_path): how for how in signals}
    wait_until(lambda: len(list(tmp_path.glob("runs/*/running.json"))) == 2)
    runs = {json.loads(file.read_text())["pid"]: file.parent for file in tmp_path.glob("runs/*/running.json")}
    ends = {}
    for command, how in commands.items():
        run = runs[command.pid]
        wait_until(lambda run=run: sum(map(is_done, run.glob("trials/*"))) >= 2)
        ends[how] = stop(command, how)
    assert {how: code for how, (code, _) in ends.items()} == {signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert "scalelab resume" in ends[signal.SIGTERM][1]
    assert "Traceback" not in ends[signal.SIGTERM][1]
    assert list_states(tmp_path) == {run.name: "interrupted" for run in runs.values()}
    for run in runs.values():
        resume_without_repeating(run)
    assert list_states(tmp_path) == {run.name: "complete" for run in runs.values()}


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
