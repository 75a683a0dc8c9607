"""The figures of `model-size`: speedups, a heat map of sizes and ranks, and what a step is made of."""

from __future__ import annotations

from scalelab.analysis.breakdown import PARTS
from scalelab.report.charts.amounts import plot_amounts, read_number
from scalelab.report.charts.columns import make_value_axis, read_columns
from scalelab.report.charts.grid import plot_grid
from scalelab.report.charts.plot import Axis, Row, plot_bars
from scalelab.report.document import Chart, Table
from scalelab.studies.breakdown_table import HEADERS
from scalelab.studies.dimension_charts import describe_cell
from scalelab.studies.model_size_answer import SizeAnswer
from scalelab.studies.sweep import describe_status
from scalelab.studies.sweep_charts import INTERVALS, keep_charts


def draw_sizes(answer: SizeAnswer) -> tuple[Chart, ...]:
    return keep_charts(_draw_grid(answer), _draw_speedups(answer))


def _draw_grid(answer: SizeAnswer) -> Chart | None:
    """Sizes down, ranks across: the step of each."""
    rows: list[Row] = [
        {
            "size": size.replace(",", " "),
            "ranks": str(count),
            **describe_cell(answer.arms.get(f"size{number}-{answer.strategy}-{count}")),
        }
        for number, size in enumerate(answer.sizes, start=1)
        for count in answer.ranks
    ]
    return plot_grid(
        title="Step by size and ranks",
        x=Axis(field="ranks", title="ranks", quantity="text"),
        y=Axis(field="size", title="", quantity="text"),
        value=Axis(field="step_seconds", title="step", quantity="seconds"),
        rows=rows,
        extra={"reason": "reason"},
        caption="Numbers are medians; their 95 % intervals are in the table.",
    )


def _draw_speedups(answer: SizeAnswer) -> Chart | None:
    """Of every row on several ranks, over one rank of the same size."""
    rows: list[Row] = [
        {
            "name": arm.label,
            "speedup": answer.speedup(arm) if arm.is_measured else None,
            "series": "",
            "key": arm.label,
            "status": "" if arm.is_measured else describe_status(arm),
        }
        for arm in answer.arms.values()
        if arm.trial.num_ranks > 1
    ]
    return plot_amounts(
        title="Speedup over one rank of the same size",
        x=Axis(field="speedup", title="speedup", quantity="ratio", from_zero=False),
        rows=rows,
        reference=1.0,
        caption=f"{INTERVALS} Left of the dashed line more ranks are slower than one.",
    )


def draw_parts(table: Table, answer: SizeAnswer) -> tuple[Chart, ...]:
    """The parts of a step, as shares of it."""
    columns = {f"{part}_share": HEADERS.get(part, part) for part in PARTS}
    every: list[Row] = [*read_columns(table, columns, [arm.label for arm in answer.spread])]
    rows = [row for row in every if read_number(row, "value") is not None]
    names = list(dict.fromkeys(str(row["name"]) for row in rows))
    if len(names) < 2:
        return ()
    for name in names:
        own = [row for row in rows if row["name"] == name]
        rest = 1.0 - sum(read_number(row, "value") or 0.0 for row in own)
        rows.append({"name": name, "key": own[0]["key"], "series": "rest", "value": rest})
    failed = {str(row["name"]): row for row in every if row["name"] not in names and row["status"]}
    chart = plot_bars(
        title="What a step is made of",
        x=make_value_axis(table, next(iter(columns)), "share of the step"),
        y=Axis(field="name", title="", quantity="text"),
        rows=rows,
        failed=list(failed.values()),
        has_labels=True,
        caption="Means over ranks; pieces are in the order of the legend. Each is measured by itself: a rest below"
        " zero, to the left, is by how much they exceed the step.",
    )
    return (chart,)
