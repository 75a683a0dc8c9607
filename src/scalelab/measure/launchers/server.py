"""The parent's end of the forkserver: start it, ask it for ranks, read its events."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from typing import Any

from scalelab.errors import LaunchFailed

START_SECONDS = 120.0
"""How long importing torch may take; on a cold network file system it is minutes."""


class ServerProcess:
    """A running `scalelab.measure.forkserver`. In a session of its own: Ctrl-C reaches only the parent."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the process
        self._events, events_write = os.pipe()
        try:
            # -P: a file in the working directory must not take the place of a module that the server imports.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "scalelab.measure.forkserver", str(events_write)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(events_write,),
                start_new_session=True,
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
            words = self._read_log()
            self.close()
            raise LaunchFailed(f"the process that loads torch did not start: {words or 'no answer'}")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def launch_ranks(self, request: dict[str, Any]) -> list[int]:
        """Fork the ranks of one trial and give their process ids."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"launch": request}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise LaunchFailed(f"the process that loads torch has died: {self._read_log()}") from error
        answer = self._next_line(START_SECONDS)
        if answer is None:
            raise LaunchFailed(f"the process that loads torch does not answer: {self._read_log()}")
        if "refused" in answer:
            raise LaunchFailed(f"{answer['refused']}: give another --port, or 0 for any free one")
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
