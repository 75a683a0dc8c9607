"""The tables about measuring: the first steps, the ways to time, the launches that a precision takes."""

from __future__ import annotations

from scalelab.analysis.stats import estimate_median
from scalelab.report.document import Column, Table, make_row
from scalelab.studies.repeats import PRECISIONS, Repeats
from scalelab.studies.sweep import INTERVAL_NOTE
from scalelab.units import format_share


def make_step_table(repeats: Repeats) -> Table:
    """Each of the first steps, all of them, and the rest."""
    columns = (
        Column(key="steps", header="steps", align="left"),
        Column(key="step_seconds", header="step", quantity="seconds"),
        Column(key="rest_ratio", header="× the rest", quantity="ratio"),
    )
    launches, dropped = repeats.launches, repeats.dropped
    rows = [
        make_row(f"{number}", estimate_median([[steps[number]] for steps in launches]), repeats.compare_step(number))
        for number in range(dropped)
    ]
    first = estimate_median([steps[:dropped] for steps in launches])
    rows.append(make_row(f"0 to {dropped - 1}", first, repeats.first_ratio))
    rows.append(make_row(f"{dropped} on", estimate_median(repeats.rest), 1.0))
    return Table(columns=columns, rows=tuple(rows), notes=(INTERVAL_NOTE,))


def make_way_table(repeats: Repeats) -> Table:
    """What each way of timing gives, how far it is from the last, and how far one more would be from it."""
    columns = (
        Column(key="way", header="way", align="left"),
        Column(key="step_seconds", header="step", quantity="seconds"),
        Column(key="against_last", header="× the last row", quantity="ratio"),
        Column(key="reach", header="reach", quantity="share"),
    )
    ways = repeats.ways
    best = ways[-1].step.value
    rows = []
    for way in ways:
        width = way.step.half_width
        reach = None if width is None else width / way.step.value
        rows.append(make_row(way.label, way.step, way.step.value / best, reach))
    notes = (
        "± of a way is where one more measurement of its kind, in one launch, falls in 95 of 100 cases",
        "± of the last row is a 95 % confidence interval",
    )
    return Table(columns=columns, rows=tuple(rows), notes=notes)


def make_launch_table(repeats: Repeats) -> Table:
    columns = (
        Column(key="precision", header="precision", align="left"),
        Column(key="launches", header="launches", quantity="count"),
        Column(key="least", header="at least", quantity="count"),
        Column(key="most", header="at most", quantity="count"),
    )
    rows = tuple(
        make_row(f"± {format_share(precision)}", *repeats.count_launches(precision)) for precision in PRECISIONS
    )
    notes = ("at least, at most: with the spread between launches at the ends of its 95 % interval",)
    return Table(columns=columns, rows=rows, notes=notes)
