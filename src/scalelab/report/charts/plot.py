"""From rows to Vega-Lite charts: lines with intervals, and stacked bars.

A row is a mapping of raw numbers in base units, or estimates, as in tables (see `axes.py`). A tooltip shows numbers as
the table prints them, with unit and interval. All charts share:

    series    the field that the legend names; clicking an entry hides the series (parameter `hidden`)
    key       the field that the charts of a report share, such as a configuration; the page sets the parameter `focus`
              to the key under the mouse, and every chart highlights it
    x_text …  the fields that a tooltip shows
    status    why something was not measured; a cross at the foot of a chart of lines, the words in place of a bar

Series differ in colour, point shape and dashes, so they can be distinguished without colour. Width, fonts and colours
are the renderer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.report.charts.axes import LINE_HEIGHT, NAME_LABELS, wrap_names
from scalelab.report.charts.axes import Axis as Axis
from scalelab.report.charts.axes import Plotted as Plotted
from scalelab.report.charts.axes import Row as Row
from scalelab.report.charts.axes import Rows as Rows
from scalelab.report.charts.axes import choose_axis_unit as choose_axis_unit
from scalelab.report.charts.axes import convert_rows as convert_rows
from scalelab.report.charts.axes import cut_intervals as cut_intervals
from scalelab.report.charts.axes import encode_axis as encode_axis
from scalelab.report.charts.axes import name_axes as name_axes
from scalelab.report.document import Chart

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
HEIGHT = 260
BAR_HEIGHT = 26
MOST_SERIES = 8
"""More cannot be distinguished in one chart."""
FOCUS: dict[str, Any] = {"name": "focus", "value": None}
IS_FOCUSED = "focus !== null && isValid(datum.key) && datum.key === focus"
HIDDEN: dict[str, Any] = {"name": "hidden", "select": {"type": "point", "fields": ["series"], "toggle": "true"}}
UNLESS_HIDDEN: dict[str, Any] = {"condition": {"param": "hidden", "empty": False, "value": 0}}
LEGEND: dict[str, Any] = {"title": None, "symbolOpacity": 1}
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "triangle-right", "triangle-left", "wedge")
DASHES = ([1, 0], [8, 2], [2, 2], [8, 2, 2, 2], [5, 3], [12, 3], [3, 1], [10, 2, 2, 2, 2, 2])
GUIDE_DASHES = ([4, 4], [1, 3], [7, 3, 1, 3], [3, 6], [10, 5])
LETTER_PIXELS = 6.6
"""The width of a letter, about: what decides whether a label fits into a bar."""


def encode_series(names: Sequence[str]) -> dict[str, Any]:
    """The colour of a series, with a legend where there are several, in the order in which they were given."""
    legend = LEGEND | {"title": None} if len(names) > 1 else None
    if list(names) == [""]:
        return {"field": "series", "type": "nominal", "legend": None}
    return {"field": "series", "type": "nominal", "scale": {"domain": list(names)}, "legend": legend}


def encode_tooltip(axes: Sequence[Axis], extra: Mapping[str, str]) -> list[dict[str, Any]]:
    """The tooltip of a mark: its series, its numbers as tables print them, and further fields by title."""
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
    failed: Rows = (),
    bands: Rows = (),
    is_joined: bool = True,
) -> Chart:
    """Points with intervals, joined by a line in every series; rows that differ in `regime` are not joined.

    `raw` are single measurements, drawn faintly behind. `guides` are lines without points: an ideal, a fit. `failed`
    have a place on x and a `status`. `bands` are rows whose y is an estimate: the area between the ends is filled.
    """
    measured = [row for row in rows if row.get(y.field) is not None]
    chosen = [*measured, *bands] or [*raw, *guides]
    plotted = convert_rows([*rows, *bands], (x, y), chosen)
    guided, scattered, crossed = (convert_rows(other, (x, y), chosen).values for other in (guides, raw, failed))
    kept = [one[y.field] for one in guided if one.get(y.field) is not None]
    shown, cut = cut_intervals(plotted.values, y, kept)
    points, filled = shown[: len(rows)], shown[len(rows) :]
    everything = name_axes(plotted, (x, y), [*shown, *guided, *scattered, *crossed])
    own = list_series(points, filled, crossed, scattered)
    names = list_series(points, filled, crossed, guided, scattered)
    places = {"x": encode_axis(x, everything), "y": encode_axis(y, everything)}
    look = {"color": encode_series(names), "opacity": UNLESS_HIDDEN | {"value": 1}}
    tooltip = encode_tooltip((x, y), extra or {})
    dash = encode_series(names) | {"scale": {"domain": names, "range": choose_dashes(names, own)}}
    ends = {"y": encode_axis(y, everything, field=f"{y.field}_low"), "y2": {"field": f"{y.field}_high"}}
    detail = [{"field": "regime", "type": "nominal"}]
    layers: list[dict[str, Any]] = []
    if filled:
        area = look | {"opacity": UNLESS_HIDDEN | {"value": 0.18}, "detail": detail}
        layers.append(_draw(filled, "area", {"x": places["x"]} | ends | area, line=False))
    if scattered:
        faint = look | {"opacity": UNLESS_HIDDEN | {"value": 0.35}, "tooltip": tooltip}
        layers.append(_draw(scattered, "circle", places | faint, size=14))
    if guided:
        layers.append(_draw(guided, "line", places | look | {"strokeDash": dash}, strokeWidth=1.5, clip=True))
    if is_joined and points:
        joined = places | look | {"detail": detail, "strokeDash": dash}
        layers.append(_draw(points, "line", joined, strokeWidth=1.5))
    known = [one for one in points if f"{y.field}_low" in one]
    if known:
        layers.append(_draw(known, "rule", {"x": places["x"]} | ends | look, strokeWidth=1.5))
    shape = encode_series(names) | {"scale": {"domain": names, "range": choose_shapes(names, own)}}
    shaped = places | look | {"shape": shape, "tooltip": tooltip, "size": stress(70, 200)}
    layers.append(_draw(points, "point", shaped, filled=True, opacity=1) | {"params": [HIDDEN | {"bind": "legend"}]})
    if crossed:
        layers.append(draw_failed(crossed, x, places["x"], look, extra or {}, HEIGHT))
    return Chart(title=title, caption=f"{caption} {cut}".strip(), spec=make_spec(layers, height=HEIGHT))


def _draw(values: Sequence[Mapping[str, Any]], kind: str, encoding: Mapping[str, Any], **look: Any) -> dict[str, Any]:
    return {"data": {"values": list(values)}, "mark": {"type": kind, **look}, "encoding": dict(encoding)}


def choose_shapes(names: Sequence[str], own: Sequence[str]) -> list[str]:
    """A shape for every series with points, a stroke for those that are lines only."""
    return [SHAPES[own.index(name) % len(SHAPES)] if name in own else "stroke" for name in names]


def choose_dashes(names: Sequence[str], own: Sequence[str]) -> list[list[int]]:
    """The first series is a whole line; guides have their own dashes."""
    guides = [name for name in names if name not in own]
    return [
        DASHES[own.index(name) % len(DASHES)] if name in own else GUIDE_DASHES[guides.index(name) % len(GUIDE_DASHES)]
        for name in names
    ]


def draw_failed(
    values: Sequence[Mapping[str, Any]],
    x: Axis,
    place: Mapping[str, Any],
    look: Mapping[str, Any],
    extra: Mapping[str, str],
    height: int,
) -> dict[str, Any]:
    """A cross at the foot of the chart for everything that was not measured; its tooltip says why."""
    entries = [("series", "series"), (f"{x.field}_text", x.title), ("status", "status"), *extra.items()]
    tooltip = [{"field": field, "type": "nominal", "title": title} for field, title in entries]
    encoding = {"x": dict(place), "y": {"value": height - 8}} | dict(look) | {"tooltip": tooltip}
    mark = {"shape": "cross", "size": 110, "angle": 45, "filled": True, "opacity": 1}
    return _draw(values, "point", encoding, **mark)


def plot_bars(
    *,
    title: str,
    x: Axis,
    y: Axis,
    rows: Rows,
    caption: str = "",
    extra: Mapping[str, str] | None = None,
    failed: Rows = (),
) -> Chart:
    """A stacked bar along x (numbers) for every name of y; a part that is wide enough has the name of its series in it.

    `failed` rows have a name on y and a `status`, which replaces their bar.
    """
    plotted = convert_rows(rows, (x, y), scaled_as=measure_stacks(rows, x, y).values())
    crossed = wrap_names(convert_rows(failed, (x, y), rows).values, y.field)
    plotted = replace(plotted, values=wrap_names(plotted.values, y.field))
    names = list_series(plotted.values)
    domain = list(dict.fromkeys(str(one[y.field]) for one in [*plotted.values, *crossed]))
    across = encode_axis(x, plotted) | {"stack": "zero"}
    along = encode_axis(y, plotted) | {"axis": NAME_LABELS, "scale": {"domain": domain}}
    along |= {"title": y.title or None}
    places = {"x": across, "y": along}
    number = {str(name): index for index, name in enumerate(names)}
    values = [one | {"order": number[str(one.get("series", ""))]} for one in plotted.values]
    look = {
        "color": encode_series(names),
        "opacity": UNLESS_HIDDEN | {"value": 1},
        "order": {"field": "order", "type": "quantitative"},
        "tooltip": encode_tooltip((replace(y, title=y.title or "run"), x), extra or {}),
    }
    edges = {"strokeWidth": stress(1, 2.5)}
    bar = _draw(values, "bar", places | look | edges, stroke={"expr": "config_edge"})
    layers = [bar | {"params": [HIDDEN | {"bind": "legend"}]}, *draw_labels(values, x, y, places)]
    if crossed:
        layers.append(draw_statuses(crossed, {"y": along}, {"status": "status"}))
    num_lines = max((name.count("\n") + 1 for name in domain), default=1)
    height = max(60, max(BAR_HEIGHT, LINE_HEIGHT * num_lines + 6) * len(domain))
    return Chart(title=title, caption=caption, spec=make_spec(layers, height=height))


def plot_parts(*, title: str, rows: Rows, caption: str, failed: Rows = (), x_title: str = "time in a step") -> Chart:
    """`seconds` of every part (`series`) of every bar."""
    return plot_bars(
        title=title,
        x=Axis(field="seconds", title=x_title, quantity="seconds"),
        y=Axis(field="bar", title="", quantity="text"),
        rows=rows,
        failed=failed,
        caption=caption,
    )


def draw_statuses(
    values: Sequence[Mapping[str, Any]], places: Mapping[str, Any], shown: Mapping[str, str]
) -> dict[str, Any]:
    """The status in place of a missing bar; `shown` are the fields of its tooltip, by title."""
    tooltip = [{"field": field, "type": "nominal", "title": title} for field, title in shown.items()]
    encoding = {**places, "x": {"value": 5}, "text": {"field": "status", "type": "nominal"}, "tooltip": tooltip}
    return _draw(values, "text", encoding, align="left", baseline="middle", fontStyle="italic")


def measure_stacks(values: Rows, x: Axis, y: Axis) -> dict[str, float]:
    """How long the stack of every name is, without what is below zero."""
    totals: dict[str, float] = {}
    for one in values:
        part = one.get(x.field)
        number = part.value if isinstance(part, Estimate) else part if isinstance(part, int | float) else 0.0
        name = str(one.get(y.field))
        totals[name] = totals.get(name, 0.0) + max(number, 0.0)
    return totals


def draw_labels(
    values: Sequence[Mapping[str, Any]], x: Axis, y: Axis, places: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The names of series inside their parts of a stack, on a halo of the background: they read on any colour."""
    widest = max(measure_stacks(values, x, y).values(), default=0.0) or 1.0
    labelled = [
        dict(one) | {"share": round(one[x.field] / widest, 4)}
        for one in values
        if (one[x.field] or 0) > 0 and one.get("series")
    ]
    fits = f"datum.share * width > {LETTER_PIXELS} * (length(datum.series) + 1)"
    encoding = {
        "x": dict(places["x"]) | {"bandPosition": 0.5},
        "y": places["y"],
        "detail": [{"field": "series", "type": "nominal"}],
        "order": {"field": "order", "type": "quantitative"},
        "opacity": UNLESS_HIDDEN | {"value": 1},
        "text": {"condition": {"test": fits, "field": "series", "type": "nominal"}, "value": ""},
    }
    halo = {"stroke": {"expr": "config_edge"}, "strokeWidth": 3, "strokeJoin": "round"}
    return [_draw(labelled, "text", encoding, tooltip=None, **look) for look in (halo, {})]


def stress(usual: float, focused: float) -> dict[str, Any]:
    """A number that grows for the focused key, in this chart or another."""
    return {"condition": {"test": IS_FOCUSED, "value": focused}, "value": usual}


def make_spec(layers: Sequence[Mapping[str, Any]], *, height: int = HEIGHT) -> dict[str, Any]:
    """Layers as a specification; `config_edge` is the colour of edges, which the renderer sets to its background."""
    edge = {"name": "config_edge", "value": "white"}
    return {"$schema": SCHEMA, "height": height, "params": [FOCUS, edge], "layer": [dict(layer) for layer in layers]}
