"""The document of `scalelab trace diff A B`: what B runs that A does not, what takes longer, what less.

The document of `scalelab trace --hta`: the numbers of HolisticTraceAnalysis, by its definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scalelab.answers.trace.view import TraceView, divide, shorten_names
from scalelab.report.document import Column, Document, Section, Table, make_row
from scalelab.report.findings import Caution, as_findings
from scalelab.trace.breakdown import Parts
from scalelab.trace.diff import NOTABLE, Amount, Change, Comparison, Difference, Side, compare_operators
from scalelab.trace.hta import HtaBreakdown
from scalelab.units import format_seconds, format_share

ORDER = (Change.SLOWER, Change.FASTER, Change.ADDED, Change.REMOVED)


def compare_traces(a: TraceView, b: TraceView, names: tuple[str, str]) -> Document:
    """Two jobs' traces side by side."""
    operators = compare_operators(_take_operators(a), _take_operators(b))
    kernels = compare_operators(_take_kernels(a), _take_kernels(b)) if a.has_device or b.has_device else None
    unit = "per rank and step" if operators.is_per_step else "per rank, whole traces"
    sections = [_make_section("Operators on the host", operators, unit, a.top)]
    if kernels is not None:
        sections.insert(0, _make_section("Kernels", kernels, unit, a.top))
    summary = list(_summarise_parts(a, b))
    for what, comparison in (("kernels", kernels), ("operators", operators)):
        summary += _summarise(what, comparison, unit)
    return Document(
        title="Two traces",
        question="What does B run that A does not, and what takes longer?",
        setting=f"A: {names[0]} · B: {names[1]} · {unit}",
        sections=tuple(section for section in sections if section.tables),
        findings=as_findings(summary),
        cautions=tuple(_find_doubts(a, b, operators)),
    )


def _count_steps(view: TraceView) -> int | None:
    """The steps of every rank; None where they differ, or there are none."""
    found = {len(view.list_steps(trace)) for trace in view.job.ranks}
    return found.pop() or None if len(found) == 1 else None


def _take_operators(view: TraceView) -> Side:
    amounts = [
        Amount(name=one.name, count=one.count, total_ns=one.self_ns)
        for counted in view.counted.values()
        for one in counted.operators
    ]
    return Side(amounts=amounts, num_ranks=len(view.ranks), num_steps=_count_steps(view))


def _take_kernels(view: TraceView) -> Side:
    amounts = [
        Amount(name=one.name, count=one.count, total_ns=one.total_ns)
        for counted in view.counted.values()
        for one in counted.kernels
    ]
    return Side(amounts=amounts, num_ranks=len(view.ranks), num_steps=_count_steps(view))


def _make_section(heading: str, comparison: Comparison, unit: str, top: int) -> Section:
    tables = [_make_table(change, comparison.list_changed(change), unit, top) for change in ORDER]
    return Section(heading=heading, tables=tuple(table for table in tables if table.rows))


def _make_table(change: Change, found: Sequence[Difference], unit: str, top: int) -> Table:
    columns = (
        Column(key="name", header="name", align="left"),
        Column(key="count_a", header="count in A", quantity="number"),
        Column(key="count_b", header="in B", quantity="number"),
        Column(key="seconds_a", header="time in A", quantity="seconds", unit_of="more_seconds"),
        Column(key="seconds_b", header="in B", quantity="seconds", unit_of="more_seconds"),
        Column(key="more_seconds", header="B − A", quantity="seconds"),
    )
    shown = found[:top]
    rows = [
        make_row(name, one.count_a, one.count_b, one.seconds_a, one.seconds_b, one.more_seconds)
        for name, one in zip(shorten_names([one.name for one in shown]), shown, strict=True)
    ]
    notes = [f"{unit}; of operators the time themselves"]
    notes += [f"{len(shown)} of {len(found)}; --top shows more"] if len(shown) < len(found) else []
    return Table(title=change.capitalize(), columns=columns, rows=tuple(rows), notes=tuple(notes))


def _summarise_parts(a: TraceView, b: TraceView) -> Iterator[str]:
    sums = [sum((view.find_parts(trace) for trace in view.job.ranks), start=Parts()) for view in (a, b)]
    if all(one.span_ns for one in sums):
        exposed, compute = (
            [format_share(getattr(one, f"{part}_ns") / one.span_ns) for one in sums] for part in ("exposed", "compute")
        )
        yield (
            f"Exposed communication takes {exposed[0]} of the spans in A and {exposed[1]} in B; compute {compute[0]}"
            f" and {compute[1]}."
        )


def _summarise(what: str, comparison: Comparison | None, unit: str) -> Iterator[str]:
    if comparison is None or not comparison.differences:
        return
    numbers = [f"{len(comparison.list_changed(change))} {change}" for change in (*ORDER, Change.SAME)]
    yield f"Of {len(comparison.differences)} {what}: {', '.join(numbers)} (within {format_share(NOTABLE)})."
    changed = comparison.differences[0]
    if changed.change is not Change.SAME:
        more = "more" if changed.more_seconds > 0 else "less"
        yield (
            f"The largest change is {shorten_names([changed.name])[0]} ({changed.change}):"
            f" {format_seconds(abs(changed.more_seconds))} {more} in B, {unit}."
        )


def _find_doubts(a: TraceView, b: TraceView, comparison: Comparison) -> Iterator[Caution]:
    if not comparison.is_per_step:
        yield Caution(
            message="whole traces are compared: one of them has no steps, or not as many on every rank",
            next_step="record both with the profiler's step(), over the same number of steps",
        )
    if len(a.ranks) != len(b.ranks):
        yield Caution(
            message=f"A has traces of {len(a.ranks)} ranks, B of {len(b.ranks)}: numbers are means over ranks",
            next_step="name the traces of the same ranks",
        )
    if a.has_device != b.has_device:
        yield Caution(
            message="one of the traces has a device, the other none: their parts mean different things",
            next_step="compare traces of the same kind of device",
        )


US = 1e-6


def describe_hta(ranks: Mapping[int, HtaBreakdown]) -> Document:
    """One row per rank."""
    columns = (
        Column(key="rank", header="rank", align="left"),
        Column(key="kernel_seconds", header="kernel time", quantity="seconds"),
        Column(key="compute_seconds", header="compute", quantity="seconds", unit_of="kernel_seconds"),
        Column(key="non_compute_seconds", header="non-compute", quantity="seconds", unit_of="kernel_seconds"),
        Column(key="idle_seconds", header="idle", quantity="seconds", unit_of="kernel_seconds"),
        Column(key="compute_share", header="compute / kernel time", quantity="share"),
        Column(key="non_compute_share", header="non-compute / kernel time", quantity="share"),
        Column(key="idle_share", header="idle / kernel time", quantity="share"),
        Column(key="overlap_share", header="overlap / comm", quantity="share"),
    )
    rows = [
        make_row(
            f"rank {rank}",
            one.kernel_us * US,
            one.compute_us * US,
            one.non_compute_us * US,
            one.idle_us * US,
            divide(one.compute_us, one.kernel_us),
            divide(one.non_compute_us, one.kernel_us),
            divide(one.idle_us, one.kernel_us),
            one.overlap,
        )
        for rank, one in ranks.items()
    ]
    notes = (
        "kernel time: from the first kernel's start to the last one's end; the last of two or more steps is dropped",
        "starts are rounded up and ends down to whole microseconds; comm: the union of communication kernels",
    )
    table = Table(columns=columns, rows=tuple(rows), notes=notes)
    return Document(
        title="Traces",
        question="What would HolisticTraceAnalysis say?",
        setting=f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} · breakdown and overlap by its definitions",
        sections=(Section(tables=(table,)),),
        findings=as_findings(_summarise_hta(ranks)),
        cautions=tuple(_find_hta_doubts(ranks)),
    )


def _summarise_hta(ranks: Mapping[int, HtaBreakdown]) -> Iterator[str]:
    for rank, one in ranks.items():
        if one.kernel_us and one.overlap is not None:
            overlap, idle = format_share(one.overlap), format_share(one.idle_us / one.kernel_us)
            yield f"Rank {rank}: {overlap} of communication lies beside compute, {idle} of the kernel time is idle."


def _find_hta_doubts(ranks: Mapping[int, HtaBreakdown]) -> Iterator[Caution]:
    empty = [str(rank) for rank, one in ranks.items() if not one.num_kernels]
    if empty:
        yield Caution(
            message=f"rank {', '.join(empty[:8])}: no kernel is left to count; HolisticTraceAnalysis reads devices",
            next_step="leave out --hta",
        )
