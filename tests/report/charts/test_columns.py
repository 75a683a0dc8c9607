"""Figures of a table say what the table says."""

from __future__ import annotations

from scalelab.analysis.estimate import Estimate
from scalelab.report.cells import format_columns
from scalelab.report.charts.amounts import make_value_axis, read_columns
from scalelab.report.document import Column, Table, make_row

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
    every = read_columns(TABLE, ["step_seconds"], ["a", "b", "control"])
    few = read_columns(TABLE, ["step_seconds"], ["a", "b", "control"], leaving_out=("control",))
    assert few == every[:2]


def test_the_axis_takes_quantity_and_header_of_its_column() -> None:
    axis = make_value_axis(TABLE, "peak_bytes")
    assert (axis.title, axis.quantity) == ("peak", "bytes")
