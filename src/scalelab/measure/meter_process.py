"""What a Meter says about the process that it is in: its script, how it ended, what memory it took."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from scalelab.errors import UsageError
from scalelab.measure.meter_result import MeterFailure
from scalelab.measure.meter_steps import StepLog
from scalelab.store import RUNS_DIR, find_runs
from scalelab.trial import Status


def make_configuration(name: str) -> str:
    """A Meter's name as it names a directory; what cannot stand in one becomes a dash."""
    found = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:80]
    if not found:
        raise UsageError(f"{name!r} cannot name a run: use letters and digits")
    return "control-run" if found == "control" else found


def name_script() -> str:
    """The file that is run, without its directory."""
    return Path(find_script()).name


def find_script() -> str:
    """The path of the file that is run; a word where there is none."""
    return str(getattr(sys.modules.get("__main__"), "__file__", None) or "interactive")


def describe_end(error: BaseException | None, rank: int, log: StepLog) -> MeterFailure | None:
    """Why a rank's Meter ended before its training did; None where it did not."""
    num_steps = log.num_written
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        if log.failure is None:
            return None
        reason = f"rank {rank} could not record more than {num_steps} steps: {log.failure.strerror}"
        return MeterFailure(status=Status.CRASHED, reason=reason)
    words = type(error).__name__ + (f": {text}" if (text := str(error).strip().partition("\n")[0]) else "")
    reason = f"rank {rank} raised an error after {num_steps} steps: {words}"
    if "torch" not in sys.modules:
        return MeterFailure(status=Status.CRASHED, reason=reason)
    from scalelab.measure.failure import format_own_frames, is_lost_peer, is_out_of_memory  # they need torch

    return MeterFailure(
        status=Status.OUT_OF_MEMORY if is_out_of_memory(error) else Status.CRASHED,
        reason=reason,
        traceback=format_own_frames(error, f"{find_script()}:main"),
        is_lost_peer=is_lost_peer(error),
    )


def read_peak_memory(device: str, resident_bytes: int) -> int:
    """The highest so far: allocated by torch on CUDA, resident in the process on CPU."""
    if device == "cuda":
        return int(sys.modules["torch"].cuda.max_memory_allocated())
    return resident_bytes


def say_where(path: Path) -> str:
    """The last line: where the run is, and the next useful command."""
    here = Path.cwd()
    short = path.relative_to(here) if path.is_relative_to(here) else path
    name = "last" if find_runs(here / RUNS_DIR)[-1:] == [path] else str(short)
    return f"Saved to {short}  ·  scalelab show {name}"
