"""The figures of `memory`: categories, forecast above measured, and what a device would hold."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.analysis.memory import CATEGORIES
from scalelab.report.charts.memory import SIDES, plot_categories
from scalelab.report.charts.plot import Row
from scalelab.report.document import Chart, Table
from scalelab.studies.memory_rows import MemoryRow
from scalelab.studies.sweep_charts import draw_columns, keep_charts
from scalelab.units import format_bytes

PIXELS = 1 / 2000
"""A category below this share of the largest peak would be no pixel wide."""


def draw_categories(rows: Sequence[MemoryRow]) -> tuple[Chart, ...]:
    """Every configuration with its forecast and its measurement, in pieces."""
    pieces: list[Row] = []
    totals: list[Row] = []
    peaks = [report.peak_bytes for row in rows for report in (row.forecast, row.measured) if report is not None]
    least = max(peaks, default=0) * PIXELS
    for row in rows:
        for side, report in zip(SIDES, (row.forecast, row.measured), strict=True):
            place = {"name": row.label, "side": side, "key": row.label}
            status = "" if report is not None else row.status if side == "measured" else "there is none"
            totals.append(place | {"memory_bytes": report.peak_bytes if report else None, "status": status})
            sizes = report.by_category if report is not None else {}
            pieces += [
                place | {"series": name, "memory_bytes": sizes[name]}
                for name in CATEGORIES
                if sizes.get(name, 0) > least
            ]
    chart = plot_categories(
        title="Memory by category",
        rows=sorted(pieces, key=lambda piece: CATEGORIES.index(str(piece["series"]))),
        totals=totals,
        caption="Bytes of one rank at the highest point of a step, of the rank that takes the most, the forecast above"
        " the measurement; pieces are in the order of the legend, those too small to be seen are in the table. The same"
        " in every launch, so without intervals.",
    )
    return keep_charts(chart)


def draw_fit(table: Table, device_bytes: int) -> tuple[Chart, ...]:
    """Every forecast beside the device."""
    chart = draw_columns(
        table,
        ["forecast_bytes"],
        title=f"Beside a device of {format_bytes(device_bytes)}",
        reference=float(device_bytes),
        caption="Forecasts; the dashed line is the memory of the device.",
    )
    return keep_charts(chart)
