"""The tables of the study of memory."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.analysis.memory import CATEGORIES
from scalelab.observations import MemoryReport
from scalelab.report.document import Cell, Column, Table, make_cell, make_row
from scalelab.studies.memory_rows import MemoryRow
from scalelab.units import format_bytes

FORECAST_MARK = "°"
ERROR_DIGITS = 4
"""A hundredth of a percent: more is of no use to anybody."""


def make_peak_table(rows: Sequence[MemoryRow]) -> Table:
    """Forecast against measurement."""
    return Table(
        columns=(
            Column(key="run", header="run", align="left"),
            Column(key="forecast_bytes", header="forecast", quantity="bytes"),
            Column(key="peak_bytes", header="peak", quantity="bytes"),
            Column(key="forecast_error", header="error", quantity="share"),
            Column(key="peak_phase", header="peak in", align="left"),
        ),
        rows=tuple(
            make_row(
                row.label,
                row.forecast.peak_bytes if row.forecast else None,
                row.measured.peak_bytes if row.measured else row.status,
                None if row.error is None else round(row.error, ERROR_DIGITS),
                (row.report.peak_phase or None) if row.report else None,
            )
            for row in rows
        ),
        notes=("bytes of one rank, of the one that takes the most",),
    )


def make_reading_table(rows: Sequence[MemoryRow]) -> Table:
    """What is often read instead of the peak."""
    known = [(row, row.report) for row in rows if row.report is not None]
    columns = [
        Column(key="run", header="run", align="left"),
        Column(key="peak_bytes", header="peak", quantity="bytes"),
        Column(key="current_bytes", header="after step", quantity="bytes"),
        Column(key="states_bytes", header="states only", quantity="bytes"),
        Column(key="process_bytes", header="process", quantity="bytes"),
    ]
    has_reserved = any(report.reserved_bytes is not None for _, report in known)
    if has_reserved:
        columns.append(Column(key="reserved_bytes", header="reserved", quantity="bytes"))
    cells = []
    for row, report in known:
        reserved = [report.reserved_bytes] if has_reserved else []
        cells.append(
            make_row(
                _name_row(row), report.peak_bytes, report.current_bytes, row.states_bytes, row.process_bytes, *reserved
            )
        )
    return Table(columns=tuple(columns), rows=tuple(cells), notes=_explain_mark(known))


def make_category_table(rows: Sequence[MemoryRow]) -> Table:
    """What was alive at the peak; categories that nobody has are left out."""
    known = [(row, row.report) for row in rows if row.report is not None]
    present = [name for name in CATEGORIES if any(report.by_category.get(name) for _, report in known)]
    columns = [Column(key=f"{name}_bytes", header=name, quantity="bytes") for name in present]
    return Table(
        columns=(Column(key="run", header="run", align="left"), *columns),
        rows=tuple(
            make_row(_name_row(row), *(report.by_category.get(name, 0) for name in present)) for row, report in known
        ),
        notes=_explain_mark(known),
    )


def _name_row(row: MemoryRow) -> Cell:
    return make_cell(row.label, mark="" if row.measured else FORECAST_MARK)


def _explain_mark(known: Sequence[tuple[MemoryRow, MemoryReport]]) -> tuple[str, ...]:
    return (f"{FORECAST_MARK} forecast: it was not measured",) if any(not row.measured for row, _ in known) else ()


def make_fit_table(rows: Sequence[MemoryRow], device_bytes: int) -> Table:
    """Whether a device of this size would hold each configuration."""
    cells = []
    for row in rows:
        peak = row.forecast.peak_bytes if row.forecast else None
        cells.append(
            make_row(
                row.label,
                peak,
                None if peak is None else peak / device_bytes,
                None if peak is None else device_bytes - peak,
                None if peak is None else ("yes" if peak <= device_bytes else "no"),
            )
        )
    return Table(
        columns=(
            Column(key="run", header="run", align="left"),
            Column(key="forecast_bytes", header="forecast", quantity="bytes"),
            Column(key="used_share", header="of the device", quantity="share"),
            Column(key="margin_bytes", header="margin", quantity="bytes"),
            Column(key="fits", header="fits", align="left"),
        ),
        rows=tuple(cells),
        notes=(f"a device of {format_bytes(device_bytes)}, by forecast",),
    )
