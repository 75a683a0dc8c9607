"""The figures of a comparison: the ratio of every configuration against 1, and both runs' steps."""

from __future__ import annotations

from scalelab.report.document import Chart, Table
from scalelab.studies.sweep_charts import INTERVALS, draw_columns, keep_charts


def draw_comparison(table: Table) -> tuple[Chart, ...]:
    steps = {"before_seconds": "A", "after_seconds": "B"}
    return keep_charts(
        draw_columns(
            table,
            ["ratio"],
            title="B over A",
            axis_title="step of B over that of A",
            reference=1.0,
            from_zero=False,
            caption=f"{INTERVALS} Left of the dashed line B is faster; an interval that crosses it decides nothing.",
        ),
        draw_columns(table, steps, title="Step in both runs", axis_title="step"),
    )
