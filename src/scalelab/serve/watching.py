"""How far a run is: trials done, the answer so far, the time left.

The answer is the study's own, from the results so far, as in a report. The time left is the mean time of the latest
trials times the number of missing ones; a search may plan more.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scalelab.errors import ScalelabError
from scalelab.records.running import RUNNING, find_holder
from scalelab.records.store import RunStore, glance_at_status
from scalelab.records.trial import Status
from scalelab.report.document import Document
from scalelab.report.text import clean_text
from scalelab.serve.listing import RunLine, describe_run
from scalelab.studies.catalogue import derive_document

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
        seconds = json.loads((store.trial_directory(name) / "result.json").read_bytes())["wall_seconds"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seconds if isinstance(seconds, int | float) and seconds > 0 else None
