"""`JoinedLauncher`: this process is one rank of a job that torchrun has launched already.

The command runs once per rank. On rank 0 this launcher does what the others do for all: it runs the trial, waits for
what every rank leaves behind, and gives one result. The other ranks only run their share (`run_member`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from scalelab.environment import read_load_average
from scalelab.errors import DamagedRun, StorageFull, UsageError
from scalelab.files import read_json
from scalelab.measure.agreement import DUMP_SIGNAL, EXIT_STORAGE, kill_group, outcome_file
from scalelab.measure.launchers.launcher import check_torch
from scalelab.measure.launchers.outcome import RankEnd, conclude_trial
from scalelab.trial import Trial, TrialResult

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WAIT_SECONDS = 15.0
"""How long rank 0 waits for the others' last words once it has ended."""
DUMP_SECONDS = 2.0
"""How long a rank may take to write its stacks after the time limit."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Which rank of how many this process is."""

    rank: int
    num_ranks: int
    num_local_ranks: int
    num_restarts: int = 0
    """How often torchrun has started the job again."""


def find_membership(variables: Mapping[str, str]) -> Membership | None:
    """What torchrun's variables say; None: nobody has launched us."""
    present = [name for name in NEEDED if variables.get(name)]
    if len(present) < len(NEEDED):
        return None
    try:
        found = Membership(
            rank=int(variables["RANK"]),
            num_ranks=int(variables["WORLD_SIZE"]),
            num_local_ranks=int(variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"])),
            num_restarts=int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    except ValueError:
        raise UsageError(
            f"RANK {variables['RANK']!r} and WORLD_SIZE {variables['WORLD_SIZE']!r} are no numbers: unset them, or"
            " start with torchrun"
        ) from None
    if not 0 <= found.rank < found.num_ranks:
        raise UsageError(f"RANK {found.rank} is none of WORLD_SIZE {found.num_ranks}: unset them, or use torchrun")
    return found


class JoinedLauncher:
    """Rank 0's launcher under torchrun."""

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        started_at, launched = datetime.now(UTC).isoformat(), time.perf_counter()
        load = read_load_average()
        for file in directory.glob("rank*.json"):
            file.unlink()
        mine = self._run(trial, directory)
        # torchrun ends the whole job as soon as one rank has failed; what is known of it is written first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if mine.code == EXIT_STORAGE:
            raise StorageFull(f"a rank could not write to {directory}: free some space, then 'scalelab resume'")
        return conclude_trial(
            trial,
            directory,
            [mine, *_wait_for_others(trial, directory, 0.0 if mine.was_killed else WAIT_SECONDS)],
            started_at=started_at,
            launched=launched,
            wall_seconds=time.perf_counter() - launched,
            load_before=load,
            has_oom_kill=False,
        )

    def _run(self, trial: Trial, directory: Path) -> RankEnd:
        """This rank's end. Told to end by torchrun, because another rank has failed: then that one's words count."""
        try:
            code = run_member(str(directory.resolve()), trial.device, trial.timeout_seconds)
        except subprocess.TimeoutExpired:
            return RankEnd(code=None, was_killed=True, is_timed_out=True)
        except KeyboardInterrupt:
            others = range(1, trial.num_processes)
            if not any(_has_failed(outcome_file(directory, rank)) for rank in others):
                raise
            return RankEnd(code=None, was_killed=True)
        return RankEnd(code=code, was_killed=False)

    def check(self) -> None:
        check_torch()

    def close(self) -> None:
        """The other ranks are not ours to end."""


def run_member(directory: str, device: str, timeout_seconds: float | None = None) -> int:
    """Run this rank's share in a process that has torch; it does not outlive this call.

    When the time limit passes, its stacks go where its errors go, and `TimeoutExpired` is raised.
    """
    command = [sys.executable, "-P", "-m", "scalelab.measure.member", str(os.getpid()), directory, device]
    process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        return process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(DUMP_SIGNAL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DUMP_SECONDS)
        raise
    finally:
        if process.poll() is None and not kill_group(process.pid):
            process.send_signal(signal.SIGKILL)
        process.wait()


def _has_failed(outcome: Path) -> bool:
    try:
        return bool(read_json(outcome).get("failure"))
    except DamagedRun:
        return False


def _wait_for_others(trial: Trial, directory: Path, seconds: float) -> list[RankEnd]:
    """How the other ranks ended, as far as their files tell."""
    others = range(1, trial.num_processes)
    give_up = time.perf_counter() + seconds
    while time.perf_counter() < give_up and not all(outcome_file(directory, rank).is_file() for rank in others):
        time.sleep(0.05)
    is_impatient = seconds == 0
    return [
        RankEnd(code=0 if outcome_file(directory, rank).is_file() else None, was_killed=is_impatient) for rank in others
    ]
