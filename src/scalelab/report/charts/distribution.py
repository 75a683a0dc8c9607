"""How step times are spread: every step as a faint point, the middle half as a box, the median with its interval.

Every configuration has a row of its own. Within it the points of one launch lie on one line, the first launch on top,
so that launches that differ show as lines that are shifted. Rows are places on an axis of numbers whose labels are the
names: so that points can lie above each other within a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scalelab.report.charts.axes import (
    Axis,
    Rows,
    convert_rows,
    cut_intervals,
    encode_axis,
    name_axes,
    shorten,
    write_choice,
)
from scalelab.report.charts.plot import make_spec, stress
from scalelab.report.document import Chart

ROW_HEIGHT = 46
HALF = 0.42
"""Of a row, from its middle to its edge."""
WIDE = 20.0
"""The longest over the shortest time from which on the axis is logarithmic."""
ENDS = ("quarter", "three_quarters")
STEP_TOOLTIP = {"name": "configuration", "seconds_text": "step time", "launch": "launch", "step": "step"}
SUMMARY_TOOLTIP = {
    "name": "configuration",
    "seconds_text": "median",
    "quarter_text": "a quarter below",
    "three_quarters_text": "three quarters below",
}


def plot_distribution(*, title: str, rows: Rows, points: Rows, failed: Rows = (), caption: str = "") -> Chart:
    """`rows`: of every `name`, `seconds` as an estimate with `quarter` and `three_quarters`; `points`: its steps.

    A point has `name`, `seconds`, `launch` and `step`; what failed has a `name` and a `status`.
    """
    x = choose_axis(points)
    plotted = convert_rows(rows, (x,))
    texts = convert_rows(
        rows,
        [Axis(field=name, title=name, quantity="seconds") for name in ENDS],
        [dict.fromkeys(ENDS, row["seconds"]) for row in rows],
    ).values
    factor = plotted.units[x.field].factor
    scattered, missing = convert_rows(points, (x,), rows).values, convert_rows(failed, ()).values
    shown, cut = cut_intervals(plotted.values, x, [one[x.field] for one in scattered if one[x.field] is not None])
    values = [
        one | {name: shorten(float(one[name]) / factor) for name in ENDS} | _keep_texts(text)
        for one, text in zip(shown, texts, strict=True)
    ]
    names = list(dict.fromkeys(str(one["name"]) for one in [*values, *missing]))
    everything = name_axes(plotted, (x,), [*values, *scattered])
    layers = draw_layers(names, values, scattered, missing, encode_axis(x, everything))
    height = max(80, ROW_HEIGHT * len(names))
    return Chart(title=title, caption=f"{caption} {cut}".strip(), spec=make_spec(layers, height=height))


def choose_axis(points: Rows) -> Axis:
    """Logarithmic where steps differ by much, and from the shortest on otherwise: it is about differences."""
    times = [value for row in points if isinstance(value := row.get("seconds"), int | float) and value > 0]
    is_log = bool(times) and max(times) > WIDE * min(times)
    return Axis(field="seconds", title="step time", quantity="seconds", is_log=is_log, from_zero=False)


def _keep_texts(texts: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}_text": texts[f"{name}_text"] for name in ENDS}


def encode_names(names: Sequence[str]) -> dict[str, Any]:
    """An axis of numbers whose labels are names, the first on top."""
    places = list(range(len(names)))
    labels = write_choice(places, names)
    return {
        "field": "place",
        "type": "quantitative",
        "title": None,
        "scale": {"domain": [-0.5, len(names) - 0.5], "nice": False, "zero": False, "reverse": True},
        "axis": {"values": places, "labelExpr": labels, "labelLimit": 220, "grid": False, "ticks": False},
    }


def draw_layers(
    names: Sequence[str],
    values: Sequence[dict[str, Any]],
    points: Sequence[dict[str, Any]],
    failed: Sequence[dict[str, Any]],
    across: dict[str, Any],
) -> list[dict[str, Any]]:
    """Points below, then boxes, medians and their intervals; the words of what failed."""
    along = encode_names(names)
    num_launches = max((int(one["launch"]) for one in points), default=1)
    scattered = [
        one | {"place": round(names.index(one["name"]) + HALF * (2 * one["launch"] / (num_launches + 1) - 1), 3)}
        for one in points
    ]
    placed = [
        one | {"place": place, "top": round(place - HALF, 3), "foot": round(place + HALF, 3)}
        for one in values
        for place in [names.index(one["name"])]
    ]
    tooltip = _list_tooltip(SUMMARY_TOOLTIP)
    sides = {"y": along | {"field": "top"}, "y2": {"field": "foot"}, "tooltip": tooltip}
    box = {"x": across | {"field": "quarter"}, "x2": {"field": "three_quarters"}} | sides
    reach = {"x": across | {"field": "seconds_low"}, "x2": {"field": "seconds_high"}, "y": along, "tooltip": tooltip}
    dots = {"x": across, "y": along, "size": stress(14, 45), "tooltip": _list_tooltip(STEP_TOOLTIP)}
    words = {"x": {"value": 6}, "y": along, "text": {"field": "status", "type": "nominal"}}
    missing = [one | {"place": names.index(one["name"])} for one in failed]
    layers = [
        (scattered, {"type": "circle", "opacity": 0.45}, dots),
        (placed, {"type": "rect", "fillOpacity": 0.14}, box),
        (placed, {"type": "rule", "strokeWidth": 2}, {"x": across} | sides),
        ([one for one in placed if "seconds_low" in one], {"type": "rule", "strokeWidth": 4}, reach),
        (missing, {"type": "text", "align": "left", "fontStyle": "italic"}, words),
    ]
    return [{"data": {"values": data}, "mark": mark, "encoding": encoding} for data, mark, encoding in layers if data]


def _list_tooltip(shown: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"field": field, "type": "nominal", "title": title} for field, title in shown.items()]
