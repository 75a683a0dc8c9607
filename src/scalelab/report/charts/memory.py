"""Memory by category: what was forecast above what was measured, each as a bar in pieces.

The bars of a configuration lie below each other and are named at their ends, with their whole. Categories beyond the
seven largest share a piece. A bar that there is none of says why in its place.

    rows      `name`, `side` (forecast or measured), `series` (the category), `memory_bytes`, `key`
    totals    `name`, `side`, `memory_bytes`, and `status` where it is not known
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalelab.report.charts.amounts import (
    MOST_SERIES,
    leave_room,
    mark_statuses,
    measure_height,
    read_number,
    write_ends,
)
from scalelab.report.charts.axes import NAME_LABELS, wrap_names
from scalelab.report.charts.plot import (
    HIDDEN,
    UNLESS_HIDDEN,
    Axis,
    Row,
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

BYTES = Axis(field="memory_bytes", title="memory of one rank at the peak", quantity="bytes")
SIDES = ("forecast", "measured")
OTHERS = "all others"


def plot_categories(*, title: str, rows: Rows, totals: Rows, caption: str = "") -> Chart | None:
    """The figure; None where nothing is known of two bars."""
    if len({(row["name"], row["side"]) for row in rows}) < 2:
        return None
    name, side = Axis(field="name", title="run", quantity="text"), Axis(field="side", title="which", quantity="text")
    joined = join_small(rows)
    plotted = convert_rows(joined, (BYTES, name, side), totals)
    whole = convert_rows(totals, (BYTES, name, side)).values
    series = list_series(plotted.values)
    number = {one: index for index, one in enumerate(series)}
    values = [one | {"order": number[one["series"]]} for one in plotted.values]
    values, whole = wrap_names(values, "name"), wrap_names(whole, "name")
    names = list(dict.fromkeys(str(one["name"]) for one in (*whole, *values)))
    sides = [one for one in SIDES if any(value["side"] == one for value in whole)]
    places: dict[str, Any] = {
        "x": leave_room(encode_axis(BYTES, plotted), whole, BYTES.field) | {"stack": "zero"},
        "y": {"field": "name", "type": "nominal", "title": None, "sort": None, "scale": {"domain": names},
              "axis": NAME_LABELS},
        "yOffset": {"field": "side", "type": "nominal", "sort": None, "scale": {"domain": sides}},
    }  # fmt: skip
    look = {
        "color": encode_series(series),
        "opacity": UNLESS_HIDDEN | {"value": 1},
        "order": {"field": "order", "type": "quantitative"},
        "strokeWidth": stress(1, 2.5),
        "tooltip": encode_tooltip((name, side, BYTES), {}),
    }
    bar = {
        "data": {"values": values},
        "params": [HIDDEN | {"bind": "legend"}],
        "mark": {"type": "bar", "stroke": {"expr": "config_edge"}},
        "encoding": places | look,
    }
    layers = [bar, *_name_bars(whole, places), *mark_statuses(_say_sides(whole), places, BYTES.field)]
    height = measure_height(names, len(sides))
    return Chart(title=title, caption=caption, spec=make_spec(layers, height=height))


def join_small(rows: Rows) -> list[Row]:
    """The same with the smallest categories as one, where there are more than can be told apart."""
    largest: dict[str, float] = {}
    for row in rows:
        size = read_number(row, BYTES.field) or 0.0
        largest[str(row["series"])] = max(largest.get(str(row["series"]), 0.0), size)
    if len(largest) <= MOST_SERIES:
        return list(rows)
    kept = sorted(largest, key=lambda name: -largest[name])[: MOST_SERIES - 1]
    joined: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row["series"] not in kept:
            place = joined.setdefault(
                (str(row["name"]), str(row["side"])), dict(row) | {"series": OTHERS, BYTES.field: 0.0}
            )
            place[BYTES.field] += read_number(row, BYTES.field) or 0.0
    return [*(row for row in rows if row["series"] in kept), *joined.values()]


def _name_bars(whole: Sequence[dict[str, Any]], places: dict[str, Any]) -> list[dict[str, Any]]:
    """Which of the two a bar is, and its whole, at its end."""
    known = [
        one | {"label": f"{one['side']} {one[f'{BYTES.field}_text']}"} for one in whole if one[BYTES.field] is not None
    ]
    return [write_ends(known, places, BYTES.field)]


def _say_sides(whole: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is written in the place of a bar, with its side."""
    return [one | {"status": f"{one['side']}: {one['status']}"} for one in whole if one.get("status")]
