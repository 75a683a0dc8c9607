"""What the launcher of a step makes of the words that ranks leave, and how a rank gets to leave its last one."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import RankUnknown
from scalelab.launch import stepped, supervisor
from scalelab.launch.agreement import end_file, loads_file, place_file
from scalelab.launch.outcome import Blame, find_cause
from scalelab.launch.stepped import StepWatch
from scalelab.records.files import write_json
from scalelab.records.observations import DeviceLoad, RankReport
from scalelab.records.trial import Status, TrialResult, to_builtins
from tests.worker.trials import make_trial

STOP_TWICE = """
import os, signal, sys
from scalelab.launch import supervisor
for number in supervisor.STOPPING:
    signal.signal(number, supervisor._stop)
try:
    os.kill(os.getpid(), signal.SIGTERM)
except supervisor.Stopped as stop:
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
    return StepWatch(make_trial(), directory, "l", [process])


def test_want_of_memory_is_told_by_the_ranks_own_nodes(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    watch = make_watch(tmp_path, sleeper)
    leave_end(tmp_path, 0)
    assert not watch.has_oom_kill()
    leave_end(tmp_path, 1, launch="earlier", has_oom_kill=True)
    assert not watch.has_oom_kill()
    leave_end(tmp_path, 1, has_oom_kill=True)
    assert watch.has_oom_kill()


def test_how_busy_ranks_were_is_told_by_their_own_nodes(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    watch = make_watch(tmp_path, sleeper)
    assert watch.read_loads() == ()
    load = DeviceLoad(seconds=1.0, device="rank 1", busy=0.5, interval_seconds=0.05)
    write_json(loads_file(tmp_path, 0), {"launch": "earlier", "loads": [to_builtins(load)]})
    write_json(loads_file(tmp_path, 1), {"launch": "l", "loads": [to_builtins(load)]})
    assert watch.read_loads() == (load,)


@pytest.mark.parametrize(
    ("variables", "rank"),
    [({"PMIX_RANK": "1"}, 1), ({"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1"}, 1)],
)
def test_a_launcher_that_says_no_number_of_ranks_has_started_as_many_as_the_trial_has(
    variables: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    member = supervisor.find_member(make_trial())
    assert (member.rank, member.num_ranks) == (rank, 2)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(RankUnknown, match="PMI_RANK"):
        supervisor.find_member(make_trial())


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


def judge_silence(
    directory: Path, process: subprocess.Popen[bytes], first: dict[str, Any], failure: dict[str, object] | None
) -> Blame:
    """What is made of two ranks that had begun on two nodes, the second of which never says a word again."""
    watch = make_watch(directory, process)
    watch.had_to_end = True
    for rank, node in enumerate(("a", "b")):
        write_json(place_file(directory, rank), {"launch": "l", "node": node})
    leave_end(directory, 0, **first)
    ends = watch.read_ends("srun ended with -15")
    assert ends is not None
    files = [{"failure": failure} if failure else None, None]
    cause = find_cause(watch.trial, ends, files, directory, has_oom_kill=False)
    assert cause is not None
    return cause


def test_a_node_that_dies_unnoticed_by_the_launcher_is_a_crash_with_its_name(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepped, "LAST_SECONDS", 0.0)
    died = "rank 1 on b exited without a message, as when a node dies; srun ended with -15"
    late = judge_silence(tmp_path, sleeper, {"code": None, "is_timed_out": True}, None)
    limit = f"{make_trial().timeout_seconds:g} s"
    assert (late.status, late.reason) == (Status.CRASHED, f"{died}; rank 0 waited for {limit}")
    words: dict[str, object] = {"status": "crashed", "reason": "Connection closed by peer", "traceback": ""}
    lost = judge_silence(tmp_path, sleeper, {"code": 1}, words | {"cause": "lost_peer"})
    assert lost.reason == died
    own = judge_silence(tmp_path, sleeper, {"code": 1}, words | {"cause": "raised"})
    assert own.reason == "Connection closed by peer", "an error of its own comes before a silence"


def test_ranks_whose_time_is_up_may_all_write_their_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepped, "GRACE_SECONDS", 0.0)
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        watch = StepWatch(make_trial(), tmp_path, "l", [process])
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
    assert signal.SIGHUP in supervisor.STOPPING


def test_the_load_of_a_login_node_is_not_that_of_the_nodes() -> None:
    def measure(*hosts: str) -> float | None:
        ranks = tuple(RankReport(rank=rank, host=host) for rank, host in enumerate(hosts))
        result = TrialResult(trial=make_trial(), status=Status.COMPLETED, ranks=ranks, load_before=7.0)
        return stepped.forget_this_host(result).load_before

    assert measure("a", "b") is None
    assert measure(socket.gethostname(), "b") == 7.0
