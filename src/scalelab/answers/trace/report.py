"""The document of a job's traces: what communication costs, who waits for whom, what ran, why nothing did.

The parts of a rank's time are exact (`trace/breakdown.py`); every share names what it is a share of. What the traces
cannot say is left out, with the reason.

What the traces of a job say, in words, and what makes that less sure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scalelab.answers.trace.charts import MOST_RANKS, draw_timelines
from scalelab.answers.trace.names import (
    add_kernels,
    add_operators,
    make_gaps_table,
    make_idle_table,
    make_kernels_table,
    make_launches_table,
    make_operators_table,
    make_queues_table,
)
from scalelab.answers.trace.view import (
    NS,
    TraceView,
    make_arrivals_table,
    make_kinds_table,
    make_parts_table,
    make_steps_table,
    make_transfers_table,
    shorten_names,
)
from scalelab.report.charts.curves import plot_parts
from scalelab.report.document import Chart, Document, Section, Table
from scalelab.report.findings import Caution, as_findings
from scalelab.trace.breakdown import Parts
from scalelab.trace.kinds import summarise_kinds, summarise_transfers
from scalelab.trace.ranks import find_match_doubts
from scalelab.units import format_bytes, format_quantity, format_seconds, format_share


def summarise(view: TraceView) -> Iterator[str]:
    """Findings, the cost of communication first."""
    parts = {rank: view.find_parts(trace) for rank, trace in view.ranks.items()}
    everything = sum(parts.values(), start=Parts())
    if not everything.span_ns:
        yield "Nothing that computes or communicates is in the traces."
        return
    yield from _summarise_exposed(parts, everything)
    yield from _summarise_waiting(view)
    yield from _summarise_last(view)
    yield from _summarise_kinds(view)
    whose = "of the spans of all ranks" if len(parts) > 1 else "of the span"
    yield (
        f"Compute takes {format_share(everything.compute_ns / everything.span_ns)} {whose}, idle"
        f" {format_share(everything.idle_ns / everything.span_ns)}."
    )
    yield from _summarise_idle(view)
    yield from _summarise_names(view)


def _summarise_exposed(parts: dict[int, Parts], everything: Parts) -> Iterator[str]:
    if not everything.communication_ns:
        return
    share, rank = max((one.exposed_ns / one.span_ns, rank) for rank, one in parts.items() if one.span_ns)
    mean = format_share(everything.exposed_ns / everything.span_ns)
    overlapped = format_share(everything.overlapped_ns / everything.communication_ns)
    where = f"of the spans of all ranks, and most, {format_share(share)}, on rank {rank}"
    yield f"Exposed communication takes {mean} {where if len(parts) > 1 else 'of the span'}."
    yield f"{overlapped} of the communication runs beside compute."


def _summarise_waiting(view: TraceView) -> Iterator[str]:
    arrivals, matching = view.arrivals, view.matching
    if arrivals is None or matching is None:
        return
    is_all = not matching.num_point_to_point and not any(matching.num_unmatched.values())
    which = "collectives" if is_all else "matched collectives"
    waiting = sum(one.waiting_ns for one in arrivals.by_rank)
    both = waiting + sum(one.transfer_ns for one in arrivals.by_rank)
    if both:
        yield (
            f"Of the time in {which}, {format_share(waiting / both)} is waiting for other ranks and"
            f" {format_share(1 - waiting / both)} transfer."
        )


def _summarise_last(view: TraceView) -> Iterator[str]:
    arrivals, matching = view.arrivals, view.matching
    if arrivals is None or matching is None:
        return
    last = arrivals.last
    certain = format_seconds(matching.uncertainty_ns * NS)
    if last is None or last.median_late_ns is None:
        yield f"No rank surely comes last: arrivals lie closer together than clocks are certain, {certain}."
        return
    unclear = f"; of {arrivals.num_unclear} it cannot be said, clocks are certain to {certain}"
    is_usual = 2 * last.num_last > arrivals.num_matched
    who = (
        f"Rank {last.rank} comes last" if is_usual else f"No rank comes last in most collectives; rank {last.rank} does"
    )
    yield (
        f"{who} in {last.num_last} of {arrivals.num_matched}{' collectives' if is_usual else ''}, by"
        f" {format_seconds(last.median_late_ns * NS)} (median): others wait {format_seconds(last.waited_for_ns * NS)}"
        f" for it{unclear if arrivals.num_unclear else ''}."
    )


def _summarise_kinds(view: TraceView) -> Iterator[str]:
    kinds = summarise_kinds(view.list_collectives())
    if not kinds:
        return
    longest, total = kinds[0], sum(kind.total_ns for kind in kinds)
    bus = next(
        (k.bus_bandwidth for k in (summarise_transfers(view.matching) if view.matching else ()) if
         k.kind == longest.kind), None
    )  # fmt: skip
    rate = "" if bus is None else f"; without waiting its bus bandwidth is {format_quantity('bandwidth', bus)}"
    yield (
        f"{longest.kind} takes {format_share(longest.total_ns / total) if total else '–'} of the time in collectives:"
        f" {longest.count} of them, {format_seconds(longest.mean_ns * NS)} on average{rate}."
    )


def _summarise_idle(view: TraceView) -> Iterator[str]:
    lanes = [lane for counted in view.counted.values() for lane in counted.lanes.idle if lane.lane.is_device]
    idle = sum(lane.idle_ns for lane in lanes)
    if not idle:
        return
    host, kernel = (sum(getattr(lane, f"{why}_wait_ns") for lane in lanes) for why in ("host", "kernel"))
    yield (
        f"Streams are idle for {format_seconds(idle * NS)} together: {format_share(host / idle)} host wait,"
        f" {format_share(kernel / idle)} kernel wait, {format_share((idle - host - kernel) / idle)} other."
    )


def _summarise_names(view: TraceView) -> Iterator[str]:
    kernels = add_kernels(view)
    total = sum(kernel.total_ns for kernel in kernels)
    if total:
        (name,) = shorten_names([kernels[0].name])
        yield f"The kernel with the most time is {name}: {format_share(kernels[0].total_ns / total)} of all kernels."
        return
    operators = add_operators(view)
    total = sum(operator.self_ns for operator in operators)
    if total:
        (name,) = shorten_names([operators[0].name])
        share = format_share(operators[0].self_ns / total)
        yield f"The operator with the most time of its own is {name}: {share} of all."


def find_doubts(view: TraceView) -> Iterator[Caution]:
    """What is missing or does not fit, each with the next step."""
    for doubt in (*view.job.doubts, *find_match_doubts(view.job)):
        yield Caution(message=doubt.message, next_step=doubt.next_step)
    unusable = {rank: trace.num_unusable for rank, trace in view.ranks.items() if trace.num_unusable}
    if unusable:
        listed = ", ".join(f"{number} of rank {rank}" for rank, number in list(unusable.items())[:8])
        yield Caution(
            message=f"events that could not be used: {listed}; they have no time, end before they begin, or have fields"
            " of another kind",
            next_step="record the trace again where they matter",
        )


def explain_missing(view: TraceView) -> Iterator[str]:
    """What is not in the document, and why."""
    if not view.has_device:
        yield "Kernels, idle streams, launches and queues: the traces have no device."
    elif not any(counted.lanes.launches for counted in view.counted.values()):
        yield "Launches and queues: the traces hold no calls that launched their kernels."
    if not any(trace.tables.steps for trace in view.job.ranks):
        yield "Steps: the profiler marked none; its step() does."
    if not any(len(trace.collectives) for trace in view.job.ranks):
        yield "Collectives: none were found."
    elif len(view.ranks) < 2:
        yield "Who waits for whom: that takes the traces of several ranks."
    elif view.job.arrivals is None:
        yield "Who waits for whom: no collective is in the traces of several ranks."


QUESTION = "What does communication cost, and where does the time go?"


def describe_traces(view: TraceView) -> Document:
    """All that the traces say."""
    missing = tuple(explain_missing(view))
    sections = (
        _add_charts(_make_section("Where the time goes", make_parts_table(view), make_steps_table(view)), view),
        _make_section("Communication", make_kinds_table(view), make_transfers_table(view), make_arrivals_table(view)),
        _make_section("What ran", make_kernels_table(view) if view.has_device else None, make_operators_table(view)),
        _make_section(
            "Why nothing ran",
            make_idle_table(view) if view.has_device else None,
            make_launches_table(view),
            make_queues_table(view),
            make_gaps_table(view),
        ),
        Section(heading="Left out", paragraphs=missing) if missing else None,
    )
    return Document(
        title="Traces",
        question=QUESTION,
        setting=describe_setting(view),
        sections=tuple(section for section in sections if section is not None),
        findings=as_findings(summarise(view)),
        cautions=tuple(find_doubts(view)),
    )


def _make_section(heading: str, *tables: Table | None) -> Section | None:
    found = tuple(table for table in tables if table is not None and table.rows)
    return Section(heading=heading, tables=found) if found else None


def _add_charts(section: Section | None, view: TraceView) -> Section | None:
    """Every rank's parts, and what it did over time."""
    if section is None:
        return None
    timelines = {rank: counted.timeline for rank, counted in view.counted.items()}
    charts = (plot_trace_parts(view), draw_timelines(view.job, timelines))
    return replace(section, charts=tuple(chart for chart in charts if chart is not None))


def plot_trace_parts(view: TraceView) -> Chart | None:
    """A stack for every rank of what is shown: compute, exposed communication, copies, idle."""
    names = {"compute": "compute", "exposed": "exposed comm", "copy": "copies", "idle": "idle"}
    rows = []
    for rank, trace in list(view.ranks.items())[:MOST_RANKS]:
        parts = view.find_parts(trace)
        rows += [
            {"bar": f"rank {rank}", "series": words, "seconds": getattr(parts, f"{name}_ns") * 1e-9}
            for name, words in names.items()
            if name != "copy" or view.has_device
        ]
    if not any(row["seconds"] for row in rows):
        return None
    more = f" {len(view.ranks) - MOST_RANKS} more ranks are in the table." if len(view.ranks) > MOST_RANKS else ""
    caption = f"The parts of what is shown add up exactly; overlapped communication is in compute.{more}"
    return plot_parts(title="Every rank's time", rows=rows, name="", caption=caption, x_title="time")


def describe_setting(view: TraceView) -> str:
    """The job and its files in one line."""
    traces = view.job.ranks
    num_ranks, num_steps = view.job.num_ranks, max(len(trace.tables.steps) for trace in traces)
    backends = {trace.header.distributed.backend for trace in traces if trace.header.distributed} - {""}
    parts = [f"{len(traces)} of {num_ranks} ranks" if num_ranks and num_ranks > len(traces) else _plural(len(traces))]
    parts += [", ".join(sorted(backends))] if backends else []
    parts.append(f"{num_steps} step{'s' if num_steps != 1 else ''}" if num_steps else "no steps")
    if view.steps is not None:
        parts.append(f"shown: {', '.join(map(str, sorted(view.steps)))}")
    parts.append(f"{format_quantity('count', sum(trace.num_events for trace in traces))} events")
    parts.append(f"{format_bytes(sum(trace.num_bytes for trace in traces))} of trace")
    return " · ".join(parts)


def _plural(num_ranks: int) -> str:
    return f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
