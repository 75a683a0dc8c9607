"""What a launcher and its ranks have agreed on: exit codes, signals, process groups and files, without torch."""

from __future__ import annotations

import os
import signal
from pathlib import Path

EXIT_FAILED = 1
"""The rank failed and its outcome file says why."""
EXIT_STORAGE = 74
"""The rank could not write its files (EX_IOERR of sysexits.h)."""
DUMP_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of all its threads into its log."""


def log_file(directory: Path, rank: int) -> Path:
    """What the rank printed, and its stacks after a time-out; stays with the trial."""
    return directory / f"rank{rank}.log"


def samples_file(directory: Path, rank: int) -> Path:
    """The rank's samples so far, extended after every block; becomes part of `samples.csv`."""
    return directory / f"rank{rank}.csv"


def outcome_file(directory: Path, rank: int) -> Path:
    """How the rank ended, written last; becomes part of `result.json`."""
    return directory / f"rank{rank}.json"


def trace_file(directory: Path, rank: int) -> Path:
    """What torch's profiler recorded; stays with the trial."""
    return directory / "trace" / f"rank{rank}.json.gz"


def kill_group(pid: int) -> bool:
    """End what is in a rank's process group; False where there is none: it has ended, or does not lead one yet."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def remove_scratch(directory: Path) -> None:
    """Remove what the result replaces."""
    for pattern in ("rank*.csv", "rank*.json"):
        for file in directory.glob(pattern):
            file.unlink()
