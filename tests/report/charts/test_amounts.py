"""Bars, points, and what stands in their place."""

from __future__ import annotations

from typing import Any

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.report.charts.amounts import measure_height, plot_amounts, spans_decades
from scalelab.report.charts.axes import CUT_NOTE, MOST_LINES, wrap_name
from scalelab.report.charts.plot import Axis, Row
from scalelab.report.document import Chart
from tests.report.charts.figures import draw, list_layers, list_texts, list_values

SECONDS = Axis(field="seconds", title="step", quantity="seconds")


def make_row(name: str, seconds: float | Estimate | None, **fields: Any) -> Row:
    return {"name": name, "seconds": seconds, "series": "", "key": name, **fields}


def plot(*rows: Row, **fields: Any) -> Chart:
    chart = plot_amounts(title="steps", x=fields.pop("x", SECONDS), rows=rows, **fields)
    assert chart is not None
    return chart


def test_one_number_is_no_figure() -> None:
    rows = [make_row("a", 1.0), make_row("b", None, status="crashed")]
    assert plot_amounts(title="", x=SECONDS, rows=rows) is None


def test_amounts_are_bars_from_zero_with_their_intervals() -> None:
    chart = plot(make_row("a", Estimate(value=0.02, low=0.019, high=0.022)), make_row("b", 0.01))
    assert [value["seconds"] for value in list_values(chart, "bar")] == [20, 10]
    (rule,) = list_values(chart, "rule")
    assert (rule["seconds_low"], rule["seconds_high"]) == (19, 22)
    assert rule["seconds_text"] == "20.0 ± 2.0 ms"
    assert list_layers(chart, "bar")[0]["encoding"]["x"]["scale"]["zero"] is True
    assert "steps" in draw(chart) or "step" in draw(chart)


def test_what_failed_keeps_its_place_and_says_why() -> None:
    chart = plot(make_row("a", 1.0), make_row("b", None, status="out of memory", reason="no room"), make_row("c", 2.0))
    domain = list_layers(chart, "bar")[0]["encoding"]["y"]["scale"]["domain"]
    assert domain == ["a", "b", "c"]
    assert list(list_texts(chart)) == ["out of memory"]
    assert ">out of memory<" in draw(chart)


def test_numbers_that_span_decades_are_points_on_a_logarithmic_axis() -> None:
    rows = [make_row("a", 0.001), make_row("b", 0.1)]
    assert spans_decades(rows, "seconds")
    chart = plot(*rows)
    assert not list_layers(chart, "bar")
    assert list_layers(chart, "point")[0]["encoding"]["x"]["scale"]["type"] == "log"
    draw(chart)


def test_a_zero_is_never_put_on_a_logarithmic_axis() -> None:
    assert not spans_decades([make_row("a", 0.0), make_row("b", 100.0)], "seconds")


def test_ratios_are_points_around_their_reference() -> None:
    ratio = Axis(field="seconds", title="B over A", quantity="ratio", from_zero=False)
    chart = plot(make_row("a", 0.9), make_row("b", 1.1), x=ratio, reference=1.0)
    assert {"seconds": 1.0} in [{"seconds": value["seconds"]} for value in list_values(chart, "rule")]
    assert list_layers(chart, "point")


def test_a_reference_is_in_the_unit_of_the_axis() -> None:
    chart = plot(make_row("a", 0.009), make_row("b", 0.011), reference=0.01)
    assert [value["seconds"] for value in list_values(chart, "rule")] == [10]


def test_bars_of_several_series_are_named_at_their_ends() -> None:
    rows = [make_row("a", 1.0), make_row("a", 2.0), make_row("b", 3.0)]
    rows = [dict(row) | {"series": series} for row, series in zip(rows, ("lazy", "eager", "lazy"), strict=True)]
    chart = plot(*rows)
    assert sorted(list_texts(chart)) == ["eager", "lazy", "lazy"]
    draw(chart)


def test_more_series_than_can_be_told_apart_are_not_drawn() -> None:
    rows = [dict(make_row("a", 1.0 + number)) | {"series": str(number)} for number in range(9)]
    assert plot_amounts(title="", x=SECONDS, rows=rows) is None


def test_an_interval_below_zero_is_cut_and_the_caption_says_so() -> None:
    chart = plot(make_row("a", Estimate(value=1.0, low=-8.0, high=10.0)), make_row("b", 2.0), caption="Intervals.")
    (rule,) = list_values(chart, "rule")
    assert (rule["seconds_low"], rule["seconds_high"]) == (0, 5)
    assert "± 9" in rule["seconds_text"]
    assert chart.caption == f"Intervals. {CUT_NOTE}"


def test_an_interval_that_crosses_the_reference_is_seen_to_cross_it() -> None:
    ratio = Axis(field="seconds", title="speedup", quantity="ratio", from_zero=False)
    wide = Estimate(value=0.3, low=-0.5, high=1.1)
    chart = plot(make_row("a", wide), make_row("b", 0.2), x=ratio, reference=1.0)
    (rule,) = [value for value in list_values(chart, "rule") if "name" in value]
    assert rule["seconds_high"] == 1.1
    assert rule["seconds_low"] == 0


@pytest.mark.parametrize("name", ["short", "features = d_model = 64, tgt_length = 16", "x" * 300])
def test_long_names_get_few_lines(name: str) -> None:
    lines = wrap_name(name)
    assert 1 <= len(lines) <= MOST_LINES
    assert all(len(line) <= 26 for line in lines)
    assert measure_height(["\n".join(lines)] * 4, 1) >= 4 * 14 * len(lines)


def test_hostile_names_are_text() -> None:
    name = '<script>alert("\u202e1")</script>'
    svg = draw(plot(make_row(name, 1.0), make_row("b", 2.0)))
    assert "<script>" not in svg
    assert "\u202e" not in svg
