"""`LocalLauncher`: the ranks of a trial as processes of this machine, forked from a server that has torch loaded.

The launcher owns the forkserver process and, through process groups, everything a rank starts. A trial ends when all
its ranks have ended: by themselves, because one failed and the others were given a moment to say what they saw, or
because the time limit passed, after every rank has written its stacks into its log.

The parent's end of the forkserver: start it, ask it for ranks, read its events.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scalelab.errors import LaunchFailed
from scalelab.launch.agreement import (
    DUMP_SIGNAL,
    EXIT_STORAGE,
    ended_file,
    kill_group,
    log_file,
    remove_scratch,
    report_storage,
    write_words,
)
from scalelab.launch.launcher import Launched, check_open_files, check_torch, is_watched, read_conditions
from scalelab.launch.outcome import RankEnd, conclude_trial, has_stack_dump
from scalelab.launch.ranks.placement import bind_ranks
from scalelab.launch.utilization import watch_devices
from scalelab.records.environment import usable_cores
from scalelab.records.files import storage_errors
from scalelab.records.observations import DeviceLoad
from scalelab.records.running import RANKS_VARIABLE, hold_directory, remove_leftovers
from scalelab.records.tasks import Script
from scalelab.records.trial import Trial, TrialResult

START_SECONDS = 120.0
"""How long importing torch may take; on a cold network file system it is minutes."""


class ServerProcess:
    """A running `scalelab.worker.forkserver`, in its own session: Ctrl-C reaches only the parent."""

    def __init__(self, python: str) -> None:
        remove_leftovers()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the process
        self._held = ExitStack()
        directory = self._held.enter_context(hold_directory("ranks"))
        self._events, events_write = os.pipe()
        try:
            # -P: a file in the working directory must not take the place of a module that the server imports.
            self._process = subprocess.Popen(
                [python, "-P", "-m", "scalelab.worker.forkserver", str(events_write)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(events_write,),
                start_new_session=True,
                env=os.environ | {RANKS_VARIABLE: str(directory)},
            )
        finally:
            os.close(events_write)
        self._pending = b""
        try:
            ready = self._next_line(START_SECONDS)
        except BaseException:
            self.close()
            raise
        if ready is None or "ready" not in ready:
            words = self._read_log() or "it ended without a message"
            if ready is None and self.is_alive():
                words = f"torch was not loaded in {START_SECONDS:g} s: let other programs end, and try again"
            self.close()
            raise LaunchFailed(f"the fork server did not start: {words}")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End a server that does not respond; the kernel kills its ranks with it."""
        self._process.kill()
        self._process.wait()

    def launch_ranks(self, request: dict[str, Any], seconds: float = START_SECONDS) -> list[int]:
        """Fork the ranks of one trial and give their process ids."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"launch": request}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise LaunchFailed(f"the fork server died: {self._read_log()}") from error
        answer = self._next_line(seconds)
        if answer is None:
            self.kill()
            words = self._read_log() or "it may be stopped; scalelab resume starts a new one"
            raise LaunchFailed(f"the fork server does not respond: {words}")
        if "refused" in answer:
            raise LaunchFailed(f"{answer['refused']}: use another --port, or 0 for any free one")
        return list(answer["launched"]["pids"])

    def next_event(self, seconds: float) -> dict[str, Any] | None:
        """The next rank that ended, or None when that much time has passed or the server has died."""
        event = self._next_line(max(0.0, seconds))
        return None if event is None else event["exited"]

    def close(self) -> None:
        """Close the pipe; the server then kills the ranks that are left and ends."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._events)
        self._log.close()
        self._held.close()

    def _next_line(self, seconds: float) -> dict[str, Any] | None:
        deadline = time.perf_counter() + seconds
        while b"\n" not in self._pending:
            remaining = max(0.0, deadline - time.perf_counter())
            ready, _, _ = select.select([self._events], [], [], remaining)
            if not ready:
                return None
            received = os.read(self._events, 65536)
            if not received:
                self._process.wait()
                return None
            self._pending += received
        line, _, self._pending = self._pending.partition(b"\n")
        return dict(json.loads(line))

    def _read_log(self) -> str:
        """The last words of the server, in one line."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1] if lines else ""


GRACE_SECONDS = 1.0
"""How long other ranks may continue after one failed, so they can write what they saw."""
ANSWER_SECONDS = 5.0
"""How long the forkserver may take to say that ranks have ended that were killed."""
DUMP_SECONDS = 3.0
"""How long a rank may take to write its stacks after the time limit."""


class LocalLauncher:
    """Runs trials on this machine. Close it, or use it as a context manager, to end the forkserver."""

    def __init__(self, python: str = "") -> None:
        self._server: ServerProcess | None = None
        self._ended: list[str] = []
        """What outlived the ranks of the last trial."""
        self._python = python
        """Another interpreter for the ranks, which has torch and this scalelab."""

    @classmethod
    def open(cls, _: Launched) -> LocalLauncher:
        return cls()

    def __enter__(self) -> LocalLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Reject at once where no trial could be launched, before a run is made."""
        check_open_files()
        if not self._python:
            check_torch()

    def start(self) -> None:
        """Load torch now; otherwise the first trial does."""
        self._ready_server()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        """Run the trial in fresh processes; whatever interrupts this call, no rank outlives it."""
        server = self._ready_server()
        with storage_errors(directory):
            clear_previous(trial, directory)
        conditions = read_conditions()
        request = _make_request(trial, directory)
        self._ended = []
        pids = server.launch_ranks(request, min(START_SECONDS, max(trial.timeout_seconds, ANSWER_SECONDS)))
        ends: dict[int, RankEnd] = {}
        try:
            with ExitStack() as stack:
                loads: list[DeviceLoad] = []
                if is_watched(trial):
                    loads = stack.enter_context(watch_devices(trial, directory, pids, request["cores"]))
                self._wait(server, pids, ends, conditions.launched + trial.timeout_seconds, directory)
        except BaseException:
            self.close()
            raise
        measured = conditions.compare()
        if self._ended:
            write_words(ended_file(directory), {"processes": self._ended})
        if any(end.code == EXIT_STORAGE for end in ends.values()):
            raise report_storage(directory)
        return conclude_trial(
            trial,
            directory,
            [ends[pid] for pid in pids],
            loads=tuple(loads),
            **measured,
        )

    def _ready_server(self) -> ServerProcess:
        if self._server is None or not self._server.is_alive():
            self.close()
            self.check()
            self._server = ServerProcess(self._python or sys.executable)
        return self._server

    def _wait(
        self,
        server: ServerProcess,
        pids: list[int],
        ends: dict[int, RankEnd],
        deadline: float,
        directory: Path,
    ) -> None:
        """Collect the end of every rank, ending them ourselves when one has failed or time is up."""
        is_ending, is_timed_out = False, False
        killed: set[int] = set()
        while len(ends) < len(pids):
            event = server.next_event(deadline - time.perf_counter())
            if event is None and not server.is_alive():
                alive = [pid for pid in pids if pid not in ends]
                ends.update(
                    {pid: RankEnd(code=None, was_killed=pid in killed, is_timed_out=is_timed_out) for pid in alive}
                )
                self.close()
            elif event is None and killed:
                server.kill()
            elif event is None:
                alive = [pid for pid in pids if pid not in ends]
                if not is_ending:
                    is_timed_out = True
                    dump_stacks(alive, [log_file(directory, pids.index(pid)) for pid in alive])
                end_ranks(alive)
                killed.update(alive)
                is_ending, deadline = True, time.perf_counter() + ANSWER_SECONDS
            else:
                pid, code = event["pid"], event["code"]
                self._ended += event["ended"]
                ends[pid] = RankEnd(code=code, was_killed=pid in killed, is_timed_out=is_timed_out)
                if code != 0 and not is_ending:
                    is_ending, deadline = True, min(deadline, time.perf_counter() + GRACE_SECONDS)


def _make_request(trial: Trial, directory: Path) -> dict[str, Any]:
    return {
        "directory": str(directory.resolve()),
        "cores": bind_ranks(trial, trial.num_processes, usable_cores()),
        "port": trial.port,
        "needs_rendezvous": trial.joins_group,
        "is_fresh": isinstance(trial.task, Script) and trial.task.is_fresh,
    }


def clear_previous(trial: Trial, directory: Path) -> None:
    """Remove what an interrupted launch of the same trial left, so no old sample counts as new.

    A training run keeps its samples, lines and traces: it continues from its last checkpoint, and drops what lies
    beyond.
    """
    if trial.training_run is None:
        remove_scratch(directory)
        shutil.rmtree(directory / "trace", ignore_errors=True)
    shutil.rmtree(directory / "flight", ignore_errors=True)
    for pattern in ("rank*.log", "rank*.json", "step.log", "ended.json", "rendezvous-*.json"):
        for file in directory.glob(pattern):
            file.unlink()


def dump_stacks(pids: list[int], logs: list[Path]) -> None:
    """Ask ranks for the stacks of all their threads and wait until they are in the logs."""
    for pid in pids:
        _send_signal(pid, DUMP_SIGNAL)
    give_up = time.perf_counter() + DUMP_SECONDS
    sizes: list[int] = []
    while time.perf_counter() < give_up:
        before, sizes = sizes, [log.stat().st_size if log.exists() else 0 for log in logs]
        if sizes == before and all(has_stack_dump(log) for log in logs):
            return
        time.sleep(0.05)


def end_ranks(pids: list[int]) -> None:
    """Kill ranks and everything in their process groups."""
    for pid in pids:
        if not kill_group(pid):
            _send_signal(pid, signal.SIGKILL)


def _send_signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
