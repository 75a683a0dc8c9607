"""The charts of communication alone, for `collectives` and `links`: time and bus bandwidth against the message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scalelab.analysis.communication import bus_factor
from scalelab.analysis.link import LinkFit, TransferSeries
from scalelab.analysis.stats import estimate_median
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.curves import plot_rates, plot_times
from scalelab.report.charts.plot import MOST_SERIES, plot_bars
from scalelab.report.document import Chart
from scalelab.studies.network.answer import LinksAnswer
from scalelab.studies.shared.arms import describe_failures, join_words

Made = dict[str, Any]
NUM_PLACES = 40
INTERVALS = "Bars are 95 % confidence intervals."


def make_points(series: TransferSeries) -> list[Made]:
    """Time and bus bandwidth of every size."""
    factor = bus_factor(series.operation, series.trial.num_ranks)
    points: list[Made] = []
    for size, rounds in series.seconds.items():
        call = estimate_median(rounds)
        rate = call.map(lambda seconds, size=size: size * factor / seconds)  # type: ignore[misc]
        label = series.trial.label
        points.append({"series": label, "payload_bytes": size, "seconds": call, "bandwidth": rate, "key": label})
    return points


def make_rounds(series: TransferSeries) -> list[Made]:
    """The median of every launch alone."""
    return [
        {"series": series.trial.label, "payload_bytes": size, "seconds": estimate_median([launch]).value}
        for size, rounds in series.seconds.items()
        for launch in rounds
        if len(rounds) > 1 and len(launch)
    ]


def make_line(fit: LinkFit, series: str) -> list[Made]:
    """The fitted line, which is a curve on logarithmic axes."""
    low, high = fit.line.smallest_bytes, fit.line.largest_bytes
    places = [low * (high / low) ** (step / (NUM_PLACES - 1)) for step in range(NUM_PLACES)]
    return [{"series": series, "payload_bytes": place, "seconds": fit.line.predict_seconds(place)} for place in places]


def plot_operations(every: Sequence[TransferSeries]) -> tuple[Chart, ...]:
    """All operations beside each other, as far as they can be told apart: times and bandwidths."""
    measured = [series for series in every if series.is_measured]
    shown = measured[:MOST_SERIES]
    rows = [point for series in shown for point in make_points(series)]
    if not rows:
        return ()
    lost = [(s.trial.label, _find_status(s)) for s in every if not s.is_measured]
    more = f"{len(measured) - len(shown)} more are drawn below only." if len(measured) > len(shown) else ""
    said = join_words(INTERVALS, more, *describe_failures(lost))
    return (
        plot_times(title="Time of a call", rows=rows, fits=(), caption=said),
        plot_rates(title="Bus bandwidth", rows=rows, caption=said),
    )


def _find_status(series: TransferSeries) -> str:
    return next((result.status.words for result in series.results if result.status != "completed"), "no timing")


def plot_operation(series: TransferSeries, fit: LinkFit | None) -> Chart | None:
    """One operation: every launch, the median, and the line that latency and bandwidth come from."""
    rows = make_points(series)
    if not rows:
        return None
    line = make_line(fit, "latency + size / bandwidth") if fit is not None else []
    said = join_words(
        INTERVALS,
        "Faint points are the medians of single launches." if len(series.results) > 1 else "",
        "" if fit is not None else "Too few sizes for a line.",
    )
    title = f"{series.trial.label}: time against size"
    return plot_times(title=title, rows=rows, raw=make_rounds(series), fits=line, caption=said)


def plot_link_costs(answer: LinksAnswer) -> Chart | None:
    """A step over every link, and what of it is exposed communication."""
    known = [(row, row.exposed) for row in answer.rows if row.is_measured and row.arm is not None]
    rows: list[Made] = []
    for row, exposed in known:
        assert row.arm is not None
        name = row.link.name
        step = row.arm.step
        if exposed is None:
            rows.append({"bar": name, "series": "step", "seconds": step, "key": row.arm.label})
            continue
        lost = max(exposed.seconds.value, 0.0)
        rows.append({"bar": name, "series": "computing", "seconds": step.value - lost, "key": row.arm.label})
        rows.append({"bar": name, "series": "exposed comm", "seconds": exposed.seconds, "key": row.arm.label})
    if not rows:
        return None
    failed = [
        {"bar": row.link.name, "status": row.arm.failure.status.words if row.arm and row.arm.failure else "not run yet"}
        for row in answer.rows
        if not row.is_measured
    ]
    return plot_bars(
        title="A step over every link",
        x=Axis(field="seconds", title="step time", quantity="seconds"),
        y=Axis(field="bar", title="", quantity="text"),
        rows=rows,
        failed=failed,
        has_labels=True,
        caption=join_words(
            "Exposed: what a step without the gradient exchange saves.",
            *describe_failures((row["bar"], row["status"]) for row in failed),
        ),
    )


def plot_link_rates(answer: LinksAnswer) -> Chart | None:
    """All-reduces alone over every link, beside the nominal rates."""
    measured = [row.series for row in answer.rows if row.series is not None and row.series.is_measured][:MOST_SERIES]
    rows = [point for series in measured for point in make_points(series)]
    if not rows:
        return None
    sizes = [point["payload_bytes"] for point in rows]
    nominal: Mapping[str, float] = {
        f"{row.link.name}, nominal": row.link.bytes_per_second
        for row in answer.rows
        if row.link.bytes_per_second is not None
    }
    guides = [
        {"series": name, "payload_bytes": size, "bandwidth": rate}
        for name, rate in list(nominal.items())[: max(0, MOST_SERIES - len(measured))]
        for size in (min(sizes), max(sizes))
    ]
    lost = [
        (row.link.name, "not run" if row.series is None else _find_status(row.series))
        for row in answer.rows
        if row.series is None or not row.series.is_measured
    ]
    said = join_words(INTERVALS, *describe_failures(lost))
    return plot_rates(title="Bus bandwidth of all-reduces alone", rows=rows, guides=guides, caption=said)
