"""Something against the batch: measured points, a law through them, what failed, and where it ends.

What failed has no height. It stands at the bottom of the figure as a cross at its batch, with its status in words, so
that the end of a curve is seen to be the end of the memory and not that of the study.

    rows      `batch`, the number, `series`, `key`
    failed    `batch`, `status`, `reason`
    curve     a law: `batch`, the number, `series`
    levels    a number that must not be passed, with `label`: a line from left to right
    knees     a batch that matters, with `label`: a line from bottom to top

A search step by step: which batch was tried when, and how it ended.

The probes are joined in the order in which they ran, so that the search is seen to close in on its answer. What ran and
what did not differ in shape and in colour; the tooltip says how each ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.report.charts.amounts import read_number
from scalelab.report.charts.plot import (
    HIDDEN,
    UNLESS_HIDDEN,
    Axis,
    Plotted,
    Row,
    Rows,
    convert_rows,
    encode_axis,
    encode_series,
    encode_tooltip,
    list_series,
    make_spec,
    plot_lines,
    stress,
)
from scalelab.report.document import Chart

BATCH = "batch"
LOG_FROM = 8
"""The largest batch over the smallest from which on the axis of batches is logarithmic."""
FEW_CURVE_POINTS = 48
MOST_TICKS = 9
FAR = 2.5
"""Single launches beyond so many times the highest point would press all others down: they are told, not drawn."""


def make_batch_axis(batches: Sequence[int], title: str = "batch per rank", *, is_log: bool | None = None) -> Axis:
    """Batches are mostly doubled: their axis is logarithmic where they span much."""
    spread = bool(batches) and min(batches) > 0 and max(batches) / min(batches) >= LOG_FROM
    is_log = spread if is_log is None else is_log
    ticks = tuple(map(float, sorted(set(batches)))) if is_log and len(set(batches)) <= MOST_TICKS else ()
    return Axis(field=BATCH, title=title, quantity="count", is_log=is_log, ticks=ticks)


def list_curve_batches(batches: Sequence[int]) -> list[float]:
    """Where a law is drawn: from the smallest batch to the largest, evenly on a logarithmic axis."""
    low, high = min(batches), max(batches)
    if low == high:
        return [float(low)]
    ratio = high / low
    return [low * ratio ** (number / (FEW_CURVE_POINTS - 1)) for number in range(FEW_CURVE_POINTS)]


def plot_against_batch(
    *,
    title: str,
    x: Axis,
    y: Axis,
    rows: Rows,
    failed: Rows = (),
    raw: Rows = (),
    curve: Rows = (),
    levels: Rows = (),
    knees: Rows = (),
    caption: str = "",
    extra: Mapping[str, str] | None = None,
    is_joined: bool = True,
) -> Chart | None:
    """The figure; None for fewer than two measured points."""
    if len(rows) < 2:
        return None
    near = leave_out_far(rows, raw, y)
    left_out = f" Single launches far above, not drawn: {len(raw) - len(near)}." if len(near) < len(raw) else ""
    chart = plot_lines(
        title=title,
        x=x,
        y=y,
        rows=rows,
        raw=near,
        guides=curve,
        caption=caption + left_out,
        extra=extra,
        is_joined=is_joined,
    )
    plotted = convert_rows(rows, (x, y))
    layers = [
        *_mark_levels(levels, x, y, plotted, rows),
        *_mark_knees(knees, x, plotted),
        *mark_failures(failed, x, plotted),
    ]
    spec = dict(chart.spec)
    return replace(chart, spec=spec | {"layer": [*layers, *spec["layer"]]})


def leave_out_far(rows: Rows, raw: Rows, y: Axis) -> list[Row]:
    """The single measurements that do not lie far above all points and their intervals."""
    values = [row.get(y.field) for row in rows]
    tops = [value.high or value.value if isinstance(value, Estimate) else value for value in values]
    top = max((float(one) for one in tops if isinstance(one, int | float)), default=0.0)
    return [row for row in raw if (read_number(row, y.field) or 0.0) <= FAR * top]


def _mark_levels(levels: Rows, x: Axis, y: Axis, plotted: Plotted, rows: Rows) -> list[dict[str, Any]]:
    if not levels:
        return []
    values = convert_rows(levels, (x, y), rows).values
    place = _place(y, plotted)
    tooltip = [{"field": "label", "type": "nominal", "title": "line"}, _tell(f"{y.field}_text", y.title)]
    label = {"type": "text", "align": "left", "baseline": "bottom", "dx": 5, "dy": -3}
    written = {"x": {"value": 0}, "y": place, "text": {"field": "label", "type": "nominal"}}
    return [
        {"data": {"values": values}, "mark": {"type": "rule", "strokeDash": [7, 3]},
         "encoding": {"y": place, "tooltip": tooltip}},
        {"data": {"values": values}, "mark": label, "encoding": written},
    ]  # fmt: skip


def _mark_knees(knees: Rows, x: Axis, plotted: Plotted) -> list[dict[str, Any]]:
    if not knees:
        return []
    values = convert_rows(knees, (replace(x, quantity="number"),)).values
    place = _place(x, plotted)
    tooltip = [{"field": "label", "type": "nominal", "title": "line"}, _tell(f"{x.field}_text", x.title)]
    label = {"type": "text", "align": "left", "baseline": "bottom", "angle": 270, "dx": 5, "dy": -3}
    written = {"x": place, "y": {"value": {"expr": "height"}}, "text": {"field": "label", "type": "nominal"}}
    return [
        {"data": {"values": values}, "mark": {"type": "rule", "strokeDash": [3, 3]},
         "encoding": {"x": place, "tooltip": tooltip}},
        {"data": {"values": values}, "mark": label, "encoding": written},
    ]  # fmt: skip


def mark_failures(failed: Rows, x: Axis, plotted: Plotted) -> list[dict[str, Any]]:
    """A cross at the bottom, and above it what happened, upwards."""
    if not failed:
        return []
    values = convert_rows(failed, (x,)).values
    told = [("reason", "reason")] if any(value.get("reason") for value in values) else []
    tooltip = [_tell(*entry) for entry in ((f"{x.field}_text", x.title), ("status", "status"), *told)]
    place = {"x": _place(x, plotted), "tooltip": tooltip}
    cross = {"type": "point", "shape": "cross", "filled": True, "angle": 45, "size": 140, "opacity": 1}
    label = {"type": "text", "align": "left", "baseline": "middle", "angle": 270, "dx": 12, "fontStyle": "italic"}
    bottom = {"value": {"expr": "height - 9"}}
    return [
        {"data": {"values": values}, "mark": cross, "encoding": place | {"y": bottom}},
        {"data": {"values": values}, "mark": label,
         "encoding": place | {"y": bottom, "text": {"field": "status", "type": "nominal"}}},
    ]  # fmt: skip


def _place(axis: Axis, plotted: Plotted) -> dict[str, Any]:
    """A channel on the same scale as the points; ticks and labels are theirs."""
    return {key: value for key, value in encode_axis(axis, plotted).items() if key != "axis"}


def _tell(field: str, title: str) -> dict[str, Any]:
    return {"field": field, "type": "nominal", "title": title}


def describe_failures(failed: Sequence[Mapping[str, Any]], what: str = "batch") -> str:
    """What was not measured, for a caption: "Crosses: batch 64 (out of memory), 128 (not run)."."""
    if not failed:
        return ""
    listed = ", ".join(f"{row[BATCH]} ({row['status']})" for row in failed)
    return f" Crosses at the bottom were not measured: {what} {listed}."


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
