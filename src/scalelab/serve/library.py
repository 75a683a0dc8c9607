"""What the page may show of a directory of runs: answers, reports, comparisons and trends.

They are computed on request and kept until a run changes. Computing the answer of ten thousand trials takes longer than
a page should wait, so it runs in a thread: a page gets the answer if it is quick, otherwise the previous one, and asks
again.

A trend is one configuration over time: is our training getting slower? Runs of the same study with the same settings
(rounds and steps may differ) are put in order, each by the step times in the table of its stored answer: a line per row
and host, with intervals. Whether there is a trend is Mann's test, and how large it is the slope of Theil and Sen, over
the runs of a line.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.quality import find_trend
from scalelab.errors import ScalelabError, UsageError
from scalelab.records.files import read_stored
from scalelab.records.store import RunStore
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.plot import plot_lines
from scalelab.report.document import Document, Section
from scalelab.report.findings import DETAIL, MAIN, Finding, FindingKind
from scalelab.report.tables import INTERVAL_NOTE, make_table, seconds_column, text_column
from scalelab.serve.listing import Index, RunLine, conclude_safely, describe_run, is_run_name, select_lines
from scalelab.units import format_share

TREND = FindingKind(
    "trend-over-runs", "How the step time of a row changed over runs", MAIN, ("change", "num_runs"), ("change",)
)
STEP = "step_seconds"
DAY_SECONDS = 86400.0
FEWEST_RUNS = 5
"""Fewer have no trend that is not chance."""
APART = ("sampling", "note")
"""Settings that say how well something is measured, not what."""


class _Cell(msgspec.Struct):
    value: float | str | bool | None = None
    low: float | None = None
    high: float | None = None


class _Column(msgspec.Struct):
    key: str


class _StoredTable(msgspec.Struct):
    columns: list[_Column]
    rows: list[list[_Cell]]


class _Section(msgspec.Struct):
    tables: list[_StoredTable] = []


class _Answer(msgspec.Struct):
    """What a trend needs of a stored document: charts, most of its bytes, are skipped."""

    sections: list[_Section] = []


@dataclass(frozen=True, kw_only=True)
class TrendPoint:
    """One row of one run."""

    run: str
    measured_at: datetime
    series: str
    step: Estimate


def name_settings(path: Path) -> str:
    """What must be equal for two runs to be of one configuration."""
    record = RunStore.open(path).record
    return json.dumps([record.study, {name: value for name, value in record.fields.items() if name not in APART}])


def find_alike(path: Path, lines: Iterable[RunLine]) -> list[RunLine]:
    """The runs of the same configuration, oldest first."""
    own = name_settings(path)
    alike = []
    for line in lines:
        try:
            if name_settings(path.parent / line.name) == own:
                alike.append(line)
        except ScalelabError:  # damaged: the list says so
            continue
    return sorted(alike, key=lambda line: line.created_at)


def read_steps(path: Path) -> dict[str, Estimate]:
    """The step time of every row of a run's stored answer; nothing without one."""
    try:
        answer = msgspec.json.decode(read_stored(path / "document.json"), type=_Answer)
    except (OSError, ValueError):
        return {}
    for table in (table for section in answer.sections for table in section.tables):
        keys = [column.key for column in table.columns]
        if STEP in keys:
            place = keys.index(STEP)
            return {_name_row(keys, row): made for row in table.rows if (made := _read_cell(row[place])) is not None}
    return {}


def _name_row(keys: Sequence[str], row: Sequence[_Cell]) -> str:
    first = row[0].value
    return f"{first:g} {keys[0].replace('_', ' ')}" if isinstance(first, float) else str(first)


def _read_cell(cell: _Cell) -> Estimate | None:
    known = isinstance(cell.value, float) and cell.value > 0
    return Estimate(value=float(cell.value or 0), low=cell.low, high=cell.high) if known else None


def collect_points(runs_dir: Path, lines: Sequence[RunLine]) -> list[TrendPoint]:
    """Every row of every run, in the order of the runs."""
    hosts = {line.host for line in lines}
    points = []
    for line in lines:
        over = f" on {line.host or 'unknown host'}" if len(hosts) > 1 else ""
        measured_at = read_time(line.created_at)
        if measured_at is None:
            continue
        for name, step in read_steps(runs_dir / line.name).items():
            points.append(TrendPoint(run=line.name, measured_at=measured_at, series=f"{name}{over}", step=step))
    return points


def read_time(text: str) -> datetime | None:
    """When a run began; None where its record was changed."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def describe_trend(runs_dir: Path, name: str, lines: Sequence[RunLine]) -> Document:
    """The step times of all runs of one configuration."""
    points = collect_points(runs_dir, find_alike(runs_dir / name, lines))
    if not points:
        raise UsageError(f"no run like {name} has step times in its answer: scalelab show {name} computes one")
    by_series: dict[str, list[TrendPoint]] = {}
    for point in points:
        by_series.setdefault(point.series, []).append(point)
    first = points[0].measured_at
    line = next(line for line in lines if line.name == name)
    chart = plot_lines(
        title="Step time over runs",
        x=Axis(field="days", title=f"days since {first:%Y-%m-%d}", quantity="number", from_zero=False),
        y=Axis(field=STEP, title="step", quantity="seconds", from_zero=False),
        rows=[
            {
                "series": point.series,
                "days": (point.measured_at - first).total_seconds() / DAY_SECONDS,
                STEP: point.step,
                "run": point.run,
            }
            for point in points
        ],
        extra={"run": "run"},
        caption="Runs of the same study with the same settings, by the time they began; rounds and steps may differ.",
    )
    table = make_table(
        points,
        text_column("run", "run", lambda point: point.run),
        text_column("measured", "measured", lambda point: f"{point.measured_at:%Y-%m-%d %H:%M}"),
        text_column("row", "row", lambda point: point.series),
        seconds_column(STEP, "step", lambda point: point.step),
        notes=(INTERVAL_NOTE,),
    )
    return Document(
        title="Trend",
        question=f"Do the steps of {line.study} with {line.workload} change over time?",
        setting=f"{len({point.run for point in points})} runs like {name}",
        sections=(Section(charts=(chart,)), Section(heading="Every run", tables=(table,))),
        findings=tuple(judge_series(by_series)),
    )


def judge_series(by_series: Mapping[str, Sequence[TrendPoint]]) -> Iterable[Finding]:
    """Whether each line rises or falls; those that do come first."""
    for series, points in by_series.items():
        days = f"from {points[0].measured_at:%Y-%m-%d} to {points[-1].measured_at:%Y-%m-%d}"
        change = find_trend(np.array([point.step.value for point in points])) if len(points) >= FEWEST_RUNS else None
        text = f"{series}: no trend over {len(points)} runs {days}."
        if len(points) < FEWEST_RUNS:
            text = f"{series}: {len(points)} runs are too few for a trend; measure at least {FEWEST_RUNS}."
        elif change is not None:
            text = f"{series}: steps got {format_share(abs(change))} {'slower' if change > 0 else 'faster'} {days}."
        yield TREND(series, text, weight=MAIN if change else DETAIL, change=change, num_runs=len(points))


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
