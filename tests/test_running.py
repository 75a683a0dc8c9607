"""Runs on the same cores at the same time: who is seen, and for how long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from scalelab.errors import RunBusy
from scalelab.launch.fake import FakeLauncher
from scalelab.records.running import (
    KEY_BYTES,
    RUNNING,
    Neighbour,
    Occupation,
    _is_same_process,
    find_registry,
    identify_process,
    read_key,
    read_neighbours,
)
from scalelab.runs.experiment import execute_run, start_run
from scalelab.runs.scheduler import TrialEnded, TrialStarted
from tests.studies.answers import find_caution, make_strong

HOLD = """
import sys
from pathlib import Path
from scalelab.records.running import Occupation
with Occupation(Path(sys.argv[1])).hold():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    found = find_registry()
    assert found == tmp_path / f"scalelab-{os.getuid()}"
    return found


@pytest.fixture
def neighbour(registry: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that measures tmp_path/runs/other."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "runs" / "other")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_run_is_seen_until_its_process_is_killed(
    registry: Path, neighbour: subprocess.Popen[str], tmp_path: Path
) -> None:
    own = Occupation(tmp_path)
    (seen,) = own.find_neighbours()
    assert seen == Neighbour(run=str(tmp_path / "runs" / "other"), pid=neighbour.pid)
    assert str(seen) == f"other in {tmp_path / 'runs'} (process {neighbour.pid})"
    neighbour.send_signal(signal.SIGKILL)
    neighbour.wait()
    assert len(list(registry.iterdir())) == 1
    assert own.find_neighbours() == []
    assert list(registry.iterdir()) == []


def test_a_clock_that_steps_lets_nobody_into_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = start_run(make_strong(), tmp_path / "runs", ["scalelab"])
    with store.claim():
        holder = json.loads((store.path / RUNNING).read_text())
        monkeypatch.setattr("psutil.Process.create_time", lambda _: holder["started"] - 3600.0)
        with pytest.raises(RunBusy, match=f"process {os.getpid()} on "), store.claim():
            raise AssertionError("two processes hold the run")
        assert store.is_running()


def test_a_marker_of_another_boot_or_of_a_reused_number_holds_nothing(tmp_path: Path) -> None:
    store = start_run(make_strong(), tmp_path / "runs", ["scalelab"])
    with store.claim():
        holder = json.loads((store.path / RUNNING).read_text())
    boot, ticks = holder["birth"].split()
    assert identify_process(os.getpid()) == f"{boot} {ticks}"
    for birth in (f"other {ticks}", f"{boot} {int(ticks) - 1}"):
        (store.path / RUNNING).write_text(json.dumps(holder | {"birth": birth}))
        assert not store.is_running()
    (store.path / RUNNING).write_text(json.dumps({name: holder[name] for name in ("pid", "host", "started")}))
    assert store.is_running()  # as 0.1 wrote it


def test_a_run_on_other_cores_is_no_neighbour(
    neighbour: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalelab.records.running.find_cores", lambda: {100_000})
    assert Occupation(tmp_path).find_neighbours() == []


def test_a_file_that_says_nothing_is_no_neighbour(registry: Path, tmp_path: Path) -> None:
    (registry / "1.json").write_text("{")
    with Occupation(tmp_path).hold() as own:
        assert own.find_neighbours() == []
        assert len(list(registry.iterdir())) == 1


def test_a_link_to_a_directory_is_no_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"scalelab-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    assert find_registry() is None


def test_a_registry_that_was_emptied_meanwhile_ends_no_run(registry: Path, tmp_path: Path) -> None:
    with Occupation(tmp_path).hold():
        (file,) = registry.iterdir()
        file.unlink()
    assert list(registry.iterdir()) == []


def test_a_run_says_once_that_another_was_beside_it_and_its_answer_warns(
    neighbour: subprocess.Popen[str], tmp_path: Path
) -> None:
    study = make_strong()
    store = start_run(study, tmp_path / "runs", ["scalelab"])
    told: list[Neighbour] = []

    def listen(event: TrialStarted | TrialEnded) -> None:
        told.extend(event.neighbours if isinstance(event, TrialStarted) else ())

    document = execute_run(store, study, FakeLauncher(lambda _: 0.1), listen)
    assert [one.pid for one in told] == [neighbour.pid]
    assert read_neighbours(store.path) == [str(tmp_path / "runs" / "other")]
    assert find_caution(document, "neighbour").subject == "other"


@pytest.mark.parametrize("has_state_home", [True, False])
def test_a_user_s_key_is_kept_where_state_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_state_home: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state") if has_state_home else "")
    place = tmp_path / "state" if has_state_home else tmp_path / "home" / ".local" / "state"
    assert read_key() is None
    key = read_key(make=True)
    assert key == read_key() == (place / "scalelab" / "key").read_bytes()
    assert key is not None
    assert len(key) == KEY_BYTES
    (place / "scalelab" / "key").write_bytes(key[1:])
    assert read_key() is None


@pytest.mark.parametrize(("seconds", "is_same"), [(0.0, True), (-0.9, True), (0.9, True), (1.0, False), (-1.2, False)])
def test_a_process_is_the_one_that_started_within_a_second(seconds: float, is_same: bool) -> None:
    started = psutil.Process().create_time()
    assert _is_same_process(os.getpid(), round(started) + seconds + (started - round(started))) is is_same
