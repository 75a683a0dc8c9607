"""Learning over time: losses and accuracies by step or epoch, a line for every training or kind of data.

A long curve is a line; one with few points shows them too. Where a line stands for several trainings, their spread is
a band around it and each of them a faint line.

A step in parts, one stacked bar for every rank or configuration, with the names of the parts inside.

Communication alone: time and bandwidth of a message against its size, on logarithmic axes, with the fitted line.
"""

from __future__ import annotations

from typing import Any

from scalelab.report.charts.axes import Axis, Rows, convert_rows, cut_intervals, encode_axis, name_axes
from scalelab.report.charts.plot import (
    HIDDEN,
    UNLESS_HIDDEN,
    choose_dashes,
    choose_shapes,
    encode_series,
    encode_tooltip,
    list_series,
    make_spec,
    plot_bars,
    plot_lines,
    stress,
)
from scalelab.report.document import Chart

HEIGHT = 240
MOST_SHOWN = 60
"""Points of one series up to which each is marked."""


def plot_curves(*, title: str, x: Axis, y: Axis, rows: Rows, singles: Rows = (), caption: str = "") -> Chart:
    """Rows have the fields of both axes and a `series`; y may be an estimate. `singles` also name their `training`."""
    plotted = convert_rows(rows, (x, y))
    values, cut = cut_intervals(plotted.values, y)
    faint = convert_rows(singles, (x, y), rows).values
    everything = name_axes(plotted, (x, y), [*values, *faint])
    names = list_series(values)
    places: dict[str, Any] = {"x": encode_axis(x, everything), "y": encode_axis(y, everything)}
    look: dict[str, Any] = {"color": encode_series(names), "opacity": UNLESS_HIDDEN | {"value": 1}}
    dashes = choose_dashes(names, names)
    dash = encode_series(names) | {"scale": {"domain": names, "range": dashes}}
    shape = encode_series(names) | {"scale": {"domain": names, "range": choose_shapes(names, names)}}
    shown = [one for name in names for one in _choose_shown([one for one in values if one["series"] == name])]
    ends = {"y": encode_axis(y, everything, field=f"{y.field}_low"), "y2": {"field": f"{y.field}_high"}}
    faintly: dict[str, Any] = {"detail": [{"field": "training"}], "opacity": UNLESS_HIDDEN | {"value": 0.35}}
    layers: list[tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = [
        (
            [one for one in values if f"{y.field}_low" in one],
            {"type": "area"},
            {"x": places["x"]} | ends | look | {"opacity": UNLESS_HIDDEN | {"value": 0.15}},
        ),
        (
            faint,
            {"type": "line", "strokeWidth": 0.8},
            places | look | faintly,
        ),
        (values, {"type": "line", "strokeWidth": 1.8}, places | look | {"strokeDash": dash}),
    ]
    drawn: list[dict[str, Any]] = [
        {"data": {"values": data}, "mark": mark, "encoding": encoding} for data, mark, encoding in layers if data
    ]
    pointed: dict[str, Any] = {"shape": shape, "size": stress(30, 90), "tooltip": encode_tooltip((x, y), {})}
    drawn.append(
        {
            "data": {"values": shown},
            "params": [HIDDEN | {"bind": "legend"}],
            "mark": {"type": "point", "filled": True, "opacity": 1},
            "encoding": places | look | pointed,
        }
    )
    return Chart(title=title, caption=f"{caption} {cut}".strip(), spec=make_spec(drawn, height=HEIGHT))


def _choose_shown(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points that are marked, for pointing at: of a long curve evenly some."""
    every = -(-len(values) // MOST_SHOWN)
    return values[:: max(every, 1)]


def plot_parts(
    *, title: str, rows: Rows, name: str, caption: str, failed: Rows = (), x_title: str = "time in a step"
) -> Chart:
    """`seconds` of every part (`series`) of every bar (`name`: what the axis calls them)."""
    return plot_bars(
        title=title,
        x=Axis(field="seconds", title=x_title, quantity="seconds"),
        y=Axis(field="bar", title=name, quantity="text"),
        rows=rows,
        failed=failed,
        caption=caption,
    )


SIZE = Axis(field="payload_bytes", title="message size", quantity="bytes", is_log=True)


def plot_times(*, title: str, rows: Rows, fits: Rows, caption: str = "", raw: Rows = (), failed: Rows = ()) -> Chart:
    """`seconds` of one call by `payload_bytes`."""
    y = Axis(field="seconds", title="time of a call", quantity="seconds", is_log=True)
    return plot_lines(title=title, x=SIZE, y=y, rows=rows, raw=raw, guides=fits, failed=failed, caption=caption)


def plot_rates(*, title: str, rows: Rows, caption: str = "", guides: Rows = ()) -> Chart:
    """`bandwidth` in bytes per second by `payload_bytes`."""
    y = Axis(field="bandwidth", title="bus bandwidth", quantity="bandwidth", is_log=True)
    return plot_lines(title=title, x=SIZE, y=y, rows=rows, guides=guides, caption=caption)
