"""A table is fitted into a width by breaking headers first and splitting last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scalelab.report.renderers.terminal import ColumnSize, arrange_columns, fill_width, measure_column
from scalelab.report.tables import TextColumn


@st.composite
def draw_sizes(draw: st.DrawFn) -> ColumnSize:
    least = draw(st.integers(1, 20))
    return ColumnSize(least + draw(st.integers(0, 30)), least, draw(st.booleans()))


def make_column(header: str, *cells: str, is_prose: bool = False) -> TextColumn:
    return TextColumn(header=header, align="right", cells=cells, marks=("",) * len(cells), is_prose=is_prose)


def test_a_table_that_fits_is_set_as_it_is() -> None:
    (part,) = arrange_columns([ColumnSize(5, 5), ColumnSize(12, 7)], 20)
    assert (part.widths, part.gap, part.width) == ((5, 12), 3, 20)


def test_headers_are_broken_before_columns_move_together() -> None:
    (part,) = arrange_columns([ColumnSize(5, 5), ColumnSize(12, 7)], 19)
    assert (part.widths, part.gap) == ((5, 7), 3)


def test_columns_move_together_before_the_table_is_split() -> None:
    (part,) = arrange_columns([ColumnSize(5, 5), ColumnSize(12, 7)], 14)
    assert (part.widths, part.gap) == ((5, 7), 2)


def test_a_split_table_repeats_its_first_column_in_parts_of_like_width() -> None:
    parts = arrange_columns([ColumnSize(4, 4)] + [ColumnSize(10, 10)] * 4, 45)
    assert [part.columns for part in parts] == [(0, 1, 2), (0, 3, 4)]


def test_where_one_part_is_shown_it_has_as_many_columns_as_fit():
    sizes = [ColumnSize(4, 4)] + [ColumnSize(10, 10)] * 4
    assert len(arrange_columns(sizes, 45)[0].columns) == 3
    assert fill_width(sizes, 45).columns == (0, 1, 2, 3)


def test_prose_gets_the_width_that_headers_could_do_without() -> None:
    (part,) = arrange_columns([ColumnSize(5, 5), ColumnSize(20, 10), ColumnSize(90, 15, True)], 60)
    assert part.widths == (5, 10, 39)


@given(st.lists(draw_sizes(), min_size=1, max_size=10), st.integers(45, 200))
def test_every_column_is_set_and_no_part_is_too_wide(sizes: list[ColumnSize], available: int) -> None:
    parts = arrange_columns(sizes, available)
    assert sorted({index for part in parts for index in part.columns}) == list(range(len(sizes)))
    for part in parts:
        assert part.width <= available
        for index, width in zip(part.columns, part.widths, strict=True):
            assert sizes[index].least <= width <= sizes[index].natural


@given(st.lists(draw_sizes(), min_size=1, max_size=10), st.integers(4, 44))
def test_in_a_narrow_terminal_parts_still_fit(sizes: list[ColumnSize], available: int) -> None:
    assert all(part.width <= available for part in arrange_columns(sizes, available))


def test_numbers_stay_whole_and_headers_take_two_lines() -> None:
    assert measure_column(make_column("exposed comm", "3 %")) == ColumnSize(12, 7)
    assert measure_column(make_column("peak memory per rank [GB]", "1.93")).least == 13
    assert measure_column(make_column("step [ms]", "413.0 ± 2.0")).least == 11


def test_prose_is_broken_between_words_and_only_long_words_inside() -> None:
    words = make_column("reason", "a rank asked for too much", is_prose=True)
    assert measure_column(words) == ColumnSize(25, 6, True)
    assert measure_column(make_column("path", "x" * 90, is_prose=True)).least == 20
