"""Heat maps: a number in every cell, readable on its colour."""

from __future__ import annotations

from typing import Any

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.report.charts.grid import MISSING, list_ticks, measure_luminance, mix_colours, plot_grid
from scalelab.report.charts.plot import Axis, Row
from scalelab.report.document import Chart
from tests.report.charts.figures import draw, list_layers, list_texts, list_values

X = Axis(field="dim", title="dim", quantity="text")
Y = Axis(field="length", title="length", quantity="text")
VALUE = Axis(field="seconds", title="step", quantity="seconds")


def make_row(dim: str, length: str, seconds: float | Estimate | None, status: str = "") -> Row:
    return {"dim": dim, "length": length, "seconds": seconds, "status": status}


def plot(*rows: Row) -> Chart:
    chart = plot_grid(title="grid", x=X, y=Y, value=VALUE, rows=rows)
    assert chart is not None
    return chart


ROWS = (
    make_row("16", "4", Estimate(value=0.010, low=0.009, high=0.011)),
    make_row("32", "4", 0.020),
    make_row("16", "8", 0.040),
    make_row("32", "8", None, "out of memory"),
)


def test_every_cell_has_its_number_without_unit_and_interval() -> None:
    chart = plot(*ROWS)
    assert set(list_texts(chart)) == {"10.0", "20.0", "40.0", "out of memory"}
    assert next(value["seconds_text"] for value in list_values(chart, "rect")) == "10.0 ± 1.0 ms"
    assert ">40.0<" in draw(chart)


def test_a_failed_cell_has_no_colour() -> None:
    outlines = [layer for layer in list_layers(plot(*ROWS), "rect") if not layer["mark"].get("filled", True)]
    assert [value["status"] for layer in outlines for value in layer["data"]["values"]] == ["out of memory"]
    assert all("color" not in layer["encoding"] for layer in outlines)


def test_what_was_not_combined_is_said_to_be_missing() -> None:
    assert MISSING in list(list_texts(plot(*ROWS[:3])))


def test_one_row_of_cells_is_no_heat_map() -> None:
    assert plot_grid(title="", x=X, y=Y, value=VALUE, rows=ROWS[:2]) is None


def test_numbers_that_are_all_the_same_are_drawn() -> None:
    rows = [make_row(dim, length, 0.5) for dim in ("1", "2") for length in ("1", "2")]
    assert ">500<" in draw(plot(*rows))


@pytest.mark.parametrize("share", [number / 40 for number in range(41)])
def test_ink_has_the_contrast_that_wcag_asks_for(share: float) -> None:
    rows = [make_row("a", "1", 0.0), make_row("b", "1", 1.0), make_row("a", "2", share), make_row("b", "2", share)]
    cell = next(value for value in list_values(plot(*rows), "rect") if value["length"] == "2")
    luminance = measure_luminance(mix_colours(share))
    contrast = 1.05 / (luminance + 0.05) if cell["is_white"] else (luminance + 0.05) / 0.05
    assert contrast >= 4.5


def test_luminance_is_that_of_black_and_of_white() -> None:
    known: list[tuple[tuple[float, float, float], float]] = [((0, 0, 0), 0.0), ((255, 255, 255), 1.0)]
    found: list[Any] = [measure_luminance(colour) for colour, _ in known]
    assert found == pytest.approx([luminance for _, luminance in known])


def test_small_numbers_beside_large_ones_are_not_written_as_nothing() -> None:
    rows = [make_row("16", "4", 0.0004), make_row("32", "4", 0.03), make_row("16", "8", 0.2), make_row("32", "8", 0.3)]
    assert set(list_texts(plot(*rows))) == {"0.40", "30.0", "200.0", "300.0"}


def test_the_legend_of_cells_that_span_decades_reaches_the_last_of_them() -> None:
    assert list_ticks([0.93, 26.0, 94.4]) == [1, 2, 5, 10, 20, 50]
    assert list_ticks([0.004, 0.3]) == [0.005, 0.01, 0.02, 0.05, 0.1, 0.2]
