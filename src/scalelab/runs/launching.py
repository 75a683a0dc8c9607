"""Which launcher runs the trials of a job: that of its record, or several where trials have their own launchers.

Outside an allocation, launchers with a batch system submit a job (`launch/batch`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from scalelab.errors import LaunchFailed, RankUnknown, UsageError
from scalelab.launch.agreement import copied_directory, ended_file
from scalelab.launch.batch.handover import JobLauncher
from scalelab.launch.batch.site import find_scheduler
from scalelab.launch.hosts import HostsLauncher
from scalelab.launch.launcher import Launched, Launcher, open_launcher
from scalelab.launch.local import LocalLauncher
from scalelab.records.files import read_json, write_trial
from scalelab.records.launchers import LAUNCHERS, Scheduler
from scalelab.records.running import hold_directory
from scalelab.records.store import RunStore
from scalelab.records.trial import Cause, Trial, TrialResult, not_run
from scalelab.report.findings import Caution, CautionKind
from scalelab.units import format_bytes, format_count


class MixedLauncher:
    """Runs every trial with its own launcher: the rows of a recipe may differ."""

    def __init__(self, own: LocalLauncher | HostsLauncher, submit: Submitter | None = None) -> None:
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


Submitter = Callable[[Scheduler, Trial, Path], JobLauncher]
"""Submits a trial of a run to a batch system."""


def choose_launcher(job: Launched, trials: Sequence[Trial], submit: Submitter | None = None) -> Launcher:
    """The launcher of a job; raises `LaunchFailed` if something it needs is missing.

    `submit` handles a recipe's trial that is a batch job; without it such a trial does not run.
    """
    if not LAUNCHERS[job.launcher].is_on_this_machine:
        return open_launcher(job)
    own = HostsLauncher() if any(trial.num_hosts > 1 for trial in trials) else LocalLauncher()
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


OUTLIVED = CautionKind("outlived", "processes outlived the ranks that started them and were ended", "note", ("number",))


def warn_of_ended(store: RunStore) -> Iterator[Caution]:
    """What ranks had left running when their trial was over."""
    mark = ended_file(Path()).name
    files = [f"{store.path}/trials/{name}/{mark}" for name in store.record.trials]
    there = [Path(file) for file in files if os.path.exists(file)]  # noqa: PTH110 - a fifth of the time, of each trial
    names = [str(name) for file in there for name in read_json(file).get("processes", ())]
    if names:
        listed = ", ".join(dict.fromkeys(names))
        yield OUTLIVED(
            "",
            f"{format_count(len(names), 'process')} outlived the ranks that started them and were ended: {listed}",
            "stop them in the workload: while they run they disturb what is measured next",
            number=len(names),
        )


MOST_COPIED_BYTES = 1_000_000_000
"""A larger working directory holds data, which a script should be given by an absolute path."""


def copy_for_script(source: Path, directory: Path) -> None:
    """Copy a script's working directory without hidden files, caches and the runs themselves."""

    def leave_out(place: str, names: list[str]) -> list[str]:
        return [name for name in names if name.startswith(".") or name == "__pycache__" or Path(place, name) in above]

    copy = copied_directory(directory.resolve())
    above = {*copy.parents} - {*source.resolve().parents, source.resolve()}
    found = (Path(place, name) for place, _, names in _walk(source.resolve(), leave_out) for name in names)
    size = sum(file.stat().st_size for file in found if file.is_file())
    if size > MOST_COPIED_BYTES:
        raise UsageError(
            f"--scratch copies at most {format_bytes(MOST_COPIED_BYTES)}, {source} has {format_bytes(size)}: start in a"
            " directory without the data, or leave out --scratch"
        )
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source.resolve(), copy, ignore=leave_out, symlinks=True)


def _walk(source: Path, leave_out: Callable[[str, list[str]], list[str]]) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` without what is left out."""
    for place, directories, files in os.walk(source):
        directories[:] = [name for name in directories if name not in leave_out(place, directories)]
        yield place, directories, [name for name in files if name not in leave_out(place, files)]
