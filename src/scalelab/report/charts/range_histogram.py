"""Histograms with the chosen quantization range.

Counts are on a symlog axis, sign(n) · log(1 + |n|): what a range clips is in the tails, where a linear axis shows
nothing. Bins are merged until they are wide enough to see.

    bins      the counts between two ends, by series
    marks     `at` (a number on the axis), `label`, `kind`: vertical lines, styled by kind
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalelab.report.charts.plot import HIDDEN, UNLESS_HIDDEN, Rows, encode_series, make_spec
from scalelab.report.document import Chart
from scalelab.report.text import clean_text
from scalelab.units import choose_unit, format_quantity, format_value

MOST_BINS = 96
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


def plot_histogram(
    *, title: str, axis_title: str, bins: Mapping[str, HistogramBins], marks: Rows = (), caption: str = ""
) -> Chart | None:
    """One area of bars for every series; None where nothing was counted."""
    known = {clean_text(name): one for name, one in bins.items() if sum(one.counts) and one.high > one.low}
    if not known:
        return None
    values = [row for name, one in known.items() for row in list_bars(name, join_bins(one))]
    most = max(row["count"] for row in values)
    ticks = [0, *(10**power for power in range(len(str(most))))]
    across = {"field": "from", "type": "quantitative", "title": axis_title, "bin": "binned", "scale": {"zero": False}}
    up = {
        "field": "count", "type": "quantitative", "title": "count", "stack": None,
        "scale": {"type": "symlog", "domainMin": 0},
        "axis": {"values": ticks, "labelExpr": "format(datum.value, '~s')"},
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
    layers = [bar, *_mark_places(marks, axis_title)]
    return Chart(title=title, caption=caption, spec=make_spec(layers, height=HEIGHT))


def join_bins(bins: HistogramBins) -> HistogramBins:
    """The same in fewer bins, each made of as many; the last may reach beyond the end."""
    size = -(-len(bins.counts) // MOST_BINS)
    if size <= 1:
        return bins
    counts = tuple(sum(bins.counts[start : start + size]) for start in range(0, len(bins.counts), size))
    width = (bins.high - bins.low) / len(bins.counts)
    return HistogramBins(low=bins.low, high=bins.low + len(counts) * size * width, counts=counts)


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


def _mark_places(marks: Rows, axis_title: str) -> list[dict[str, Any]]:
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
        layers += [{"data": {"values": own}, "mark": LABEL | look, "encoding": label} for look in (HALO, {})]
    return layers


def _read(mark: Mapping[str, Any]) -> float | None:
    at = mark.get("at")
    return float(at) if isinstance(at, int | float) else None


def list_marks(places: Sequence[tuple[str, str, float | None]]) -> list[dict[str, float | str | None]]:
    """Rows of marks from kind, label and place; those whose place is unknown are left out."""
    return [{"kind": kind, "label": label, "at": at} for kind, label, at in places if at is not None]
