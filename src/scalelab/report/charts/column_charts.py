"""Charts of a table, so that both say the same: bars or stacks by the names of its rows, lines over a column.

Numbers and units come from the table. A word in place of a number, such as `out of memory`, becomes the `status` of the
row: a failed row keeps its place in the chart. A row has

    name      the first cell of the row
    series    the header of the column
    value     the number with its interval; None: a word, or unknown
    status    the word
    key       what charts of one report share; by default the name
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scalelab.report.charts.amounts import plot_amounts, read_number
from scalelab.report.charts.plot import Axis, Row, Rows, convert_rows, plot_bars, plot_lines
from scalelab.report.document import Cell, Chart, Table
from scalelab.report.findings import Known
from scalelab.units import UNKNOWN

CONTROL = "control"
"""The row that is the reference measured again: charts leave it out."""
INTERVALS = "Thin lines are 95 % confidence intervals."
VALUE = "value"
Columns = Mapping[str, str] | Sequence[str]
"""Keys of columns, or what a chart calls the series of each."""


def draw_columns(
    table: Table,
    columns: Columns,
    *,
    title: str,
    axis_title: str = "",
    reference: float | None = None,
    from_zero: bool = True,
    caption: str = INTERVALS,
) -> Chart | None:
    """Columns of a table as bars by the names of its rows; None if fewer than two numbers are known."""
    rows = read_columns(table, columns, leaving_out=(CONTROL,))
    has_control = any(cells[0].value == CONTROL for cells in table.rows)
    return plot_amounts(
        title=title,
        x=make_value_axis(table, next(iter(columns)), axis_title, from_zero=from_zero),
        rows=rows,
        caption=_complete_caption(caption, rows) + (" The control is not drawn." if has_control else ""),
        reference=reference,
        name_title=_name_rows(table),
    )


def draw_lines(
    table: Table,
    over: Axis,
    columns: Columns,
    *,
    title: str,
    axis_title: str = "",
    guides: Mapping[str, str] | None = None,
    levels: Rows = (),
    caption: str = INTERVALS,
    is_joined: bool = True,
) -> Chart | None:
    """Columns of a table as lines over another of its columns, the field of the axis; None for fewer than two points.

    `guides` are columns drawn as lines without points, such as a model; `levels` are further rows of such lines.
    """
    every = read_columns(table, columns, over=over.field)
    rows = [row for row in every if row[VALUE] is not None]
    failed = [row for row in every if row[VALUE] is None and row["status"] != UNKNOWN]
    if len(rows) < 2:
        return None
    law = read_columns(table, guides, over=over.field) if guides else []
    return plot_lines(
        title=title,
        x=over,
        y=make_value_axis(table, next(iter(columns)), axis_title),
        rows=rows,
        guides=[*(row for row in law if row[VALUE] is not None), *levels],
        failed=failed,
        is_joined=is_joined,
        caption=_complete_caption(caption, failed),
    )


def draw_stacks(
    table: Table, columns: Columns, *, title: str, axis_title: str = "", rest: str = "", caption: str = ""
) -> Chart | None:
    """Columns of a table as parts of one bar per row; None if no number is known.

    `rest` names a further part: what the columns, which are shares, leave of 1.
    """
    every = read_columns(table, columns, leaving_out=(CONTROL,))
    rows: list[dict[str, Known]] = [row for row in every if row[VALUE] is not None]
    names = list(dict.fromkeys(row["name"] for row in rows))
    if not names:
        return None
    for name in names if rest else ():
        parts = [read_number(row, VALUE) or 0.0 for row in rows if row["name"] == name]
        rows.append({"name": name, "key": name, "series": rest, VALUE: 1.0 - sum(parts)})
    failed = {row["name"]: row for row in every if row["name"] not in names and row["status"]}
    return plot_bars(
        title=title,
        x=make_value_axis(table, next(iter(columns)), axis_title),
        y=Axis(field="name", title=_name_rows(table), quantity="text"),
        rows=rows,
        failed=list(failed.values()),
        caption=caption,
    )


def _name_rows(table: Table) -> str:
    """What an axis calls the rows; that they are runs needs no saying."""
    header = table.columns[0].header
    return "" if header == "run" else header


def _complete_caption(caption: str, rows: Rows) -> str:
    statuses = dict.fromkeys(f"{row['name']} ({row['status']})" for row in rows if row["status"] not in ("", UNKNOWN))
    return f"{caption} Not measured: {', '.join(statuses)}." if statuses else caption


def keep_charts(*charts: Chart | None) -> tuple[Chart, ...]:
    """The keys that the table has."""
    return tuple(chart for chart in charts if chart is not None)


def read_columns(
    table: Table, columns: Columns, leaving_out: Sequence[str] = (), over: str = ""
) -> list[dict[str, Known]]:
    """The rows of some columns, by their keys, one after the other within every row of the table.

    Rows named in `leaving_out` are not drawn, but count in the choice of units. `over`: a column that rows have too, by
    its key.
    """
    position = {column.key: index for index, column in enumerate(table.columns)}
    texts = {key: _format_column(table, position[key]) for key in columns}
    rows: list[dict[str, Known]] = []
    for number, cells in enumerate(table.rows):
        name = str(cells[0].value)
        if name in leaving_out:
            continue
        status = _find_status(table, cells, position, columns)
        place: dict[str, Known] = {over: cells[position[over]].estimate} if over else {}
        for column in columns:
            cell = cells[position[column]]
            title = columns[column] if isinstance(columns, Mapping) else table.columns[position[column]].header
            rows.append(
                {
                    "name": name,
                    "series": title,
                    "key": name,
                    VALUE: cell.estimate,
                    "status": "" if cell.estimate is not None else status,
                    f"{VALUE}_text": texts[column][number],
                    **place,
                }
            )
    return rows


def make_value_axis(table: Table, key: str, title: str = "", *, from_zero: bool = True) -> Axis:
    """The axis of the numbers of a column."""
    column = next(column for column in table.columns if column.key == key)
    return Axis(field=VALUE, title=title or column.header, quantity=column.quantity, from_zero=from_zero)


def _format_column(table: Table, index: int) -> list[str]:
    """The numbers of a column as text with unit and interval."""
    axis = Axis(field=VALUE, title="", quantity=table.columns[index].quantity)
    rows: list[Row] = [{VALUE: cells[index].estimate} for cells in table.rows]
    return [str(value[f"{VALUE}_text"]) for value in convert_rows(rows, (axis,)).values]


def _find_status(table: Table, cells: Sequence[Cell], position: Mapping[str, int], columns: Columns) -> str:
    """The word in place of a number, in the wanted columns or in the first that has one."""
    every = [*(position[key] for key in columns), *range(1, len(cells))]
    words = [
        str(cells[index].value)
        for index in every
        if table.columns[index].quantity != "text" and isinstance(cells[index].value, str)
    ]
    return next((word for word in words if word != UNKNOWN), UNKNOWN)
