"""The directory of a run: create, append, read, resume.

    runs/2026-08-22-1403-strong-scaling/
      run.json            study, its fields, command line, version
      environment.json
      trials/ddp-2-r1/    trial.json   samples.csv   rank0.log …   result.json
      document.json       what every renderer reads

`result.json` is written last and atomically: its presence means that the trial is complete. It carries the checksum of
`samples.csv` (and of `transfers.csv` or `fetches.csv`), so that truncated or changed files are detected. Plain files,
because database locks do not work on the file systems that compute nodes share. Creating the directory claims it, so
two runs never share one; `running.json`, created atomically, keeps two processes off the same run.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalelab.errors import DamagedRun, StoreError, UnknownName, UsageError
from scalelab.records.environment import Environment
from scalelab.records.files import RUNS_DIR as RUNS_DIR
from scalelab.records.files import (
    SCHEMA_VERSION,
    check_schema,
    convert_file,
    open_stored,
    read_json,
    read_result,
    read_stored,
    read_trial,
    storage_errors,
    write_atomically,
    write_json,
    write_trial,
)
from scalelab.records.running import (
    RUNNING,
    find_holder,
    is_own,
    put_marker,
    refuse_holder,
    remove_stale_marker,
    seal_run,
)
from scalelab.records.samples import RAW_FILES, list_raw, read_raw, render_raw, sha256_of
from scalelab.records.trial import Trial, TrialResult, to_builtins, with_samples

JOBS_FILE = "job.json"
"""The batch jobs of the run, if it has any."""

GLANCE_BYTES = 8192
STATUS = re.compile(rb'"status": "(\w+)"')


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The contents of `run.json`: the study, its fields, when and by which version."""

    study: str
    fields: dict[str, Any]
    """The fields of the study."""
    command: tuple[str, ...]
    version: str
    created_at: str
    """UTC, ISO 8601, to the microsecond."""
    workload_sha256: str | None = None
    """Of the user's own workload file at the start of the run; None for a built-in workload."""
    trials: tuple[str, ...]
    """Names of the planned trials, in the order in which they run."""
    study_class: str | None = None
    """Where the class of the user's own study is, `/path/file.py:Class`; None for a study of scalelab."""
    note: str = ""
    """What its user says about it."""
    schema_version: int = SCHEMA_VERSION


class RunStore:
    """One run's directory."""

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        self.paths = [path]
        """The directories that its files are in."""
        self.record = record

    @classmethod
    def create(
        cls,
        runs_dir: Path,
        *,
        study: str,
        study_class: str | None = None,
        fields: dict[str, Any],
        trials: Sequence[Trial],
        environment: Environment,
        command: Sequence[str] = (),
        label: str | None = None,
        note: str = "",
    ) -> RunStore:
        """Create the directory of a new run, named by time and study or `label`, with its plan."""
        if not trials:
            raise StoreError(f"study {study!r} planned no trials")
        now = datetime.now(UTC)
        record = RunRecord(
            study=study,
            study_class=study_class,
            fields=fields,
            command=tuple(command),
            version=environment.scalelab,
            created_at=now.isoformat(),
            workload_sha256=hash_workload(trials[0].workload),
            trials=tuple(trial.name for trial in trials),
            note=note,
        )
        with storage_errors(runs_dir):
            runs_dir.mkdir(parents=True, exist_ok=True)
            path = _claim_directory(runs_dir, f"{now.astimezone():%Y-%m-%d-%H%M}-{label or study}")
            store = cls(path, record)
            write_json(path / "environment.json", to_builtins(environment))
            for trial in trials:
                store.trial_directory(trial.name).mkdir(parents=True)
                write_trial(store.trial_directory(trial.name), trial)
            seal_run(path, record.created_at)
            write_json(path / "run.json", to_builtins(record))
        return store

    @classmethod
    def open(cls, path: Path) -> RunStore:
        """The run in an existing directory."""
        if not (path / "run.json").is_file():
            raise StoreError(f"{path} is not a run: no run.json")
        data = read_json(path / "run.json")
        check_schema(path / "run.json", data)
        return cls(path, convert_file(path / "run.json", data, RunRecord))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_own(self) -> bool:
        """Whether this user made the run here, or trusts it; what it names may then be executed."""
        return is_own(self.path, self.record.created_at)

    def trust(self) -> None:
        """Take a run that somebody sent for one's own."""
        with storage_errors(self.path):
            seal_run(self.path, self.record.created_at)

    def trial_directory(self, trial_name: str) -> Path:
        return self.path.joinpath("trials", trial_name)

    def trials(self, known: Iterable[TrialResult] = ()) -> tuple[Trial, ...]:
        """The planned trials, in the order in which they run; those with a known result are not read again."""
        found = {result.trial.name: result.trial for result in known}
        with without_collector():
            return tuple(found.get(name) or self.trial(name) for name in self.record.trials)

    def trial(self, trial_name: str) -> Trial:
        """One planned trial."""
        return read_trial(self.trial_directory(trial_name))

    def add_trials(self, trials: Sequence[Trial]) -> None:
        """Extend the plan: a search adds trials that depend on results."""
        known = set(self.record.trials)
        for trial in trials:
            if trial.name in known:
                raise StoreError(f"run {self.name} already has a trial {trial.name}")
        with storage_errors(self.path):
            for trial in trials:
                self.trial_directory(trial.name).mkdir(parents=True, exist_ok=True)
                write_trial(self.trial_directory(trial.name), trial)
            names = (*self.record.trials, *(trial.name for trial in trials))
            record = replace(self.record, trials=names, schema_version=SCHEMA_VERSION)
            write_json(self.path / "run.json", to_builtins(record))
        self.record = record

    def environment(self) -> Environment:
        file = self.path / "environment.json"
        return convert_file(file, read_json(file), Environment)

    def save_environment(self, environment: Environment) -> None:
        """Record where the run is measured, if it was planned elsewhere."""
        with storage_errors(self.path):
            write_json(self.path / "environment.json", to_builtins(environment))

    def has_result(self, trial_name: str) -> bool:
        return os.path.isfile(f"{self.path}/trials/{trial_name}/result.json")  # noqa: PTH113 - a fifth of the time

    def save_result(self, result: TrialResult) -> None:
        """Write the samples, then `result.json`; after that the trial is complete."""
        directory = self.trial_directory(result.trial.name)
        raw = list_raw(result)
        texts = {name: render_raw(name, lines) for name, lines in raw.items()}
        header = {k: value for k, value in to_builtins(with_samples(result, ())).items() if k not in RAW_FILES}
        header |= {"schema_version": SCHEMA_VERSION} | {f"num_{name}": len(lines) for name, lines in raw.items()}
        header |= {f"{name}_sha256": sha256_of(text.encode()) for name, text in texts.items()}
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                write_atomically(directory / f"{name}.csv", text)
            write_json(directory / "result.json", header)

    def result(self, trial_name: str) -> TrialResult:
        """A stored result with its samples; raises `DamagedRun` if a file was changed or truncated."""
        directory = self.trial_directory(trial_name)
        bare, header = read_result(directory / "result.json")
        raw = {
            name: read_raw(directory / f"{name}.csv", header.get(f"{name}_sha256"), header.get(f"num_{name}"))
            for name in list_raw(bare)
        }
        return with_samples(bare, **raw)

    def results(self) -> tuple[list[TrialResult], list[DamagedRun]]:
        """All readable results in plan order, and the errors of the others."""
        found, damaged = [], []
        with without_collector():
            for name in self.record.trials:
                if self.has_result(name):
                    try:
                        found.append(self.result(name))
                    except DamagedRun as error:
                        damaged.append(error)
        return found, damaged

    def set_aside(self, trial_name: str, suffix: str = "damaged") -> None:
        """Rename a result so that its trial runs again, or continues; nothing is deleted."""
        file = self.trial_directory(trial_name) / "result.json"
        with storage_errors(file):
            file.replace(file.with_suffix(f".json.{suffix}"))

    def save_document(self, text: str) -> None:
        with storage_errors(self.path):
            write_atomically(self.path / "document.json", text)

    def read_document_text(self) -> str | None:
        try:
            return read_stored(self.path / "document.json").decode("utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise DamagedRun(f"{self.path / 'document.json'} cannot be read: {error}") from error

    @contextmanager
    def claim(self, name: str = RUNNING, job: str = "") -> Iterator[None]:
        """Hold the run for this process and batch job; raises `RunBusy` while another live process holds it."""
        marker = self.path / name
        refuse_holder(marker)
        with storage_errors(marker):
            remove_stale_marker(marker)
            put_marker(marker, job)
        try:
            yield
        finally:
            with suppress(OSError):  # a file system that became read-only: the marker names a process that has ended
                marker.unlink(missing_ok=True)

    def release(self, job: str) -> None:
        """Remove the claim of a batch job that has ended, and no other."""
        marker = self.path / RUNNING
        holder = find_holder(marker)
        if holder is not None and holder.get("job") == job:
            marker.unlink(missing_ok=True)

    def is_running(self) -> bool:
        return find_holder(self.path / RUNNING) is not None


@contextmanager
def without_collector() -> Iterator[None]:
    """Read many records without the collector of cycles, which would look through all of them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def glance_at_status(file: Path) -> str | None:
    """The status in the first bytes of a result; None: there is no result."""
    try:
        with open_stored(file) as stream:
            head = stream.read(GLANCE_BYTES)
            found = STATUS.search(head) or STATUS.search(head + stream.read())
    except OSError:
        return None
    return found[1].decode() if found else "damaged"


def hash_workload(workload: str) -> str | None:
    """The checksum of the user's own file; None for a built-in workload or a missing file."""
    try:
        return sha256_of(read_stored(Path(workload.rpartition(":")[0]))) if ":" in workload else None
    except OSError:
        return None


def find_runs(runs_dir: Path) -> list[Path]:
    """The directories of all runs, oldest first."""
    if not runs_dir.is_dir():
        return []
    found = [entry for entry in runs_dir.iterdir() if (entry / "run.json").is_file()]
    return sorted(found, key=lambda path: (_creation_time(path), path.name))


def open_run(name: str, runs_dir: Path) -> RunStore:
    """The run called `name`: `last`, a name, a unique prefix, a path, or the newest with a part or workload."""
    as_path = Path(name)
    if (as_path / "run.json").is_file():
        return RunStore.open(as_path)
    runs = find_runs(runs_dir)
    if name == "last" and runs:
        return RunStore.open(next((path for path in reversed(runs) if not has_failed(path)), runs[-1]))
    by_name = {path.name: path for path in runs}
    matching = [path for path in runs if path.name.startswith(name)] if name else []
    if name in by_name:
        return RunStore.open(by_name[name])
    if len(matching) == 1:
        return RunStore.open(matching[0])
    if matching:
        names = ", ".join(path.name for path in matching)
        raise UsageError(f"{name!r} matches {len(matching)} runs: {names}; use more of the name")
    labelled = [path for path in runs if re.fullmatch(rf"[\d-]+-{re.escape(name)}(-\d+)?", path.name)]
    named = labelled or [path for path in runs if name and name in path.name]
    if named:
        return RunStore.open(named[-1])
    for path in reversed(runs if name else []):
        with suppress(StoreError):  # a damaged run has no workload
            store = RunStore.open(path)
            if name == store.record.study or name in find_workload_name(store.record):
                return store
    hint = "use --runs-dir for another directory" if runs else "measure one with `scalelab run`, or use --runs-dir"
    raise UnknownName("run", name, list(by_name)[-10:], f"Searched {runs_dir}; {hint}.")


def find_before(store: RunStore) -> RunStore:
    """The run before this one with the same study and workload; runs in which every trial failed do not count."""
    wanted = (store.record.study, find_workload_name(store.record))
    runs = find_runs(store.path.parent)
    names = [path.name for path in runs]
    for path in reversed(runs[: names.index(store.name)]):
        with suppress(StoreError):  # a damaged run has no workload
            other = RunStore.open(path)
            if (other.record.study, find_workload_name(other.record)) == wanted and not has_failed(path):
                return other
    what = " of ".join(filter(None, wanted))
    raise UsageError(f"{store.name} is the first run of {what} in {store.path.parent}: name two, scalelab compare A B")


def find_workload_name(record: RunRecord) -> str:
    """A built-in workload, or the name of the user's file, module or script; nothing where a study trains nothing."""
    job = record.fields.get("job", {})
    if not isinstance(job, dict):
        return ""
    script = job.get("script")
    named = script.get("target", "") if isinstance(script, dict) else job.get("workload", "")
    return Path(str(named)).name


def has_failed(path: Path) -> bool:
    """Whether every trial of a run has a result, and none was completed."""
    try:
        trials = RunStore.open(path).record.trials
    except StoreError:
        return False
    statuses = (glance_at_status(path / "trials" / name / "result.json") for name in trials)
    return all(status not in (None, "completed") for status in statuses)


def _claim_directory(runs_dir: Path, name: str) -> Path:
    """Create `name`, or `name-2`, `name-3` … if two runs start at once: creating a directory is atomic."""
    for attempt in range(1, 10_000):
        path = runs_dir / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise StoreError(f"no free name for {name} in {runs_dir}")


def _creation_time(path: Path) -> str:
    """When the run was created; a damaged record sorts by the date in its name."""
    try:
        head = read_stored(path / "run.json").decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return path.name
    match = re.search(r'"created_at": "([^"]+)"', head)
    return match.group(1) if match else path.name
