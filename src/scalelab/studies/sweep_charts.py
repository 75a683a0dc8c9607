"""Figures of what a sweep's table lists: a column or several by configuration, in the table's own words.

The control is the reference once more, and is left to the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from scalelab.report.charts.amounts import plot_amounts
from scalelab.report.charts.columns import make_value_axis, read_columns
from scalelab.report.document import Chart, Table
from scalelab.studies.arms import Arm
from scalelab.studies.sweep import CONTROL

INTERVALS = "Thin lines are 95 % confidence intervals."


def draw_columns(
    table: Table,
    columns: Mapping[str, str] | Sequence[str],
    *,
    title: str,
    keys: Sequence[str] = (),
    axis_title: str = "",
    reference: float | None = None,
    from_zero: bool = True,
    caption: str = INTERVALS,
) -> Chart | None:
    """Columns of any table by the names of its rows; None where fewer than two numbers are known."""
    rows = read_columns(table, columns, keys, leaving_out=(CONTROL,))
    axis = make_value_axis(table, next(iter(columns)), axis_title, from_zero=from_zero)
    statuses = dict.fromkeys(f"{row['name']} ({row['status']})" for row in rows if _is_failed(row["status"]))
    missing = f" Without a number: {', '.join(statuses)}." if statuses else ""
    hidden = " The control is not drawn." if CONTROL in keys else ""
    name_title = table.columns[0].header
    return plot_amounts(
        title=title,
        x=axis,
        rows=rows,
        caption=f"{caption}{missing}{hidden}".strip(),
        reference=reference,
        name_title="" if name_title == "run" else name_title,
    )


def _is_failed(status: object) -> bool:
    return status not in ("", "–")


def list_keys(arms: Iterable[Arm]) -> list[str]:
    """What the rows of a sweep's table are called in all figures."""
    return [arm.label for arm in arms]


def keep_charts(*charts: Chart | None) -> tuple[Chart, ...]:
    """Those that there are."""
    return tuple(chart for chart in charts if chart is not None)
