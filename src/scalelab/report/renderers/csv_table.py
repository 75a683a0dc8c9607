"""The numbers of a document for spreadsheets and pandas: CSV, raw and in base units.

The tables are in long form, one line per cell, so that tables of any shape fit one file: `pandas.read_csv(path)` reads
it, and `frame.pivot(index="row", columns="column", values="value")` restores a table. A spreadsheet would execute a
text that starts like a formula: such a text gets a single quote in front of it.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping

from scalelab.checks import defuse_formula
from scalelab.report.document import Cell, Document
from scalelab.report.findings import Value
from scalelab.units import Quantity

CSV_HEADER = ("table", "row", "column", "unit", "value", "low", "high", "mark")

UNITS: Mapping[Quantity, str] = {
    "text": "", "seconds": "s", "bytes": "B", "rate": "1/s", "latency": "s", "bandwidth": "B/s"
}  # fmt: skip
"""The base units; everything else is a pure number, "1"."""


def render_csv(document: Document) -> str:
    """Every cell of every table: table, row (from 1), column, unit, value, low, high, mark."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    writer.writerows(_list_cells(document))
    return buffer.getvalue()


def _list_cells(document: Document) -> Iterator[tuple[str, ...]]:
    """One line of CSV per cell."""
    for name, table in zip(name_tables(document), document.tables, strict=True):
        for row in table.rows:
            label = _write_value(row[0].value)
            for column, cell in zip(table.columns, row, strict=True):
                unit = UNITS.get(column.quantity, "1") if cell.estimate else ""
                yield (name, label, defuse_formula(column.key), unit, *_list_values(cell))


def name_tables(document: Document) -> list[str]:
    """A different name for each table: its title, its section's or the document's, with a number if that is taken."""
    names: list[str] = []
    for section in document.sections:
        for table in section.tables:
            name = defuse_formula(table.title or section.heading or document.title)
            names.append(f"{name} ({len(names) + 1})" if name in names else name)
    return names


def _list_values(cell: Cell) -> tuple[str, ...]:
    return (*map(_write_value, (cell.whole or cell.value, cell.low, cell.high)), defuse_formula(cell.mark))


def _write_value(value: Value) -> str:
    """A raw value: every digit of a number, nothing for what is unknown."""
    if isinstance(value, str):
        return defuse_formula(value)
    if isinstance(value, bool):
        return str(value).lower()
    is_unknown = value is None or (isinstance(value, float) and not math.isfinite(value))
    return "" if is_unknown else str(value)
