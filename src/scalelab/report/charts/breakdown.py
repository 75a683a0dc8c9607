"""A step in parts, one stacked bar for every rank or configuration, with the names of the parts inside."""

from __future__ import annotations

from scalelab.report.charts.axes import Axis, Rows
from scalelab.report.charts.plot import plot_bars
from scalelab.report.document import Chart


def plot_parts(
    *, title: str, rows: Rows, name: str, caption: str, failed: Rows = (), x_title: str = "time in a step"
) -> Chart:
    """`seconds` of every part (`series`) of every bar (`name`: what the axis calls them)."""
    return plot_bars(
        title=title,
        x=Axis(field="seconds", title=x_title, quantity="seconds"),
        y=Axis(field="bar", title=name, quantity="text"),
        rows=rows,
        failed=failed,
        caption=caption,
        has_labels=True,
    )
