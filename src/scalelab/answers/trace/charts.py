"""The timeline of one profiled step, from the traces of a run or any others.

Traces are read once, so the timeline is a counter like the others (`trace/rank_trace.py`). It keeps the events of one
step: the middle one of those shown, since the first profiled step is often slow. Events inside a collective or another
operator on the same thread are not drawn. Events shorter than a pixel are merged with their neighbours, which bounds
the number of marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scalelab.errors import ScalelabError
from scalelab.report.charts.step_times import plot_timeline
from scalelab.report.document import Chart
from scalelab.trace.files.reader import find_trace_files
from scalelab.trace.job_trace import JobTrace, read_ranks
from scalelab.trace.kinds import Kind
from scalelab.trace.rank_time import select_work
from scalelab.trace.rank_trace import RankTrace, Tables
from scalelab.trace.windows import ProfilerStep, Steps, Window
from scalelab.units import format_seconds

if TYPE_CHECKING:
    from scalelab.studies.shared.arms import Arm

RESOLUTION = 2000
"""Events shorter than this part of the step are merged while a trace is read."""
MOST_MARKS = 700
MOST_RANKS = 16
COARSEST = 50
"""Marks that would have to be longer than this part of the step may cover what other lanes ran."""
LARGEST_FILES = 64_000_000
"""Compressed bytes of traces that are read for the chart of a run; larger ones are left to `scalelab trace`."""
LANES = ("communication", "compute", "copies")
SERIES = ("compute", "communication", "copies")
"""In the order of the parts of a rank, so that both charts have the same colours."""
_KINDS = {Kind.COMMUNICATION: "communication", Kind.COPY: "copies"}
NANOSECONDS = 1e-9


@dataclass
class Span:
    """One event, or several that were merged."""

    start_ns: int
    end_ns: int
    name: str
    longest_ns: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What one rank did in one step."""

    step: int | None
    """None: the trace has no steps, and this is all of it."""
    low_ns: int
    high_ns: int
    lanes: Mapping[str, Sequence[Span]]


@dataclass
class _Lane:
    """Spans in order of their start; short ones join their neighbours."""

    shortest_ns: int
    spans: list[Span] = field(default_factory=list)
    others: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    """Starts of what other lanes ran, in order, and the latest end up to each: nothing is drawn across it."""

    def add(self, start: int, end: int, name: str, longest: int | None = None, count: int = 1) -> None:
        last = self.spans[-1] if self.spans else None
        is_apart = last is None or start >= last.end_ns + self.shortest_ns or self._is_between(last.end_ns, start)
        if last is None or is_apart or self._is_long(start, end, last):
            self.spans.append(Span(start, end, name, end - start if longest is None else longest, count))
        elif end > last.end_ns:
            last.end_ns, last.count = end, last.count + count
            if (longest or end - start) > last.longest_ns:
                last.name, last.longest_ns = name, longest or end - start

    def _is_between(self, low: int, high: int) -> bool:
        """Whether another lane ran something there."""
        if self.others is None or high <= low:
            return False
        place = int(np.searchsorted(self.others[0], high)) - 1
        return place >= 0 and int(self.others[1][place]) > low

    def _is_long(self, start: int, end: int, last: Span) -> bool:
        """Whether an event that follows immediately gets its own mark: both are long, and it is not inside."""
        is_inside = end <= last.end_ns
        return not is_inside and min(end - start, last.end_ns - last.start_ns) >= self.shortest_ns


class TimelineCounter:
    """Keeps the events of one step of a trace."""

    def __init__(self, tables: Tables, steps: Steps = None) -> None:
        self._tables = tables
        self._step = choose_step(tables.steps, steps)
        bounds = (self._step.start, self._step.end) if self._step else (tables.low, tables.high)
        self._low, self._high = bounds
        shortest = max(1, (self._high - self._low) // RESOLUTION)
        self._lanes = {name: _Lane(shortest) for name in LANES}
        self._has_begun = False

    def take(self, window: Window) -> None:
        if window.end <= self._low or window.start >= self._high:
            return
        records = select_work(window.all_records, has_device=self._tables.has_device)
        if self._has_begun:
            records = records[records["start"] >= window.start]
        self._has_begun = True
        records = records[np.lexsort((-records["end"], records["start"]))]
        starts = np.maximum(records["start"], self._low).tolist()
        ends = np.minimum(records["end"], self._high).tolist()
        names = self._tables.names
        for start, end, kind, name in zip(
            starts, ends, records["kind"].tolist(), records["name"].tolist(), strict=True
        ):
            if start < end:
                self._lanes[_KINDS.get(kind, "compute")].add(start, end, names[name])

    def finish(self) -> Timeline:
        return Timeline(
            step=self._step.number if self._step else None,
            low_ns=self._low,
            high_ns=self._high,
            lanes={name: lane.spans for name, lane in self._lanes.items() if lane.spans},
        )


def choose_step(steps: Sequence[ProfilerStep], wanted: Steps) -> ProfilerStep | None:
    """The middle one of those that are shown."""
    known = [step for step in steps if wanted is None or step.number in wanted]
    return known[len(known) // 2] if known else None


def merge_spans(spans: Sequence[Span], shortest_ns: int, others: Iterable[Span] = ()) -> list[Span]:
    """The same with larger pieces, none of them across a gap in which one of the others runs."""
    ordered = sorted(others, key=lambda span: span.start_ns)
    starts = np.array([span.start_ns for span in ordered], dtype=np.int64)
    reach = np.maximum.accumulate(np.array([span.end_ns for span in ordered], dtype=np.int64))
    lane = _Lane(shortest_ns, others=(starts, reach))
    for span in spans:
        lane.add(span.start_ns, span.end_ns, span.name, span.longest_ns, span.count)
    return lane.spans


def plot_recorded_steps(arms: Sequence[Arm], find_directory: Callable[[str], Path], most: int = 1) -> Iterator[Chart]:
    """The timelines of configurations with most ranks that have traces, each of its last launch.

    More than one only of other strategies or links: those send other messages, or send them another way.
    """
    drawn: set[tuple[str, str]] = set()
    for arm in sorted(arms, key=lambda arm: -arm.trial.num_processes):
        kind = (arm.trial.strategy, str(arm.trial.link))
        is_smaller = bool(drawn) and arm.trial.num_processes < max(one.trial.num_processes for one in arms)
        if (
            len(drawn) < most
            and not is_smaller
            and kind not in drawn
            and (chart := _plot_recorded(arm, find_directory))
        ):
            drawn.add(kind)
            title = f"{chart.title}, {arm.label}" if len(drawn) > 1 else chart.title
            yield replace(chart, title=title)


def _plot_recorded(arm: Arm, find_directory: Callable[[str], Path]) -> Chart | None:
    for result in reversed(arm.completed):
        plan = result.trial.step_plan
        if plan is not None and not plan.profiled_steps:
            return None
        job = read_recorded(find_directory(result.trial.name))
        if job is not None:
            timelines = {rank: trace.counted[0] for rank, trace in job.by_rank.items()}
            return draw_timelines(job, timelines, f"of {arm.label}, launch {result.trial.round}")
    return None


def read_recorded(directory: Path) -> JobTrace | None:
    """The traces of a trial; None if there are none, or they cannot be read at once."""
    if not (directory / "trace").is_dir():
        return None
    try:
        files = find_trace_files([directory / "trace"])
        if sum(file.stat().st_size for file in files) > LARGEST_FILES:
            return None
        return read_ranks(files, counters=[TimelineCounter], counts_work=False)
    except (ScalelabError, OSError):
        return None


def draw_timelines(job: JobTrace, timelines: Mapping[int, Timeline], words: str = "") -> Chart | None:
    """Every rank's step on one clock; None if nothing ran in it."""
    steps = {timeline.step for timeline in timelines.values()}
    shown = {rank: timeline for rank, timeline in timelines.items() if timeline.lanes}
    chosen = dict(list(shown.items())[:MOST_RANKS])
    if not chosen:
        return None
    origin = min(_find_shift(job, rank)(timeline.low_ns) for rank, timeline in chosen.items())
    span = max(timeline.high_ns - timeline.low_ns for timeline in chosen.values())
    shortest, merged = merge_all(chosen, span)
    rows = [row for rank, lanes in merged.items() for row in _list_rows(rank, lanes, _find_shift(job, rank), origin)]
    num_merged = sum(row["count"] for row in rows if row["count"] > 1)
    said = [describe_steps(steps, words)]
    if num_merged:
        said.append(
            f"{num_merged} events that are shorter or closer than {format_seconds(shortest * NANOSECONDS)} are merged."
        )
    said += list(_describe_clock(job, chosen))
    if len(shown) > len(chosen):
        said.append(f"{len(shown) - len(chosen)} more ranks are not drawn.")
    return plot_timeline(title="Timeline of a profiled step", rows=rows, caption=" ".join(said), series=SERIES)


def describe_steps(steps: set[int | None], words: str) -> str:
    known = sorted(step for step in steps if step is not None)
    which = f"Profiler step {known[0]}" if len(known) == 1 else "The middle profiled step"
    return f"{which if known else 'The whole trace'}{f' {words}' if words else ''}; communication above compute."


def merge_all(timelines: Mapping[int, Timeline], span_ns: int) -> tuple[int, dict[int, dict[str, list[Span]]]]:
    """Merge until the figure has few enough marks; also the shortest mark."""
    shortest = max(1, span_ns // RESOLUTION)
    while True:
        is_exact = COARSEST * shortest < span_ns
        merged = {rank: _merge_lanes(timeline.lanes, shortest, is_exact) for rank, timeline in timelines.items()}
        if sum(len(spans) for lanes in merged.values() for spans in lanes.values()) <= MOST_MARKS:
            return shortest, merged
        shortest = shortest * 3 // 2 + 1


def _merge_lanes(lanes: Mapping[str, Sequence[Span]], shortest_ns: int, is_exact: bool) -> dict[str, list[Span]]:
    """All lanes of a rank; exact: no mark covers time in which only another lane ran."""
    return {
        name: merge_spans(
            spans,
            shortest_ns,
            [span for other, more in lanes.items() if other != name for span in more] if is_exact else (),
        )
        for name, spans in lanes.items()
    }


def _find_shift(job: JobTrace, rank: int) -> Callable[[int], int]:
    """From a rank's times to those of the reference's clock."""
    trace: RankTrace = job.by_rank[rank]
    base = trace.header.base_ns if abs(trace.header.base_ns) < 2**62 else 0
    clock = job.matching.clocks.get(rank) if job.matching is not None else None
    if clock is None:
        return lambda time: time + base
    return lambda time: int(clock.correct(np.array([time + base], dtype=np.int64))[0])


def _describe_clock(job: JobTrace, timelines: Mapping[int, Timeline]) -> Iterator[str]:
    if len(timelines) < 2 or job.matching is None:
        return
    if any(clock.num_collectives == 1 for clock in job.matching.clocks.values()):
        yield "Clocks are aligned by a single collective: their error is unknown."
    elif uncertain := job.matching.uncertainty_ns * NANOSECONDS:
        yield f"Clocks are aligned to {format_seconds(uncertain)}."


def _list_rows(
    rank: int, lanes: Mapping[str, Sequence[Span]], shift: Callable[[int], int], origin: int
) -> Iterator[dict[str, Any]]:
    for name in LANES:
        for span in lanes.get(name, ()):
            start = shift(span.start_ns) - origin
            length = span.end_ns - span.start_ns
            others = f" and {span.count - 1} more" if span.count > 1 else ""
            yield {
                "series": name,
                "lane": f"rank {rank} {name}",
                "rank": rank,
                "start": start * NANOSECONDS,
                "duration": length * NANOSECONDS,
                "name": f"{span.name[:80]}{others}",
                "count": span.count,
            }
