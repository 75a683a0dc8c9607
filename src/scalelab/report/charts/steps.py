"""Step after step: the times of one configuration in the order in which they were measured, launch after launch.

Steps of the warm-up and outliers have a shape of their own. The median of every launch is a line as long as the launch,
so that drift from launch to launch shows as stairs; where a trend was found it is a dashed line over all of them.
"""

from __future__ import annotations

from typing import Any

from scalelab.report.charts.axes import Axis, Rows, convert_rows, encode_axis, name_axes
from scalelab.report.charts.plot import (
    HIDDEN,
    UNLESS_HIDDEN,
    choose_dashes,
    encode_series,
    encode_tooltip,
    list_series,
    make_spec,
    stress,
)
from scalelab.report.document import Chart

HEIGHT = 170
WIDE = 8.0
"""The longest over the median time from which on the axis is logarithmic."""
STEP, WARM_UP, OUTLIER, MEDIAN, DRIFT = "step", "warm-up", "outlier", "median of a launch", "trend over launches"
LOOKS = {STEP: ("circle", 14), WARM_UP: ("triangle-up", 26), OUTLIER: ("diamond", 70)}


def plot_steps(*, title: str, points: Rows, medians: Rows, trend: Rows = (), caption: str = "") -> Chart:
    """`points`: `place`, `seconds`, `launch`, `step`, and what kind of step as `series`; `medians`: `place`, `seconds`,
    a pair for every `launch`; `trend`: a pair.
    """
    times = sorted(value for row in points if isinstance(value := row.get("seconds"), int | float) and value > 0)
    is_log = bool(times) and times[-1] > WIDE * times[len(times) // 2]
    x = Axis(field="place", title="step, launch after launch", quantity="count", from_zero=False)
    y = Axis(field="seconds", title="step time", quantity="seconds", is_log=is_log)
    plotted = convert_rows(points, (x, y))
    lines = convert_rows([*medians, *trend], (x, y), points).values
    everything = name_axes(plotted, (x, y), [*plotted.values, *lines])
    for one in plotted.values:
        del one["place_text"]  # the launch and its step say more
    names = [name for name in (STEP, WARM_UP, OUTLIER, MEDIAN, DRIFT) if name in list_series(points, medians, trend)]
    places = {"x": encode_axis(x, everything), "y": encode_axis(y, everything)}
    look = {"color": encode_series(names), "opacity": UNLESS_HIDDEN | {"value": 0.75}}
    shapes = [LOOKS[name][0] if name in LOOKS else "stroke" for name in names]
    shape = encode_series(names) | {"scale": {"domain": names, "range": shapes}}
    larger = [{"test": f"datum.series === '{name}'", "value": LOOKS[name][1]} for name in (WARM_UP, OUTLIER)]
    size = {"condition": larger, "value": LOOKS[STEP][1]}
    dashes = choose_dashes(names, [name for name in names if name != DRIFT])
    dashes = [dash if name == DRIFT else [1, 0] for name, dash in zip(names, dashes, strict=True)]
    line: dict[str, Any] = {"strokeDash": encode_series(names) | {"scale": {"domain": names, "range": dashes}}}
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
