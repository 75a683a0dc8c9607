"""The figures of `loader-workers`: what a step waits for, and what an epoch takes."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.report.charts.amounts import read_number
from scalelab.report.charts.columns import make_value_axis, read_columns
from scalelab.report.charts.plot import Axis, plot_bars
from scalelab.report.document import Chart, Table
from scalelab.studies.arms import Arm
from scalelab.studies.sweep import CONTROL
from scalelab.studies.sweep_charts import draw_columns, keep_charts, list_keys


def draw_split(table: Table, arms: Sequence[Arm]) -> tuple[Chart, ...]:
    """The step, and its two parts on top of each other."""
    keys = list_keys(arms)
    parts = {"load_seconds": "load", "train_seconds": "train"}
    every = read_columns(table, parts, keys, leaving_out=(CONTROL,))
    rows = [row for row in every if read_number(row, "value") is not None]
    names = {row["name"] for row in rows}
    failed = {row["name"]: row for row in every if row["name"] not in names}
    stacked = None
    if len(names) > 1:
        stacked = plot_bars(
            title="A step in two parts",
            x=make_value_axis(table, "load_seconds", "median of each part"),
            y=Axis(field="name", title="", quantity="text"),
            rows=rows,
            failed=list(failed.values()),
            has_labels=True,
            caption="load: waiting for the batch; train: forward, backward and optimizer. Medians of steps whose phases"
            " were timed, so they need not add up to a clean step; intervals are in the table.",
        )
    return keep_charts(draw_columns(table, ["step_seconds"], title="Step by number of workers", keys=keys), stacked)


def draw_epochs(table: Table, arms: Sequence[Arm]) -> tuple[Chart, ...]:
    """An epoch as it is, and as it would be without loading."""
    columns = {"epoch_seconds": "with loading", "epoch_train_seconds": "without loading"}
    chart = draw_columns(table, columns, title="An epoch", keys=list_keys(arms), axis_title="epoch")
    return keep_charts(chart)
