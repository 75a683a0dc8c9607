"""Every column has one unit, in its header, and numbers that stand below each other."""

from __future__ import annotations

from scalelab.analysis.estimate import Estimate
from scalelab.report.document import Cell, Column, Table, make_cell
from scalelab.report.tables import TextColumn, format_columns, list_notes
from scalelab.units import UNKNOWN


def format_only_column(column: Column, *cells: Cell) -> TextColumn:
    (text,) = format_columns(Table(columns=(column,), rows=tuple((cell,) for cell in cells)))
    return text


def test_the_header_carries_the_unit_of_the_column() -> None:
    column = Column(key="step", header="step", quantity="seconds")
    assert format_only_column(column, make_cell(0.4), make_cell(0.2)).header == "step [ms]"


def test_columns_that_are_compared_have_one_unit() -> None:
    ours = Column(key="ours", header="ours", quantity="bytes", unit_of="published")
    published = Column(key="published", header="published", quantity="bytes")
    rows = ((make_cell(104e6), make_cell(15.8e9)),)
    columns = format_columns(Table(columns=(ours, published), rows=rows))
    assert [(column.header, *column.cells) for column in columns] == [
        ("ours [GB]", "0.104"),
        ("published [GB]", "15.8"),
    ]
    alone = format_columns(Table(columns=(ours, published), rows=((make_cell(104e6), make_cell(None)),)))
    assert (alone[0].header, *alone[0].cells) == ("ours [MB]", "104")


def test_percent_stands_in_the_cells_instead() -> None:
    text = format_only_column(Column(key="e", header="efficiency", quantity="share"), make_cell(0.96))
    assert (text.header, text.cells) == ("efficiency", ("96 %",))


def test_a_rate_has_its_unit_in_its_name() -> None:
    column = Column(key="r", header="samples/s", quantity="rate")
    assert format_only_column(column, make_cell(155.0)).header == "samples/s"
    assert format_only_column(column, make_cell(2.5e6)).header == "samples/s [M]"


def test_the_signs_of_a_column_stand_below_each_other() -> None:
    wide, narrow = Estimate(value=0.2, low=0.188, high=0.212), Estimate(value=0.4, low=0.398, high=0.402)
    column = Column(key="step", header="step", quantity="seconds")
    text = format_only_column(column, make_cell(narrow), make_cell(wide), make_cell(0.3))
    assert text.cells == ("400.0 ±  2.0", "200.0 ± 12.0", "300.0")


def test_words_truths_and_unknowns_stand_among_numbers() -> None:
    column = Column(key="step", header="step", quantity="seconds")
    cells = (make_cell("out of memory"), make_cell(True), make_cell(False), make_cell(None), make_cell(0.4))
    assert format_only_column(column, *cells).cells == ("out of memory", "yes", "no", UNKNOWN, "400")


def test_the_marks_of_numbers_stand_beside_the_column() -> None:
    column = Column(key="ranks", header="ranks", quantity="count")
    text = format_only_column(column, make_cell(4), make_cell(8, mark="†"))
    assert (text.cells, text.marks, text.mark_width) == (("4", "8"), ("", "†"), 1)


def test_the_mark_of_a_word_stands_in_its_cell() -> None:
    text = format_only_column(Column(key="s", header="strategy", align="left"), make_cell("ddp", mark="†"))
    assert (text.cells, text.mark_width) == (("ddp†",), 0)


def test_notes_of_columns_follow_those_of_the_table() -> None:
    column = Column(key="k", header="Karp–Flatt", quantity="share", note="the serial part")
    table = Table(columns=(column,), rows=(), notes=("± is a 95 % confidence interval",))
    assert list_notes(table) == ("± is a 95 % confidence interval", "Karp–Flatt: the serial part")
