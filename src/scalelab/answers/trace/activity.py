"""Tables of what ran, for what, and what did not: kernels, operators, device time, idle streams, launches, gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from scalelab.answers.trace.tables import latency_column, note_more
from scalelab.answers.trace.view import NS, TraceView, add_kernels, add_operators, divide, name_cells
from scalelab.report.charts.step_times import plot_timeline
from scalelab.report.document import Cell, Chart, Table
from scalelab.report.tables import (
    Field,
    count_column,
    make_column,
    make_table,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.trace.attribution import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    UNATTRIBUTED,
    UNKNOWN,
    Caller,
    CallerTime,
    add_asked,
)
from scalelab.trace.idle import SHORT
from scalelab.trace.kinds import MODULE
from scalelab.trace.launches import LIMIT, LONG_CALL_NS, LONG_DELAY_NS
from scalelab.trace.rank_trace import Lane
from scalelab.units import format_seconds, format_share

LONGEST_NEIGHBOUR = 36
"""Characters of the two names beside a gap."""
T = TypeVar("T")


def name_rows(rows: Sequence[Any]) -> dict[str, Cell]:
    """Names that fit a table, by the whole name."""
    return name_cells([row.name for row in rows])


def make_kernels_table(view: TraceView) -> Table:
    """Kernels by their total."""
    kernels = add_kernels(view)
    shown, everything = kernels[: view.top], sum(kernel.total_ns for kernel in kernels)
    names = name_rows(shown)
    return make_table(
        shown,
        text_column("kernel", "kernel", lambda one: names[one.name]),
        text_column("kind", "kind", lambda one: one.kind),
        count_column("num_runs", "count", lambda one: one.count),
        seconds_column("total_seconds", "total", lambda one: one.total_ns * NS),
        latency_column("mean", "mean", lambda one: one.mean_ns * NS),
        latency_column("max", "max", lambda one: one.longest_ns * NS),
        share_column("kernel_share", "total / all kernels", lambda one: divide(one.total_ns, everything)),
        title="Kernels",
        notes=(
            "all kernels: sum of durations over ranks and streams, overlaps included",
            *note_more(len(kernels), len(shown)),
        ),
    )


def make_operators_table(view: TraceView) -> Table:
    """Operators by their self time."""
    operators = add_operators(view)
    shown, everything = operators[: view.top], sum(operator.self_ns for operator in operators)
    names = name_rows(shown)
    return make_table(
        shown,
        text_column("operator", "operator", lambda one: names[one.name]),
        count_column("num_calls", "count", lambda one: one.count),
        seconds_column("self_seconds", "self", lambda one: one.self_ns * NS),
        share_column("self_share", "self / all", lambda one: divide(one.self_ns, everything)),
        seconds_column("total_seconds", "total", lambda one: one.total_ns * NS, unit_of="self_seconds"),
        latency_column("max", "max", lambda one: one.longest_ns * NS),
        title="Operators on the host",
        notes=(
            "self: without the operators inside it; all: self time of all operators on all threads",
            *note_more(len(operators), len(shown)),
        ),
    )


def choose_rows(view: TraceView, rows: Sequence[tuple[int, T]], size: Callable[[T], float]) -> list[tuple[int, T]]:
    """The largest, in the order of their ranks."""
    return sorted(sorted(rows, key=lambda row: -size(row[1]))[: view.top], key=lambda row: row[0])


def rank_column() -> Field[Any]:
    return text_column("rank", "rank", lambda row: f"rank {row[0]}")


def lane_column(view: TraceView, key: str, header: str) -> Field[Any]:
    return text_column(key, header, lambda row: name_lane(view, row[0], row[1].lane))


def make_idle_table(view: TraceView) -> Table:
    """Why streams were idle, the busiest first."""
    lanes = [(rank, lane) for rank, counted in view.counted.items() for lane in counted.lanes.idle]
    shown = choose_rows(view, lanes, lambda lane: lane.busy_ns)

    def share(part: str, whole: str, row: Any) -> float | None:
        return divide(getattr(row[1], f"{part}_ns"), getattr(row[1], f"{whole}_ns"))

    return make_table(
        shown,
        rank_column(),
        lane_column(view, "stream", "stream"),
        count_column("num_kernels", "kernels", lambda row: row[1].num_events),
        seconds_column("span_seconds", "span", lambda row: row[1].span_ns * NS),
        seconds_column("idle_seconds", "idle", lambda row: row[1].idle_ns * NS, unit_of="span_seconds"),
        share_column("idle_share", "idle / span", partial(share, "idle", "span")),
        share_column("host_wait_share", "host wait / idle", partial(share, "host_wait", "idle")),
        share_column("kernel_wait_share", "kernel wait / idle", partial(share, "kernel_wait", "idle")),
        share_column("other_share", "other / idle", partial(share, "other", "idle")),
        title="Idle streams",
        notes=(
            "span: from the first kernel to the last; host wait: launched after the previous kernel had ended",
            f"kernel wait: launched in time, gap below {describe_limits(view)} ({SHORT} × the usual switch)",
            "other: the rest",
            *note_more(len(lanes), len(shown)),
        ),
    )


def describe_limits(view: TraceView) -> str:
    """The longest gaps that count as kernel wait, over the ranks."""
    limits = [counted.lanes.kernel_wait_limit_ns * NS for counted in view.counted.values()]
    low, high = format_seconds(min(limits)), format_seconds(max(limits))
    return low if low == high else f"{low} to {high}"


def make_launches_table(view: TraceView) -> Table | None:
    """Kernel launches by call; None: the traces hold none."""
    launches = [(rank, times) for rank, counted in view.counted.items() for times in counted.lanes.launches]
    if not launches:
        return None
    shown = choose_rows(view, launches, lambda times: times.num_kernels)
    graphs = sum(times.num_kernels for _, times in launches if "GraphLaunch" in times.name)
    started = sum(times.num_kernels for _, times in launches)
    return make_table(
        shown,
        rank_column(),
        text_column("call", "call", lambda row: row[1].name),
        count_column("num_launches", "launches", lambda row: row[1].count),
        count_column("num_kernels", "kernels", lambda row: row[1].num_kernels),
        latency_column("mean_call", "mean call", lambda row: row[1].call_ns / row[1].count * NS),
        latency_column("median_delay", "median delay", lambda row: row[1].median_delay_ns * NS),
        latency_column("p95_delay", "p95 delay", lambda row: row[1].p95_delay_ns * NS),
        count_column("num_short_kernels", "short kernels", lambda row: row[1].num_short_kernels),
        count_column("num_long_calls", "long calls", lambda row: row[1].num_long_calls),
        count_column("num_late_kernels", "late kernels", lambda row: row[1].num_late_kernels),
        title="Launches",
        notes=(
            "delay: from the start of the call to the start of its (first) kernel, to within 0.8 %",
            *([f"graphs start {format_share(graphs / started)} of the kernels"] if graphs else []),
            f"short: shorter than its call; long: over {LONG_CALL_NS // 1000} µs; late: delay over"
            f" {LONG_DELAY_NS // 1000} µs",
            *note_more(len(launches), len(shown)),
        ),
    )


def make_queues_table(view: TraceView) -> Table | None:
    """How many launches wait for a stream; None: the traces hold none."""
    queues = [(rank, queue) for rank, counted in view.counted.items() for queue in counted.lanes.queues]
    if not queues:
        return None
    shown = choose_rows(view, queues, lambda queue: queue.num_launches)
    return make_table(
        shown,
        rank_column(),
        lane_column(view, "stream", "stream"),
        count_column("num_launches", "launches", lambda row: row[1].num_launches),
        count_column("longest_queue", "longest", lambda row: row[1].longest),
        make_column("number", "mean_queue", "mean", lambda row: row[1].mean),
        seconds_column("at_limit_seconds", f"at {LIMIT}", lambda row: row[1].at_limit_ns * NS),
        title="Queues",
        notes=(
            "launched but not started; mean: over time, from the first launch to the last kernel's start",
            f"at {LIMIT}: how long {LIMIT} or more were queued; a driver then blocks the host",
            *note_more(len(queues), len(shown)),
        ),
    )


def make_gaps_table(view: TraceView) -> Table | None:
    """The largest gaps by the kernels around them; None: there are none."""
    pairs = [(rank, pair) for rank, counted in view.counted.items() for pair in counted.lanes.pairs]
    idle = sum(lane.idle_ns for counted in view.counted.values() for lane in counted.lanes.idle)
    if not pairs:
        return None
    shown = sorted(pairs, key=lambda one: -one[1].total_ns)[: view.top]
    where = "stream" if view.has_device else "thread"
    names = {
        name: cell
        for side in ([pair.before for _, pair in shown], [pair.after for _, pair in shown])
        for name, cell in name_cells(side, LONGEST_NEIGHBOUR).items()
    }
    return make_table(
        shown,
        rank_column(),
        lane_column(view, "lane", where),
        text_column("before", "after the end of", lambda row: names[row[1].before]),
        text_column("after", "before the start of", lambda row: names[row[1].after]),
        count_column("num_gaps", "count", lambda row: row[1].count),
        seconds_column("total_seconds", "total", lambda row: row[1].total_ns * NS),
        share_column("idle_share", "total / idle", lambda row: divide(row[1].total_ns, idle)),
        title="Largest gaps",
        notes=(f"grouped by the neighbours on the same {where}; idle: sum over all {where}s and ranks",),
    )


def name_lane(view: TraceView, rank: int, lane: Lane) -> str:
    """A stream by its number, with its device if the trace has several."""
    has_several = len(view.ranks[rank].tables.list_devices()) > 1
    return f"{lane.process}/{lane.thread}" if lane.is_device and has_several else lane.thread


FLAMES = (FORWARD, BACKWARD, OPTIMIZER, UNATTRIBUTED, UNKNOWN)
MOST_BOXES = 400
NARROWEST = 1 / 500
"""Boxes of the flame graph that are narrower are left out."""


def make_asked_tables(view: TraceView) -> Iterator[Table]:
    """Device time by phase and operator, module, annotation and line, as far as recorded."""
    times = add_asked(one for counted in view.counted.values() for one in counted.attribution.times)
    whole = sum(one.total_ns for one in times)
    readers: dict[str, Callable[[Caller], str]] = {
        "operator": lambda asked: asked.operator,
        "module": lambda asked: name_module(asked.modules),
        "annotation": lambda asked: asked.annotation,
        "source line": lambda asked: asked.source,
    }
    for what, read in readers.items():
        merged = add_asked(
            CallerTime(Caller(one.asked.phase, read(one.asked)), one.count, one.total_ns) for one in times
        )
        if any(one.asked.operator for one in merged) and whole:
            yield _make_asked_table(view, what, merged, whole)


def name_module(modules: Sequence[str]) -> str:
    """The last module of a chain, inside the one around it."""
    return " / ".join(name.removeprefix(MODULE) for name in modules[-2:])


def _make_asked_table(view: TraceView, what: str, rows: Sequence[CallerTime], whole: int) -> Table:
    shown = rows[: view.top]
    names = name_cells([one.asked.operator for one in shown])
    return make_table(
        shown,
        text_column(
            what.replace(" ", "_"), what, lambda one: names[one.asked.operator] if one.asked.operator else None
        ),
        text_column("phase", "phase", lambda one: one.asked.phase),
        count_column("num_kernels", "kernels", lambda one: one.count),
        seconds_column("total_seconds", "device time", lambda one: one.total_ns * NS),
        share_column("device_share", "device time / all", lambda one: divide(one.total_ns, whole)),
        title=f"Device time by {what}",
        notes=(
            "all: sum over kernels, copies and ranks; a kernel belongs to what was open where the host launched it",
            *note_more(len(rows), len(shown)),
        ),
    )


def draw_flames(view: TraceView) -> Chart | None:
    """Device time from phase to module to operator; None: nothing was launched."""
    times = add_asked(one for counted in view.counted.values() for one in counted.attribution.times)
    whole = sum(one.total_ns for one in times)
    tree: dict[tuple[str, ...], int] = {}
    for one in times:
        asked = one.asked
        modules = [name.removeprefix(MODULE) for name in asked.modules]
        path = [
            asked.phase,
            *([asked.annotation] if asked.annotation and not modules else []),
            *modules,
            asked.operator,
        ]
        for depth in range(1, len(path) + bool(path[-1])):
            key = tuple(path[:depth])
            tree[key] = tree.get(key, 0) + one.total_ns
    rows = list(_place_boxes(tree, whole)) if whole else []
    if len(rows) < 2:
        return None
    rows.sort(key=lambda row: row["depth"])
    caption = (
        "Width is device time, summed over kernels and ranks: the phase on top, then modules or annotations, then the"
        f" operator that launched the kernels. Boxes below {format_share(NARROWEST)} of it are left out."
    )
    return plot_timeline(
        title="Device time by what asked for it", rows=rows[:MOST_BOXES], caption=caption, series=FLAMES
    )


def _place_boxes(tree: Mapping[tuple[str, ...], int], whole: int) -> Iterator[dict[str, Any]]:
    """Children side by side below their parent, the widest first."""
    children: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for path in tree:
        children.setdefault(path[:-1], []).append(path)
    waiting: list[tuple[tuple[str, ...], int]] = [((), 0)]
    while waiting:
        parent, start = waiting.pop()
        for path in sorted(children.get(parent, ()), key=lambda one: (-tree[one], one)):
            if tree[path] >= NARROWEST * whole:
                yield {
                    "series": path[0], "lane": f"level {len(path)}", "rank": 0, "depth": len(path), "start": start * NS,
                    "duration": tree[path] * NS, "name": path[-1][:80], "count": 1,
                }  # fmt: skip
                waiting.append((path, start))
            start += tree[path]
