"""A search step by step: which batch was tried when, and how it ended.

The probes are joined in the order in which they ran, so that the search is seen to close in on its answer. What ran and
what did not differ in shape and in colour; the tooltip says how each ended.
"""

from __future__ import annotations

from typing import Any

from scalelab.report.charts.plot import (
    HIDDEN,
    UNLESS_HIDDEN,
    Axis,
    Plotted,
    Rows,
    convert_rows,
    encode_axis,
    encode_series,
    encode_tooltip,
    list_series,
    make_spec,
    stress,
)
from scalelab.report.document import Chart

NUMBER = Axis(field="number", title="probe", quantity="number", from_zero=False)


def plot_search(rows: Rows, *, largest: int | None) -> Chart | None:
    """Rows with `number`, `batch`, `series` and `ended` (how, in words); None for fewer than two."""
    if len(rows) < 2:
        return None
    y = Axis(field="batch", title="batch per rank", quantity="count", is_log=_is_wide(rows))
    plotted = convert_rows(rows, (NUMBER, y))
    series = list_series(plotted.values)
    ticks = {"axis": {"tickMinStep": 1, "format": "d", "grid": False}}
    places = {"x": encode_axis(NUMBER, plotted) | ticks, "y": encode_axis(y, plotted)}
    look = {
        "color": encode_series(series),
        "shape": encode_series(series),
        "opacity": UNLESS_HIDDEN | {"value": 1},
        "size": stress(110, 240),
        "tooltip": encode_tooltip((NUMBER, y), {"ended": "ended"}),
    }
    values = {"values": plotted.values}
    layers: list[dict[str, Any]] = [
        *_mark_answer(largest, y, plotted),
        {"data": values, "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.5}, "encoding": places},
        {
            "data": values,
            "params": [HIDDEN | {"bind": "legend"}],
            "mark": {"type": "point", "filled": True, "opacity": 1},
            "encoding": places | look,
        },
    ]
    caption = "Probes in the order in which they ran"
    answer = f"; the dashed line is the largest batch that ran, {largest}." if largest is not None else "."
    return Chart(title="The search", caption=caption + answer, spec=make_spec(layers))


def _is_wide(rows: Rows) -> bool:
    batches = [float(str(row["batch"])) for row in rows]
    return min(batches) > 0 and max(batches) / min(batches) >= 8


def _mark_answer(largest: int | None, y: Axis, plotted: Plotted) -> list[dict[str, Any]]:
    if largest is None:
        return []
    rule = {"type": "rule", "strokeDash": [5, 3]}
    return [{"data": {"values": [{y.field: largest}]}, "mark": rule, "encoding": {"y": encode_axis(y, plotted)}}]
