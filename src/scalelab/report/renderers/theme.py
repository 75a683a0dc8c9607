"""What charts look like: fonts, sizes, colours and widths, which specifications leave open.

A specification says what is drawn, this file how, so that a page, a typeset report and a picture beside Markdown show
the same figure. Two themes, light and dark. Series differ without colour first (points, dashes, edges); the
colours of a theme help, and neighbours in the list differ in lightness by at least 18 steps of CIE L*, so that they
stay apart in grey and for readers who cannot tell hues. Every colour has 3:1 against its background and every text
4.5:1, which is level AA of the Web Content Accessibility Guidelines 2.2 (1.4.3 and 1.4.11).

Widths: a figure of one view is fitted, labels and all, into the width that it gets. Vega-Lite cannot fit figures that
are made of several views, so what lies beside their plotting areas is estimated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scalelab.report.document import Chart

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', 'DejaVu Sans', Arial, sans-serif"
DEFAULT_WIDTH = 640
BESIDE = 84
"""What labels and titles of axes take beside the plotting area of a view, in pixels."""
LETTER = 6.6
"""How wide a letter of a legend is, in pixels."""
LEGEND_SIGN = 34
"""What the sign of an entry and the gap to the next one take."""
COMPOSED = ("concat", "hconcat", "vconcat", "spec")
"""What a figure of several views holds them in."""


@dataclass(frozen=True, kw_only=True)
class Palette:
    """The colours of a theme."""

    background: str
    text: str
    quiet: str
    """Labels of axes, captions."""
    line: str
    """Axes."""
    grid: str
    series: tuple[str, ...]
    ramp: tuple[str, ...]
    """From little to much, for heat maps: ends that lie far apart in lightness."""


LIGHT = Palette(
    background="#ffffff",
    text="#1b2430",
    quiet="#4d5866",
    line="#8a94a1",
    grid="#e6e9ee",
    series=("#0b4a8f", "#d9660f", "#14604c", "#c066ae", "#5c1f1f", "#2f8fb8", "#4a4a52", "#9a8410"),
    ramp=("#eef4fb", "#c3dbf0", "#86b6dd", "#3f83bd", "#0b4a8f", "#06294f"),
)
DARK = Palette(
    background="#14181f",
    text="#e8ecf1",
    quiet="#a9b4c1",
    line="#5f6b7a",
    grid="#2a313b",
    series=("#9cc7ff", "#d9772b", "#8fe0c4", "#c06fb0", "#ffd9b0", "#3d9cc9", "#d5d8de", "#a8932c"),
    ramp=("#182534", "#1f4263", "#2f6a9c", "#5b9bd0", "#a3cbee", "#e7f2fc"),
)


EXTRAS = {
    "light": {
        "accent": "#0b4a8f",
        "raised": "#fbfcfd",
        "edge": "#dfe3e9",
        "hover": "#f1f5fa",
        "warn": "#96500a",
        "failed": "#a32020",
    },
    "dark": {
        "accent": "#9cc7ff",
        "raised": "#191e26",
        "edge": "#2e3641",
        "hover": "#202732",
        "warn": "#f0b35f",
        "failed": "#ff9d94",
    },
}
"""Colours of the page that figures have not."""


def choose_palette(*, is_dark: bool) -> Palette:
    return DARK if is_dark else LIGHT


def apply_theme(spec: Mapping[str, Any], *, is_dark: bool = False, width: float = DEFAULT_WIDTH) -> dict[str, Any]:
    """The specification, complete: as wide as asked for, in the fonts and colours of a theme."""
    palette = choose_palette(is_dark=is_dark)
    config = merge_config(make_config(palette), set_legend(spec, width))
    themed = set_width(spec, width)
    themed["background"] = palette.background
    themed["config"] = merge_config(config, spec.get("config", {}))
    themed["params"] = [
        param | {"value": palette.background} if param.get("name") == "config_edge" else param
        for param in spec.get("params", ())
    ]
    return themed


def set_width(spec: Mapping[str, Any], width: float) -> dict[str, Any]:
    """The specification with a width: fitted where it is one view, estimated view by view where it is several."""
    if not any(name in spec for name in COMPOSED):
        return dict(spec) | {"width": width, "autosize": {"type": "fit-x", "contains": "padding"}}
    return set_inner_width(spec, width)


def set_inner_width(spec: Mapping[str, Any], width: float) -> dict[str, Any]:
    """A part of a figure with the width of its plotting area, so that it takes about the width asked for."""
    made = dict(spec)
    if "spec" in made:
        num_columns = max(1, count_columns(made))
        made["spec"] = set_inner_width(made["spec"], width / num_columns)
    elif "vconcat" in made:
        made["vconcat"] = [set_inner_width(view, width) for view in made["vconcat"]]
    elif "hconcat" in made or "concat" in made:
        name = "hconcat" if "hconcat" in made else "concat"
        num_columns = min(len(made[name]), int(made.get("columns", len(made[name]))) if name == "concat" else 99)
        made[name] = [set_inner_width(view, width / max(1, num_columns)) for view in made[name]]
    elif "width" not in made:
        made["width"] = max(60, round(width - BESIDE))
    return made


def count_columns(spec: Mapping[str, Any]) -> int:
    """How many views a repeated or faceted figure has beside each other."""
    facet = spec.get("facet", {})
    if isinstance(facet, Mapping) and "row" in facet and "column" not in facet:
        return 1
    return int(spec.get("columns", 2))


def set_legend(spec: Mapping[str, Any], width: float) -> dict[str, Any]:
    """The legend in as many columns as its longest name allows."""
    longest = max((len(name) for name in list_names(spec)), default=0)
    entry = longest * LETTER + LEGEND_SIGN
    limit = max(80, round(width - LEGEND_SIGN - 8))
    return {"legend": {"columns": max(1, int(width // entry)), "labelLimit": limit}}


def list_names(spec: object) -> Iterator[str]:
    """The names that the legends of a chart may show: the domains of its scales."""
    for part in list_mappings(spec):
        for channel in ("color", "shape", "fill", "stroke"):
            encoded = part.get(channel)
            scale = encoded.get("scale") if isinstance(encoded, Mapping) else None
            domain = scale.get("domain") if isinstance(scale, Mapping) else None
            yield from map(str, domain if isinstance(domain, list | tuple) else ())


def list_mappings(part: object) -> Iterator[Mapping[str, Any]]:
    """Every mapping inside a specification, except its data."""
    if isinstance(part, Mapping):
        yield part
        part = [value for name, value in part.items() if name not in ("data", "datasets")]
    if isinstance(part, list | tuple):
        for value in part:
            yield from list_mappings(value)


def make_config(palette: Palette) -> dict[str, Any]:
    """Vega-Lite's configuration of a theme."""
    labels = {"labelColor": palette.quiet, "labelFont": FONT, "labelFontSize": 12}
    titles = {"titleColor": palette.text, "titleFont": FONT, "titleFontSize": 12, "titleFontWeight": 500}
    first = palette.series[0]
    return {
        "font": FONT,
        "padding": {"left": 4, "right": 14, "top": 4, "bottom": 4},  # the last label of an axis reaches beyond it
        "view": {"stroke": None},
        "axis": {
            **labels,
            **titles,
            "domainColor": palette.line,
            "tickColor": palette.line,
            "gridColor": palette.grid,
            "titlePadding": 8,
            "labelPadding": 5,
            "tickSize": 4,
        },
        "axisX": {"grid": False, "labelFlush": False, "tickCount": {"expr": "ceil(width / 70)"}},
        "axisY": {"domain": False, "ticks": False},
        "axisBand": {"grid": False},
        "legend": {
            **labels,
            **titles,
            "orient": "top",
            "direction": "horizontal",
            "symbolStrokeWidth": 1.5,
            "symbolSize": 90,
            "columnPadding": 16,
            "offset": 14,
        },
        "header": labels | titles | {"labelFontWeight": 500, "labelColor": palette.text},
        "title": {"color": palette.text, "font": FONT, "fontSize": 13, "fontWeight": 600, "anchor": "start"},
        "range": {
            "category": list(palette.series),
            "ordinal": {"scheme": "viridis"},
            "heatmap": list(palette.ramp),
            "ramp": list(palette.ramp),
        },
        "mark": {"color": first},
        "bar": {"color": first},
        "rule": {"color": palette.text},
        "text": {"color": palette.text, "font": FONT, "fontSize": 12},
        "point": {"size": 70},
    }


def merge_config(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Two configurations in one; where both say something, the second one's counts."""
    merged = dict(under)
    for name, value in over.items():
        known = merged.get(name)
        is_nested = isinstance(known, Mapping) and isinstance(value, Mapping)
        merged[name] = merge_config(known, value) if is_nested else value  # type: ignore[arg-type]
    return merged


def is_wide(chart: Chart) -> bool:
    """Whether a figure needs all of the page: several views, or one that is gone through in detail."""
    return any(name in chart.spec for name in COMPOSED) or is_zoomable(chart)


def is_zoomable(chart: Chart) -> bool:
    selections = (part["select"] for part in list_mappings(chart.spec) if "select" in part)
    return any((one.get("type") if isinstance(one, Mapping) else one) == "interval" for one in selections)
