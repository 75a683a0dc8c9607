"""The documents of `scalelab trace diff A B` (which kernels and operators changed) and of `scalelab trace --hta`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from scalelab.answers.trace.tables import note_more
from scalelab.answers.trace.view import NS, TraceView, name_cells, shorten_names
from scalelab.report.document import Document, Section, Table
from scalelab.report.findings import MAIN, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import Field, make_column, make_table, seconds_column, text_column
from scalelab.trace.operators import (
    NOTABLE,
    Amount,
    Comparison,
    OperatorChange,
    OperatorDifference,
    Side,
    compare_operators,
)
from scalelab.trace.rank_time import Parts
from scalelab.units import format_count, format_seconds, format_share

LARGEST = FindingKind(
    "largest-change", "The name whose time changed most from A to B", MAIN, ("change", "seconds"), free=("seconds",)
)
SPAN = FindingKind("changed-span", "The time of a rank, over its steps if both have some, in A and B", MAIN, ("a", "b"))
PARTS = FindingKind(
    "changed-shares", "Exposed communication and compute as shares of the time, in A and in B", REASON,
    ("exposed_a", "exposed_b", "compute_a", "compute_b"),
)  # fmt: skip
COUNTS = FindingKind("changes", "How many names changed, and how", REASON, tuple(OperatorChange))
WHOLE_TRACES = CautionKind("whole-traces", "Traces are compared as a whole, not per step", "noise")
OTHER_RANKS = CautionKind("other-ranks", "The traces have different numbers of ranks", "wrong-work", ("a", "b"))
OTHER_DEVICE = CautionKind("other-device", "Only one of the traces has a device", "wrong-work")

ORDER = (
    OperatorChange.SLOWER,
    OperatorChange.FASTER,
    OperatorChange.ADDED,
    OperatorChange.REMOVED,
    OperatorChange.SAME,
)


def compare_traces(a: TraceView, b: TraceView, names: tuple[str, str]) -> Document:
    """Two jobs' traces side by side."""
    operators = compare_operators(_take(a, "operators", "self_ns"), _take(b, "operators", "self_ns"))
    found = {"operators": operators}
    if a.has_device or b.has_device:
        kernels = compare_operators(_take(a, "kernels", "total_ns"), _take(b, "kernels", "total_ns"))
        found = {"kernels": kernels, "operators": operators}
    unit = "per rank and step" if operators.is_per_step else "per rank, whole traces"
    (first, main), *_ = found.items()
    headings = {"kernels": "Kernels", "operators": "Operators on the host (self time)"}
    totals = _make_totals(a, b, found, unit)
    largest = _make_table(main.list_changed(*ORDER[:-1]), unit, a.top, f"Largest changes of {first}")
    sections = [
        Section(tables=tuple(table for table in (largest, totals) if table.rows)),
        *(_make_section(headings[what], found[what], unit, a.top) for what in found),
    ]
    return Document(
        title="Trace diff",
        question="What does B run that A does not, and what got slower?",
        setting=f"A: {names[0]} · B: {names[1]} · {unit}",
        sections=tuple(section for section in sections if any(table.rows for table in section.tables)),
        findings=(
            *_summarise_span(totals, unit),
            *_summarise_parts(a, b),
            *(finding for what, comparison in found.items() for finding in _summarise(what, comparison, unit)),
        ),
        cautions=tuple(_find_doubts(a, b, operators)),
    )


class Total(NamedTuple):
    """One sum in both traces, in seconds."""

    name: str
    a: float
    b: float


def _make_totals(a: TraceView, b: TraceView, found: Mapping[str, Comparison], unit: str) -> Table:
    """Where the time went in both: the parts of the span, and the sums over all names."""
    is_per_step = all(comparison.is_per_step for comparison in found.values())
    sides = [_average_parts(view, is_per_step) for view in (a, b)]
    parts = {"span": "span", "compute": "compute", "exposed": "exposed comm", "copy": "copies", "idle": "idle"}
    rows = [Total(name, sides[0][part], sides[1][part]) for part, name in parts.items()]
    sums = {"kernels": "all kernels", "operators": "all operators (self time)"}
    for what, comparison in found.items():
        differences = comparison.differences
        rows.append(
            Total(sums[what], sum(one.seconds_a for one in differences), sum(one.seconds_b for one in differences))
        )
    return make_table(
        [row for row in rows if row.a or row.b],
        text_column("total", "total", lambda row: row.name),
        seconds_column("seconds_a", "A", lambda row: row.a, unit_of="more_seconds"),
        seconds_column("seconds_b", "B", lambda row: row.b, unit_of="more_seconds"),
        seconds_column("more_seconds", "B − A", lambda row: row.b - row.a),
        title="Totals",
        notes=(unit, "span = compute + exposed comm + copies + idle"),
    )


def _average_parts(view: TraceView, is_per_step: bool) -> dict[str, float]:
    """The parts of a rank's span in seconds, over its steps if there are any: time between steps counts too."""
    ranks = view.timed_ranks.values()
    total = sum((view.find_parts(trace) for trace in ranks), start=Parts())
    num_shares = sum(len(view.list_steps(trace)) if is_per_step else 1 for trace in ranks)
    names = ("span", "compute", "exposed", "copy", "idle")
    return {name: getattr(total, f"{name}_ns") * NS / max(1, num_shares) for name in names}


def _take(view: TraceView, what: str, time: str) -> Side:
    """How often every name ran, and for how long."""
    amounts = [
        Amount(name=one.name, count=one.count, total_ns=getattr(one, time))
        for counted in view.counted.values()
        for one in getattr(counted, what)
    ]
    steps = {len(view.list_steps(trace)) for trace in view.job.ranks}
    return Side(amounts=amounts, num_ranks=len(view.ranks), num_steps=steps.pop() or None if len(steps) == 1 else None)


def _make_section(heading: str, comparison: Comparison, unit: str, top: int) -> Section:
    tables = [_make_table(comparison.list_changed(one), unit, top, one.capitalize()) for one in ORDER[:-1]]
    return Section(heading=heading, tables=tuple(table for table in tables if table.rows))


def _make_table(changed: Sequence[OperatorDifference], unit: str, top: int, title: str) -> Table:
    """What changed, the largest difference first."""
    shown = changed[:top]
    names = name_cells([one.name for one in shown])

    def column(key: str, header: str) -> Field[OperatorDifference]:
        def read(one: OperatorDifference) -> float:
            return float(getattr(one, key))

        if key.startswith("count"):
            return make_column("number", key, header, read, is_detail=True)
        return seconds_column(key, header, read, **({} if key == "more_seconds" else {"unit_of": "more_seconds"}))

    return make_table(
        shown,
        text_column("name", "name", lambda one: names[one.name]),
        text_column("change", "change", lambda one: str(one.change)),
        column("count_a", "count in A"),
        column("count_b", "count in B"),
        column("seconds_a", "A"),
        column("seconds_b", "B"),
        column("more_seconds", "B − A"),
        title=title,
        notes=(unit, *note_more(len(changed), len(shown))),
    )


def _summarise_span(totals: Table, unit: str) -> Iterator[Finding]:
    first = {str(row[0].value): row for row in totals.rows}.get("span")
    before, after = (first[1].estimate, first[2].estimate) if first else (None, None)
    if before is None or after is None or not before.value:
        return
    change = after.value / before.value - 1
    how = f"{format_share(abs(change))} {'longer' if change > 0 else 'shorter'} than A"
    text = f"B takes {format_seconds(after.value)} {unit}, {how} ({format_seconds(before.value)})."
    yield SPAN("", text, a=before.value, b=after.value)


def _summarise_parts(a: TraceView, b: TraceView) -> Iterator[Finding]:
    sums = [sum((view.find_parts(trace) for trace in view.job.ranks), start=Parts()) for view in (a, b)]
    if not all(one.span_ns for one in sums):
        return
    shares = {
        f"{part}_{side}": getattr(one, f"{part}_ns") / one.span_ns
        for side, one in zip("ab", sums, strict=True)
        for part in ("exposed", "compute")
    }
    words = {key: format_share(share) for key, share in shares.items()}
    yield PARTS(
        "",
        f"Exposed communication takes {words['exposed_a']} of the time in A and {words['exposed_b']} in B, compute"
        f" {words['compute_a']} and {words['compute_b']}.",
        **shares,
    )


def _summarise(what: str, comparison: Comparison, unit: str) -> Iterator[Finding]:
    if not comparison.differences:
        return
    largest = comparison.differences[0]
    if largest.change is not OperatorChange.SAME:
        (name,) = shorten_names([largest.name])
        yield LARGEST(
            name,
            f"Largest change in {what}: {name} ({largest.change}), {format_seconds(abs(largest.more_seconds))}"
            f" {'more' if largest.more_seconds > 0 else 'less'} in B {unit}.",
            change=str(largest.change),
            seconds=largest.more_seconds,
        )
    counts = {change: len(comparison.list_changed(change)) for change in ORDER}
    listed = ", ".join(f"{number} {change}" for change, number in counts.items())
    yield COUNTS(
        what,
        f"Of {len(comparison.differences)} {what}: {listed} (within {format_share(NOTABLE)}).",
        **{str(change): number for change, number in counts.items()},
    )


def _find_doubts(a: TraceView, b: TraceView, comparison: Comparison) -> Iterator[Caution]:
    if not comparison.is_per_step:
        yield WHOLE_TRACES(
            "",
            "whole traces are compared: one has no steps, or not the same number on every rank",
            "record both with the profiler's step(), over the same number of steps",
        )
    if len(a.ranks) != len(b.ranks):
        yield OTHER_RANKS(
            "",
            f"A has traces of {format_count(len(a.ranks), 'rank')}, B of {len(b.ranks)}: numbers are means over ranks",
            "give the traces of the same ranks",
            a=len(a.ranks),
            b=len(b.ranks),
        )
    if a.has_device != b.has_device:
        yield OTHER_DEVICE(
            "",
            "only one of the traces has a device: their parts mean different things",
            "compare traces of the same kind of device",
        )
