"""What ranks did over time: a lane of communication above a lane of compute for every rank, to be zoomed into."""

from __future__ import annotations

from typing import Any

from scalelab.report.charts.axes import Axis, Rows, convert_rows, encode_axis
from scalelab.report.charts.plot import HIDDEN, UNLESS_HIDDEN, encode_series, list_series, make_spec
from scalelab.report.document import Chart

LANE_HEIGHT = 22
WHEEL = "wheel![event.ctrlKey || event.shiftKey]"
"""With a key, so that the wheel alone still scrolls the page."""
ZOOM: dict[str, Any] = {
    "name": "zoom",
    "select": {"type": "interval", "encodings": ["x"], "zoom": WHEEL},
    "bind": "scales",
}


def plot_timeline(*, title: str, rows: Rows, caption: str = "") -> Chart:
    """`start` and `duration` in seconds of what is called `name`, in the `lane` of a rank and a `series`."""
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
