"""The tables of `scalelab trace` about what ran, by name, and about lanes: kernels, operators, idle, launches, gaps."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.answers.trace.view import NS, TraceView, divide, shorten_names
from scalelab.report.document import Cell, Column, Table, make_row
from scalelab.trace.idle import KERNEL_WAIT_NS, GapPair
from scalelab.trace.launches import LIMIT, LONG_CALL_NS, LONG_DELAY_NS
from scalelab.trace.operators import KernelTime, OperatorTime
from scalelab.trace.rank import Lane

RANK = Column(key="rank", header="rank", align="left")
LONGEST_NEIGHBOUR = 36
"""Of the two names beside a gap."""


def add_kernels(view: TraceView) -> list[KernelTime]:
    """The kernels of all ranks together, the longest total first."""
    found: dict[tuple[str, str], KernelTime] = {}
    for counted in view.counted.values():
        for kernel in counted.kernels:
            key = (kernel.name, kernel.kind)
            known = found.get(key)
            found[key] = kernel if known is None else KernelTime(
                name=kernel.name,
                kind=kernel.kind,
                count=known.count + kernel.count,
                total_ns=known.total_ns + kernel.total_ns,
                longest_ns=max(known.longest_ns, kernel.longest_ns),
            )  # fmt: skip
    return sorted(found.values(), key=lambda kernel: (-kernel.total_ns, kernel.name))


def add_operators(view: TraceView) -> list[OperatorTime]:
    """The operators of all ranks together, the longest time themselves first."""
    found: dict[str, OperatorTime] = {}
    for counted in view.counted.values():
        for operator in counted.operators:
            known = found.get(operator.name)
            found[operator.name] = operator if known is None else OperatorTime(
                name=operator.name,
                count=known.count + operator.count,
                total_ns=known.total_ns + operator.total_ns,
                self_ns=known.self_ns + operator.self_ns,
                longest_ns=max(known.longest_ns, operator.longest_ns),
            )  # fmt: skip
    return sorted(found.values(), key=lambda operator: (-operator.self_ns, operator.name))


def make_kernels_table(view: TraceView) -> Table:
    """Kernels by their total."""
    kernels = add_kernels(view)
    shown, everything = kernels[: view.top], sum(kernel.total_ns for kernel in kernels)
    columns = (
        Column(key="kernel", header="kernel", align="left"),
        Column(key="kind", header="kind", align="left"),
        Column(key="num_runs", header="count", quantity="count"),
        Column(key="total_seconds", header="total", quantity="seconds"),
        Column(key="mean_seconds", header="mean", quantity="latency"),
        Column(key="max_seconds", header="max", quantity="latency"),
        Column(key="kernel_share", header="total / all kernels", quantity="share"),
    )
    rows = [
        make_row(
            name,
            kernel.kind,
            kernel.count,
            kernel.total_ns * NS,
            kernel.mean_ns * NS,
            kernel.longest_ns * NS,
            divide(kernel.total_ns, everything),
        )
        for name, kernel in zip(shorten_names([kernel.name for kernel in shown]), shown, strict=True)
    ]
    notes = ["all kernels: their durations added up, of all ranks and streams, also where they overlap"]
    return Table(
        title="Kernels", columns=columns, rows=tuple(rows), notes=(*notes, *_note_more(len(kernels), len(shown)))
    )


def make_operators_table(view: TraceView) -> Table:
    """Operators by their time themselves."""
    operators = add_operators(view)
    shown, everything = operators[: view.top], sum(operator.self_ns for operator in operators)
    columns = (
        Column(key="operator", header="operator", align="left"),
        Column(key="num_calls", header="count", quantity="count"),
        Column(key="self_seconds", header="itself", quantity="seconds"),
        Column(key="self_share", header="itself / all", quantity="share"),
        Column(key="total_seconds", header="total", quantity="seconds", unit_of="self_seconds"),
        Column(key="max_seconds", header="max", quantity="latency"),
    )
    rows = [
        make_row(
            name,
            operator.count,
            operator.self_ns * NS,
            divide(operator.self_ns, everything),
            operator.total_ns * NS,
            operator.longest_ns * NS,
        )
        for name, operator in zip(shorten_names([operator.name for operator in shown]), shown, strict=True)
    ]
    notes = ["itself: without the operators and calls inside it; all: the time of all threads in any of them"]
    return Table(
        title="Operators on the host", columns=columns, rows=tuple(rows),
        notes=(*notes, *_note_more(len(operators), len(shown))),
    )  # fmt: skip


def make_idle_table(view: TraceView) -> Table:
    """Why streams were idle, the busiest first."""
    lanes = [(rank, lane) for rank, counted in view.counted.items() for lane in counted.lanes.idle]
    shown = sorted(sorted(lanes, key=lambda one: -one[1].busy_ns)[: view.top], key=lambda one: one[0])
    columns = (
        RANK,
        Column(key="stream", header="stream", align="left"),
        Column(key="num_kernels", header="kernels", quantity="count"),
        Column(key="span_seconds", header="span", quantity="seconds"),
        Column(key="idle_seconds", header="idle", quantity="seconds", unit_of="span_seconds"),
        Column(key="idle_share", header="idle / span", quantity="share"),
        Column(key="host_wait_share", header="host wait / idle", quantity="share"),
        Column(key="kernel_wait_share", header="kernel wait / idle", quantity="share"),
        Column(key="other_share", header="other / idle", quantity="share"),
    )
    rows = [
        make_row(
            f"rank {rank}",
            _name_lane(view, rank, lane.lane),
            lane.num_events,
            lane.span_ns * NS,
            lane.idle_ns * NS,
            divide(lane.idle_ns, lane.span_ns),
            divide(lane.host_wait_ns, lane.idle_ns),
            divide(lane.kernel_wait_ns, lane.idle_ns),
            divide(lane.other_ns, lane.idle_ns),
        )
        for rank, lane in shown
    ]
    notes = [
        "span: from its first kernel to its last; host wait: launched after the kernel before had ended",
        f"kernel wait: launched before, and less than {KERNEL_WAIT_NS} ns apart; other: all the rest",
        *_note_more(len(lanes), len(shown)),
    ]
    return Table(title="Idle streams", columns=columns, rows=tuple(rows), notes=tuple(notes))


def make_launches_table(view: TraceView) -> Table | None:
    """Launches by the name of their call; None: the traces hold none."""
    launches = [(rank, times) for rank, counted in view.counted.items() for times in counted.lanes.launches]
    if not launches:
        return None
    shown = sorted(sorted(launches, key=lambda one: -one[1].count)[: view.top], key=lambda one: one[0])
    columns = (
        RANK,
        Column(key="call", header="call", align="left"),
        Column(key="num_launches", header="launches", quantity="count"),
        Column(key="mean_call_seconds", header="mean call", quantity="latency"),
        Column(key="median_delay_seconds", header="median delay", quantity="latency"),
        Column(key="p95_delay_seconds", header="p95 delay", quantity="latency"),
        Column(key="num_short_kernels", header="short kernels", quantity="count"),
        Column(key="num_long_calls", header="long calls", quantity="count"),
        Column(key="num_late_kernels", header="late kernels", quantity="count"),
    )
    rows = [
        make_row(
            f"rank {rank}",
            times.name,
            times.count,
            times.call_ns / times.count * NS,
            times.median_delay_ns * NS,
            times.p95_delay_ns * NS,
            times.num_short_kernels,
            times.num_long_calls,
            times.num_late_kernels,
        )
        for rank, times in shown
    ]
    notes = [
        "delay: from the call's beginning to its kernel's, to within 0.8 %; of calls whose kernel is here",
        f"short: the kernel takes less time than its call; long: over {LONG_CALL_NS // 1000} µs;"
        f" late: a delay over {LONG_DELAY_NS // 1000} µs",
        *_note_more(len(launches), len(shown)),
    ]
    return Table(title="Launches", columns=columns, rows=tuple(rows), notes=tuple(notes))


def make_queues_table(view: TraceView) -> Table | None:
    """How many launches wait for a stream; None: the traces hold none."""
    queues = [(rank, queue) for rank, counted in view.counted.items() for queue in counted.lanes.queues]
    if not queues:
        return None
    shown = sorted(sorted(queues, key=lambda one: -one[1].num_launches)[: view.top], key=lambda one: one[0])
    columns = (
        RANK,
        Column(key="stream", header="stream", align="left"),
        Column(key="num_launches", header="launches", quantity="count"),
        Column(key="longest_queue", header="longest", quantity="count"),
        Column(key="mean_queue", header="mean", quantity="number"),
        Column(key="at_limit_seconds", header=f"at {LIMIT}", quantity="seconds"),
    )
    rows = [
        make_row(
            f"rank {rank}",
            _name_lane(view, rank, queue.lane),
            queue.num_launches,
            queue.longest,
            queue.mean,
            queue.at_limit_ns * NS,
        )
        for rank, queue in shown
    ]
    notes = [
        "launched and not yet begun; mean: over time, from the first launch to the last kernel's start",
        f"at {LIMIT}: how long so many waited or more; a driver then lets the host wait",
        *_note_more(len(queues), len(shown)),
    ]
    return Table(title="Queues", columns=columns, rows=tuple(rows), notes=tuple(notes))


def make_gaps_table(view: TraceView) -> Table | None:
    """The most costly gaps by what ran before and after; None: there are none."""
    pairs = [(rank, pair) for rank, counted in view.counted.items() for pair in counted.lanes.pairs]
    idle = sum(lane.idle_ns for counted in view.counted.values() for lane in counted.lanes.idle)
    if not pairs:
        return None
    shown = sorted(pairs, key=lambda one: -one[1].total_ns)[: view.top]
    where = "stream" if view.has_device else "thread"
    columns = (
        RANK,
        Column(key="lane", header=where, align="left"),
        Column(key="before", header="after the end of", align="left"),
        Column(key="after", header="before the start of", align="left"),
        Column(key="num_gaps", header="count", quantity="count"),
        Column(key="total_seconds", header="total", quantity="seconds"),
        Column(key="idle_share", header="total / idle", quantity="share"),
    )
    before = shorten_names([pair.before for _, pair in shown], LONGEST_NEIGHBOUR)
    after = shorten_names([pair.after for _, pair in shown], LONGEST_NEIGHBOUR)
    rows = [
        _make_gap_row(rank, _name_lane(view, rank, pair.lane), pair, (first, second), idle)
        for (rank, pair), first, second in zip(shown, before, after, strict=True)
    ]
    notes = [f"by what ran before and after on the same {where}; idle: of all {where}s of all ranks together"]
    return Table(title="The most costly gaps", columns=columns, rows=tuple(rows), notes=tuple(notes))


def _make_gap_row(rank: int, lane: str, pair: GapPair, names: tuple[str, str], idle_ns: int) -> tuple[Cell, ...]:
    return make_row(
        f"rank {rank}",
        lane,
        *names,
        pair.count,
        pair.total_ns * NS,
        divide(pair.total_ns, idle_ns),
    )


def _name_lane(view: TraceView, rank: int, lane: Lane) -> str:
    """A stream by its number, with its device where the trace holds several."""
    has_several = len(view.ranks[rank].tables.list_devices()) > 1
    return f"{lane.process}/{lane.thread}" if lane.is_device and has_several else lane.thread


def _note_more(num_all: int, num_shown: int) -> Sequence[str]:
    return [f"{num_shown} of {num_all}; --top shows more"] if num_shown < num_all else []
