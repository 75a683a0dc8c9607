"""Themes: contrast, series that can be told apart without colours, and widths."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from scalelab.report.renderers.theme import DARK, LIGHT, Palette, apply_theme, merge_config

THEMES = pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
VIEW: dict[str, Any] = {"mark": "point", "encoding": {}}


def find_luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    shares = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def find_contrast(one: str, other: str) -> float:
    low, high = sorted(map(find_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def find_lightness(colour: str) -> float:
    """CIE L*."""
    return 116 * find_luminance(colour) ** (1 / 3) - 16


@THEMES
def test_texts_and_series_contrast_with_the_background(palette: Palette) -> None:
    assert all(find_contrast(text, palette.background) >= 4.5 for text in (palette.text, palette.quiet))
    assert all(find_contrast(colour, palette.background) >= 3 for colour in (*palette.series, palette.line))


@THEMES
def test_neighbouring_series_differ_in_lightness(palette: Palette) -> None:
    lightness = [find_lightness(colour) for colour in palette.series]
    assert min(abs(one - other) for one, other in pairwise(lightness)) >= 18


@THEMES
def test_a_ramp_goes_one_way(palette: Palette) -> None:
    lightness = [find_lightness(colour) for colour in palette.ramp]
    assert lightness in (sorted(lightness), sorted(lightness, reverse=True))
    assert abs(lightness[0] - lightness[-1]) > 70


def test_edges_take_the_colour_of_the_background_and_other_parameters_stay() -> None:
    params = [{"name": "config_edge", "value": "white"}, {"name": "focus", "value": None}]
    themed = apply_theme({**VIEW, "params": params}, is_dark=True, width=500)
    assert themed["params"] == [{"name": "config_edge", "value": DARK.background}, params[1]]
    assert themed["background"] == DARK.background
    assert params[0]["value"] == "white"


def test_one_view_is_fitted_and_several_share_the_width() -> None:
    assert apply_theme(VIEW, width=500)["width"] == 500
    both = apply_theme({"vconcat": [VIEW, {"hconcat": [VIEW, VIEW]}]}, width=500)
    above, below = both["vconcat"]
    assert 350 < above["width"] < 500
    assert sum(one["width"] for one in below["hconcat"]) < 400
    faceted = apply_theme({"facet": {"row": {"field": "a"}}, "spec": VIEW}, width=500)
    assert faceted["spec"]["width"] == above["width"]


def test_a_legend_of_long_names_has_one_column() -> None:
    color = {"field": "series", "scale": {"domain": ["x" * 60, "y"]}}
    themed = apply_theme({"layer": [{"mark": "line", "encoding": {"color": color}}]}, width=400)
    assert themed["config"]["legend"]["columns"] == 1
    assert themed["config"]["legend"]["labelLimit"] < 400
    assert apply_theme(VIEW, width=400)["config"]["legend"]["columns"] > 5


def test_what_a_chart_configures_itself_counts() -> None:
    assert apply_theme({**VIEW, "config": {"axis": {"grid": True}}})["config"]["axis"]["grid"] is True
    assert merge_config({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}) == {"a": {"b": 3, "c": 2}, "d": 4}
