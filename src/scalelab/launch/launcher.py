"""The seam between planning and measuring: one method; and which launcher runs the trials of a job.

That is the one its record names, or several where trials have their own. Outside an allocation, launchers with a batch
system submit a job (`launch/batch`).

What the machine was doing before a launch, and what that makes of the result afterwards.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from scalelab.errors import LaunchFailed, RankUnknown
from scalelab.records.environment import count_oom_kills, installed_version, read_load_average, read_stolen_seconds
from scalelab.records.files import write_trial
from scalelab.records.launchers import LAUNCHERS, LauncherName, Scheduler, find_scheduler, load
from scalelab.records.running import hold_directory
from scalelab.records.settings import find_kind
from scalelab.records.trial import Cause, Trial, TrialResult, not_run

if TYPE_CHECKING:
    from scalelab.launch.batch.handover import JobLauncher

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
    return open_by_name(job.launcher, job)


def open_by_name(name: LauncherName, job: Launched) -> Launcher:
    launcher: Launcher = load(LAUNCHERS[name].type).open(job)
    return launcher


Submitter = Callable[[Scheduler, Trial, Path], "JobLauncher"]
"""Submits a trial of a run to a batch system."""


class MixedLauncher:
    """Runs every trial with its own launcher: the rows of a recipe may differ."""

    def __init__(self, own: Launcher, submit: Submitter | None = None) -> None:
        self._own = own
        self._submit = submit

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        if LAUNCHERS[trial.launcher].is_on_this_machine:
            return self._own.launch(trial, directory)
        try:
            launcher = self._choose(trial, directory)
        except (LaunchFailed, RankUnknown) as error:
            return not_run(trial, str(error), cause=Cause.LAUNCHER)  # trials of other launchers can still run
        try:
            return launcher.launch(trial, directory)
        finally:
            launcher.close()

    def _choose(self, trial: Trial, directory: Path) -> Launcher:
        scheduler = find_scheduler(trial.launcher, os.environ)
        if scheduler is None or self._submit is None:
            return open_launcher(trial)
        launcher = self._submit(scheduler, trial, directory.parents[1])
        launcher.check()
        return launcher

    def check(self) -> None:
        self._own.check()

    def close(self) -> None:
        self._own.close()


def choose_launcher(job: Launched, trials: Sequence[Trial], submit: Submitter | None = None) -> Launcher:
    """The launcher of a job; raises `LaunchFailed` if something it needs is missing.

    `submit` handles a recipe's trial that is a batch job; without it such a trial does not run.
    """
    if not LAUNCHERS[job.launcher].is_on_this_machine:
        return open_launcher(job)
    own = open_by_name("hosts" if any(trial.num_hosts > 1 for trial in trials) else "local", job)
    is_mixed = any(not LAUNCHERS[trial.launcher].is_on_this_machine for trial in trials)
    return MixedLauncher(own, submit) if is_mixed else own


def try_trial(trial: Trial, launcher: Launcher | None = None) -> TrialResult:
    """Run a trial in a directory that is removed afterwards: for a look, not for a result."""
    own = launcher or choose_launcher(trial, [trial])
    try:
        with hold_directory("try") as directory:
            write_trial(directory, trial)
            return own.launch(trial, directory)
    finally:
        if launcher is None:
            own.close()


def is_watched(trial: Trial) -> bool:
    """Whether `utilization` looks at devices while the trial runs: at cores if it asks, at GPUs always."""
    return "utilization" in trial.instruments or has_watched_gpus(trial)


def has_watched_gpus(trial: Trial) -> bool:
    return find_kind(trial.device).is_listed and not trial.is_forecast


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
