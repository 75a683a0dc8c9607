"""The document of a job's traces: what communication costs, which rank is late, what ran, and why devices were idle.

The parts of a rank's time are exact (`trace/rank_time.py`); every share names its base. What the traces cannot show is
left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scalelab.answers.trace.activity import (
    make_gaps_table,
    make_idle_table,
    make_kernels_table,
    make_launches_table,
    make_operators_table,
    make_queues_table,
)
from scalelab.answers.trace.charts import MOST_RANKS, draw_timelines
from scalelab.answers.trace.critical import find_critical_step, make_critical_section, summarise_critical
from scalelab.answers.trace.efficiency import explain_unrecorded, make_efficiency_sections, summarise_efficiency
from scalelab.answers.trace.tables import (
    make_arrivals_table,
    make_kinds_table,
    make_ranks_table,
    make_steps_table,
    make_transfers_table,
)
from scalelab.answers.trace.view import NS, TraceView, add_kernels, add_operators, divide, shorten_names
from scalelab.report.charts.plot import plot_parts
from scalelab.report.document import Chart, Document, Section, Table
from scalelab.report.findings import DETAIL, MAIN, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.trace.job_trace import find_match_doubts
from scalelab.trace.rank_time import Parts
from scalelab.trace.waiting import summarise_transfers
from scalelab.units import format_bytes, format_count, format_quantity, format_seconds, format_share

EXPOSED = FindingKind(
    "exposed-share",
    "Communication that compute does not hide, as a share of the time",
    MAIN,
    ("share", "overlapped_share", "most_share", "rank"),
)
LAST_RANK = FindingKind(
    "last-rank", "The rank that arrives last", REASON, ("rank", "num_last", "num_matched", "late_seconds", "certainty")
)
COLLECTIVE = FindingKind(
    "collective", "The collective with the most time", DETAIL, ("share", "count", "mean_seconds", "bus_bandwidth")
)
TIME_PARTS = FindingKind("time-breakdown", "Compute and idle shares of the time", REASON, ("compute", "idle"))
IDLE = FindingKind("idle", "Why device streams were idle", DETAIL, ("seconds", "host_wait", "kernel_wait", "other"))
LONGEST = FindingKind("longest", "The kernel or operator with the most time", DETAIL, ("share",))
HOST_ONLY = FindingKind("host-only", "The traces lack the work of the device that the job ran on", MAIN)
EMPTY = FindingKind("empty", "The traces contain neither compute nor communication", MAIN)

DOUBTS = {
    kind.name: kind
    for kind in (
        CautionKind("no-device-activity", "A job ran on a device, but the trace has none of its kernels", "wrong-work"),
        CautionKind("mixed-jobs", "Trace files come from different jobs", "wrong-work"),
        CautionKind("unknown-rank", "A trace file has no rank", "note"),
        CautionKind("no-communication", "A job of several ranks without communication in its traces", "wrong-work"),
        CautionKind("several-devices", "One trace has several devices", "note"),
        CautionKind("host-collectives", "Collectives ran on host threads, beside devices", "note"),
        CautionKind("unlinked-steps", "Kernels that no step can be assigned to", "noise"),
        CautionKind("generic-communication", "Communication that a generic rule recognizes", "note"),
        CautionKind("missing-ranks", "Ranks without a trace", "note"),
        CautionKind("unmatched-collectives", "Collectives without a counterpart in other traces", "noise"),
        CautionKind("inferred-groups", "Collectives whose process group is not recorded", "note"),
        CautionKind("uncertain-pairing", "Collectives that can be paired in several ways", "noise"),
        CautionKind("uncertain-clocks", "Clocks of ranks cannot be aligned well", "noise"),
    )
}
UNUSABLE = CautionKind("unusable-events", "Events that could not be used", "noise", ("num_events",))
LEAST_BESIDE = 0.01
"""Of the time of all ranks: shorter collectives of host threads beside devices are not worth a finding."""
MOST_IS = 0.5
"""A larger share is most of it."""
QUESTION = "What does communication cost, and where does the time go?"


def summarise(view: TraceView) -> Iterator[Finding]:
    """Findings, the cost of communication first."""
    if view.lacks_device:
        device = next(trace.tables.missing_device for trace in view.job.ranks if trace.tables.missing_device)
        text = f"The job ran on a device ({device}), but the traces have none of its kernels: its time is unknown."
        yield HOST_ONLY("", text)
        yield from _summarise_names(view)
        return
    parts = {rank: view.find_parts(trace) for rank, trace in view.timed_ranks.items()}
    everything = sum(parts.values(), start=Parts())
    if not everything.span_ns:
        yield EMPTY("", "The traces contain neither compute nor communication.")
        return
    yield from _summarise_exposed(view, parts, everything)
    yield from _summarise_last(view)
    yield from _summarise_waiting(view)
    compute, idle = everything.compute_ns / everything.span_ns, everything.idle_ns / everything.span_ns
    text = f"Compute takes {format_share(compute)} of {_name_base(len(parts))}; {format_share(idle)} is idle."
    yield TIME_PARTS("", text, compute=compute, idle=idle)
    yield from _summarise_kinds(view)
    yield from _summarise_idle(view)
    yield from _summarise_names(view)
    yield from summarise_efficiency(view)


def _name_base(num_ranks: int) -> str:
    return "the time of all ranks" if num_ranks > 1 else "the time"


def measure_waiting(view: TraceView) -> float | None:
    """The share of waiting in the time of matched collectives; None: none were matched."""
    ranks = view.arrivals.by_rank if view.arrivals is not None else ()
    waiting = sum(one.waiting_ns for one in ranks)
    return divide(waiting, waiting + sum(one.transfer_ns for one in ranks))


def _summarise_exposed(view: TraceView, parts: dict[int, Parts], everything: Parts) -> Iterator[Finding]:
    if not everything.communication_ns:
        return
    most, rank = max((one.exposed_ns / one.span_ns, rank) for rank, one in parts.items() if one.span_ns)
    share = everything.exposed_ns / everything.span_ns
    overlapped = everything.overlapped_ns / everything.communication_ns
    where = f", at most {format_share(most)} on rank {rank}" if len(parts) > 1 else ""
    waiting = measure_waiting(view)
    if waiting is not None and waiting > MOST_IS and share > 0:
        where += ", most of it waiting for other ranks"
    yield EXPOSED(
        "",
        f"Exposed communication takes {format_share(share)} of {_name_base(len(parts))}{where};"
        f" {format_share(overlapped)} of communication overlaps with compute.",
        share=share,
        overlapped_share=overlapped,
        most_share=most,
        rank=rank,
    )


def _summarise_waiting(view: TraceView) -> Iterator[Finding]:
    arrivals, matching = view.arrivals, view.matching
    if arrivals is None or matching is None:
        return
    from scalelab.studies.shared.breakdown import WAITING  # here: one trace alone needs none of it

    is_all = not matching.num_point_to_point and not any(matching.num_unmatched.values())
    share = measure_waiting(view)
    if share is not None:
        yield WAITING(
            "",
            f"Of the time in {'' if is_all else 'matched '}collectives, {format_share(share)} is waiting for other"
            f" ranks and {format_share(1 - share)} is transfer.",
            weight=REASON,
            share=share,
        )


def _summarise_last(view: TraceView) -> Iterator[Finding]:
    arrivals, matching = view.arrivals, view.matching
    if arrivals is None or matching is None:
        return
    last, matched = arrivals.last, arrivals.num_matched
    error = format_seconds(matching.uncertainty_ns * NS)
    if last is None or last.median_late_ns is None:
        text = f"No rank is certainly last: arrivals are closer together than the clock error, {error}."
        yield LAST_RANK("", text, num_matched=matched)
        return
    late = last.median_late_ns * NS
    most = f" and {format_seconds(last.max_late_ns * NS)} at most" if last.max_late_ns and last.num_last > 1 else ""
    is_usual = 2 * last.num_last > matched
    who = f"Rank {last.rank} arrives last" if is_usual else f"Rank {last.rank} is last most often,"
    unclear = f"; {arrivals.num_unclear} undecided (clock error {error})" if arrivals.num_unclear else ""
    yield LAST_RANK(
        f"rank {last.rank}",
        f"{who} in {last.num_last} of {format_count(matched, 'collective')}, by {format_seconds(late)}"
        f" (median){most}; others wait {format_seconds(last.waited_for_ns * NS)} for it in total{unclear}.",
        rank=last.rank,
        num_last=last.num_last,
        num_matched=matched,
        late_seconds=late,
        certainty=matching.certainty,
    )


def _summarise_kinds(view: TraceView) -> Iterator[Finding]:
    kinds = [kind for kind in view.kinds if not kind.is_beside]
    total = sum(kind.total_ns for kind in kinds)
    spans = sum(view.find_parts(trace).span_ns for trace in view.timed_ranks.values())
    is_beside = view.has_device and not any(trace.collectives.num_on_device for trace in view.job.ranks)
    if not total or (is_beside and total < LEAST_BESIDE * spans):
        return
    longest = kinds[0]
    transfers = summarise_transfers(view.matching) if view.matching else ()
    bus = next((one.bus_bandwidth for one in transfers if one.kind == longest.kind), None)
    rate = "" if bus is None else f"; its bus bandwidth without waiting is {format_quantity('bandwidth', bus)}"
    share = longest.total_ns / total
    yield COLLECTIVE(
        longest.kind,
        f"{longest.kind} takes {format_share(share)} of the time in collectives: {format_count(longest.count, 'call')},"
        f" {format_seconds(longest.mean_ns * NS)} on average{rate}.",
        share=share,
        count=longest.count,
        mean_seconds=longest.mean_ns * NS,
        bus_bandwidth=bus,
    )


def _summarise_idle(view: TraceView) -> Iterator[Finding]:
    lanes = [lane for counted in view.counted.values() for lane in counted.lanes.idle if lane.lane.is_device]
    idle = sum(lane.idle_ns for lane in lanes)
    if not idle:
        return
    host, kernel = (sum(getattr(lane, f"{why}_wait_ns") for lane in lanes) / idle for why in ("host", "kernel"))
    which, total = (f"{len(lanes)} streams are", " in total") if len(lanes) > 1 else ("The stream is", "")
    yield IDLE(
        "",
        f"{which} idle for {format_seconds(idle * NS)}{total}: {format_share(host)} waiting for the host to"
        f" launch the next kernel, {format_share(kernel)} between kernels, {format_share(1 - host - kernel)} other.",
        seconds=idle * NS,
        host_wait=host,
        kernel_wait=kernel,
        other=1 - host - kernel,
    )


def _summarise_names(view: TraceView) -> Iterator[Finding]:
    times = [(kernel.name, kernel.total_ns) for kernel in add_kernels(view)]
    words = "The kernel with the most time is {name}: {share} of the time of all kernels."
    if not sum(time for _, time in times):
        times = [(operator.name, operator.self_ns) for operator in add_operators(view)]
        words = "The operator with the most self time is {name}: {share} of the self time of all operators."
    total = sum(time for _, time in times)
    if total:
        (name,), share = shorten_names([times[0][0]]), times[0][1] / total
        yield LONGEST(name, words.format(name=name, share=format_share(share)), share=share)


def find_doubts(view: TraceView) -> Iterator[Caution]:
    """What is missing or does not fit, each with the next step."""
    for doubt in (*view.job.doubts, *find_match_doubts(view.job)):
        yield DOUBTS[doubt.kind](doubt.subject, doubt.message, doubt.next_step)
    unusable = {rank: trace.num_unusable for rank, trace in view.ranks.items() if trace.num_unusable}
    if unusable:
        listed = ", ".join(f"{number} of rank {rank}" for rank, number in list(unusable.items())[:8])
        yield UNUSABLE(
            "",
            f"unusable events (no time, end before start, or malformed fields): {listed}",
            "record the trace again if they matter",
            num_events=sum(unusable.values()),
        )


def explain_missing(view: TraceView) -> Iterator[str]:
    """What is not in the document, and why."""
    if view.lacks_device:
        yield "Time of ranks and steps, kernels, streams: the traces have no device activity."
    elif not view.has_device:
        yield "Kernels, idle streams, launches and queues: the traces have no device."
    elif not any(counted.lanes.launches for counted in view.counted.values()):
        yield "Launches and queues: the traces have no calls that launched their kernels."
    if not any(trace.tables.steps for trace in view.job.ranks):
        yield "Steps: the profiler marked none; call its step()."
    if not any(len(trace.collectives) for trace in view.job.ranks):
        yield "Collectives: the traces have none."
    elif len(view.ranks) < 2:
        yield "Arrivals: they need the traces of several ranks."
    elif view.job.arrivals is None:
        yield "Arrivals: no collective is in the traces of several ranks."
    yield from explain_unrecorded(view)


def describe_traces(view: TraceView) -> Document:
    """Everything that the traces show."""
    missing = tuple(explain_missing(view))
    critical = find_critical_step(view)
    sections = (
        None
        if view.lacks_device
        else _add_charts(_make_section("Where the time goes", make_ranks_table(view), make_steps_table(view)), view),
        _make_section("Communication", make_kinds_table(view), make_transfers_table(view), make_arrivals_table(view)),
        make_critical_section(view, critical),
        *make_efficiency_sections(view),
        _make_section("What ran", make_kernels_table(view) if view.has_device else None, make_operators_table(view)),
        _make_section(
            "Idle time",
            make_idle_table(view) if view.has_device and view.counted else None,
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
        findings=(*summarise(view), *summarise_critical(critical)),
        cautions=tuple(find_doubts(view)),
    )


def _make_section(heading: str, *tables: Table | None) -> Section | None:
    found = tuple(table for table in tables if table is not None and table.rows)
    return Section(heading=heading, tables=found) if found else None


def _add_charts(section: Section | None, view: TraceView) -> Section | None:
    """The parts of every rank, and its timeline."""
    if section is None or not view.has_charts:
        return section
    timelines = {rank: counted.timeline for rank, counted in view.counted.items()}
    charts = (draw_ranks(section.tables[0]), draw_timelines(view.job, timelines))
    return replace(section, charts=tuple(chart for chart in charts if chart is not None))


def draw_ranks(table: Table) -> Chart | None:
    """A stack per rank: compute, exposed communication, copies, idle."""
    keys = ("compute_seconds", "exposed_seconds", "copy_seconds", "idle_seconds")
    rows = [
        {"bar": row[0].value, "series": column.header, "seconds": cell.value}
        for row in table.rows[:MOST_RANKS]
        for column, cell in zip(table.columns, row, strict=True)
        if column.key in keys
    ]
    if not any(row["seconds"] for row in rows):
        return None
    more = f" {len(table.rows) - MOST_RANKS} more ranks are in the table." if len(table.rows) > MOST_RANKS else ""
    caption = f"The parts add up exactly; overlapped communication counts as compute.{more}"
    return plot_parts(title="Time of every rank", rows=rows, caption=caption, x_title="time")


def describe_setting(view: TraceView) -> str:
    """The job and its files in one line."""
    traces = view.job.ranks
    num_ranks, num_steps = view.job.num_ranks, max(len(trace.tables.steps) for trace in traces)
    backends = {trace.header.distributed.backend for trace in traces if trace.header.distributed} - {""}
    parts = [
        f"{len(traces)} of {num_ranks} ranks"
        if num_ranks and num_ranks > len(traces)
        else format_count(len(traces), "rank")
    ]
    parts += [", ".join(sorted(backends))] if backends else []
    parts.append(format_count(num_steps, "step") if num_steps else "no steps")
    if view.steps is not None:
        parts.append(f"shown: {', '.join(map(str, sorted(view.steps)))}")
    parts.append(f"{format_quantity('count', sum(trace.num_events for trace in traces))} events")
    parts.append(f"{format_bytes(sum(trace.num_bytes for trace in traces))} of trace")
    return " · ".join(parts)
