"""From rows to a Vega-Lite figure: axes with one unit each, lines with intervals, bars.

A row is a mapping with raw numbers in base units, or estimates, as tables have them. Every axis gets one unit, and
every number that can be pointed at its text with unit and interval, made by the same functions as the cells of tables:
a tooltip says what the table says. What all figures have in common:

    series    the field that a legend names; a click on its entry puts the series away (parameter `hidden`)
    key       the field that figures of one report share, such as a configuration; whoever shows the report sets the
              parameter `focus` to the key that is pointed at, and all figures stress it
    x_text …  the fields that a tooltip shows

Series differ in colour, in the shape of their points and in the dashes of their lines, so that they can be told apart
without colours. Width, fonts and colours are the renderer's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.report.document import Chart, Value
from scalelab.report.text import clean_text
from scalelab.units import UNKNOWN, Quantity, Unit, choose_unit, format_estimate

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
HEIGHT = 260
Row = Mapping[str, "Value | Estimate"]
Rows = Sequence[Row]
FOCUS: dict[str, Any] = {"name": "focus", "value": None}
IS_FOCUSED = "focus !== null && isValid(datum.key) && datum.key === focus"
HIDDEN: dict[str, Any] = {"name": "hidden", "select": {"type": "point", "fields": ["series"], "toggle": "true"}}
UNLESS_HIDDEN: dict[str, Any] = {"condition": {"param": "hidden", "empty": False, "value": 0}}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One dimension of a figure."""

    field: str
    """The key of its number in every row."""
    title: str
    """For a reader, without the unit."""
    quantity: Quantity = "number"
    """`text` makes it an axis of names, in the order of the rows."""
    is_log: bool = False
    from_zero: bool = True
    """Whether a linear axis begins at zero."""

    @property
    def is_named(self) -> bool:
        return self.quantity == "text"


@dataclass(frozen=True, kw_only=True)
class Plotted:
    """Rows as a figure holds them, in the units of its axes."""

    values: list[dict[str, Any]]
    titles: Mapping[str, str]
    """Of every axis, with its unit."""


def convert_rows(rows: Rows, axes: Sequence[Axis], unit_rows: Rows | None = None) -> Plotted:
    """The rows in one unit per axis, with `_low`, `_high` and `_text` beside every number; other fields stay.

    `unit_rows`: the rows that choose the units, where they are not these.
    """
    units = {axis.field: choose_axis_unit(axis, unit_rows if unit_rows is not None else rows) for axis in axes}
    values = [dict(_convert_row(row, units)) for row in rows]
    titles = {
        axis.field: f"{axis.title} [{unit.symbol}]" if (unit := units[axis.field]).symbol else axis.title
        for axis in axes
    }
    return Plotted(values=values, titles=titles)


def choose_axis_unit(axis: Axis, rows: Rows) -> Unit:
    """The unit of all numbers of an axis."""
    if axis.is_named:
        return Unit()
    found = [row.get(axis.field) for row in rows]
    return choose_unit(axis.quantity, [None if isinstance(one, str | bool) else one for one in found])


def _convert_row(row: Row, units: Mapping[str, Unit]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for field, value in row.items():
        if isinstance(value, str):
            made[field] = clean_text(value)
            made |= {f"{field}_text": made[field]} if field in units else {}
        elif field in units:
            made |= _convert_number(field, value, units[field])
        else:
            made[field] = value.value if isinstance(value, Estimate) else value
    return made


def _convert_number(field: str, value: bool | int | float | Estimate | None, unit: Unit) -> dict[str, Any]:
    estimate = value if isinstance(value, Estimate) or value is None else Estimate(value=value)
    if estimate is None or not math.isfinite(estimate.value):
        return {field: None, f"{field}_text": UNKNOWN}
    symbol = f" {unit.symbol}" if unit.symbol and not unit.suffix else ""
    made: dict[str, Any] = {
        field: estimate.value / unit.factor,
        f"{field}_text": format_estimate(estimate, unit) + symbol,
    }
    if estimate.low is not None and estimate.high is not None:
        made |= {f"{field}_low": estimate.low / unit.factor, f"{field}_high": estimate.high / unit.factor}
    return made


def encode_axis(axis: Axis, plotted: Plotted, *, field: str | None = None) -> dict[str, Any]:
    """The channel of an axis."""
    encoded: dict[str, Any] = {"field": field or axis.field, "title": plotted.titles[axis.field]}
    if axis.is_named:
        return encoded | {"type": "nominal", "sort": None, "axis": {"labelAngle": 0, "labelOverlap": True}}
    encoded |= {"type": "quantitative"}
    if axis.is_log:
        return encoded | {"scale": {"type": "log", "base": 2 if axis.quantity == "count" else 10, "nice": False}}
    return encoded | {"scale": {"zero": axis.from_zero, "nice": True}}


def encode_series(names: Sequence[str], *, title: str | None = None) -> dict[str, Any]:
    """The colour of a series, with a legend where there are several, in the order in which they were given."""
    legend: dict[str, Any] | None = {"title": title} if len(names) > 1 else None
    return {"field": "series", "type": "nominal", "scale": {"domain": list(names)}, "legend": legend}


def encode_tooltip(axes: Sequence[Axis], extra: Mapping[str, str]) -> list[dict[str, Any]]:
    """What pointing at a mark tells: its series, its numbers as tables print them, and further fields by title."""
    entries = [("series", "series"), *((f"{axis.field}_text", axis.title) for axis in axes), *extra.items()]
    return [{"field": field, "type": "nominal", "title": title} for field, title in entries]


def list_series(*groups: Rows) -> list[str]:
    """The names of all series, each once, in their order."""
    return list(dict.fromkeys(str(row.get("series", "")) for rows in groups for row in rows))


def plot_lines(
    *,
    title: str,
    x: Axis,
    y: Axis,
    rows: Rows,
    raw: Rows = (),
    guides: Rows = (),
    caption: str = "",
    extra: Mapping[str, str] | None = None,
) -> Chart:
    """Points with intervals, joined by a line in every series; rows that differ in `regime` are not joined.

    `raw` are single measurements, drawn faintly behind. `guides` are lines without points: an ideal, a fit.
    """
    plotted = convert_rows(rows, (x, y))
    guided, scattered = (convert_rows(other, (x, y), rows).values for other in (guides, raw))
    names = list_series(rows, guides, raw)
    places = {"x": encode_axis(x, plotted), "y": encode_axis(y, plotted)}
    look = {"color": encode_series(names), "opacity": UNLESS_HIDDEN | {"value": 1}}
    detail = [{"field": "regime", "type": "nominal"}]
    tooltip = encode_tooltip((x, y), extra or {})
    ends = {"y": encode_axis(y, plotted, field=f"{y.field}_low"), "y2": {"field": f"{y.field}_high"}}
    layers: list[dict[str, Any]] = []
    if scattered:
        faint = look | {"opacity": UNLESS_HIDDEN | {"value": 0.35}, "tooltip": tooltip}
        dot = {"type": "circle", "size": 14}
        layers.append({"data": {"values": scattered}, "mark": dot, "encoding": places | faint})
    if guided:
        dashed = {"type": "line", "strokeDash": [2, 3], "strokeWidth": 1.5, "clip": True}
        layers.append({"data": {"values": guided}, "mark": dashed, "encoding": places | look})
    dash = {"field": "series", "type": "nominal", "scale": {"domain": names}, "legend": None}
    joined = places | look | {"detail": detail, "strokeDash": dash}
    shaped = look | {"shape": encode_series(names), "tooltip": tooltip, "size": stress(90, 220)}
    layers += [
        {"data": {"values": plotted.values}, "mark": {"type": "line", "strokeWidth": 1.5}, "encoding": joined},
        {
            "data": {"values": [one for one in plotted.values if f"{y.field}_low" in one]},
            "mark": {"type": "rule", "strokeWidth": 1.5},
            "encoding": {"x": places["x"]} | ends | look,
        },
        {
            "data": {"values": plotted.values},
            "params": [HIDDEN | {"bind": "legend"}],
            "mark": {"type": "point", "filled": True, "opacity": 1},
            "encoding": places | shaped,
        },
    ]
    return Chart(title=title, caption=caption, spec=make_spec(layers))


def plot_bars(
    *,
    title: str,
    x: Axis,
    y: Axis,
    rows: Rows,
    caption: str = "",
    extra: Mapping[str, str] | None = None,
    is_stacked: bool = True,
) -> Chart:
    """Bars along x (numbers) at every name of y: the series of a name on top of each other, or below each other."""
    plotted = convert_rows(rows, (x, y))
    names = list_series(rows)
    across = encode_axis(x, plotted) | {"stack": "zero" if is_stacked else None}
    places = {"x": across, "y": encode_axis(y, plotted) | {"axis": {"labelLimit": 220}}}
    if not is_stacked and len(names) > 1:
        places |= {"yOffset": {"field": "series", "type": "nominal", "sort": names}}
    number = {str(name): index for index, name in enumerate(names)}
    values = [one | {"order": number[str(one.get("series", ""))]} for one in plotted.values]
    look = {
        "color": encode_series(names),
        "opacity": UNLESS_HIDDEN | {"value": 1},
        "order": {"field": "order", "type": "quantitative"},
        "strokeWidth": stress(1, 2.5),
        "tooltip": encode_tooltip((y, x), extra or {}),
    }
    bar: dict[str, Any] = {
        "data": {"values": values},
        "params": [HIDDEN | {"bind": "legend"}],
        "mark": {"type": "bar", "stroke": {"expr": "config_edge"}},
        "encoding": places | look,
    }
    rule: dict[str, Any] = {
        "data": {"values": [one for one in values if f"{x.field}_low" in one]},
        "mark": {"type": "rule", "strokeWidth": 1.5},
        "encoding": {
            **places,
            "x": encode_axis(x, plotted, field=f"{x.field}_low"),
            "x2": {"field": f"{x.field}_high"},
            "opacity": UNLESS_HIDDEN | {"value": 1},
        },
    }
    num_rows = len({str(row.get(y.field)) for row in rows}) * (1 if is_stacked else len(names))
    layers = [bar] if is_stacked else [bar, rule]
    return Chart(title=title, caption=caption, spec=make_spec(layers, height=max(60, 26 * num_rows)))


def stress(usual: float, focused: float) -> dict[str, Any]:
    """A number that grows for what is pointed at, in this figure or in another one."""
    return {"condition": {"test": IS_FOCUSED, "value": focused}, "value": usual}


def make_spec(layers: Sequence[Mapping[str, Any]], *, height: int = HEIGHT) -> dict[str, Any]:
    """Layers as a specification; `config_edge` is the colour of edges, which the renderer sets to its background."""
    edge = {"name": "config_edge", "value": "white"}
    return {"$schema": SCHEMA, "height": height, "params": [FOCUS, edge], "layer": [dict(layer) for layer in layers]}
