"""The figures of `messages`: bytes beside theory, and by kind."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.report.charts.amounts import MOST_SERIES
from scalelab.report.charts.plot import Axis, Row, plot_bars
from scalelab.report.document import Chart, Table
from scalelab.studies.arms import Arm
from scalelab.studies.messages_tables import list_lines
from scalelab.studies.sweep import CONTROL
from scalelab.studies.sweep_charts import draw_columns, keep_charts, list_keys


def draw_payloads(table: Table, arms: Sequence[Arm]) -> tuple[Chart, ...]:
    """What was counted, what theory says, and what must go over the wire; and the step."""
    keys = list_keys(arms)
    columns = {"payload_bytes": "payload, counted", "expected_bytes": "payload by theory", "wire_bytes": "on the wire"}
    return keep_charts(
        draw_columns(
            table,
            columns,
            title="Bytes of one step",
            keys=keys,
            axis_title="bytes of one rank",
            caption="Counted in one step, so without intervals. A dash: theory does not give every byte.",
        ),
        draw_columns(table, ["step_seconds"], title="Step of every strategy", keys=keys),
    )


def draw_kinds(arms: Sequence[Arm]) -> tuple[Chart, ...]:
    """The payload of every configuration by collective and purpose."""
    rows: list[Row] = [
        {
            "name": arm.label,
            "payload_bytes": line.payload_bytes,
            "series": f"{line.kind.replace('_', '-')} of {line.purpose or 'unknown'}",
            "key": arm.label,
            "phase": line.phase,
            "count": line.count or 0,
        }
        for arm in arms
        if arm.configuration != CONTROL
        for line in list_lines(arm)
    ]
    names, kinds = ({str(row[field]) for row in rows} for field in ("name", "series"))
    if len(names) < 2 or len(kinds) > MOST_SERIES:
        return ()
    chart = plot_bars(
        title="Payload of one step by kind",
        x=Axis(field="payload_bytes", title="payload", quantity="bytes"),
        y=Axis(field="name", title="", quantity="text"),
        rows=rows,
        has_labels=True,
        extra={"phase": "in", "count": "messages"},
        caption="Pieces are in the order of the legend; the same kind in two phases of a step is two pieces.",
    )
    return (chart,)
