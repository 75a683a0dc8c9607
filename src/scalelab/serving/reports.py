"""Reports as the page shows them: derived when they are asked for, kept while nothing has changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from scalelab.report.document import Document
from scalelab.serving.listing import describe_run
from scalelab.serving.watching import conclude_safely

MOST_KEPT = 32
Answer = tuple[Document | None, str]


@dataclass(kw_only=True)
class Shelf:
    """Answers and pages by the runs that they are of and what those held when they were made."""

    _answers: OrderedDict[Path, tuple[object, Answer]] = field(default_factory=OrderedDict)
    _pages: OrderedDict[tuple[Path, ...], tuple[object, str]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def conclude(self, path: Path) -> Answer:
        """The answer of a run, derived again only where it has more results than before."""
        state = read_state(path)
        with self._lock:
            kept = self._answers.get(path)
            if kept is not None and kept[0] == state:
                return kept[1]
        made = conclude_safely(path)
        with self._lock:
            self._answers[path] = (state, made)
            if len(self._answers) > MOST_KEPT:
                self._answers.popitem(last=False)
        return made

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
