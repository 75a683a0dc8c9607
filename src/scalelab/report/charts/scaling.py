"""Speedup and efficiency against ranks: the ideal, what was measured with its intervals and its rounds, the laws.

Both axes of a speedup are logarithmic from eight ranks on, so that the ideal stays a straight line. Points whose ranks
share cores, or that lie in another regime for another reason, are not joined to the others: a line would say that what
lies between could be read off it.

Predictions as fans: what was measured as points, the predicted median as a line, its interval as a band.

Nothing joins the two: what was measured is one thing, what is expected of sizes that were not run another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from scalelab.report.charts.axes import Axis, Rows
from scalelab.report.charts.plot import plot_lines
from scalelab.report.document import Chart

FROM_LOG = 8
"""Numbers of ranks from which on the axes are logarithmic."""
NUM_PLACES = 25
"""Of a guide, from the smallest to the largest number of ranks."""
Law = Callable[[float], float]


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


MEASURED, PREDICTED = "measured", "predicted"


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
