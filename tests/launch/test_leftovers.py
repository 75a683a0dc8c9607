"""What ranks and killed commands leave: daemons, sockets of loader workers, temporary directories."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from scalelab.launch.agreement import EXIT_FAILED, ended_file, report_storage
from scalelab.launch.local import LocalLauncher
from scalelab.records.files import read_json
from scalelab.records.running import HELD, RANKS_VARIABLE, hold_directory, remove_leftovers
from scalelab.records.trial import Status
from tests.cli.commands import answer, make_environment, wait_until
from tests.worker.trials import launch, make_trial, write_workload

DAEMON = """
import subprocess
from pathlib import Path
from multiprocessing.util import get_temp_dir
place = Path(__file__).parent
(place / "tempdir").write_text(get_temp_dir())
if rank == 0 and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        (place / "pid").write_text(str(child.pid))
    os._exit(0)
while not (place / "pid").exists():
    time.sleep(0.01)
"""
"""A double fork, which leaves a process in a session of its own."""

HOLD = """
import os, subprocess, sys
from scalelab.records.running import RANKS_VARIABLE, hold_directory
with hold_directory("ranks") as path:
    child = subprocess.Popen(["sleep", "300"], env=os.environ | {RANKS_VARIABLE: str(path)}, start_new_session=True)
    print(path, child.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_a_held_directory_is_gone_afterwards_and_kept_while_it_is_held(temporary: Path) -> None:
    with hold_directory("pdf") as path:
        assert path.parent == temporary
        assert path.name.startswith(f"{HELD}pdf-")
        (path / "file").touch()
        assert remove_leftovers() == []
        assert (path / "file").exists()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_command_left_is_removed_and_its_processes_end(temporary: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    ) as command:  # fmt: skip
        assert command.stdout is not None
        path, pid = command.stdout.readline().split()
        assert remove_leftovers() == []
        command.send_signal(signal.SIGKILL)
    orphan = psutil.Process(int(pid))
    assert orphan.environ()[RANKS_VARIABLE] == path
    (temporary / "others").mkdir()
    done = answer("doctor", "--clean", cwd=tmp_path)
    assert done.stdout.splitlines()[:2] == [f"removed process {pid}", f"removed {path}"]
    wait_until(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE)
    assert [file.name for file in temporary.iterdir()] == ["others"]
    assert answer("doctor", "--clean", cwd=tmp_path).stdout == "Nothing was left\n"


def test_a_directory_that_another_user_or_a_link_has_is_left_alone(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (temporary / f"{HELD}pdf-link").symlink_to(tmp_path / "precious")
    assert remove_leftovers() == []
    assert (tmp_path / "precious").is_dir()


@pytest.mark.ranks
def test_a_daemon_of_a_rank_ends_with_its_trial_and_is_named(launcher: LocalLauncher, tmp_path: Path) -> None:
    result = launch(launcher, make_trial(workload=write_workload(tmp_path, DAEMON)), tmp_path / "trial")
    assert result.status is Status.COMPLETED, result.reason
    assert read_json(ended_file(tmp_path / "trial")) == {"processes": ["sleep"]}
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert Path((tmp_path / "tempdir").read_text()).name.startswith(f"{HELD}ranks-")


@pytest.mark.parametrize(
    ("has_run", "words"), [(True, "'scalelab resume' continues from here"), (False, "measure again")]
)
def test_a_directory_that_its_workload_deleted_is_named(has_run: bool, words: str, tmp_path: Path) -> None:
    directory = tmp_path / "run" / "trials" / "single-1-r1"
    directory.mkdir(parents=True)
    assert "free some space" in str(report_storage(directory))
    directory.rmdir()
    if has_run:
        (tmp_path / "run" / "run.json").touch()
    assert str(report_storage(directory)) == f"{directory} was deleted while a rank was writing to it: {words}"


def test_a_server_that_still_imports_ends_with_its_parent(tmp_path: Path) -> None:
    """Its parent was killed while torch, or a library that takes longer, was being imported."""
    (tmp_path / "torch.py").write_text("print('loading', flush=True)\nimport time\ntime.sleep(1000)\n")
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "scalelab.worker.forkserver", "1"],
        env=make_environment(PYTHONPATH=str(tmp_path)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == "loading\n"
        server.stdin.close()
        assert server.wait(timeout=60) == EXIT_FAILED
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
