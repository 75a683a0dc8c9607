"""Whole commands as a user types them: in separate processes, or in this one, which has the packages loaded."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from scalelab.cli.app import main

SMALL = ["--workload", "mlp", "--dim", "16", "--depth", "2", "--global-batch-size", "8", "--steps", "6", "--no-control"]
"""A job of microseconds: what is tested is the command, not the numbers."""

QUICK = [*SMALL, "--phase-steps", "2", "--comm-free-steps", "2"]


def scalelab(*arguments: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "scalelab", *map(str, arguments)],
        cwd=cwd,
        env=make_environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def answer(*arguments: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in this process: nothing is imported again, and `shared_ranks` saves loading torch."""
    words, code = [str(argument) for argument in arguments], 0
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(cwd))
        stack.enter_context(mock.patch.dict(os.environ, make_environment(**variables)))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(said))
        try:
            main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, printed.getvalue(), said.getvalue())


def start_scalelab(*arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
    """Start a command and go on."""
    return subprocess.Popen(
        [sys.executable, "-m", "scalelab", *map(str, arguments)],
        cwd=cwd,
        env=make_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def make_environment(**variables: str) -> dict[str, str]:
    """The test's own environment, with a terminal of a known width and no colour."""
    return {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", **variables}


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Look until something is so; fail when it never is."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def finished_trials(runs_dir: Path) -> set[Path]:
    """The trials of all runs that have a result."""
    return {file.parent for file in runs_dir.glob("*/trials/*/result.json")}
