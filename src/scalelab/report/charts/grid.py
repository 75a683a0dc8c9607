"""A heat map of two dimensions, with the number in every cell.

The number is black or white, whichever contrasts more with its cell, so the colours are fixed: light to dark blue, on
light and dark pages alike. The ink changes where black and white contrast equally, (L + 0.05) / 0.05 = 1.05 / (L +
0.05), at luminance L = 0.179: both then have 4.6 : 1, above the 4.5 : 1 of WCAG 2.2 (success criterion 1.4.3; relative
luminance as defined there).

A cell that failed or was not run has no colour and says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scalelab.report.charts.amounts import read_number, spans_decades
from scalelab.report.charts.plot import Axis, Plotted, Row, Rows, convert_rows, encode_tooltip, make_spec, stress
from scalelab.report.document import Chart
from scalelab.units import Unit, format_value

LIGHT, DARK = (222, 235, 247), (8, 48, 107)
TURNING_LUMINANCE = 0.179
CELL_HEIGHT = 38
MISSING = "not run"


def plot_grid(
    *,
    title: str,
    x: Axis,
    y: Axis,
    value: Axis,
    rows: Rows,
    caption: str = "",
    extra: Mapping[str, str] | None = None,
    cell_height: int = CELL_HEIGHT,
) -> Chart | None:
    """One cell for every combination of an x and a y; None unless both have two values and two cells a number.

    `extra`: further fields in the tooltip of a failed cell, by title. Cells below `CELL_HEIGHT` have no numbers.
    """
    columns, lines = _list_names(rows, x), _list_names(rows, y)
    known = [row for row in rows if read_number(row, value.field) is not None]
    if len(columns) < 2 or len(lines) < 2 or len(known) < 2:
        return None
    is_log = spans_decades(rows, value.field)
    plotted = convert_rows(fill_grid(rows, x, y, value), (x, y, value))
    values = shade_cells(plotted, value.field, is_log=is_log)
    across, down = (_encode_names(plotted, axis) for axis in (x, y))
    tooltip = encode_tooltip((x, y, value), {})[1:]
    failed = encode_tooltip((x, y), {"status": "status", **(extra or {})})[1:]
    layers = _list_layers(values, {"x": across, "y": down}, value, plotted, (tooltip, failed), is_log=is_log)
    if cell_height < CELL_HEIGHT:
        for place in (across, down):
            place["axis"]["labelOverlap"] = True
        layers = [layer | {"mark": {"type": "rect"}} for layer in layers[:1]]
    spec = make_spec(layers, height=max(80, cell_height * len(lines)))
    return Chart(title=title, caption=caption, spec=spec)


def fill_grid(rows: Rows, x: Axis, y: Axis, value: Axis) -> list[Row]:
    """All combinations in order; those without a row have a status instead of a number."""
    found = {(str(row[x.field]), str(row[y.field])): row for row in rows}
    return [
        found.get((column, line), {x.field: column, y.field: line, value.field: None, "status": MISSING, "reason": ""})
        for line in _list_names(rows, y)
        for column in _list_names(rows, x)
    ]


def shade_cells(plotted: Plotted, field: str, *, is_log: bool) -> list[dict[str, Any]]:
    """Every cell with what is written in it, and whether that is white; the unit is in the colour legend."""
    unit = plotted.units[field]
    numbers = [float(one[field]) for one in plotted.values if one.get(field) is not None]
    low, high = min(numbers), max(numbers)
    shaded = []
    for one in plotted.values:
        number = one.get(field)
        if number is None:
            shaded.append({**one, "label": one.get("status") or "–", "is_white": False})
            continue
        share = _find_share(float(number), low, high, is_log=is_log)
        text = write_cell(float(number), unit, is_log=is_log)
        shaded.append({**one, "label": text, "is_white": measure_luminance(mix_colours(share)) < TURNING_LUMINANCE})
    return shaded


def write_cell(number: float, unit: Unit, *, is_log: bool) -> str:
    """What is written in a cell; where cells span decades, small numbers have decimals that large ones do not need."""
    decimals = max(unit.decimals, 1 - math.floor(math.log10(number))) if is_log else unit.decimals
    return format_value(number * unit.factor, replace(unit, decimals=decimals))


def _find_share(number: float, low: float, high: float, *, is_log: bool) -> float:
    """Where a number lies between the least and the largest, as the scale of the colours has it."""
    if low == high:
        return 0.0
    if is_log:
        return math.log(number / low) / math.log(high / low)
    return (number - low) / (high - low)


def mix_colours(share: float) -> tuple[float, float, float]:
    """The colour at a share of the way from light to dark, mixed channel by channel as Vega does."""
    red, green, blue = (light + share * (dark - light) for light, dark in zip(LIGHT, DARK, strict=True))
    return red, green, blue


def measure_luminance(colour: tuple[float, float, float]) -> float:
    """Relative luminance of an sRGB colour with channels up to 255 (WCAG 2.2)."""
    linear = [
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        for channel in (value / 255 for value in colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def list_ticks(numbers: Sequence[float]) -> list[float]:
    """1, 2 and 5 times every power of ten between the least and the largest: Vega's own leave out the last ones."""
    powers = range(math.floor(math.log10(min(numbers))), math.floor(math.log10(max(numbers))) + 1)
    ticks = [float(f"{one}e{power}") for power in powers for one in (1, 2, 5)]
    return [tick for tick in ticks if min(numbers) <= tick <= max(numbers)]


def _list_names(rows: Rows, axis: Axis) -> list[str]:
    return list(dict.fromkeys(str(row[axis.field]) for row in rows))


def _encode_names(plotted: Plotted, axis: Axis) -> dict[str, Any]:
    names = list(dict.fromkeys(one[axis.field] for one in plotted.values))
    return {
        "field": axis.field, "type": "nominal", "title": axis.title, "sort": None, "scale": {"domain": names},
        "axis": {"labelAngle": 0, "labelLimit": 160, "domain": False, "ticks": False},
    }  # fmt: skip


def _list_layers(
    values: list[dict[str, Any]],
    places: dict[str, Any],
    value: Axis,
    plotted: Plotted,
    tooltips: tuple[list[dict[str, Any]], list[dict[str, Any]]],
    *,
    is_log: bool,
) -> list[dict[str, Any]]:
    measured = [one for one in values if one.get(value.field) is not None]
    failed = [one for one in values if one.get(value.field) is None]
    ends = [f"rgb({red}, {green}, {blue})" for red, green, blue in (LIGHT, DARK)]
    scale = {"type": "log" if is_log else "linear", "range": ends, "interpolate": "rgb", "zero": False, "nice": False}
    scale = {key: one for key, one in scale.items() if not (is_log and key == "zero")}
    colour: dict[str, Any] = {
        "field": value.field,
        "type": "quantitative",
        "title": plotted.titles[value.field],
        "scale": scale,
    }
    if is_log:
        colour["legend"] = {"values": list_ticks([float(one[value.field]) for one in measured])}
    ink = {"condition": {"test": "datum.is_white", "value": "white"}, "value": "black"}
    tooltip, why = tooltips
    label = {"field": "label", "type": "nominal"}
    cell = {"type": "rect", "stroke": {"expr": "config_edge"}}
    layers: list[dict[str, Any]] = [
        {
            "data": {"values": measured},
            "mark": cell,
            "encoding": places | {"color": colour, "strokeWidth": stress(1, 4), "tooltip": tooltip},
        },
        {
            "data": {"values": measured},
            "mark": {"type": "text"},
            "encoding": places | {"text": label, "tooltip": tooltip, "color": ink},
        },
    ]
    if failed:
        outline = {"type": "rect", "filled": False, "strokeDash": [3, 3], "strokeWidth": 1, "opacity": 0.6}
        words = {"type": "text", "fontStyle": "italic"}
        layers.append({"data": {"values": failed}, "mark": outline, "encoding": places | {"tooltip": why}})
        layers.append({"data": {"values": failed}, "mark": words, "encoding": places | {"text": label, "tooltip": why}})
    return layers
