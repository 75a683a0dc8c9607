"""Numbers by name: bars where the axis starts at zero, points elsewhere, each with its interval.

Where numbers span decades the axis is logarithmic, and where a ratio is compared with 1 the distance from 1 matters:
both draw points. A failed row keeps its place and shows its status.

A row has `name` and the field of its number; `series` where a name has several, which are drawn below each other;
`status` where there is no number.

Histograms show a chosen range in the counts of values. Counts are on a symlog axis, sign(n) · log(1 + |n|): what a
range clips is in the tails, where a linear axis shows nothing. Bins are merged until they are wide enough to see.

    bins      the counts between two ends, by series
    marks     `at` (a number on the axis), `label`, `kind`: vertical lines, styled by kind
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.checks import clean_text
from scalelab.report.charts.axes import LINE_HEIGHT, NAME_LABELS, wrap_names
from scalelab.report.charts.plot import (
    HIDDEN,
    UNLESS_HIDDEN,
    Axis,
    Plotted,
    Rows,
    convert_rows,
    cut_intervals,
    draw_statuses,
    encode_axis,
    encode_series,
    encode_tooltip,
    list_series,
    make_spec,
    name_axes,
    stress,
)
from scalelab.report.document import Chart
from scalelab.units import choose_unit, format_quantity, format_value

MOST_SERIES = 8
DECADES = 50
"""The largest number over the smallest above which an axis is logarithmic."""
BAR_HEIGHT = 26
SUB_BAR_HEIGHT = 17
LETTER_PIXELS = 5.6
"""How wide a letter at the end of a bar is, about."""
ROOM = 1.22
"""How far an axis reaches, over its longest bar, if bars end in words."""
NAME = "name"
STATUS_FIELDS = {"name_text": "run", "series": "series", "status": "status", "reason": "reason"}


def plot_amounts(
    *,
    title: str,
    x: Axis,
    rows: Rows,
    caption: str = "",
    reference: float | None = None,
    name_title: str = "",
) -> Chart | None:
    """One bar or point for every row; None if fewer than two have a number.

    `reference`: a number to compare all others with, in base units, drawn as a line.
    """
    known = [row for row in rows if read_number(row, x.field) is not None]
    if len(known) < 2 or len(list_series(rows)) > MOST_SERIES:
        return None
    x = replace(x, is_log=x.is_log or spans_decades(rows, x.field))
    y = Axis(field=NAME, title=name_title, quantity="text")
    plotted = convert_rows(rows, (x, y))
    series = list_series(plotted.values)
    kept = [] if reference is None else [reference / plotted.units[x.field].factor]
    shown, cut = cut_intervals(plotted.values, x, kept)
    plotted = name_axes(plotted, (x, y), wrap_names(shown, NAME))
    places = encode_places(x, y, plotted, series)
    tooltip = encode_tooltip((replace(y, title=name_title or "run"), x), {})
    tooltip = tooltip if len(series) > 1 else tooltip[1:]
    marks = _mark_points if x.is_log or not x.from_zero else _mark_bars
    layers = [
        *_mark_reference(reference, x, plotted, rows),
        *marks(plotted, places, series, x, tooltip),
        *mark_statuses(plotted.values, places, x.field),
    ]
    height = measure_height({str(value[NAME]) for value in plotted.values}, len(series))
    return Chart(title=title, caption=f"{caption} {cut}".strip(), spec=make_spec(layers, height=height))


def measure_height(names: Iterable[str], num_series: int) -> int:
    """As high as the bars need it, or the lines of their names."""
    every = list(names)
    num_lines = max((name.count("\n") + 1 for name in every), default=1)
    bars = BAR_HEIGHT if num_series == 1 else SUB_BAR_HEIGHT * num_series + 10
    return max(60, max(bars, LINE_HEIGHT * num_lines + 6) * len(every))


def read_number(row: Mapping[str, Any], field: str) -> float | None:
    """A row's number without its interval; None if there is none that could be drawn."""
    value = row.get(field)
    number = value.value if isinstance(value, Estimate) else value
    if number is None or isinstance(number, str | bool) or not math.isfinite(number):
        return None
    return float(number)


def spans_decades(rows: Rows, field: str) -> bool:
    """Whether the numbers are so different that the small ones could not be seen beside the large ones."""
    found = [number for row in rows if (number := read_number(row, field)) is not None]
    return bool(found) and min(found) > 0 and max(found) / min(found) >= DECADES


def encode_places(x: Axis, y: Axis, plotted: Plotted, series: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Where the mark of a row is: along x by its number, at its name, below the other series of the name."""
    across = {
        "field": NAME,
        "type": "nominal",
        "title": y.title or None,
        "sort": None,
        "scale": {"domain": list(dict.fromkeys(str(value[NAME]) for value in plotted.values))},
        "axis": NAME_LABELS,
    }
    places = {"x": encode_axis(x, plotted), "y": across}
    if len(series) > 1:
        places["yOffset"] = {"field": "series", "type": "nominal", "sort": None, "scale": {"domain": list(series)}}
    return places


def leave_room(place: dict[str, Any], values: Sequence[Mapping[str, Any]], field: str) -> dict[str, Any]:
    """An axis that ends beyond the longest bar, for the words at the ends of bars."""
    ends = [one.get(f"{field}_high", one[field]) for one in values if one.get(field) is not None]
    longest = max(ends, default=0.0)
    return place | {"scale": place["scale"] | {"domainMax": ROOM * longest, "nice": False}} if longest > 0 else place


def _mark_bars(
    plotted: Plotted, places: dict[str, Any], series: Sequence[str], x: Axis, tooltip: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    known = [value for value in plotted.values if value.get(x.field) is not None]
    if len(series) > 1:
        places = {**places, "x": leave_room(places["x"], known, x.field)}
    look = {"color": encode_series(series), "opacity": UNLESS_HIDDEN | {"value": 1}, "tooltip": tooltip}
    bar = {
        "data": {"values": known},
        "params": [HIDDEN | {"bind": "legend"}],
        "mark": {"type": "bar", "stroke": {"expr": "config_edge"}},
        "encoding": {**places, "x": places["x"] | {"stack": None}} | look | {"strokeWidth": stress(1, 2.5)},
    }
    return [bar, *_mark_intervals(known, places, x), *_name_bars(known, places, series, x)]


def _mark_points(
    plotted: Plotted, places: dict[str, Any], series: Sequence[str], x: Axis, tooltip: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    known = [value for value in plotted.values if value.get(x.field) is not None]
    look = {
        "color": encode_series(series),
        "shape": encode_series(series),
        "opacity": UNLESS_HIDDEN | {"value": 1},
        "size": stress(90, 220),
        "tooltip": tooltip,
    }
    places = {**places, "y": places["y"] | {"axis": places["y"]["axis"] | {"grid": True}}}
    point = {
        "data": {"values": known},
        "params": [HIDDEN | {"bind": "legend"}],
        "mark": {"type": "point", "filled": True, "opacity": 1},
        "encoding": places | look,
    }
    return [*_mark_intervals(known, places, x), point]


def _mark_intervals(known: list[dict[str, Any]], places: dict[str, Any], x: Axis) -> list[dict[str, Any]]:
    low, high = f"{x.field}_low", f"{x.field}_high"
    values = [value for value in known if low in value]
    if not values:
        return []
    ends = {"x": places["x"] | {"field": low}, "x2": {"field": high}, "opacity": UNLESS_HIDDEN | {"value": 1}}
    return [{"data": {"values": values}, "mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": places | ends}]


def _name_bars(
    known: list[dict[str, Any]], places: dict[str, Any], series: Sequence[str], x: Axis
) -> list[dict[str, Any]]:
    """The series beside its bar, so that bars can be distinguished without colour."""
    if len(series) < 2:
        return []
    values = [value | {"label": value["series"]} for value in known]
    return [write_ends(values, places, x.field)]


def write_ends(values: Sequence[Mapping[str, Any]], places: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The `label` of every bar at its end, or at that of its interval, where the figure is wide enough for it."""
    ends = [max(value[field], value.get(f"{field}_high", -math.inf)) for value in values]
    longest = ROOM * max(ends)
    placed = [
        dict(value) | {"end": end, "room": round(1 - end / longest, 4) if longest > 0 else 1.0}
        for value, end in zip(values, ends, strict=True)
    ]
    text = {"type": "text", "align": "left", "baseline": "middle", "dx": 4, "fontSize": 10}
    fits = f"datum.room * width > {LETTER_PIXELS} * length(datum.label)"
    encoding = {
        **places,
        "x": places["x"] | {"field": "end", "stack": None},
        "text": {"condition": {"test": fits, "field": "label", "type": "nominal"}, "value": ""},
        "opacity": UNLESS_HIDDEN | {"value": 0.85},
    }
    return {"data": {"values": placed}, "mark": text, "encoding": encoding}


def mark_statuses(values: Sequence[Mapping[str, Any]], places: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """What there is in the place of a number, in words at the axis."""
    failed = [value for value in values if value.get(field) is None and value.get("status")]
    if not failed:
        return []
    known = {field: title for field, title in STATUS_FIELDS.items() if any(value.get(field) for value in failed)}
    return [draw_statuses(failed, {name: place for name, place in places.items() if name != "x"}, known)]


def _mark_reference(reference: float | None, x: Axis, plotted: Plotted, rows: Rows) -> list[dict[str, Any]]:
    if reference is None:
        return []
    values = convert_rows([{x.field: reference}], (x,), rows).values
    rule = {"type": "rule", "strokeDash": [5, 3], "strokeWidth": 1.5}
    return [{"data": {"values": values}, "mark": rule, "encoding": {"x": encode_axis(x, plotted)}}]


MOST_BINS = 96
EDGE = 1e-9
"""Of a bin: what rounding may leave beyond the end of a grid."""
HEIGHT = 190
LABEL_HEIGHTS = {"chosen": 0, "deviation": 48}
"""Where labels begin, in pixels from the top: those of different kinds do not meet where their lines do."""
LABEL: dict[str, Any] = {
    "type": "text", "angle": 270, "align": "right", "baseline": "bottom", "dx": -3, "dy": -2, "fontSize": 10,
}  # fmt: skip
HALO: dict[str, Any] = {"stroke": {"expr": "config_edge"}, "strokeWidth": 3, "strokeJoin": "round"}
"""Around a label, so that it reads on any colour."""
DASHES: Mapping[str, list[int]] = {"chosen": [1, 0], "deviation": [4, 3]}


@dataclass(frozen=True, kw_only=True)
class HistogramBins:
    """How many numbers lie in each of equal bins between two ends."""

    low: float
    high: float
    counts: tuple[int, ...]

    @property
    def width(self) -> float:
        return (self.high - self.low) / len(self.counts)


def plot_histogram(
    *,
    title: str,
    axis_title: str,
    bins: Mapping[str, HistogramBins],
    marks: Rows = (),
    caption: str = "",
    is_log: bool = True,
    is_labelled: bool = True,
) -> Chart | None:
    """One area of bars for every series; None if nothing was counted.

    A logarithmic axis of counts shows the few in the tails, a linear one the shape. `is_labelled`: marks have their
    names beside them, for which a narrow chart has no room.
    """
    known = {clean_text(name): one for name, one in bins.items() if sum(one.counts) and one.high > one.low}
    if not known:
        return None
    values = [row for name, one in align_bins(known).items() for row in list_bars(name, one)]
    most = max(row["count"] for row in values)
    ticks = [0, *(10**power for power in range(len(str(most))))]
    across = {"field": "from", "type": "quantitative", "title": axis_title, "bin": "binned", "scale": {"zero": False}}
    up: dict[str, Any] = {
        "field": "count", "type": "quantitative", "title": "count", "stack": None,
        "scale": {"type": "symlog" if is_log else "linear", "domainMin": 0},
        "axis": ({"values": ticks} if is_log else {}) | {"labelExpr": "format(datum.value, '~s')"},
    }  # fmt: skip
    tooltip = [
        {"field": field, "type": "nominal", "title": name}
        for field, name in (("series", "series"), ("range", "from … to"), ("count_text", "count"))
    ]
    look = {"color": encode_series(list(known)), "opacity": UNLESS_HIDDEN | {"value": 1 if len(known) == 1 else 0.6}}
    bar = {
        "data": {"values": values},
        "params": [HIDDEN | {"bind": "legend"}],
        "mark": {"type": "bar", "binSpacing": 0},
        "encoding": {"x": across, "x2": {"field": "to"}, "y": up, "tooltip": tooltip} | look,
    }
    layers = [bar, *_mark_places(marks, axis_title, is_labelled=is_labelled)]
    return Chart(title=title, caption=caption, spec=make_spec(layers, height=HEIGHT))


def join_bins(bins: HistogramBins) -> HistogramBins:
    """The same in fewer bins, each made of as many; the last may reach beyond the end."""
    size = -(-len(bins.counts) // MOST_BINS)
    if size <= 1:
        return bins
    counts = tuple(sum(bins.counts[start : start + size]) for start in range(0, len(bins.counts), size))
    return HistogramBins(low=bins.low, high=bins.low + len(counts) * size * bins.width, counts=counts)


def align_bins(series: Mapping[str, HistogramBins]) -> dict[str, HistogramBins]:
    """All series in the bins of the one whose bins are widest, so that equal numbers have bars of equal height."""
    joined = {name: join_bins(one) for name, one in series.items()}
    widest = max(joined.values(), key=lambda one: one.width)
    return {name: one if one is widest else spread_bins(series[name], widest) for name, one in joined.items()}


def spread_bins(bins: HistogramBins, grid: HistogramBins) -> HistogramBins:
    """The same numbers in bins of another grid, which goes on as far as they do: a bin's count by what overlaps."""
    before = math.ceil(max(0.0, grid.low - bins.low) / grid.width - EDGE)
    after = math.ceil(max(0.0, bins.high - grid.high) / grid.width - EDGE)
    low, num = grid.low - before * grid.width, before + len(grid.counts) + after
    edges = np.linspace(low, low + num * grid.width, num + 1)
    up_to = np.concatenate([[0], np.cumsum(bins.counts)])
    found = np.interp(edges, np.linspace(bins.low, bins.high, len(bins.counts) + 1), up_to)
    found[-1] = up_to[-1]
    return HistogramBins(low=low, high=float(edges[-1]), counts=tuple(map(int, np.diff(np.rint(found)))))


def list_bars(series: str, bins: HistogramBins) -> list[dict[str, Any]]:
    """A row for every bin that holds something."""
    width = (bins.high - bins.low) / len(bins.counts)
    unit = choose_unit("number", [bins.low, bins.high])
    rows = []
    for number, count in enumerate(bins.counts):
        low, high = bins.low + number * width, bins.low + (number + 1) * width
        if count:
            rows.append(
                {
                    "series": series,
                    "from": float(f"{low:.6g}"),
                    "to": float(f"{high:.6g}"),
                    "count": count,
                    "range": f"{format_value(low, unit)} … {format_value(high, unit)}",
                    "count_text": format_quantity("count", count),
                }
            )
    return rows


def _mark_places(marks: Rows, axis_title: str, *, is_labelled: bool = True) -> list[dict[str, Any]]:
    values = [dict(mark) | {"at_text": format_quantity("number", _read(mark))} for mark in marks]
    layers: list[dict[str, Any]] = []
    place = {"field": "at", "type": "quantitative", "title": axis_title}
    for kind, dash in DASHES.items():
        own = [value for value in values if value.get("kind") == kind]
        if not own:
            continue
        tooltip = [
            {"field": "label", "type": "nominal", "title": "line"},
            {"field": "at_text", "type": "nominal", "title": "at"},
        ]
        layers.append(
            {"data": {"values": own}, "mark": {"type": "rule", "strokeDash": dash, "strokeWidth": 1.5},
             "encoding": {"x": place, "tooltip": tooltip}}
        )  # fmt: skip
        label = {"x": place, "y": {"value": LABEL_HEIGHTS[kind]}, "text": {"field": "label", "type": "nominal"}}
        looks = (HALO, {}) if is_labelled else ()
        layers += [{"data": {"values": own}, "mark": LABEL | look, "encoding": label} for look in looks]
    return layers


def _read(mark: Mapping[str, Any]) -> float | None:
    at = mark.get("at")
    return float(at) if isinstance(at, int | float) else None


def list_marks(places: Sequence[tuple[str, str, float | None]]) -> list[dict[str, float | str | None]]:
    """Rows of marks from kind, label and place; those whose place is unknown are left out."""
    return [{"kind": kind, "label": label, "at": at} for kind, label, at in places if at is not None]
