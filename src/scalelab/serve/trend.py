"""One configuration over time: is our training getting slower?

Runs of the same study with the same settings (rounds and steps may differ) are put in order, each by the step times in
the table of its stored answer: a line per row and host, with intervals. Whether there is a trend is Mann's test, and
how large it is the slope of Theil and Sen, over the runs of a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

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
from scalelab.serve.listing import RunLine
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
