"""From columns of a table to the rows of a figure, so that both say the same.

A figure of what a table lists takes its numbers from the table's own cells, and the text of every number is made with
the unit of its column. A word in the place of a number, such as `out of memory`, becomes the row's `status`: what
failed keeps its place in the figure.

    name      the first cell of the row
    series    the header of the column
    value     the number with its interval; None: a word, or unknown
    status    the word
    key       what figures of one report share, where it is told
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.report.charts.plot import Axis, Row, convert_rows
from scalelab.report.document import Cell, Table, Value
from scalelab.units import UNKNOWN

VALUE = "value"


def read_columns(
    table: Table,
    columns: Mapping[str, str] | Sequence[str],
    keys: Sequence[str] = (),
    leaving_out: Sequence[str] = (),
) -> list[dict[str, Value | Estimate]]:
    """The rows of some columns, by their keys, one after the other within every row of the table.

    A mapping says how a figure calls each series. `keys` are the rows' own, in their order; rows whose key is in
    `leaving_out` are not drawn, but have their say in the units.
    """
    position = {column.key: index for index, column in enumerate(table.columns)}
    texts = {key: _format_column(table, position[key]) for key in columns}
    rows: list[dict[str, Value | Estimate]] = []
    for number, cells in enumerate(table.rows):
        key = keys[number] if keys else str(cells[0].value)
        if key in leaving_out:
            continue
        status = _find_status(table, cells, position, columns)
        for column in columns:
            index = position[column]
            title = columns[column] if isinstance(columns, Mapping) else table.columns[index].header
            rows.append(
                {
                    "name": str(cells[0].value),
                    "series": title,
                    "key": key,
                    VALUE: cells[index].estimate,
                    "status": "" if cells[index].estimate is not None else status,
                    f"{VALUE}_text": texts[column][number],
                }
            )
    return rows


def make_value_axis(table: Table, key: str, title: str = "", *, is_log: bool = False, from_zero: bool = True) -> Axis:
    """The axis of the numbers of a column."""
    column = next(column for column in table.columns if column.key == key)
    return Axis(field=VALUE, title=title or column.header, quantity=column.quantity, is_log=is_log, from_zero=from_zero)


def _format_column(table: Table, index: int) -> list[str]:
    """The numbers of a column as text with unit and interval."""
    axis = Axis(field=VALUE, title="", quantity=table.columns[index].quantity)
    rows: list[Row] = [{VALUE: cells[index].estimate} for cells in table.rows]
    return [str(value[f"{VALUE}_text"]) for value in convert_rows(rows, (axis,)).values]


def _find_status(
    table: Table, cells: Sequence[Cell], position: Mapping[str, int], columns: Mapping[str, str] | Sequence[str]
) -> str:
    """The word that stands in the place of a number, in the wanted columns or in the first that has one."""
    every = [*(position[key] for key in columns), *range(1, len(cells))]
    words = [
        str(cells[index].value)
        for index in every
        if table.columns[index].quantity != "text" and isinstance(cells[index].value, str)
    ]
    return next((word for word in words if word != UNKNOWN), UNKNOWN)
