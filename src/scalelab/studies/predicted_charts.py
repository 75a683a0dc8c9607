"""The charts of `predict` and `plan`: fans of what is expected, and where its time and memory go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.predict.extrapolate import Extrapolated
from scalelab.predict.prediction import Prediction
from scalelab.predict.scale_out import ScaledStep
from scalelab.predict.search import Candidate
from scalelab.predict.series import ScalingSeries
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.plot import plot_bars
from scalelab.report.charts.prediction import MEASURED, PREDICTED, plot_fan
from scalelab.report.document import Chart

Made = dict[str, Any]
BAND = "The band is the 80 % interval of the prediction"
MOST_CANDIDATES = 12


def to_estimate(found: Prediction) -> Estimate:
    return Estimate(value=found.value, low=found.low, high=found.high)


def plot_predicted_steps(measured: Mapping[int, Estimate], steps: Sequence[ScaledStep]) -> Chart:
    """A step by number of ranks."""
    rows: list[Made] = [
        {"series": PREDICTED, "ranks": one.num_ranks, "seconds": to_estimate(one.step)} for one in steps
    ]
    rows += [{"series": MEASURED, "ranks": n, "seconds": step} for n, step in sorted(measured.items())]
    more = "; bars at what was measured are 95 % confidence intervals" if measured else ""
    y = Axis(field="seconds", title="step time", quantity="seconds", is_log=True)
    return plot_fan(title="A step by number of ranks", y=y, rows=rows, caption=f"{BAND}{more}.")


def plot_predicted_speedup(steps: Sequence[ScaledStep]) -> Chart:
    rows: list[Made] = [
        {"series": PREDICTED, "ranks": one.num_ranks, "speedup": to_estimate(one.speedup)} for one in steps
    ]
    y = Axis(field="speedup", title="speedup over one rank", quantity="ratio", is_log=True)
    return plot_fan(title="Speedup by number of ranks", y=y, rows=rows, caption=f"{BAND}.", ideal=1.0)


def plot_predicted_parts(steps: Sequence[ScaledStep], names: Mapping[str, str]) -> Chart:
    """Where a step of every size goes."""
    rows: list[Made] = []
    for one in steps:
        for key, words in names.items():
            seconds = getattr(one.parts, f"{key}_seconds")
            rows.append({"bar": f"{one.num_ranks}", "series": words, "seconds": seconds})
    used = {row["series"] for row in rows if row["seconds"] > 0.002 * max(row["seconds"] for row in rows)}
    return plot_bars(
        title="Where a step goes, by number of ranks",
        x=Axis(field="seconds", title="time in a step", quantity="seconds"),
        y=Axis(field="bar", title="ranks", quantity="text"),
        rows=[row for row in rows if row["series"] in used],
        has_labels=True,
        caption="The parts add up to the predicted step.",
    )


def plot_extrapolated(series: ScalingSeries, extrapolated: Sequence[Extrapolated], *, is_time: bool) -> Chart:
    """A series of somebody's table, and what is expected of other sizes."""

    def show(throughput: float) -> float:
        return 1 / throughput if is_time else throughput

    rows: list[Made] = [
        {"series": MEASURED, "ranks": count, "value": show(series.throughput[count])} for count in series.ranks
    ]
    rows += [
        {"series": PREDICTED, "ranks": one.ranks, "value": to_estimate(one.throughput.map(show))}
        for one in extrapolated
        if one.ranks not in series.throughput
    ]
    y = Axis(field="value", title=series.unit or "value", quantity="number", is_log=True)
    first = series.ranks[0]
    ideal = None if is_time else series.throughput[first] / first
    return plot_fan(title=series.label, y=y, rows=rows, caption=f"{BAND}.", ideal=ideal)


def plot_candidates(best: Sequence[Candidate], confirmed: Mapping[int, Estimate] | None) -> Chart:
    """What the best combinations should give, and what those gave that were run."""
    rows: list[Made] = []
    for place, one in enumerate(best[:MOST_CANDIDATES], start=1):
        name = f"{place}. {', '.join(one.change.changes) or 'nothing changed'}"
        rows.append({"bar": name, "series": PREDICTED, "rate": to_estimate(one.step.throughput)})
        if confirmed and place in confirmed:
            rows.append({"bar": name, "series": MEASURED, "rate": confirmed[place]})
    more = f" {len(best) - MOST_CANDIDATES} more are in the table." if len(best) > MOST_CANDIDATES else ""
    return plot_bars(
        title="Samples per second of what could be changed",
        x=Axis(field="rate", title="samples per second", quantity="rate"),
        y=Axis(field="bar", title="", quantity="text"),
        rows=rows,
        is_stacked=False,
        caption=f"Thin lines are 80 % intervals of predictions, 95 % of what was measured.{more}",
    )


def plot_planned_times(parts: Mapping[str, float]) -> Chart | None:
    """Where the step of a layout goes."""
    rows: list[Made] = [{"bar": name, "seconds": seconds} for name, seconds in parts.items() if seconds]
    if not rows:
        return None
    return plot_bars(
        title="Where the step goes",
        x=Axis(field="seconds", title="time in a step", quantity="seconds"),
        y=Axis(field="bar", title="", quantity="text"),
        rows=rows,
        is_stacked=False,
        caption="The parts add up to the step of the fastest layout.",
    )


def plot_planned_memory(parts: Mapping[str, float], device_bytes: float) -> Chart | None:
    """What a device holds at the highest point."""
    rows: list[Made] = [{"bar": "one device", "series": name, "bytes": size} for name, size in parts.items() if size]
    if not rows:
        return None
    free = device_bytes - sum(parts.values())
    if free > 0:
        rows.append({"bar": "one device", "series": "left of the device", "bytes": free})
    return plot_bars(
        title="What a device holds",
        x=Axis(field="bytes", title="memory", quantity="bytes"),
        y=Axis(field="bar", title="", quantity="text"),
        rows=rows,
        has_labels=True,
        caption="Left of the device: for its context, its allocator, and what no plan knows.",
    )
