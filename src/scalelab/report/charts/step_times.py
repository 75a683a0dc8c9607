"""Charts of single steps.

`plot_steps`: the step times of one configuration in the order measured. Warm-up steps and outliers have their own
shapes. The median of every launch is a line as long as the launch, so drift shows as stairs; a detected trend is a
dashed line.

`plot_distribution`: one row per configuration with every step as a faint point, the middle half as a box, and the
median with its interval. The points of a launch lie on one line, the first launch on top, so launches that differ are
visibly shifted.

`plot_timeline`: a zoomable lane of communication above a lane of compute for every rank.
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
from scalelab.report.charts.plot import (
    GUIDE_DASHES,
    HIDDEN,
    UNLESS_HIDDEN,
    encode_series,
    encode_tooltip,
    list_series,
    make_spec,
    stress,
)
from scalelab.report.document import Chart

HEIGHT = 170
WIDE = 8.0
"""The longest over the median time above which the axis is logarithmic."""
STEP, WARM_UP, OUTLIER, MEDIAN, DRIFT = "step", "warm-up", "outlier", "launch median", "trend over launches"
LOOKS = {STEP: ("circle", 14), WARM_UP: ("triangle-up", 26), OUTLIER: ("diamond", 70)}


def plot_steps(*, title: str, points: Rows, medians: Rows, trend: Rows = (), caption: str = "") -> Chart:
    """`points`: `place`, `seconds`, `launch`, `step`, and what kind of step as `series`; `medians`: `place`, `seconds`,
    a pair for every `launch`; `trend`: a pair.
    """
    times = sorted(value for row in points if isinstance(value := row.get("seconds"), int | float) and value > 0)
    is_log = bool(times) and times[-1] > WIDE * times[len(times) // 2]
    x = Axis(field="place", title="step, over all launches", quantity="count", from_zero=False)
    y = Axis(field="seconds", title="step time", quantity="seconds", is_log=is_log)
    plotted = convert_rows(points, (x, y))
    lines = convert_rows([*medians, *trend], (x, y), points).values
    everything = name_axes(plotted, (x, y), [*plotted.values, *lines])
    for one in plotted.values:
        del one["place_text"]  # the launch and its step say more
    names = [STEP, WARM_UP, OUTLIER, MEDIAN, DRIFT]  # every figure has the same colours, and names what it shows
    present = list_series(points, medians, trend)
    series = encode_series(names)
    series |= {"legend": series["legend"] | {"values": [name for name in names if name in present]}}
    places = {"x": encode_axis(x, everything), "y": encode_axis(y, everything)}
    look = {"color": series, "opacity": UNLESS_HIDDEN | {"value": 0.75}}
    shapes = [LOOKS[name][0] if name in LOOKS else "stroke" for name in names]
    shape = series | {"scale": {"domain": names, "range": shapes}}
    larger = [{"test": f"datum.series === '{name}'", "value": LOOKS[name][1]} for name in (WARM_UP, OUTLIER)]
    size = {"condition": larger, "value": LOOKS[STEP][1]}
    dashes = [GUIDE_DASHES[0] if name == DRIFT else [1, 0] for name in names]
    line: dict[str, Any] = {"strokeDash": series | {"scale": {"domain": names, "range": dashes}}}
    layers: list[dict[str, Any]] = [
        {
            "data": {"values": plotted.values},
            "params": [HIDDEN | {"bind": "legend"}],
            "mark": {"type": "point", "filled": True},
            "encoding": places
            | look
            | {"shape": shape, "size": size, "tooltip": encode_tooltip((y,), {"launch": "launch", "step": "step"})},
        },
        {
            "data": {"values": lines},
            "mark": {"type": "line"},
            "encoding": places
            | look
            | line
            | {"detail": [{"field": "launch", "type": "nominal"}], "strokeWidth": stress(2, 3)}
            | {"opacity": UNLESS_HIDDEN | {"value": 1}},
        },
    ]
    return Chart(title=title, caption=caption, spec=make_spec(layers, height=HEIGHT))


ROW_HEIGHT, DENSE_ROW_HEIGHT, MANY_ROWS = 46, 34, 8
HALF = 0.42
"""Of a row, from its middle to its edge."""
WIDE_BOX = 20.0
"""The longest over the shortest time above which the axis is logarithmic."""
ENDS = ("quarter", "three_quarters")
STEP_TOOLTIP = {"name": "configuration", "seconds_text": "step time", "launch": "launch", "step": "step"}
SUMMARY_TOOLTIP = {
    "name": "configuration",
    "seconds_text": "median",
    "quarter_text": "lower quartile",
    "three_quarters_text": "upper quartile",
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
    height = max(80, (DENSE_ROW_HEIGHT if len(names) > MANY_ROWS else ROW_HEIGHT) * len(names))
    return Chart(title=title, caption=f"{caption} {cut}".strip(), spec=make_spec(layers, height=height))


def choose_axis(points: Rows) -> Axis:
    """Logarithmic where steps differ by much, and from the shortest on otherwise: it is about differences."""
    times = [value for row in points if isinstance(value := row.get("seconds"), int | float) and value > 0]
    is_log = bool(times) and max(times) > WIDE_BOX * min(times)
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


LANE_HEIGHT = 22
WHEEL = "wheel![event.ctrlKey || event.shiftKey]"
"""With a key, so that the wheel alone still scrolls the page."""
ZOOM: dict[str, Any] = {
    "name": "zoom",
    "select": {"type": "interval", "encodings": ["x"], "zoom": WHEEL},
    "bind": "scales",
}


def plot_timeline(*, title: str, rows: Rows, caption: str = "", series: Sequence[str] = ()) -> Chart:
    """`start` and `duration` in seconds of what is called `name`, in the `lane` of a rank and a `series`.

    `series` is the order of all that there may be, which decides their colours.
    """
    x = Axis(field="start", title="time", quantity="seconds")
    length = Axis(field="duration", title="duration", quantity="seconds")
    ends = [float(row["start"]) + float(row["duration"]) for row in rows]  # type: ignore[arg-type]
    plotted = convert_rows(rows, (x,), scaled_as=[max(ends, default=1.0)])
    factor = plotted.units["start"].factor
    lengths = convert_rows(rows, (length,)).values
    values = []
    for one, other, end in zip(plotted.values, lengths, ends, strict=True):
        kept = {name: one[name] for name in ("series", "lane", "start", "start_text", "name")}
        values.append(kept | {"end": float(f"{end / factor:.7g}"), "duration_text": other["duration_text"]})
    names = list_series(values)
    known = [place for place, name in enumerate(series) if name in names]
    names = [*series[: max(known, default=-1) + 1], *(name for name in names if name not in series)]
    lanes = list(dict.fromkeys(str(one["lane"]) for one in values))
    shown = {"name": "event", "lane": "where", "start_text": "start", "duration_text": "duration"}
    encoding = {
        "x": encode_axis(x, plotted),
        "x2": {"field": "end"},
        "y": {
            "field": "lane",
            "type": "nominal",
            "title": None,
            "scale": {"domain": lanes, "paddingInner": 0.15},
            "axis": {"labelLimit": 220},
        },
        "color": encode_series(names),
        "opacity": UNLESS_HIDDEN | {"value": 1},
        "tooltip": [{"field": field, "type": "nominal", "title": title} for field, title in shown.items()],
    }
    layer = {
        "data": {"values": values},
        "params": [ZOOM, HIDDEN | {"bind": "legend"}],
        "mark": {"type": "bar", "clip": True},
        "encoding": encoding,
    }
    return Chart(title=title, caption=caption, spec=make_spec([layer], height=max(70, LANE_HEIGHT * len(lanes))))
