"""Charts of a table, so that both say the same: bars or stacks by the names of its rows, lines over a column.

Numbers and units come from the table. A word in place of a number, such as `out of memory`, becomes the `status` of the
row: a failed row keeps its place in the chart. A row has

    name      the first cell of the row
    series    the header of the column
    value     the number with its interval; None: a word, or unknown
    status    the word
    key       what charts of one report share; by default the name

Lines over ranks: speedup and efficiency with the ideal, the laws and every round; both axes of a speedup are
logarithmic from eight ranks on, so that the ideal stays straight. Rows in another regime, such as ranks that share
cores, are not joined to the others. A prediction is a fan: measured points, the predicted median as a line, its
interval as a band; nothing joins measured to predicted.

Lines over steps or epochs: losses and accuracies. A long curve marks only some of its points. Where a line stands for
several training runs, their spread is a band and each of them a faint line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from scalelab.report.charts.amounts import plot_amounts, read_number
from scalelab.report.charts.axes import cut_intervals, encode_axis, name_axes
from scalelab.report.charts.plot import (
    HIDDEN,
    UNLESS_HIDDEN,
    Axis,
    Row,
    Rows,
    choose_dashes,
    choose_shapes,
    convert_rows,
    encode_series,
    encode_tooltip,
    list_series,
    make_spec,
    plot_bars,
    plot_lines,
    stress,
)
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


FROM_LOG = 8
"""From this many ranks on, the axes are logarithmic."""
NUM_PLACES = 25
"""Of a guide, from the smallest to the largest number of ranks."""
Law = Callable[[float], float]
MEASURED, PREDICTED = "measured", "predicted"
SIZE = Axis(field="payload_bytes", title="message size", quantity="bytes", is_log=True)
CURVE_HEIGHT = 240
MOST_SHOWN = 60
"""Points of one series up to which each is marked."""


def plot_speedup(
    *,
    rows: Rows,
    raw: Rows = (),
    laws: Mapping[str, Law],
    failed: Rows = (),
    reach: int | None = None,
    name: str = "speedup",
    caption: str = "",
) -> Chart:
    """`speedup` by `ranks`; every law gives the speedup on so many ranks, and is drawn up to `reach` of them."""
    ranks = list_ranks(rows, failed)
    guides = trace_guides(ranks, {"ideal": float}, "speedup") + trace_guides(cut_ranks(ranks, reach), laws, "speedup")
    y = Axis(field="speedup", title=name, quantity="ratio", is_log=ranks[-1] >= FROM_LOG)
    return plot_over_ranks(y, ranks, rows=rows, raw=raw, guides=guides, failed=failed, caption=caption)


def plot_efficiency(
    *,
    rows: Rows,
    raw: Rows = (),
    laws: Mapping[str, Law],
    failed: Rows = (),
    reach: int | None = None,
    caption: str = "",
) -> Chart:
    """`efficiency` by `ranks`; every law gives the speedup on so many ranks, and is drawn up to `reach` of them."""
    ranks = list_ranks(rows, failed)
    made = {name: _per_rank(law) for name, law in laws.items()}
    guides = trace_guides(ranks, {"ideal": lambda _: 1.0}, "efficiency")
    guides += trace_guides(cut_ranks(ranks, reach), made, "efficiency")
    y = Axis(field="efficiency", title="efficiency", quantity="share")
    return plot_over_ranks(y, ranks, rows=rows, raw=raw, guides=guides, failed=failed, caption=caption)


def plot_over_ranks(
    y: Axis, ranks: Sequence[int], *, rows: Rows, raw: Rows, guides: Rows, failed: Rows, caption: str
) -> Chart:
    """A quantity on an axis of ranks, with a tick at each that was measured."""
    is_log = ranks[-1] >= FROM_LOG
    return plot_lines(
        title=f"{y.title[0].upper()}{y.title[1:]} against ranks",
        x=Axis(field="ranks", title="ranks", quantity="count", is_log=is_log, from_zero=False, ticks=tuple(ranks)),
        y=y,
        rows=rows,
        raw=raw,
        guides=guides,
        failed=failed,
        caption=caption,
        extra={"key": "configuration", "note": "note"},
    )


def _per_rank(law: Law) -> Law:
    return lambda num_ranks: law(num_ranks) / num_ranks


def cut_ranks(ranks: Sequence[int], reach: int | None) -> list[int]:
    """Those that a law was fitted to: beyond them it would be a prediction."""
    return [count for count in ranks if reach is None or count <= reach] or list(ranks[:1])


def list_ranks(*groups: Rows) -> list[int]:
    """The numbers of ranks that rows are about, ascending."""
    found = {value for rows in groups for row in rows if isinstance(value := row.get("ranks"), int)}
    return sorted(found)


def trace_guides(ranks: Sequence[int], laws: Mapping[str, Law], field: str) -> list[dict[str, str | float]]:
    """The points of every law, close enough for a curve, spaced as a logarithmic axis would."""
    low, high = ranks[0], max(ranks[-1], ranks[0])
    num_places = NUM_PLACES if high > low else 1
    places = [round(low * (high / low) ** (step / max(num_places - 1, 1)), 4) for step in range(num_places)]
    return [{"series": name, "ranks": place, field: law(place)} for name, law in laws.items() for place in places]


def plot_fan(
    *,
    title: str,
    y: Axis,
    rows: Rows,
    caption: str = "",
    ideal: float | None = None,
    failed: Rows = (),
    x_title: str = "ranks",
) -> Chart:
    """`rows`: `ranks`, the field of y, and whether `measured` or `predicted` as `series`. `ideal`: y of one rank, where
    it should grow with them.
    """
    ranks = list_ranks(rows, failed)
    is_log = ranks[-1] > 2 * ranks[0]
    x = Axis(field="ranks", title=x_title, quantity="count", is_log=is_log, from_zero=False, ticks=tuple(ranks))
    y = replace(y, is_log=y.is_log and is_log)
    predicted = [row for row in rows if row.get("series") == PREDICTED]
    guides = [] if ideal is None else trace_guides(ranks, {"ideal": lambda count: ideal * count}, y.field)
    return plot_lines(
        title=title,
        x=x,
        y=y,
        rows=[row | {"regime": str(row.get("series"))} for row in map(dict, rows)],
        bands=predicted if len(predicted) > 1 else (),
        guides=guides,
        failed=failed,
        caption=caption,
    )


def plot_times(*, title: str, rows: Rows, fits: Rows, caption: str = "", raw: Rows = ()) -> Chart:
    """`seconds` of one call by `payload_bytes`."""
    y = Axis(field="seconds", title="time per call", quantity="seconds", is_log=True)
    return plot_lines(title=title, x=SIZE, y=y, rows=rows, raw=raw, guides=fits, caption=caption)


def plot_rates(*, title: str, rows: Rows, caption: str = "", guides: Rows = ()) -> Chart:
    """`bandwidth` in bytes per second by `payload_bytes`."""
    y = Axis(field="bandwidth", title="bus bandwidth", quantity="bandwidth", is_log=True)
    return plot_lines(title=title, x=SIZE, y=y, rows=rows, guides=guides, caption=caption)


def plot_curves(*, title: str, x: Axis, y: Axis, rows: Rows, singles: Rows = (), caption: str = "") -> Chart:
    """Rows have the fields of both axes and a `series`; y may be an estimate. `singles` also name their `training`."""
    plotted = convert_rows(rows, (x, y))
    values, cut = cut_intervals(plotted.values, y)
    faint = convert_rows(singles, (x, y), rows).values
    everything = name_axes(plotted, (x, y), [*values, *faint])
    names = list_series(values)
    places: dict[str, Any] = {"x": encode_axis(x, everything), "y": encode_axis(y, everything)}
    look: dict[str, Any] = {"color": encode_series(names), "opacity": UNLESS_HIDDEN | {"value": 1}}
    dashes = choose_dashes(names, names)
    dash = encode_series(names) | {"scale": {"domain": names, "range": dashes}}
    shape = encode_series(names) | {"scale": {"domain": names, "range": choose_shapes(names, names)}}
    shown = [one for name in names for one in _choose_shown([one for one in values if one["series"] == name])]
    ends = {"y": encode_axis(y, everything, field=f"{y.field}_low"), "y2": {"field": f"{y.field}_high"}}
    faintly: dict[str, Any] = {"detail": [{"field": "training"}], "opacity": UNLESS_HIDDEN | {"value": 0.35}}
    layers: list[tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = [
        (
            [one for one in values if f"{y.field}_low" in one],
            {"type": "area"},
            {"x": places["x"]} | ends | look | {"opacity": UNLESS_HIDDEN | {"value": 0.15}},
        ),
        (
            faint,
            {"type": "line", "strokeWidth": 0.8},
            places | look | faintly,
        ),
        (values, {"type": "line", "strokeWidth": 1.8}, places | look | {"strokeDash": dash}),
    ]
    drawn: list[dict[str, Any]] = [
        {"data": {"values": data}, "mark": mark, "encoding": encoding} for data, mark, encoding in layers if data
    ]
    pointed: dict[str, Any] = {"shape": shape, "size": stress(30, 90), "tooltip": encode_tooltip((x, y), {})}
    drawn.append(
        {
            "data": {"values": shown},
            "params": [HIDDEN | {"bind": "legend"}],
            "mark": {"type": "point", "filled": True, "opacity": 1},
            "encoding": places | look | pointed,
        }
    )
    return Chart(title=title, caption=f"{caption} {cut}".strip(), spec=make_spec(drawn, height=CURVE_HEIGHT))


def _choose_shown(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points that are marked, for pointing at: of a long curve evenly some."""
    every = -(-len(values) // MOST_SHOWN)
    return values[:: max(every, 1)]
