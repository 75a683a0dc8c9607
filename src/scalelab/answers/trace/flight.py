"""The document of flight-recorder dumps: which collective the job hangs in, who waits, and who never came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scalelab.answers.trace.overview import format_ranks
from scalelab.report.document import Document, Section, Table
from scalelab.report.findings import MAIN, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import count_column, make_table, text_column
from scalelab.trace.files.flight import FlightDump, FlightEntry, GroupFlight, inspect_flight
from scalelab.units import format_count

ABSENT = FindingKind("absent-ranks", "Ranks that never called the collective that others wait in", MAIN, ("sequence",))
DISAGREEING = FindingKind(
    "disagreeing-collectives", "Ranks called collectives of another kind, size or type under one number", MAIN,
    ("sequence",),
)  # fmt: skip
UNFINISHED = FindingKind("unfinished-collective", "A collective that all ranks called and not all completed", MAIN,
                         ("sequence",))  # fmt: skip
COMPLETE = FindingKind("complete-collectives", "Every recorded collective is complete on all ranks", MAIN)
ELSEWHERE = FindingKind("last-collective", "What absent ranks called last", REASON, ("sequence",))
NO_DUMP = CautionKind("missing-dumps", "Ranks without a dump of the flight recorder", "wrong-work")
MOST_NAMED = 3


def describe_flight(dumps: Sequence[FlightDump]) -> Document:
    """Where the job hangs."""
    groups = inspect_flight(dumps)
    num_entries = sum(len(dump.entries) for dump in dumps)
    tables = (make_groups_table(groups), make_last_table(dumps)) if groups else ()
    return Document(
        title="Flight recorder",
        question="Which collective does the job hang in, and which rank is missing?",
        setting=f"{format_count(len(dumps), 'rank')} · {format_count(num_entries, 'collective')} recorded",
        sections=(Section(heading="Where ranks are", tables=tables),) if tables else (),
        findings=tuple(summarise_flight(groups, dumps)),
        cautions=tuple(find_undumped(groups)),
    )


def name_group(group: GroupFlight) -> str:
    return f"group {group.name}" + (f" ({group.description})" if group.description else "")


def summarise_flight(groups: Sequence[GroupFlight], dumps: Sequence[FlightDump]) -> Iterator[Finding]:
    """The hang, and what absent ranks did instead."""
    stuck = [group for group in groups if group.stuck is not None or group.mismatch]
    if not stuck:
        text = "Every recorded collective is complete on all ranks." if groups else "The dumps have no collective."
        yield COMPLETE("", text)
    for group in stuck[:MOST_NAMED]:
        yield from _summarise_group(group, dumps)


def _summarise_group(group: GroupFlight, dumps: Sequence[FlightDump]) -> Iterator[Finding]:
    if group.mismatch:
        number = next(iter(group.mismatch.values())).sequence
        kinds = sorted({_describe(one) for one in group.mismatch.values()})
        listed = "; ".join(
            f"{one} on rank {format_ranks([r for r, e in group.mismatch.items() if _describe(e) == one])}"
            for one in kinds
        )
        text = f"Ranks disagree on collective {number} of {name_group(group)}: {listed}."
        yield DISAGREEING(name_group(group), text, sequence=number)
    if group.stuck is None:
        return
    where = f"{group.stuck.name} of {name_group(group)}"
    source = f" ({group.stuck.source})" if group.stuck.source else ""
    if group.missing:
        who = f"Rank {format_ranks(group.missing)} never called {where}"
        text = f"{who}; rank {format_ranks(group.waiting)} waits in it{source}."
        yield ABSENT(f"rank {format_ranks(group.missing)}", text, sequence=group.stuck.sequence)
        for rank in group.missing[:MOST_NAMED]:
            last = _find_last(next(dump for dump in dumps if dump.rank == rank))
            if last is not None:
                at = f" at {last.source}" if last.source else ""
                text = f"Rank {rank} called {last.name} of group {last.group} last{at}."
                yield ELSEWHERE(f"rank {rank}", text, sequence=last.sequence)
    elif not group.mismatch:
        text = f"All ranks called {where}; rank {format_ranks(group.waiting)} has not completed it{source}."
        yield UNFINISHED(name_group(group), text, sequence=group.stuck.sequence)


def _describe(entry: FlightEntry) -> str:
    return " ".join(part for part in (entry.kind, entry.sizes, entry.dtypes) if part)


def _find_last(dump: FlightDump) -> FlightEntry | None:
    return max(dump.entries, key=lambda entry: entry.created_ns or 0, default=None)


def find_undumped(groups: Sequence[GroupFlight]) -> Iterator[Caution]:
    """Ranks that nothing is known of."""
    undumped = sorted({rank for group in groups for rank in group.undumped})
    if undumped:
        yield NO_DUMP(
            "",
            f"no dump of rank {format_ranks(undumped)}: it may be the one that others wait for",
            "give the dumps of all ranks; a rank that was killed writes none",
        )


def _format_span(numbers: Sequence[int]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return str(low) if low == high else f"{low}–{high}"


def make_groups_table(groups: Sequence[GroupFlight]) -> Table:
    return make_table(
        groups,
        text_column("group", "group", name_group),
        count_column("num_ranks", "ranks", lambda group: len(group.ranks)),
        text_column("last_called", "last called", lambda group: _format_span([*group.last_called.values()])),
        text_column("last_completed", "last completed", lambda group: _format_span([*group.last_completed.values()])),
        text_column("stuck", "hangs in", lambda group: group.stuck.name if group.stuck else "–"),
        text_column("missing", "missing ranks", lambda group: format_ranks(group.missing) or "–"),
        title="Groups",
        notes=("numbers are torch's collective_seq_id; a range: ranks differ",),
    )


def make_last_table(dumps: Sequence[FlightDump]) -> Table:
    rows = [(dump, last) for dump in dumps if (last := _find_last(dump)) is not None]
    return make_table(
        rows,
        text_column("rank", "rank", lambda row: f"rank {row[0].rank}"),
        text_column("group", "group", lambda row: row[1].group or "–"),
        text_column("last", "last called", lambda row: row[1].name),
        text_column("state", "state", lambda row: _name_state(row[1])),
        text_column("source", "line", lambda row: row[1].source or "–"),
        title="Last collective of every rank",
    )


def _name_state(entry: FlightEntry) -> str:
    return "completed" if entry.is_completed else "started" if entry.is_started else "called"
