"""The one screen of an answer: what failed, the main table, the weightiest findings, the worst warnings.

Everything else is one flag away (`--full`), in the HTML, and in the JSON. The parts are chosen here and printed by the
terminal renderer, which counts what was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scalelab.report.document import Document, Table
from scalelab.report.findings import Caution, Finding, order_findings

MOST_LINES = 38
"""Lines of one screen, less the two that say where the run is."""
MOST_FINDINGS = 5
MOST_WARNINGS = 4
FEWEST_ROWS = 6
"""A table always shows this many."""


@dataclass(frozen=True, kw_only=True)
class Brief:
    """What of a document fits on one screen."""

    failures: tuple[Caution, ...]
    table: Table | None
    findings: tuple[Finding, ...]
    warnings: tuple[Caution, ...]
    left_out: str
    """What is not shown, in words; empty: nothing."""


def shorten(document: Document) -> Brief:
    """Choose by severity and weight; how many rows and columns of the table fit is for the renderer to see."""
    failures, warnings = document.failures, merge_alike(document.warnings)
    findings = order_findings(document.findings)
    tables = document.tables
    main = replace_details(tables[0]) if tables else None
    rest = (
        (len(tables) - 1, "table"),
        (len(findings) - MOST_FINDINGS, "finding"),
        (len(failures) - MOST_WARNINGS, "failure"),
        (len(warnings) - MOST_WARNINGS, "warning"),
    )
    left_out = ", ".join(f"{number} more {what}{'s' if number > 1 else ''}" for number, what in rest if number > 0)
    return Brief(
        failures=tuple(failures[:MOST_WARNINGS]),
        table=main,
        findings=tuple(findings[:MOST_FINDINGS]),
        warnings=tuple(warnings[:MOST_WARNINGS]),
        left_out=left_out,
    )


def merge_alike(cautions: Sequence[Caution]) -> list[Caution]:
    """One caution of each kind, which names the other subjects that it holds for."""
    by_kind: dict[str, list[Caution]] = {}
    for number, caution in enumerate(cautions):
        by_kind.setdefault(caution.kind if caution.subject else f"{caution.kind} {number}", []).append(caution)
    merged = []
    for first, *others in by_kind.values():
        subjects = [one.subject for one in others if one.subject != first.subject]
        also = f" (also {', '.join(dict.fromkeys(subjects))})" if subjects else ""
        merged.append(replace(first, message=f"{first.message}{also}"))
    return merged


def replace_details(table: Table) -> Table:
    """The table without the columns that are for the full report."""
    kept = [index for index, column in enumerate(table.columns) if not column.is_detail]
    return replace(
        table,
        columns=tuple(table.columns[index] for index in kept),
        rows=tuple(tuple(row[index] for index in kept) for row in table.rows),
    )
