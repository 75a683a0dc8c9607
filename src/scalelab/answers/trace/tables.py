"""The tables of `scalelab trace`: time in parts, collectives, arrivals, kernels, operators, idle streams, launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from scalelab.answers.trace.view import NS, TraceView, add_kernels, add_operators, divide, shorten_names
from scalelab.report.document import Table
from scalelab.report.tables import (
    Field,
    bytes_column,
    count_column,
    make_column,
    make_table,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.trace.idle import KERNEL_WAIT_NS
from scalelab.trace.launches import LIMIT, LONG_CALL_NS, LONG_DELAY_NS
from scalelab.trace.rank_time import Parts
from scalelab.trace.rank_trace import Lane
from scalelab.trace.waiting import KindSummary, summarise_kinds, summarise_transfers
from scalelab.units import format_count

MOST_RANKS_PER_STEP = 4
"""With more ranks, a step has one row: the mean over ranks."""
BARRIER = "barrier"
"""It has no payload."""
LONGEST_NEIGHBOUR = 36
"""Characters of the two names beside a gap."""
T = TypeVar("T")
Read = Callable[[Any], Any]


class PartsRow(NamedTuple):
    """The time of a rank, of a step, or of a step on a rank, in parts."""

    name: str
    parts: Parts
    num_ranks: int = 1


def latency_column(key: str, header: str, read: Read, **options: Any) -> Field[Any]:
    return make_column("latency", f"{key}_seconds", header, read, **options)


def bandwidth_column(key: str, header: str, read: Read) -> Field[Any]:
    return make_column("bandwidth", f"{key}_bandwidth", header, read)


def make_part_table(rows: Iterable[PartsRow], name: str, has_device: bool, *notes: str, title: str) -> Table:
    """Parts that add up to the span, and their shares of it."""

    def time(part: str, header: str, **options: Any) -> Field[PartsRow]:
        def read(row: PartsRow) -> float:
            return float(getattr(row.parts, f"{part}_ns") * NS / row.num_ranks)

        unit = {} if part == "span" else {"unit_of": "span_seconds"}
        return seconds_column(f"{part}_seconds", header, read, **unit, **options)

    def share(part: str, header: str, whole: str = "span", **options: Any) -> Field[PartsRow]:
        def read(row: PartsRow) -> float | None:
            return divide(getattr(row.parts, f"{part}_ns"), getattr(row.parts, f"{whole}_ns"))

        return share_column(f"{part}_share", header, read, **options)

    copies = "copies + " if has_device else ""
    return make_table(
        rows,
        text_column(name, name, lambda row: row.name),
        time("span", "span"),
        time("compute", "compute"),
        time("exposed", "exposed comm"),
        time("copy", "copies") if has_device else None,
        time("idle", "idle"),
        time("communication", "comm", is_detail=True),
        time("overlapped", "overlapped comm", is_detail=True),
        share("compute", "compute / span", is_detail=True),
        share("exposed", "exposed / span"),
        share("copy", "copies / span", is_detail=True) if has_device else None,
        share("idle", "idle / span"),
        share("communication", "comm / span", is_detail=True),
        share("overlapped", "overlapped / comm", "communication"),
        title=title,
        notes=(
            f"span = compute + exposed comm + {copies}idle, exactly; comm = exposed + overlapped",
            "compute: union of compute kernels"
            if has_device
            else "no device in the trace: compute is operators on host threads, idle when none runs",
            *notes,
        ),
    )


def make_ranks_table(view: TraceView) -> Table:
    """One row per rank: its span in parts."""
    rows = [PartsRow(f"rank {rank}", view.find_parts(trace)) for rank, trace in view.ranks.items()]
    title = "Every rank" if view.steps is None else f"Every rank, step {', '.join(map(str, sorted(view.steps)))}"
    return make_part_table(rows, "rank", view.has_device, title=title)


def make_steps_table(view: TraceView) -> Table | None:
    """One row per step and rank, or per step if there are many ranks; None: there are no steps."""
    by_step: dict[int, dict[int, Parts]] = {}
    for rank, trace in view.ranks.items():
        for step, parts in view.list_steps(trace).items():
            by_step.setdefault(step, {})[rank] = parts
    if not by_step:
        return None
    longest = sorted(by_step, key=lambda step: -max(parts.span_ns for parts in by_step[step].values()))
    shown = sorted(longest[: view.top])
    is_mean = len(view.ranks) > MOST_RANKS_PER_STEP
    if is_mean:
        means = ((step, by_step[step]) for step in shown)
        rows = [PartsRow(f"step {step}", sum(ranks.values(), start=Parts()), len(ranks)) for step, ranks in means]
    else:
        on = ", rank {}" if len(view.ranks) > 1 else ""
        rows = [
            PartsRow(f"step {step}{on.format(rank)}", parts) for step in shown for rank, parts in by_step[step].items()
        ]
    notes = ["a step is the interval that the profiler marked", *(["means over ranks"] if is_mean else [])]
    if len(by_step) > len(shown):
        notes.append(f"the {len(shown)} longest of {len(by_step)} steps; --top shows more")
    return make_part_table(rows, "step", view.has_device, *notes, title="Every step")


def make_kinds_table(view: TraceView) -> Table | None:
    """The collectives of all ranks by kind; None: there are none."""
    summaries = summarise_kinds(view.list_collectives())
    if not summaries:
        return None
    lacking = [one for one in summaries if one.num_sized < one.count and one.kind != BARRIER]
    unsized = ", ".join(f"{one.count - one.num_sized} of {one.count} {one.kind}" for one in lacking)
    return make_table(
        summaries,
        text_column("kind", "collective", name_kind),
        count_column("num_collectives", "count", lambda one: one.count),
        bytes_column("payload_bytes", "bytes", lambda one: one.payload_bytes),
        seconds_column("total_seconds", "total", lambda one: one.total_ns * NS),
        latency_column("mean", "mean", lambda one: one.mean_ns * NS),
        latency_column("p95", "p95", lambda one: one.p95_ns * NS),
        latency_column("max", "max", lambda one: one.max_ns * NS),
        bandwidth_column("algorithm", "algorithm bandwidth", lambda one: one.algorithm_bandwidth),
        bandwidth_column("bus", "bus bandwidth", lambda one: one.bus_bandwidth),
        title="Collectives by kind",
        notes=(
            f"counted on each of {format_count(len(view.ranks), 'rank')}; times include waiting for other ranks",
            "bytes: sum of the payloads; bandwidths follow from these times",
            *([f"size unknown: {unsized}"] if unsized else []),
        ),
    )


def name_kind(one: KindSummary) -> str:
    return one.kind + (f", run as {one.ran_as}" if one.ran_as else "")


def make_transfers_table(view: TraceView) -> Table | None:
    """Matched collectives by kind, each counted once; None: none was matched."""
    summaries = summarise_transfers(view.matching) if view.matching is not None else []
    if not summaries:
        return None
    return make_table(
        summaries,
        text_column("kind", "collective", lambda one: one.kind),
        count_column("num_collectives", "matched", lambda one: one.count),
        bytes_column("payload_bytes", "bytes", lambda one: one.payload_bytes),
        latency_column("mean_transfer", "mean transfer", lambda one: one.mean_ns * NS),
        latency_column("p95_transfer", "p95 transfer", lambda one: one.p95_ns * NS),
        bandwidth_column("algorithm", "algorithm bandwidth", lambda one: one.algorithm_bandwidth),
        bandwidth_column("bus", "bus bandwidth", lambda one: one.bus_bandwidth),
        title="Collectives matched across ranks",
        notes=("transfer: the shortest time of any rank, that of the last to arrive; bandwidths exclude waiting",),
    )


def make_arrivals_table(view: TraceView) -> Table | None:
    """Which rank waits and which is late; None: nothing was matched."""
    arrivals = view.arrivals
    if arrivals is None:
        return None

    def late(name: str, one: Any) -> float | None:
        value = getattr(one, f"{name}_ns")
        return None if value is None else value * NS

    return make_table(
        arrivals.by_rank,
        text_column("rank", "rank", lambda one: f"rank {one.rank}"),
        count_column("num_collectives", "matched", lambda one: one.num_collectives),
        seconds_column("transfer_seconds", "transfer", lambda one: one.transfer_ns * NS),
        seconds_column("waiting_seconds", "waiting", lambda one: one.waiting_ns * NS, unit_of="transfer_seconds"),
        share_column(
            "waiting_share",
            "waiting / (transfer + waiting)",
            lambda one: divide(one.waiting_ns, one.waiting_ns + one.transfer_ns),
        ),
        count_column("num_last", "last", lambda one: one.num_last),
        seconds_column("median_late_seconds", "late by", partial(late, "median_late")),
        seconds_column("max_late_seconds", "at most", partial(late, "max_late"), unit_of="median_late_seconds"),
        seconds_column(
            "waited_for_seconds", "others waited", lambda one: one.waited_for_ns * NS, unit_of="transfer_seconds"
        ),
        title="Arrivals",
        notes=(
            "waiting: time in a collective beyond the transfer",
            "last: how often the rank was certainly last; late by: the median delay of these",
        ),
    )


def name_rows(rows: Sequence[Any]) -> dict[str, str]:
    """Names that fit a table, by the whole name."""
    return {row.name: name for row, name in zip(rows, shorten_names([row.name for row in rows]), strict=True)}


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
            f"kernel wait: launched in time and less than {KERNEL_WAIT_NS} ns apart; other: the rest",
            *note_more(len(lanes), len(shown)),
        ),
    )


def make_launches_table(view: TraceView) -> Table | None:
    """Kernel launches by call; None: the traces hold none."""
    launches = [(rank, times) for rank, counted in view.counted.items() for times in counted.lanes.launches]
    if not launches:
        return None
    shown = choose_rows(view, launches, lambda times: times.count)
    return make_table(
        shown,
        rank_column(),
        text_column("call", "call", lambda row: row[1].name),
        count_column("num_launches", "launches", lambda row: row[1].count),
        latency_column("mean_call", "mean call", lambda row: row[1].call_ns / row[1].count * NS),
        latency_column("median_delay", "median delay", lambda row: row[1].median_delay_ns * NS),
        latency_column("p95_delay", "p95 delay", lambda row: row[1].p95_delay_ns * NS),
        count_column("num_short_kernels", "short kernels", lambda row: row[1].num_short_kernels),
        count_column("num_long_calls", "long calls", lambda row: row[1].num_long_calls),
        count_column("num_late_kernels", "late kernels", lambda row: row[1].num_late_kernels),
        title="Launches",
        notes=(
            "delay: from the start of the call to the start of its kernel, to within 0.8 %",
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
        name: short
        for side in ([pair.before for _, pair in shown], [pair.after for _, pair in shown])
        for name, short in zip(side, shorten_names(side, LONGEST_NEIGHBOUR), strict=True)
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


def note_more(num_all: int, num_shown: int) -> Sequence[str]:
    return [f"{num_shown} of {num_all}; --top shows more"] if num_shown < num_all else []
