"""What the launcher of a step makes of the words that ranks leave, and how a rank gets to leave its last one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scalelab.files import write_json
from scalelab.measure import cluster_rank
from scalelab.measure.agreement import end_file, place_file
from scalelab.measure.launchers import stepped
from scalelab.measure.launchers.stepped import StepWatch
from tests.measure.trials import make_trial

STOP_TWICE = """
import os, signal, sys
from scalelab.measure import cluster_rank
for number in cluster_rank.STOPPING:
    signal.signal(number, cluster_rank._stop)
try:
    os.kill(os.getpid(), signal.SIGTERM)
except cluster_rank.Stopped as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    print("ended by", stop.args[0])
"""


def leave_end(directory: Path, rank: int, launch: str = "l", **words: object) -> None:
    defaults = {"code": 0, "signal": None, "is_timed_out": False, "has_oom_kill": False, "node": "a"}
    write_json(end_file(directory, rank), defaults | {"launch": launch} | words)


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "pass"])


def make_watch(directory: Path, process: subprocess.Popen[bytes]) -> StepWatch:
    process.wait()
    return StepWatch(make_trial(), directory, "l", process)


def test_want_of_memory_is_told_by_the_ranks_own_nodes(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    watch = make_watch(tmp_path, sleeper)
    leave_end(tmp_path, 0)
    assert not watch.has_oom_kill()
    leave_end(tmp_path, 1, launch="earlier", has_oom_kill=True)
    assert not watch.has_oom_kill()
    leave_end(tmp_path, 1, has_oom_kill=True)
    assert watch.has_oom_kill()


def test_words_that_a_shared_file_system_shows_late_are_waited_for(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = make_watch(tmp_path, sleeper)
    for rank in (0, 1):
        write_json(place_file(tmp_path, rank), {"launch": "l", "node": "a"})
    leave_end(tmp_path, 0)

    class Clock:
        perf_counter = staticmethod(time.perf_counter)

        @staticmethod
        def sleep(_: float) -> None:
            leave_end(tmp_path, 1)

    monkeypatch.setattr(stepped, "time", Clock)
    ends = watch.read_ends("it said nothing")
    assert ends is not None
    assert [end.code for end in ends] == [0, 0]


def test_ranks_whose_time_is_up_may_all_write_their_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepped, "GRACE_SECONDS", 0.0)
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        watch = StepWatch(make_trial(), tmp_path, "l", process)
        leave_end(tmp_path, 0, code=None, is_timed_out=True)
        looks = iter(range(3))

        def look(_: float) -> None:
            if next(looks, None) is None:
                process.communicate()

        monkeypatch.setattr(watch, "_sleep", look)
        watch.wait(time.perf_counter() + 60)
        assert not watch.had_to_end


def test_a_second_signal_does_not_interrupt_the_last_word() -> None:
    done = subprocess.run([sys.executable, "-c", STOP_TWICE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"ended by {int(signal.SIGTERM)}\n"), done.stderr
    assert signal.SIGHUP in cluster_rank.STOPPING
