"""What there is in a directory of runs, in one line each, told quickly.

A listing looks at every trial once: whether it has a result, and how that ended. The status stands near the beginning
of `result.json`, so a glance at the first bytes is enough, and ten thousand trials are told in a fraction of a second.
What has ended does not change; an `Index` keeps its line as long as the files of the run's directory are the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scalelab.errors import ScalelabError, StoreError
from scalelab.records.store import JOBS_FILE, RUNNING, RunStore, find_holder, find_runs, glance_at_status


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """What a listing says of one run."""

    name: str
    study: str
    workload: str
    num_done: int
    num_trials: int
    state: str
    created_at: str = ""
    num_failed: int = 0

    @property
    def is_over(self) -> bool:
        return self.num_done == self.num_trials and self.state.startswith("complete")


def describe_run(path: Path) -> RunLine:
    """One line for one run; a damaged run is a line too."""
    try:
        store = RunStore.open(path)
    except StoreError:
        return RunLine(name=path.name, study="–", workload="–", num_done=0, num_trials=0, state="damaged")
    trials = store.record.trials
    statuses = [glance_at_status(store.trial_directory(name) / "result.json") for name in trials]
    done = sum(status is not None for status in statuses)
    failed = sum(status not in (None, "completed") for status in statuses)
    state = describe_jobs(store) if done < len(trials) else ""
    state = state or ("running" if store.is_running() else "complete" if done == len(trials) else "interrupted")
    job = store.record.fields.get("job", {})
    workload = str(job.get("workload", "–")) if isinstance(job, dict) else "–"
    return RunLine(
        name=path.name,
        study=store.record.study,
        workload=Path(workload).name,
        num_done=done,
        num_trials=len(trials),
        state=f"{state}, {failed} failed" if failed else state,
        created_at=store.record.created_at,
        num_failed=failed,
    )


def describe_jobs(store: RunStore) -> str:
    """How far the jobs of a run are that has trials left; empty: it has none, or others execute it meanwhile."""
    if not (store.path / JOBS_FILE).is_file():
        return ""
    from scalelab.measure.launchers.batch import find_living, name_job, read_record  # loads PSI/J

    try:
        record = read_record(store.path)
        if record is None or not record.jobs:
            return ""
        living = find_living(store.path, record)
    except ScalelabError:  # without PSI/J, or from a damaged record, nobody can be asked
        return "submitted"
    if not living:
        holder = find_holder(store.path / RUNNING)
        own = [name_job(record.scheduler, job.id) for job in record.jobs]
        if holder is not None and holder.get("job") not in own:
            return ""
        numbers = ", ".join(job.id for job in record.jobs)
        return f"interrupted, {record.scheduler} job {numbers} ended"
    number, state = next(iter(living.items()))
    others = f" and {len(living) - 1} more" if len(living) > 1 else ""
    return f"{record.scheduler} job {number} {state}{others}"


@dataclass(kw_only=True)
class Index:
    """The lines of all runs in a directory; those of runs that are over are kept."""

    runs_dir: Path
    _kept: dict[Path, tuple[tuple[int, ...], RunLine]] = field(default_factory=dict)

    def list_lines(self) -> list[RunLine]:
        """Every run, newest first, but those that cannot be shown: links that lead out, names that are no text."""
        return [self._describe(path) for path in reversed(find_runs(self.runs_dir)) if self._can_show(path)]

    def _can_show(self, path: Path) -> bool:
        return is_run_name(path.name) and (
            not path.is_symlink() or path.resolve().is_relative_to(self.runs_dir.resolve())
        )

    def search(self, words: str) -> list[RunLine]:
        """The runs whose name, study, workload or state has every word."""
        wanted = words.lower().split()
        return [line for line in self.list_lines() if _has_all(line, wanted)]

    def _describe(self, path: Path) -> RunLine:
        marks = _read_marks(path)
        kept = self._kept.get(path)
        if kept is not None and kept[0] == marks:
            return kept[1]
        line = describe_run(path)
        if line.is_over:
            self._kept[path] = (marks, line)
        return line


def _has_all(line: RunLine, words: Sequence[str]) -> bool:
    text = f"{line.name} {line.study} {line.workload} {line.state}".lower()
    return all(word in text for word in words)


def _read_marks(path: Path) -> tuple[int, ...]:
    """When a run's directory and its files were changed last: resuming a run puts a marker there and takes it away."""
    try:
        with os.scandir(path) as entries:
            return (path.stat().st_mtime_ns, *sorted(entry.stat().st_mtime_ns for entry in entries))
    except OSError:
        return ()


def is_run_name(name: str) -> bool:
    """Whether a text can be the name of a directory of a run, and of nothing else."""
    return bool(name) and not re.search(r"[/\\\x00\ud800-\udfff]", name) and name not in (".", "..")
