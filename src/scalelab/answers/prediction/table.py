"""The document of `scalelab predict --table FILE`: somebody's measurements, extrapolated."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.answers.prediction.report import plot_extrapolated, show
from scalelab.predict.extrapolate import Extrapolated, extrapolate
from scalelab.predict.prediction import find_doubts
from scalelab.predict.tables import ReadSeries, ScalingSeries
from scalelab.report.document import Cell, Column, Document, Section, Table, make_row
from scalelab.report.findings import Caution, as_findings
from scalelab.units import format_quantity, format_share

INTERVAL_NOTE = "± is an 80 % interval of the prediction; rows without it were measured"


def describe_table(found: Sequence[ReadSeries], ranks: Sequence[int], source: str, *, is_forced: bool) -> Document:
    """Every series of a table at other sizes; those that cannot be right are named instead."""
    sections, summary, cautions = [], [], []
    alone = [one.series.label for one in found if len(one.series.ranks) < 2]
    for one in found:
        series = one.series
        doubts = find_doubts(series, one.utilization)
        cautions += [
            Caution(
                message=f"{series.label}: {doubt}",
                next_step="compare rows of the same job, or extrapolate all the same with --force",
            )
            for doubt in doubts
        ]
        if len(series.ranks) < 2 or (doubts and not is_forced):
            continue
        wanted = choose_sizes(series, ranks)
        extrapolated = extrapolate(series, wanted)
        chart = plot_extrapolated(series, extrapolated, is_time=series.is_time)
        sections.append(Section(heading=series.label, tables=(make_table(series, extrapolated),), charts=(chart,)))
        summary.append(summarise(series, extrapolated))
    if alone:
        cautions.append(
            Caution(
                message=f"{len(alone)} of {len(found)} jobs are there with one size only, such as {alone[0]}",
                next_step="say which columns tell jobs apart with --by, if these are one job",
            )
        )
    return Document(
        title="Prediction",
        question="What would other numbers of ranks give?",
        setting=f"{source} · {len(found)} series",
        sections=tuple(sections),
        findings=as_findings(summary),
        cautions=tuple(cautions),
    )


def choose_sizes(series: ScalingSeries, ranks: Sequence[int]) -> list[int]:
    """Those that were asked for; without any, twice, four and eight times the largest."""
    return list(ranks) or [series.ranks[-1] * factor for factor in (2, 4, 8)]


def make_table(series: ScalingSeries, extrapolated: Sequence[Extrapolated]) -> Table:
    """Measured sizes, then predicted ones."""
    what = Column(key="seconds", header=series.unit, quantity="number") if series.is_time else None
    columns = (
        Column(key="ranks", header="ranks", quantity="count"),
        what or Column(key="throughput", header=series.unit, quantity="number"),
        Column(key="speedup", header="speedup", quantity="ratio"),
        Column(key="efficiency", header="efficiency", quantity="share"),
        Column(key="source", header="", align="left"),
    )
    first = series.ranks[0]
    stretch = series.stretch
    rows = [
        make_row(
            count,
            show_value(series, series.throughput[count]),
            series.throughput[count] / series.throughput[first],
            1 / stretch[count],
            "measured",
        )
        for count in series.ranks
    ]
    rows += [
        (
            Cell(value=one.ranks),
            show(one.throughput.map(lambda value: show_value(series, value))),
            show(one.throughput.map(lambda value: value / series.throughput[first])),
            show(one.efficiency),
            Cell(value="predicted"),
        )
        for one in extrapolated
        if one.ranks not in series.throughput
    ]
    weights = extrapolated[0].weights if extrapolated else {}
    told = ", ".join(f"{name} {format_share(weight)}" for name, weight in weights.items() if weight > 0.005)
    over = f"speedup and efficiency are over {first} rank{'s'[: first != 1]}"
    return Table(columns=columns, rows=tuple(rows), notes=(INTERVAL_NOTE, over, f"laws by weight: {told}"))


def show_value(series: ScalingSeries, throughput: float) -> float:
    """In the unit of the table: a time where it has times."""
    return 1 / throughput if series.is_time else throughput


def summarise(series: ScalingSeries, extrapolated: Sequence[Extrapolated]) -> str:
    """The largest size in words."""
    last = max(extrapolated, key=lambda one: one.ranks)
    value = last.throughput.map(lambda throughput: show_value(series, throughput))
    low, middle, high = (format_quantity("number", number) for number in (value.low, value.value, value.high))
    efficiency = format_share(last.efficiency.value)
    return (
        f"{series.label}: {last.ranks} ranks would give {series.unit} {middle} ({low} to {high}), an efficiency of"
        f" {efficiency} over {series.ranks[0]}."
    )
