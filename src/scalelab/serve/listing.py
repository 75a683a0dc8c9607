"""The runs of a directory, one line each, quickly; and how far a run is.

A listing reads the status of every trial from the first bytes of its `result.json`, so that ten thousand trials take a
fraction of a second. Complete runs do not change: an `Index` keeps their lines while the files of the run's directory
are the same.

A run in progress is watched: trials done, the answer so far, the time left. The answer is the study's own, from the
results so far, as in a report. The time left is the mean time of the latest trials times the number of missing ones; a
search may plan more.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scalelab.checks import clean_text
from scalelab.errors import ScalelabError, StoreError, UsageError
from scalelab.records.files import load_json, storage_errors, write_atomically
from scalelab.records.running import RUNNING, find_holder
from scalelab.records.store import JOBS_FILE, RunStore, find_runs, find_workload_name, glance_at_status, has_failed
from scalelab.records.trial import Status
from scalelab.report.document import Document
from scalelab.studies.catalogue import derive_document, find_name, read_study

if TYPE_CHECKING:
    from scalelab.studies.shared.study import Study

OK = (None, "completed")
"""Statuses of a trial that is yet to run, and of one that did."""
Phase = Literal["complete", "running", "interrupted", "submitted", "damaged"]


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """One run in a listing."""

    name: str
    study: str
    workload: str
    num_done: int
    num_trials: int
    phase: Phase
    state: str
    """The phase in words, with batch jobs and failures."""
    created_at: str = ""
    num_failed: int = 0
    note: str = ""
    result: str = ""
    """What its answer says first; filled in where it is asked for."""
    host: str = ""
    tags: tuple[str, ...] = ()


def describe_run(path: Path) -> RunLine:
    """One line for one run; a damaged run is a line too."""
    try:
        store = RunStore.open(path)
    except StoreError:
        return RunLine(
            name=path.name, study="–", workload="–", num_done=0, num_trials=0, phase="damaged", state="damaged"
        )
    trials = store.record.trials
    statuses = [glance_at_status(store.trial_directory(name) / "result.json") for name in trials]
    done = sum(status is not None for status in statuses)
    failed = count_failed(store, [name for name, one in zip(trials, statuses, strict=True) if one not in OK])
    phase, state = find_phase(store, is_complete=done == len(trials))
    return RunLine(
        name=path.name,
        study=find_name(store.record.study),
        workload=find_workload_name(store.record) or "–",
        num_done=done,
        num_trials=len(trials),
        phase=phase,
        state=f"{state}, {failed} failed" if failed else state,
        created_at=store.record.created_at,
        num_failed=failed,
        note=store.record.note,
        host=read_host(path),
        tags=read_tags(path),
    )


def read_host(path: Path) -> str:
    """The machine that a run was measured on; empty: unknown."""
    try:
        return str(load_json(path / "environment.json")["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


TAGS_FILE = "tags.json"
MOST_TAGS, MOST_TAG_LETTERS = 20, 40


def read_tags(path: Path) -> tuple[str, ...]:
    """The words that people put on a run."""
    try:
        found = load_json(path / TAGS_FILE)
    except (OSError, ValueError):
        return ()
    return (
        tuple(clean_text(tag)[:MOST_TAG_LETTERS] for tag in found if isinstance(tag, str))[:MOST_TAGS]
        if isinstance(found, list)
        else ()
    )


def write_tags(path: Path, tags: Sequence[str]) -> tuple[str, ...]:
    """Replace the tags of a run; refuses too many and too long ones."""
    wanted = tuple(dict.fromkeys(word for tag in tags if (word := " ".join(clean_text(tag).split()))))
    if len(wanted) > MOST_TAGS or any(len(tag) > MOST_TAG_LETTERS for tag in wanted):
        raise UsageError(f"a run has at most {MOST_TAGS} tags of {MOST_TAG_LETTERS} letters")
    with storage_errors(path / TAGS_FILE):
        write_atomically(path / TAGS_FILE, json.dumps(wanted, ensure_ascii=False) + "\n")
    return wanted


def count_failed(store: RunStore, names: Sequence[str]) -> int:
    """How many of the trials that did not complete should have: a search for a limit is meant to pass it.

    Only built-in studies are asked: a listing does not run the code of others.
    """
    if not names or store.record.study_class is not None:
        return len(names)
    try:
        study = read_study(store)
    except ScalelabError:  # a damaged run: show says so
        return len(names)
    if study.is_search:  # one result alone does not show where the search ended
        results, damaged = store.results()
        return len(damaged) + len(study.find_unexpected(results))
    return sum(not _is_expected(store, study, name) for name in names)


def _is_expected(store: RunStore, study: Study, name: str) -> bool:
    try:
        return study.expects(store.result(name))
    except ScalelabError:
        return False


def find_result(path: Path) -> str:
    """The first sentence of a run's answer, or why all its trials failed; nothing while there is neither."""
    try:
        findings = load_json(path / "document.json").get("findings", [])
        texts = [(one["weight"], one["text"]) for one in findings]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # written by 0.1, or damaged: show says so
        texts = []
    return str(max(texts, key=lambda pair: pair[0])[1]) if texts else find_failure(path)


def find_failure(path: Path) -> str:
    """Why the first trial failed, where all did."""
    if not has_failed(path):
        return ""
    store = RunStore.open(path)
    try:
        first = next(store.result(name) for name in store.record.trials)
    except (ScalelabError, StopIteration):  # a damaged result: show says so
        return ""
    return f"{first.status.words}: {first.reason}" if first.reason else first.status.words


def find_phase(store: RunStore, *, is_complete: bool) -> tuple[Phase, str]:
    """How far a run is, and the same in words."""
    by_job = None if is_complete else describe_jobs(store)
    if by_job is not None:
        return by_job
    phase: Phase = "running" if store.is_running() else "complete" if is_complete else "interrupted"
    return phase, phase


def describe_jobs(store: RunStore) -> tuple[Phase, str] | None:
    """The state of the batch jobs of an unfinished run; None: it has none, or another process executes it."""
    if not (store.path / JOBS_FILE).is_file():
        return None
    from scalelab.launch.batch.system import find_living, read_record
    from scalelab.records.launchers import name_job

    try:
        record = read_record(store.path)
        if record is None or not record.jobs:
            return None
        living = find_living(store.path, record)
    except ScalelabError:  # PSI/J is missing, or the record is damaged
        return "submitted", "submitted"
    if not living:
        holder = find_holder(store.path / RUNNING)
        own = [name_job(record.scheduler, job.id) for job in record.jobs]
        if holder is not None and holder.get("job") not in own:
            return None
        numbers = ", ".join(job.id for job in record.jobs)
        return "interrupted", f"interrupted, {record.scheduler} job {numbers} ended"
    number, state = next(iter(living.items()))
    others = f" and {len(living) - 1} more" if len(living) > 1 else ""
    return "submitted", f"{record.scheduler} job {number} {state}{others}"


@dataclass(kw_only=True)
class Index:
    """The lines of all runs in a directory; those of complete runs are kept."""

    runs_dir: Path
    _kept: dict[Path, tuple[tuple[int, ...], RunLine]] = field(default_factory=dict)

    def list_lines(self) -> list[RunLine]:
        """Every run, newest first, except links that lead out of the directory and names that are not text."""
        paths = [path for path in reversed(find_runs(self.runs_dir)) if self._can_show(path)]
        lines = [self._describe(path) for path in paths]
        if len(self._kept) > len(paths):  # runs were removed
            self._kept = {path: self._kept[path] for path in paths if path in self._kept}
        return lines

    def _can_show(self, path: Path) -> bool:
        return is_run_name(path.name) and (
            not path.is_symlink() or path.resolve().is_relative_to(self.runs_dir.resolve())
        )

    def _describe(self, path: Path) -> RunLine:
        marks = _read_marks(path)
        kept = self._kept.get(path)
        if kept is not None and kept[0] == marks:
            return kept[1]
        line = describe_run(path)
        if line.phase == "complete":
            self._kept[path] = (marks, line)
        return line


def select_lines(lines: Sequence[RunLine], asked: Mapping[str, str]) -> list[RunLine]:
    """The runs of one study, workload, host or tag, from one day to another, with every word of `q`."""
    words = asked.get("q", "").lower().split()
    return [line for line in lines if _is_selected(line, asked) and _has_all(line, words)]


def _is_selected(line: RunLine, asked: Mapping[str, str]) -> bool:
    day = line.created_at[:10]
    return (
        all(asked.get(name, "") in ("", getattr(line, name)) for name in ("study", "workload", "host"))
        and (not asked.get("tag") or asked["tag"] in line.tags)
        and (not asked.get("since") or day >= asked["since"])
        and (not asked.get("until") or (day != "" and day <= asked["until"]))
    )


def list_choices(lines: Sequence[RunLine]) -> dict[str, list[str]]:
    """What runs can be selected by."""
    choices = {
        name: sorted({getattr(line, name) for line in lines} - {"", "–"}) for name in ("study", "workload", "host")
    }
    return choices | {"tag": sorted({tag for line in lines for tag in line.tags})}


def _has_all(line: RunLine, words: Sequence[str]) -> bool:
    shown = (line.name, line.study, line.workload, line.state, line.host, line.note, *line.tags)
    text = " ".join(shown).lower()
    return all(word in text for word in words)


def _read_marks(path: Path) -> tuple[int, ...]:
    """Modification times of a run's directory and files: resuming a run adds and removes a marker."""
    try:
        with os.scandir(path) as entries:
            return (path.stat().st_mtime_ns, *sorted(entry.stat().st_mtime_ns for entry in entries))
    except OSError:
        return ()


def is_run_name(name: str) -> bool:
    """Whether a text can be the name of a run's directory, and not a path."""
    return bool(name) and not re.search(r"[/\\\x00\ud800-\udfff]", name) and name not in (".", "..")


MOST_FINDINGS = 6
MOST_TIMED = 50
"""Trials that the time left is estimated from: a page asks every other second."""


@dataclass(frozen=True, kw_only=True)
class TrialLine:
    """One trial of a run."""

    name: str
    status: str
    """In words; `running` or `waiting` without a result."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """A run being watched."""

    line: RunLine
    current: str = ""
    """The trial that is running."""
    elapsed_seconds: float | None = None
    seconds_left: float | None = None
    title: str = ""
    question: str = ""
    findings: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    problem: str = ""
    """Why there is no answer yet."""
    is_newest: bool = True
    """Whether the answer includes all results; otherwise it is being recomputed."""


def watch_run(path: Path, document: Document | None, problem: str, is_newest: bool = True) -> Watch:
    """How far the run is, with its answer."""
    line = describe_run(path)
    if line.phase == "damaged":
        return Watch(line=line, problem=problem or "run.json cannot be read")
    store = RunStore.open(path)
    is_running = line.phase == "running"
    missing = [name for name in store.record.trials if not store.has_result(name)]
    return Watch(
        line=line,
        current=missing[0] if missing and is_running else "",
        elapsed_seconds=measure_elapsed(store) if is_running else None,
        seconds_left=estimate_left(store, missing) if is_running else None,
        title=clean_text(document.title) if document else line.study,
        question=clean_text(document.question) if document else "",
        findings=tuple(map(clean_text, document.summary[:MOST_FINDINGS])) if document else (),
        cautions=tuple(clean_text(f"{one.message} → {one.next_step}") for one in document.cautions) if document else (),
        problem=problem,
        is_newest=is_newest,
    )


def conclude_safely(path: Path) -> tuple[Document | None, str]:
    """The answer so far, or why there is none: a run may be damaged or just started."""
    try:
        return derive_document(RunStore.open(path)), ""
    except ScalelabError as error:
        return None, str(error)


def list_trials(store: RunStore) -> list[TrialLine]:
    """Every planned trial with its status."""
    lines = []
    is_next = store.is_running()
    for name in store.record.trials:
        found = glance_at_status(store.trial_directory(name) / "result.json")
        status = describe_status(found) if found else "running" if is_next else "waiting"
        is_next = is_next and found is not None
        lines.append(TrialLine(name=name, status=status))
    return lines


def describe_status(found: str) -> str:
    try:
        return Status(found).words
    except ValueError:
        return found


def list_files(directory: Path) -> tuple[str, ...]:
    """The files of one trial, by name."""
    if not directory.is_dir():
        return ()
    return tuple(sorted(entry.name for entry in directory.iterdir() if entry.is_file()))


def measure_elapsed(store: RunStore) -> float | None:
    """Seconds since the executing process started: a resumed run is younger than its directory."""
    holder = find_holder(store.path / RUNNING)
    started = holder.get("started") if holder else None
    return max(0.0, time.time() - started) if isinstance(started, int | float) else None


def estimate_left(store: RunStore, missing: Sequence[str]) -> float | None:
    """Mean wall time of the latest trials times the missing ones; None before the first."""
    left = set(missing)
    done = [name for name in store.record.trials if name not in left]
    measured = [seconds for name in done[-MOST_TIMED:] if (seconds := read_wall_seconds(store, name))]
    return statistics.fmean(measured) * len(left) if measured else None


def read_wall_seconds(store: RunStore, name: str) -> float | None:
    """Wall time of a trial, without reading its samples; None if unreadable."""
    try:
        seconds = load_json(store.trial_directory(name) / "result.json")["wall_seconds"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seconds if isinstance(seconds, int | float) and seconds > 0 else None
