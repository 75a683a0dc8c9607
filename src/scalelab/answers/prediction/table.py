"""The document of `scalelab predict --table FILE`: a ranks-vs-throughput CSV, extrapolated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from scalelab.analysis.estimate import Estimate
from scalelab.answers.prediction.report import BAND, FAR, PREDICTION
from scalelab.predict.extrapolate import Extrapolated, extrapolate
from scalelab.predict.scaling_table import ReadSeries, ScalingSeries, find_doubts
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.column_charts import MEASURED, PREDICTED, plot_fan
from scalelab.report.document import Chart, Document, Section, Table
from scalelab.report.findings import Caution, CautionKind, Finding
from scalelab.report.tables import count_column, make_column, make_table, ratio_column, share_column, text_column
from scalelab.studies.shared.cautions import EXTRAPOLATED
from scalelab.units import format_count, format_quantity, format_share

IMPOSSIBLE = CautionKind(
    "impossible-series", "A series that cannot be right", "wrong-work", ("ranks", "gain", "utilization")
)
FLAT_TOTAL = CautionKind(
    "flat-throughput", "A throughput that may be per device", "wrong-work", ("ranks", "throughput")
)
NODES = CautionKind("nodes-counted", "A table that counts nodes, not ranks", "note", ("largest_nodes",))
SINGLE_SIZE = CautionKind("single-size", "Jobs with one size cannot be extrapolated", "note", ("num_jobs",))


class Size(NamedTuple):
    """One row: a size of a series, measured or not."""

    ranks: int
    value: Estimate
    """In the table's own unit."""
    speedup: Estimate
    efficiency: Estimate
    source: str


def describe_table(found: Sequence[ReadSeries], ranks: Sequence[int], source: str, *, is_forced: bool) -> Document:
    """Every series of a table at other sizes; impossible ones are warned of instead."""
    sections, findings = [], []
    cautions: list[Caution] = []
    for one in found:
        series = one.series
        doubts = list(warn_of_doubts(one))
        cautions += [*doubts, *warn_of_flat_total(series)]
        if len(series.ranks) < 2 or (doubts and not is_forced):
            continue
        extrapolated = extrapolate(series, list(ranks) or [series.ranks[-1] * factor for factor in (2, 4, 8)])
        sizes = list(list_sizes(series, extrapolated))
        table = make_sizes_table(one, sizes, extrapolated[0].weights)
        sections.append(Section(heading=series.label, tables=(table,), charts=(draw_sizes(series, sizes),)))
        findings.append(summarise(series, extrapolated))
        cautions += warn_of_distance(series, max(one.ranks for one in extrapolated))
        cautions += warn_of_nodes(series)
    return Document(
        title="Prediction",
        question="How fast would these jobs run at other rank counts?",
        setting=f"{source} · {len(found)} series",
        sections=tuple(sections),
        findings=tuple(findings),
        cautions=(*cautions, *warn_of_single_sizes(found)),
    )


def warn_of_doubts(one: ReadSeries) -> Iterator[Caution]:
    for doubt in find_doubts(one.series, one.utilization):
        yield IMPOSSIBLE(
            one.series.label,
            f"{one.series.label}: {doubt.text}",
            "compare rows of the same job, or use --force to extrapolate anyway",
            ranks=doubt.ranks,
            gain=doubt.gain,
            utilization=doubt.utilization,
        )


def warn_of_distance(series: ScalingSeries, largest: int) -> Iterator[Caution]:
    known = series.ranks[-1]
    if largest > FAR * known:
        yield EXTRAPOLATED(
            series.label,
            f"{series.label}: {largest} {series.size_word}s is more than {FAR} times the {known} of the table: the"
            " interval does not cover effects that appear only there",
            "add a larger size to the table",
            ranks=largest,
            largest_ranks=known,
        )


def warn_of_nodes(series: ScalingSeries) -> Iterator[Caution]:
    if series.size_word == "node":
        yield NODES(
            series.label,
            f"{series.label}: the table counts nodes, so --ranks counts nodes too",
            "to predict by GPU, add a column such as gpus_per_node",
            largest_nodes=series.ranks[-1],
        )


def warn_of_flat_total(series: ScalingSeries) -> Iterator[Caution]:
    if series.looks_per_rank:
        yield FLAT_TOTAL(
            series.label,
            f"{series.label}: {series.unit} does not grow from {series.ranks[0]} to {series.ranks[-1]}"
            f" {series.size_word}s, and was read as the total of all: it looks like a value of one device",
            "if it is, mark it in the header: 'samples/s per GPU'",
            ranks=series.ranks[-1],
            throughput=series.throughput[series.ranks[-1]],
        )


def warn_of_single_sizes(found: Sequence[ReadSeries]) -> Iterator[Caution]:
    alone = [one.series.label for one in found if len(one.series.ranks) < 2]
    if alone:
        yield SINGLE_SIZE(
            alone[0],
            f"{len(alone)} of {len(found)} jobs have one size only, for example {alone[0]}",
            "if these are one job, use --by to name the columns that identify a job",
            num_jobs=len(alone),
        )


def make_sizes_table(one: ReadSeries, sizes: Sequence[Size], weights: Mapping[str, float]) -> Table:
    series = one.series
    laws = ", ".join(f"{name} {format_share(weight)}" for name, weight in weights.items() if weight > 0.005)
    return make_table(
        sizes,
        count_column("ranks", f"{series.size_word}s", lambda row: row.ranks),
        make_column("number", "seconds" if series.is_time else "throughput", series.unit, lambda row: row.value),
        ratio_column("speedup", "speedup", lambda row: row.speedup),
        share_column("efficiency", "efficiency", lambda row: row.efficiency),
        text_column("source", "", lambda row: row.source),
        notes=(
            "intervals are 80 % prediction intervals; measured rows have none",
            f"speedup and efficiency: relative to {format_count(series.ranks[0], series.size_word)}",
            f"weights of the scaling laws: {laws}",
            *one.notes,
        ),
    )


def draw_sizes(series: ScalingSeries, sizes: Sequence[Size]) -> Chart:
    first = series.ranks[0]
    return plot_fan(
        title=series.label,
        y=Axis(field="value", title=series.unit or "value", quantity="number", is_log=True),
        rows=[{"series": one.source, "ranks": one.ranks, "value": one.value} for one in sizes],
        caption=f"{BAND}.",
        ideal=None if series.is_time or series.is_per_rank else series.throughput[first] / first,
    )


def list_sizes(series: ScalingSeries, extrapolated: Sequence[Extrapolated]) -> Iterator[Size]:
    """Measured sizes, then predicted ones."""
    base, stretch = series.throughput[series.ranks[0]], series.stretch
    for count in series.ranks:
        throughput = Estimate(value=series.throughput[count])
        yield Size(
            count,
            throughput.map(partial(series.restore, count)),
            throughput.map(lambda rate: rate / base),
            Estimate(value=1 / stretch[count]),
            MEASURED,
        )
    for one in extrapolated:
        if one.ranks not in series.throughput:
            value = one.throughput.map(partial(series.restore, one.ranks))
            yield Size(one.ranks, value, one.throughput.map(lambda rate: rate / base), one.efficiency, PREDICTED)


def summarise(series: ScalingSeries, extrapolated: Sequence[Extrapolated]) -> Finding:
    """The largest size that is predicted, if any is."""
    unknown = [one for one in extrapolated if one.ranks not in series.throughput]
    last = max(unknown or extrapolated, key=lambda one: one.ranks)
    value = last.throughput.map(partial(series.restore, last.ranks))
    low, middle, high = (format_quantity("number", number) for number in (value.low, value.value, value.high))
    return PREDICTION(
        series.label,
        f"{series.label}: on {format_count(last.ranks, series.size_word)}, {series.unit} would be {middle} ({low} to"
        f" {high}): {format_share(last.efficiency.value)} efficiency relative to"
        f" {format_count(series.ranks[0], series.size_word)}.",
        num_ranks=last.ranks,
        throughput=last.throughput,
        efficiency=last.efficiency,
    )
