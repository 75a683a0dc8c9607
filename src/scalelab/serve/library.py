"""What the page may show of a directory of runs: answers, reports, comparisons and trends.

They are computed on request and kept until a run changes. Computing the answer of ten thousand trials takes longer than
a page should wait, so it runs in a thread: a page gets the answer if it is quick, otherwise the previous one, and asks
again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from scalelab.errors import ScalelabError
from scalelab.records.store import RunStore
from scalelab.report.document import Document
from scalelab.serve.listing import Index, conclude_safely, describe_run, is_run_name, select_lines
from scalelab.serve.trend import describe_trend

MOST_KEPT = 32
WAIT_SECONDS = 1.0
DERIVING = "computing the answer from the raw samples"
Derived = tuple[Document | None, str]


class RunAnswer(NamedTuple):
    """The answer of a run, or why there is none."""

    document: Document | None
    problem: str
    is_newest: bool
    """Whether it includes all results."""


@dataclass(kw_only=True)
class Shelf:
    """Answers and pages by run, with the state of the run when they were made."""

    wait_seconds: float = WAIT_SECONDS
    """How long to wait for a new answer before returning the previous one."""
    _answers: OrderedDict[Path, tuple[object, Derived]] = field(default_factory=OrderedDict)
    _working: dict[Path, threading.Thread] = field(default_factory=dict)
    _pages: OrderedDict[tuple[Path, ...], tuple[object, str]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _rendering: threading.Lock = field(default_factory=threading.Lock)

    def conclude(self, path: Path) -> RunAnswer:
        """The answer of a run, recomputed only if it has new results; the previous one if that takes long."""
        state = read_state(path)
        with self._lock:
            kept = self._answers.get(path)
            if kept is not None and kept[0] == state:
                return RunAnswer(*kept[1], is_newest=True)
            work = self._working.get(path)
            if work is None:
                work = threading.Thread(target=self._derive, args=(path, state), daemon=True)
                self._working[path] = work
                work.start()
        work.join(self.wait_seconds)
        with self._lock:
            known, derived = self._answers.get(path, (None, (None, DERIVING)))
        return RunAnswer(*derived, is_newest=known == state)

    def _derive(self, path: Path, state: object) -> None:
        made: Derived = (None, DERIVING)
        try:
            made = conclude_safely(path)
        except Exception as error:  # noqa: BLE001 - the page shows it and may ask again
            made = (None, f"the answer cannot be computed ({type(error).__name__}: {error})")
        finally:
            with self._lock:
                self._answers[path] = (state, made)
                self._working.pop(path, None)
                if len(self._answers) > MOST_KEPT:
                    self._answers.popitem(last=False)

    def render(self, paths: tuple[Path, ...], render: Callable[[], str]) -> str:
        """A page of runs, rendered again only if one of them changed."""
        state = tuple(map(read_state, paths))
        with self._lock:
            kept = self._pages.get(paths)
            if kept is not None and kept[0] == state:
                return kept[1]
        with self._rendering:  # a hundred clients that want the same page wait for one
            with self._lock:
                kept = self._pages.get(paths)
                if kept is not None and kept[0] == state:
                    return kept[1]
            made = render()
            with self._lock:
                self._pages[paths] = (state, made)
                if len(self._pages) > MOST_KEPT:
                    self._pages.popitem(last=False)
        return made


def read_state(path: Path) -> object:
    """What an answer depends on: the results and the run's record."""
    line = describe_run(path)
    try:
        changed = (path / "run.json").stat().st_mtime_ns
    except OSError:
        changed = 0
    return line, changed


class Refused(Exception):
    """A refused request, with its HTTP status."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass(kw_only=True)
class Library:
    """What the server may show, and how it renders it."""

    runs_dir: Path
    describe: Callable[[Sequence[RunStore]], Document]
    """The document of one run, or the comparison of several."""
    render: Callable[[Document, Sequence[Path]], str]
    """A document as a page, with the raw files of runs to download."""
    index: Index = field(init=False)
    shelf: Shelf = field(default_factory=Shelf)

    def __post_init__(self) -> None:
        self.index = Index(runs_dir=self.runs_dir)

    def find(self, name: str) -> Path:
        """The directory of a run; refuses anything else."""
        path = self.runs_dir / name
        if not is_run_name(name) or not (path / "run.json").is_file() or not self.is_inside(path):
            raise Refused(HTTPStatus.NOT_FOUND, "no such run")
        return path

    def is_inside(self, path: Path) -> bool:
        """Whether a path, with links resolved, lies in the directory of the runs."""
        return path.resolve().is_relative_to(self.runs_dir.resolve())

    def make_report(self, names: Sequence[str]) -> str:
        """The report of one run, or of several as a comparison."""
        paths = tuple(self.find(name) for name in names)
        try:
            stores = [RunStore.open(path) for path in paths]
            return self.shelf.render(paths, lambda: self.render(self.describe(stores), paths))
        except ScalelabError as error:
            raise Refused(HTTPStatus.CONFLICT, str(error)) from error

    def make_trend(self, name: str, asked: Mapping[str, str]) -> str:
        """The runs like one, over time, of those that are selected."""
        path = self.find(name)
        lines = [line for line in self.index.list_lines() if line.phase != "damaged"]
        selected = {line.name for line in select_lines(lines, asked)} | {name}
        chosen = [line for line in lines if line.name in selected]
        try:
            return self.render(describe_trend(path.parent, name, chosen), ())
        except ScalelabError as error:
            raise Refused(HTTPStatus.CONFLICT, str(error)) from error
