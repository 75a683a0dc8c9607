"""The axes of charts: one unit per axis, ticks where something was measured, labels that do not collide.

A row is a mapping of raw numbers in base units, or estimates, as in tables. Beside every number a chart holds its text,
formatted like the cells of tables. Logarithmic axes have ticks at the measured places where these are given, else at 1,
2 and 5 or at powers of ten. If such an axis of seconds or bytes spans more than a factor of 1000, every label has its
own unit and the title has none.
"""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.checks import clean_text
from scalelab.report.findings import Value
from scalelab.units import GROUP_SEPARATOR, UNKNOWN, Quantity, Unit, choose_unit, format_estimate, format_quantity

Row = Mapping[str, "Value | Estimate"]
Rows = Sequence[Row]
WIDE = 1000.0
"""A logarithmic axis that spans more has labels with their own units."""
OWN_UNITS: Mapping[Quantity, tuple[Quantity, str]] = {
    "seconds": ("seconds", ""),
    "latency": ("seconds", ""),
    "bytes": ("bytes", ""),
    "bandwidth": ("bytes", "/s"),
}
"""Quantities whose labels may have their own units, and where these come from."""
GROUPED = f"join(split(datum.label, ','), '{GROUP_SEPARATOR}')"
"""Thousands are set apart as in tables."""
MOST_TICKS = 9
FEWEST_TICKS = 3
REACH = 2.5
"""How far intervals are drawn, over the largest number."""
CUT_NOTE = "Intervals much wider than the data are clipped; the tables have them in full."
LABEL_LIMIT = 200
LINE_LETTERS = 26
MOST_LINES = 3
LINE_HEIGHT = 14
NAME_LABELS: Mapping[str, Any] = {
    "labelLimit": LABEL_LIMIT, "labelOverlap": False, "labelExpr": "split(datum.label, '\\n')",
    "labelLineHeight": LINE_HEIGHT,
}  # fmt: skip
"""Of an axis of names."""
PADDING = 14
"""Pixels between the ends of an axis and the outermost marks, where it does not begin at zero."""
DIGITS = 6
"""Significant digits of numbers in a figure: less than a pixel."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One dimension of a figure."""

    field: str
    """The key of its number in every row."""
    title: str
    """For a reader, without the unit."""
    quantity: Quantity = "number"
    """`text` makes it an axis of names, in the order of the rows."""
    is_log: bool = False
    from_zero: bool = True
    """Whether a linear axis begins at zero."""
    is_signed: bool = False
    """Whether it is a change or a balance, of which either sign is as possible."""
    ticks: tuple[float, ...] = ()
    """Where the ticks are, in base units, such as the numbers of ranks that were measured; empty: where they fit."""

    @property
    def is_named(self) -> bool:
        return self.quantity == "text"


@dataclass(frozen=True, kw_only=True)
class Plotted:
    """Rows as a figure holds them, in the units of its axes."""

    values: list[dict[str, Any]]
    titles: Mapping[str, str]
    """Of every axis, with its unit."""
    units: Mapping[str, Unit] = field(default_factory=dict)


def convert_rows(
    rows: Rows, axes: Sequence[Axis], unit_rows: Rows | None = None, scaled_as: Iterable[float] = ()
) -> Plotted:
    """The rows in one unit per axis, with `_low`, `_high` and `_text` beside every number; other fields stay.

    `unit_rows`: the rows that choose units and decimals, where they are not these. `scaled_as`: the numbers that choose
    the units in their place, such as the lengths of whole stacks.
    """
    chosen, scales = unit_rows if unit_rows is not None else rows, list(scaled_as)
    units = {axis.field: choose_axis_unit(axis, chosen, scales) for axis in axes}
    values = [_convert_row(row, units) for row in rows]
    shown = values if unit_rows is None else [_convert_row(row, units) for row in chosen]
    for axis in axes:
        if _labels_alone(axis, *_find_reach(axis, shown)):
            for row, made in zip(rows, values, strict=True):
                made |= _write_alone(axis, row)
    return name_axes(Plotted(values=values, titles={}, units=units), axes, values)


def name_axes(plotted: Plotted, axes: Iterable[Axis], values: Sequence[dict[str, Any]]) -> Plotted:
    """These values in the units of others, with titles that go with the labels they give their axes."""
    titles = {axis.field: _name_axis(axis, plotted.units[axis.field], values) for axis in axes}
    return Plotted(values=list(values), titles=titles, units=plotted.units)


def _write_alone(axis: Axis, row: Row) -> dict[str, str]:
    """The text of a number in its own best unit."""
    value, (base, per) = row.get(axis.field), OWN_UNITS[axis.quantity]
    if value is None or isinstance(value, str):
        return {}
    text = format_quantity(base, value)
    return {f"{axis.field}_text": text if text == UNKNOWN else f"{text}{per}"}


def choose_axis_unit(axis: Axis, rows: Rows, scaled_as: Iterable[float] = ()) -> Unit:
    """The unit of all numbers of an axis."""
    if axis.is_named:
        return Unit()
    found = [row.get(axis.field) for row in rows]
    return choose_unit(axis.quantity, [None if isinstance(one, str | bool) else one for one in found], scaled_as)


def _name_axis(axis: Axis, unit: Unit, values: Sequence[Mapping[str, Any]]) -> str:
    has_own = not unit.symbol or _labels_alone(axis, *_find_reach(axis, values))
    return axis.title if has_own else f"{axis.title} [{unit.symbol}]"


def _convert_row(row: Row, units: Mapping[str, Unit]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, str):
            made[name] = clean_text(value)
            made |= {f"{name}_text": made[name]} if name in units else {}
        elif name in units:
            made |= _convert_number(name, value, units[name])
        else:
            made[name] = value.value if isinstance(value, Estimate) else value
    return made


def _convert_number(name: str, value: bool | int | float | Estimate | None, unit: Unit) -> dict[str, Any]:
    estimate = value if isinstance(value, Estimate) or value is None else Estimate(value=value)
    if estimate is None or not math.isfinite(estimate.value):
        return {name: None, f"{name}_text": UNKNOWN}
    symbol = f" {unit.symbol}" if unit.symbol and not unit.suffix else ""
    made: dict[str, Any] = {
        name: shorten(estimate.value / unit.factor),
        f"{name}_text": format_estimate(estimate, unit) + symbol,
    }
    if estimate.low is not None and estimate.high is not None:
        low, high = shorten(estimate.low / unit.factor), shorten(estimate.high / unit.factor)
        made |= {f"{name}_low": low, f"{name}_high": high}
    return made


def shorten(number: float) -> float:
    """A number with as many digits as a figure can show; whole numbers stay whole."""
    return number if isinstance(number, int) or not math.isfinite(number) else float(f"{number:.{DIGITS}g}")


def encode_axis(axis: Axis, plotted: Plotted, *, field: str | None = None) -> dict[str, Any]:
    """The channel of an axis."""
    encoded: dict[str, Any] = {"field": field or axis.field, "title": plotted.titles[axis.field]}
    if axis.is_named:
        return encoded | {"type": "nominal", "sort": None, "axis": {"labelAngle": 0, "labelOverlap": True}}
    encoded |= {"type": "quantitative"}
    unit = plotted.units.get(axis.field, Unit())
    marks: dict[str, Any] = {"values": [tick / unit.factor for tick in axis.ticks]} if axis.ticks else {}
    if axis.quantity == "count" and not axis.is_log:
        marks |= {"format": ",d"}
        if not marks.get("values"):
            marks["values"] = choose_count_ticks([0.0] * axis.from_zero + list(_list_numbers(axis, plotted.values)))
    scale: dict[str, Any] = {"zero": True, "nice": True}
    if not axis.from_zero:
        scale = {"zero": False, "nice": False, "padding": PADDING}
    if axis.is_log:
        low, high = _find_reach(axis, plotted.values)
        base = 2 if axis.quantity == "count" else 10
        scale = {"type": "log", "base": base, "nice": False, "padding": PADDING}
        return encoded | {"scale": scale, "axis": encode_log_ticks(axis, unit, low, high)}
    if max(map(abs, _list_numbers(axis, plotted.values)), default=0.0) >= 1000:
        marks |= {"labelExpr": GROUPED}
    return encoded | {"scale": scale} | ({"axis": marks} if marks else {})


def wrap_names(values: Sequence[Mapping[str, Any]], field: str) -> list[dict[str, Any]]:
    """Long names in several lines: one that is cut short does not say what it is the name of."""
    return [{**value, field: "\n".join(wrap_name(str(value[field])))} for value in values]


def wrap_name(name: str) -> list[str]:
    """A name in lines; words that are longer than a line are broken, and what is beyond the last line is left out."""
    lines = textwrap.wrap(name, LINE_LETTERS) or [name]
    return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], f"{lines[MOST_LINES - 1][:-1]}…"]


def choose_count_ticks(numbers: Iterable[float]) -> list[int]:
    """Whole numbers, evenly spaced: an axis of steps has no half ones."""
    found = list(numbers)
    low, high = math.floor(min(found, default=0)), math.ceil(max(found, default=1))
    sizes = (digit * 10**power for power in range(16) for digit in (1, 2, 5))
    step = next(size for size in sizes if (high - low) / size <= MOST_TICKS + 1)
    return list(range(-(-low // step) * step, high + 1, step))


def _list_numbers(axis: Axis, values: Iterable[Mapping[str, Any]]) -> Iterator[float]:
    for one in values:
        for name in (axis.field, f"{axis.field}_low", f"{axis.field}_high"):
            number = one.get(name)
            if isinstance(number, int | float):
                yield number


def cut_intervals(
    values: Sequence[Mapping[str, Any]], axis: Axis, kept: Iterable[float] = ()
) -> tuple[list[dict[str, Any]], str]:
    """Intervals clipped to the range of the numbers, and a note where one was.

    Two launches that differ have intervals many times as wide as the value, which would squeeze everything else. None
    is clipped before the numbers in `kept` (in the axis's unit), which it is compared with: it would seem to exclude
    them. For the same reason intervals of signed changes are never clipped.
    """
    low, high = f"{axis.field}_low", f"{axis.field}_high"
    found = [one[axis.field] for one in values if one.get(axis.field) is not None] + list(kept)
    top = REACH * max(map(abs, found), default=0.0)
    if axis.is_signed or not top:
        return list(map(dict, values)), ""
    foot = 0.0 if min(found) >= 0 else -top
    if axis.quantity == "accuracy":
        top = min(top, 100.0)
    if axis.is_log:
        foot = min((number for number in found if number > 0), default=0.0) / REACH
    made, is_cut = [], False
    for one in map(dict, values):
        if low in one and (one[low] < foot or one[high] > top):
            one |= {low: max(one[low], foot), high: min(one[high], top)}
            is_cut = True
        made.append(one)
    return made, CUT_NOTE if is_cut else ""


def _find_reach(axis: Axis, values: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """The smallest and the largest positive number of an axis, in its unit; 1 and 1 where there is none."""
    found = [number for number in _list_numbers(axis, values) if number > 0]
    return (min(found), max(found)) if found else (1.0, 1.0)


def _labels_alone(axis: Axis, low: float, high: float) -> bool:
    return axis.is_log and axis.quantity in OWN_UNITS and high > WIDE * low


def encode_log_ticks(axis: Axis, unit: Unit, low: float, high: float) -> dict[str, Any]:
    """The ticks and labels of a logarithmic axis that reaches from `low` to `high` in its unit."""
    ticks = [tick / unit.factor for tick in axis.ticks] or choose_log_ticks(low, high, axis.quantity == "count")
    while len(ticks) > MOST_TICKS:
        ticks = ticks[::2]
    described: dict[str, str] = {}
    if _labels_alone(axis, low, high):
        labels = [format_tick(axis.quantity, tick * unit.factor) for tick in ticks]
        described = {"description": f"{axis.title} [{unit.symbol}]"}  # the title has no unit, but the numbers have
    else:
        labels = [f"{tick:,.12f}".rstrip("0").rstrip(".").replace(",", GROUP_SEPARATOR) for tick in ticks]
    return {"values": ticks, "labelExpr": write_labels(ticks, labels), "labelOverlap": True} | described


def choose_log_ticks(low: float, high: float, is_count: bool = False) -> list[float]:
    """Powers of two for counts; else powers of ten, or between them as many as it takes to read the axis."""
    if is_count:
        exponents = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        return [tick for n in exponents if low * 0.999 <= (tick := 2.0**n) <= high * 1.001] or [low]
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    inside: list[float] = []
    for digits in ((1.0,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(n / 10 for n in range(10, 100))):
        found = [float(f"{digit}e{decade}") for decade, digit in itertools.product(decades, digits)]
        inside = [tick for tick in found if low * 0.999 <= tick <= high * 1.001]
        if len(inside) >= FEWEST_TICKS:
            break
    return inside or [low]


def format_tick(quantity: Quantity, value: float) -> str:
    """A round number with its own unit: "100 µs", "4 MB"."""
    base, per = OWN_UNITS[quantity]
    unit = choose_unit(base, [value])
    return f"{shorten(value / unit.factor):g} {unit.symbol}{per}"


def write_labels(ticks: Sequence[float], labels: Sequence[str]) -> str:
    """Vega's expression that gives every tick of a logarithmic axis its label."""
    borders = [math.sqrt(tick * following) for tick, following in itertools.pairwise(ticks)]
    return _write_ladder(borders, labels)


def write_choice(places: Sequence[int], labels: Sequence[str]) -> str:
    """The same for places that are whole numbers."""
    return _write_ladder([place + 0.5 for place in places[:-1]], labels)


def _write_ladder(borders: Sequence[float], labels: Sequence[str]) -> str:
    """Which label stands for a value, by the borders between them."""
    written = json.dumps(labels[-1] if labels else "")
    for border, label in reversed(list(zip(borders, labels, strict=False))):
        written = f"datum.value < {border:.6g} ? {json.dumps(label)} : {written}"
    return written
