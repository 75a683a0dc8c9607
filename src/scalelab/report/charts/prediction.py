"""Predictions as fans: what was measured as points, the predicted median as a line, its interval as a band.

Nothing joins the two: what was measured is one thing, what is expected of sizes that were not run another.
"""

from __future__ import annotations

from dataclasses import replace

from scalelab.report.charts.axes import Axis, Rows
from scalelab.report.charts.plot import plot_lines
from scalelab.report.charts.scaling import list_ranks, trace_guides
from scalelab.report.document import Chart

MEASURED, PREDICTED = "measured", "predicted"


def plot_fan(
    *,
    title: str,
    y: Axis,
    rows: Rows,
    caption: str = "",
    ideal: float | None = None,
    failed: Rows = (),
    x_title: str = "ranks",
) -> Chart:
    """`rows`: `ranks`, the field of y, and whether `measured` or `predicted` as `series`. `ideal`: y of one rank, where
    it should grow with them.
    """
    ranks = list_ranks(rows, failed)
    is_log = ranks[-1] > 2 * ranks[0]
    x = Axis(field="ranks", title=x_title, quantity="count", is_log=is_log, from_zero=False, ticks=tuple(ranks))
    y = replace(y, is_log=y.is_log and is_log)
    predicted = [row for row in rows if row.get("series") == PREDICTED]
    guides = [] if ideal is None else trace_guides(ranks, {"ideal": lambda count: ideal * count}, y.field)
    return plot_lines(
        title=title,
        x=x,
        y=y,
        rows=[row | {"regime": str(row.get("series"))} for row in map(dict, rows)],
        bands=predicted if len(predicted) > 1 else (),
        guides=guides,
        failed=failed,
        caption=caption,
    )
