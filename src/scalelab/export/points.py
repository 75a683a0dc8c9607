"""A run as numbers over steps, as TensorBoard and MLflow expect them.

    step_seconds/clean …   the time of every step by kind, the maximum over ranks
    samples_per_second     of clean steps
    phase/forward …        the seconds of each phase, the mean over ranks, where phases were timed
    loss                   of every step, the mean over ranks
    train/…, test/…        the lines of a training run: loss, accuracy, learning rate
    call_seconds/SIZE      one call of a collective by message size, the maximum over ranks
    fetch_seconds/PASS …   every batch of a stored set by pass, the maximum over ranks
    answer/TABLE/ROW/KEY   every number of the report's tables, in base units, with /low and /high of its interval

Characters that those programs do not allow in names become dashes.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from scalelab.checks import clean_text
from scalelab.records.observations import Fetch, Transfer
from scalelab.records.tasks import PHASES
from scalelab.records.trial import StepKind, StepSample, TrialResult
from scalelab.report.document import Document
from scalelab.studies.shared.arms import count_step_samples

LONGEST_NAME = 60
"""Letters of one part of a tag: a row's label may have 300."""


class Point(NamedTuple):
    """One number of a series."""

    tag: str
    step: int
    value: float
    seconds: float
    """Since the start of the trial."""


def list_points(result: TrialResult) -> Iterator[Point]:
    """Every finite number over steps of one trial."""
    ends = _find_ends(result)
    points = [
        *_list_steps(result, ends),
        *_list_phases(result, ends),
        *_list_losses(result, ends),
        *_list_curve(result, ends),
        *_list_transfers(result),
        *_list_fetches(result),
    ]
    yield from (point for point in points if math.isfinite(point.value))


def list_answers(document: Document) -> Iterator[tuple[str, float]]:
    """Every number of a document's tables by its name; tables and rows with the same name are numbered."""
    tables: dict[str, int] = {}
    for section in document.sections:
        for table in section.tables:
            title = _number(tables, make_name(table.title or section.heading or document.title))
            rows: dict[str, int] = {}
            for row in table.rows:
                label = _number(rows, make_name(str(row[0].value)))
                for column, cell in zip(table.columns[1:], row[1:], strict=True):
                    number = cell.estimate.value if cell.estimate else None
                    ends = {"": number, "/low": cell.low, "/high": cell.high}
                    for end, value in ends.items():
                        if value is not None and math.isfinite(value):
                            yield f"answer/{title}/{label}/{column.key}{end}", value


def make_name(text: str) -> str:
    """A text as one part of a tag."""
    name = re.sub(r"[^A-Za-z0-9_. -]+", "-", clean_text(text)).strip("- .")
    return name[:LONGEST_NAME].strip("- .") or "unnamed"


def find_first_start(results: Sequence[TrialResult]) -> float:
    """Start of the first trial in seconds since 1970; 0 if unknown."""
    return min((start for result in results if (start := read_start(result))), default=0.0)


def read_start(result: TrialResult) -> float:
    """Start of a trial in seconds since 1970; 0 if unknown."""
    try:
        return datetime.fromisoformat(result.started_at).timestamp()
    except ValueError:
        return 0.0


def _number(names: dict[str, int], name: str) -> str:
    names[name] = names.get(name, 0) + 1
    return name if names[name] == 1 else f"{name} {names[name]}"


def _find_ends(result: TrialResult) -> dict[int, float]:
    """End of every step on all ranks, in seconds since the start of the trial; each host has its own clock."""
    begun = _find_starts(result.samples)
    before = result.first_step_seconds or 0.0
    ends: dict[int, float] = {}
    for sample in result.samples:
        end = before + sample.start_seconds - begun[sample.rank] + sample.step_seconds
        ends[sample.step] = max(ends.get(sample.step, 0.0), end)
    return ends


def _list_steps(result: TrialResult, ends: Mapping[int, float]) -> Iterator[Point]:
    samples = count_step_samples(result)
    for kind in StepKind:
        for step, seconds in result.step_seconds(kind).items():
            yield Point(f"step_seconds/{kind.value}", step, seconds, ends[step])
            if kind is StepKind.CLEAN and seconds > 0:
                yield Point("samples_per_second", step, samples / seconds, ends[step])


def _list_phases(result: TrialResult, ends: Mapping[int, float]) -> Iterator[Point]:
    timed = [sample for sample in result.samples if sample.kind is StepKind.PHASES]
    for phase in PHASES:
        by_step: dict[int, list[float]] = {}
        for sample in timed:
            seconds = getattr(sample, f"{phase}_seconds")
            if seconds is not None:
                by_step.setdefault(sample.step, []).append(seconds)
        for step, values in sorted(by_step.items()):
            yield Point(f"phase/{phase}", step, statistics.fmean(values), ends[step])


def _list_losses(result: TrialResult, ends: Mapping[int, float]) -> Iterator[Point]:
    if not result.curve:
        yield from (Point("loss", step, loss, ends[step]) for step, loss in result.losses().items())


def _list_curve(result: TrialResult, ends: Mapping[int, float]) -> Iterator[Point]:
    """The lines at the end of their steps; an evaluation comes after its step."""
    passed = 0.0
    for point in result.curve:
        passed += point.seconds
        if point.step in ends:
            passed = ends[point.step] + (point.seconds if point.is_evaluation else 0.0)
        group = "test" if point.is_evaluation else "train"
        named = {"loss": point.loss, "accuracy": point.accuracy, "learning_rate": point.learning_rate}
        for name, value in named.items():
            if value is not None:
                yield Point(f"{group}/{name}", point.step, value, passed)


def _list_transfers(result: TrialResult) -> Iterator[Point]:
    begun = _find_starts(result.transfers)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for one in result.transfers:
        tag = f"call_seconds/{one.payload_bytes} bytes"
        passed = one.start_seconds - begun[one.rank] + one.seconds
        found.setdefault((tag, one.repeat), []).append((one.seconds / max(1, one.num_calls), passed))
    yield from _list_slowest(found)


def _list_fetches(result: TrialResult) -> Iterator[Point]:
    begun = _find_starts(result.fetches)
    num_batches = 1 + max((one.batch for one in result.fetches), default=0)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for one in result.fetches:
        tag = f"fetch_seconds/{one.order} {one.access} {one.cache}"
        passed = one.start_seconds - begun[one.rank] + one.fetch_seconds
        found.setdefault((tag, one.epoch * num_batches + one.batch), []).append((one.fetch_seconds, passed))
    yield from _list_slowest(found)


def _find_starts(timings: Iterable[StepSample | Transfer | Fetch]) -> dict[int, float]:
    """Start of each rank by its own clock."""
    begun: dict[int, float] = {}
    for one in timings:
        begun[one.rank] = min(begun.get(one.rank, math.inf), one.start_seconds)
    return begun


def _list_slowest(found: Mapping[tuple[str, int], Sequence[tuple[float, float]]]) -> Iterator[Point]:
    for (tag, step), times in sorted(found.items()):
        yield Point(tag, step, max(value for value, _ in times), max(passed for _, passed in times))
