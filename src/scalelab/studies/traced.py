"""The document of a job's traces: what communication costs, who waits for whom, what ran, why nothing did.

The parts of a rank's time are exact (`trace/breakdown.py`); every share names what it is a share of. What the traces
cannot say is left out, with the reason.
"""

from __future__ import annotations

from dataclasses import replace

from scalelab.report.charts.breakdown import plot_parts
from scalelab.report.document import Chart, Document, Section, Table
from scalelab.studies.traced_charts import MOST_RANKS, draw_timelines
from scalelab.studies.traced_names import (
    make_gaps_table,
    make_idle_table,
    make_kernels_table,
    make_launches_table,
    make_operators_table,
    make_queues_table,
)
from scalelab.studies.traced_tables import (
    make_arrivals_table,
    make_kinds_table,
    make_parts_table,
    make_steps_table,
    make_transfers_table,
)
from scalelab.studies.traced_view import TraceView
from scalelab.studies.traced_words import explain_missing, find_doubts, summarise
from scalelab.units import format_bytes, format_quantity

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
        summary=tuple(summarise(view)),
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
