"""Figures of a table say what the table says."""

from __future__ import annotations

from dataclasses import replace

from scalelab.analysis.estimate import Estimate
from scalelab.report.charts.column_charts import draw_columns, draw_lines, draw_stacks, make_value_axis, read_columns
from scalelab.report.charts.plot import Axis
from scalelab.report.document import Column, Table
from scalelab.report.tables import format_columns
from tests.report.charts.figures import draw, list_layers, list_values
from tests.report.samples import make_row

TABLE = Table(
    columns=(
        Column(key="run", header="run", align="left"),
        Column(key="step_seconds", header="step", quantity="seconds"),
        Column(key="peak_bytes", header="peak", quantity="bytes"),
    ),
    rows=(
        make_row("small", Estimate(value=0.0413, low=0.041, high=0.0417), 1_500_000),
        make_row("large", "out of memory", None),
        make_row("control", Estimate(value=0.0420), 1_600_000),
    ),
)


def test_every_column_becomes_a_series_of_every_row() -> None:
    rows = read_columns(TABLE, {"step_seconds": "time", "peak_bytes": "memory"})
    assert [(row["name"], row["series"]) for row in rows] == [
        ("small", "time"), ("small", "memory"), ("large", "time"), ("large", "memory"), ("control", "time"),
        ("control", "memory"),
    ]  # fmt: skip


def test_a_number_has_the_text_of_its_cell() -> None:
    cells = format_columns(TABLE)[1].cells
    rows = read_columns(TABLE, ["step_seconds"])
    assert rows[0]["value_text"] == f"{cells[0]} ms"


def test_a_word_in_the_place_of_a_number_is_the_status_of_the_whole_row() -> None:
    rows = read_columns(TABLE, ["step_seconds", "peak_bytes"])
    failed = [row for row in rows if row["name"] == "large"]
    assert [row["status"] for row in failed] == ["out of memory", "out of memory"]
    assert [row["value"] for row in failed] == [None, None]


def test_rows_that_are_left_out_have_their_say_in_the_decimals() -> None:
    every = read_columns(TABLE, ["step_seconds"])
    few = read_columns(TABLE, ["step_seconds"], leaving_out=("control",))
    assert few == every[:2]


def test_the_axis_takes_quantity_and_header_of_its_column() -> None:
    axis = make_value_axis(TABLE, "peak_bytes")
    assert (axis.title, axis.quantity) == ("peak", "bytes")


SIZES = Table(
    columns=(
        Column(key="batch", header="batch", quantity="count"),
        Column(key="measured_seconds", header="measured", quantity="seconds"),
        Column(key="model_seconds", header="model", quantity="seconds"),
    ),
    rows=(
        make_row(4, Estimate(value=0.04, low=0.03, high=0.05), 0.041),
        make_row(8, 0.08, 0.079),
        make_row(16, "out of memory", None),
        make_row(32, None, None),
    ),
)
OVER = Axis(field="batch", title="batch", quantity="count")


def test_lines_over_a_column_have_points_guides_and_crosses_for_what_failed() -> None:
    chart = draw_lines(SIZES, OVER, ["measured_seconds"], title="t", guides={"model_seconds": "model"})
    assert chart is not None
    points = [layer for layer in list_layers(chart, "point") if layer["mark"].get("shape") != "cross"]
    assert [value["batch"] for layer in points for value in layer["data"]["values"]] == [4, 8]
    crosses = [layer for layer in list_layers(chart, "point") if layer["mark"].get("shape") == "cross"]
    found = [(value["batch"], value["status"]) for layer in crosses for value in layer["data"]["values"]]
    assert found == [(16, "out of memory")]
    assert "16 (out of memory)" in chart.caption
    assert "32" not in chart.caption, "what is unknown has not failed"
    assert {value["series"] for value in list_values(chart, "line")} == {"measured", "model"}
    assert "<svg" in draw(chart)


def test_fewer_than_two_numbers_are_not_drawn() -> None:
    short = replace(SIZES, rows=SIZES.rows[1:])
    assert draw_lines(short, OVER, ["measured_seconds"], title="t") is None
    assert draw_columns(short, ["measured_seconds"], title="t") is None


PARTS = Table(
    columns=(
        Column(key="ranks", header="ranks", quantity="count"),
        Column(key="compute", header="compute", quantity="share"),
        Column(key="comm", header="comm", quantity="share"),
    ),
    rows=(make_row(1, 0.7, None), make_row(2, 0.5, 0.3), make_row(4, "out of memory", None)),
)


def test_stacks_have_a_part_per_column_and_the_rest() -> None:
    chart = draw_stacks(PARTS, ["compute", "comm"], title="t", rest="rest")
    assert chart is not None
    parts = {(one["name"], one["series"]): one["value"] for one in list_values(chart, "bar")}
    assert parts == {
        ("1", "compute"): 70, ("1", "rest"): 30, ("2", "compute"): 50, ("2", "comm"): 30, ("2", "rest"): 20,
    }  # fmt: skip
    assert "out of memory" in draw(chart)
    assert draw_stacks(replace(PARTS, rows=PARTS.rows[2:]), ["compute"], title="t") is None
