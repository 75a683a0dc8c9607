"""How far a run is: trials done, the answer so far, the time that is left.

The answer is the study's own, from whatever has been measured: nothing is told that a report would not tell. The time
left is the mean of the latest trials, times those that are missing; a search may plan more.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scalelab.errors import ScalelabError
from scalelab.records.store import RUNNING, RunStore, find_holder, glance_at_status
from scalelab.records.trial import Status
from scalelab.report.document import Document
from scalelab.report.text import clean_text
from scalelab.serve.listing import RunLine, describe_run
from scalelab.studies.catalogue import derive_document

MOST_FINDINGS = 6
MOST_TIMED = 50
"""Trials whose times tell how long the rest will take: a page asks every other second."""


@dataclass(frozen=True, kw_only=True)
class TrialLine:
    """One trial of a run."""

    name: str
    status: str
    """In words; `running` or `waiting` where it has no result."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """A run as somebody sees it who watches."""

    line: RunLine
    current: str = ""
    """The trial that is being run."""
    elapsed_seconds: float | None = None
    seconds_left: float | None = None
    title: str = ""
    question: str = ""
    findings: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    problem: str = ""
    """Why there is no answer yet, in words."""
    is_newest: bool = True
    """Whether the answer is of all results that there are now; otherwise it is being derived again."""


def watch_run(path: Path, document: Document | None, problem: str, is_newest: bool = True) -> Watch:
    """How far the run is, with the answer that was derived from its results."""
    line = describe_run(path)
    if line.state == "damaged":
        return Watch(line=line, problem=problem or "its run.json cannot be read")
    store = RunStore.open(path)
    is_running = line.state.startswith("running")
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
    """The answer from whatever there is, or why there is none: a run may be damaged, or only beginning."""
    try:
        return derive_document(RunStore.open(path)), ""
    except ScalelabError as error:
        return None, str(error)


def list_trials(store: RunStore) -> list[TrialLine]:
    """Every planned trial with how it ended."""
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
    """Since the process began that executes the run; a run that was resumed is not as old as its directory."""
    holder = find_holder(store.path / RUNNING)
    started = holder.get("started") if holder else None
    return max(0.0, time.time() - started) if isinstance(started, int | float) else None


def estimate_left(store: RunStore, missing: Sequence[str]) -> float | None:
    """The mean wall time of the latest trials, for every trial that is missing; None before the first."""
    left = set(missing)
    done = [name for name in store.record.trials if name not in left]
    measured = [seconds for name in done[-MOST_TIMED:] if (seconds := read_wall_seconds(store, name))]
    return statistics.fmean(measured) * len(left) if measured else None


def read_wall_seconds(store: RunStore, name: str) -> float | None:
    """How long a trial took, without its samples; None where that cannot be read."""
    try:
        seconds = json.loads((store.trial_directory(name) / "result.json").read_bytes())["wall_seconds"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seconds if isinstance(seconds, int | float) and seconds > 0 else None
