"""A table is declared once, and read row by row."""

from __future__ import annotations

from scalelab.analysis.estimate import Estimate
from scalelab.report.document import Cell
from scalelab.report.tables import make_table, ratio_column, seconds_column, text_column


def test_cells_come_from_estimates_plain_values_and_cells() -> None:
    table = make_table(
        [1.0, 2.0],
        text_column("run", "run", lambda row: f"r{row:.0f}"),
        seconds_column("step_seconds", "step", lambda row: Estimate(value=row, low=0.0, high=3.0)),
        ratio_column("speedup", "speedup", lambda row: Cell(value=row, mark="†"), shows_interval=False),
        title="T",
        notes=("n",),
    )
    assert [column.quantity for column in table.columns] == ["text", "seconds", "ratio"]
    assert table.columns[0].align == "left"
    assert not table.columns[2].shows_interval
    assert table.rows[1] == (Cell(value="r2"), Cell(value=2.0, low=0.0, high=3.0), Cell(value=2.0, mark="†"))


def test_a_row_without_numbers_has_its_status_in_the_second_column() -> None:
    table = make_table(
        ["good", "bad"],
        text_column("run", "run", lambda row: row),
        seconds_column("a", "a", lambda _: 1.0),
        seconds_column("b", "b", lambda _: 2.0),
        status=lambda row: "out of memory" if row == "bad" else None,
    )
    assert [cell.value for cell in table.rows[1]] == ["bad", "out of memory", None]


def test_a_column_that_is_not_wanted_is_left_out() -> None:
    table = make_table([1], text_column("run", "run", str), None)
    assert len(table.columns) == 1
