"""Reports as the page shows them: derived when they are asked for, kept while nothing has changed.

Deriving the answer of ten thousand trials takes longer than somebody waits who only wants to know how far a run is. So
it is done beside: a page gets the answer if that is quick, and otherwise the one before, and asks again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from scalelab.report.document import Document
from scalelab.serving.listing import describe_run
from scalelab.serving.watching import conclude_safely

MOST_KEPT = 32
WAIT_SECONDS = 1.0
DERIVING = "the answer is being derived from the raw samples"
Derived = tuple[Document | None, str]


class Answer(NamedTuple):
    """What a run says, or why it says nothing."""

    document: Document | None
    problem: str
    is_newest: bool
    """Whether it is of all results that there are now."""


@dataclass(kw_only=True)
class Shelf:
    """Answers and pages by the runs that they are of and what those held when they were made."""

    wait_seconds: float = WAIT_SECONDS
    """How long an answer is waited for before the one before is given."""
    _answers: OrderedDict[Path, tuple[object, Derived]] = field(default_factory=OrderedDict)
    _working: dict[Path, threading.Thread] = field(default_factory=dict)
    _pages: OrderedDict[tuple[Path, ...], tuple[object, str]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def conclude(self, path: Path) -> Answer:
        """The answer of a run, derived again only where it has more results than before; or the one before it."""
        state = read_state(path)
        with self._lock:
            kept = self._answers.get(path)
            if kept is not None and kept[0] == state:
                return Answer(*kept[1], is_newest=True)
            work = self._working.get(path)
            if work is None:
                work = threading.Thread(target=self._derive, args=(path, state), daemon=True)
                self._working[path] = work
                work.start()
        work.join(self.wait_seconds)
        with self._lock:
            known, derived = self._answers.get(path, (None, (None, DERIVING)))
        return Answer(*derived, is_newest=known == state)

    def _derive(self, path: Path, state: object) -> None:
        made: Derived = (None, DERIVING)
        try:
            made = conclude_safely(path)
        except Exception as error:  # noqa: BLE001 - whoever asked is told, and may ask again
            made = (None, f"nothing can be concluded ({type(error).__name__}: {error})")
        finally:
            with self._lock:
                self._answers[path] = (state, made)
                self._working.pop(path, None)
                if len(self._answers) > MOST_KEPT:
                    self._answers.popitem(last=False)

    def render(self, paths: tuple[Path, ...], render: Callable[[], str]) -> str:
        """A page of runs, made again only where one of them has changed."""
        state = tuple(map(read_state, paths))
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
    """What an answer depends on: which results there are, and who wrote the last of them."""
    line = describe_run(path)
    try:
        changed = (path / "run.json").stat().st_mtime_ns
    except OSError:
        changed = 0
    return line, changed
