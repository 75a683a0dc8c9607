"""Charts of lines: over ranks, over message sizes, over steps and epochs.

Over ranks: speedup and efficiency with the ideal, the laws and every round; both axes of a speedup are logarithmic from
eight ranks on, so that the ideal stays straight. Rows in another regime, such as ranks that share cores, are not joined
to the others. A prediction is a fan: measured points, the predicted median as a line, its interval as a band; nothing
joins measured to predicted.

Over steps or epochs: losses and accuracies. A long curve marks only some of its points. Where a line stands for several
training runs, their spread is a band and each of them a faint line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from scalelab.report.charts.axes import Axis, Rows, convert_rows, cut_intervals, encode_axis, name_axes
from scalelab.report.charts.plot import (
    HIDDEN,
    UNLESS_HIDDEN,
    choose_dashes,
    choose_shapes,
    encode_series,
    encode_tooltip,
    list_series,
    make_spec,
    plot_lines,
    stress,
)
from scalelab.report.document import Chart

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
