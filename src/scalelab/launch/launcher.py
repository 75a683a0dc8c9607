"""The seam between planning and measuring: one method.

What the machine was doing before a launch, and what that makes of the result afterwards.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from scalelab.errors import LaunchFailed
from scalelab.records.environment import count_oom_kills, installed_version, read_load_average, read_stolen_seconds
from scalelab.records.launchers import LAUNCHERS, LauncherName, load
from scalelab.records.trial import Trial, TrialResult

LEAST_OPEN_FILES = 64
"""Of a process: torch's libraries, a rank's own files, the store and gloo's sockets."""


class Launched(Protocol):
    """What a job and a trial say about how ranks are started."""

    @property
    def launcher(self) -> LauncherName: ...
    @property
    def mpiexec(self) -> str | None: ...
    @property
    def ranks_per_node(self) -> int | None: ...


class Launcher(Protocol):
    """Runs a trial in fresh processes and returns what it measured.

    `directory` is the trial's: it holds `trial.json`, and logs and traces go there. A trial that fails is a result;
    only when no trial could be started at all (`LaunchFailed`) or nothing can be stored does `launch` raise.
    """

    def check(self) -> None:
        """Raise `LaunchFailed` where nothing can be started, before a run is made."""
        ...

    def launch(self, trial: Trial, directory: Path) -> TrialResult: ...

    def close(self) -> None:
        """End every process that the launcher started."""
        ...


def open_launcher(job: Launched) -> Launcher:
    """The launcher that a job names; raises `LaunchFailed` if something it needs is missing."""
    launcher: Launcher = load(LAUNCHERS[job.launcher].type).open(job)
    return launcher


def check_torch() -> None:
    """Reject at once where nothing can be trained."""
    if installed_version("torch") is None:
        raise LaunchFailed("torch is not installed: pip install 'scalelab[torch]' (or uv run --extra torch)")


def check_open_files() -> None:
    """Reject a limit under which ranks wait for a connection that can never open; raise it where that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_OPEN_FILES:
        raise LaunchFailed(
            f"a process may open {hard} files (ulimit -n), ranks need {LEAST_OPEN_FILES}: raise ulimit -n"
        )
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_OPEN_FILES, hard))


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Readings of this machine, taken when a trial was about to start."""

    started_at: str
    launched: float
    """By `perf_counter`."""
    load_before: float | None
    stolen: tuple[float, float] | None
    oom_kills: int | None

    def compare(self) -> dict[str, Any]:
        """The arguments of `conclude_trial` once the trial has ended."""
        return {
            "started_at": self.started_at,
            "launched": self.launched,
            "wall_seconds": time.perf_counter() - self.launched,
            "load_before": self.load_before,
            "steal_ratio": find_steal_ratio(self.stolen, read_stolen_seconds()),
            "has_oom_kill": self.oom_kills is not None and (count_oom_kills() or 0) > self.oom_kills,
        }


def read_conditions() -> Conditions:
    return Conditions(
        started_at=datetime.now(UTC).isoformat(),
        load_before=read_load_average(),
        stolen=read_stolen_seconds(),
        oom_kills=count_oom_kills(),
        launched=time.perf_counter(),
    )


def find_steal_ratio(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    """The share of processor time that a hypervisor gave to others between two readings; None if none is known."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])
