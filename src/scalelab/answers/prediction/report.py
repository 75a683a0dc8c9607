"""The document of `scalelab predict RUN`: a measured job at sizes that were not run.

The charts of `predict` and `plan`: fans of what is expected, and where its time and memory go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.answers.prediction.job import MeasuredJob
from scalelab.predict.extrapolate import Extrapolated
from scalelab.predict.prediction import Prediction
from scalelab.predict.scale_out import GROUP_WORDS, ScaledStep
from scalelab.predict.tables import ScalingSeries
from scalelab.predict.what_if import Candidate, WhatIf
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.plot import plot_bars
from scalelab.report.charts.scaling import MEASURED, PREDICTED, plot_fan
from scalelab.report.document import Cell, Chart, Column, Document, Section, Table, make_row
from scalelab.report.findings import Caution, as_findings
from scalelab.units import format_quantity, format_seconds, format_share

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


INTERVAL_NOTE = "± is an 80 % interval of the prediction"
PART_NAMES = {
    "input": "input",
    "forward": "forward",
    "backward": "backward",
    "exposed": "exposed comm",
    "optimizer": "optimizer",
    "straggler": "waiting for the slowest",
    "crowding": "waiting for cores",
    "rest": "rest",
}
"""The parts of a step, as tables and charts call them."""
FAR = 16
"""Times the ranks that were measured."""


def describe_prediction(found: MeasuredJob, steps: Sequence[ScaledStep], change: WhatIf, source: str) -> Document:
    """Predicted sizes beside those that were measured."""
    kind = "weak scaling" if found.is_weak else "strong scaling"
    batch = f"batch {change.batch or found.batch}{' per rank' if found.is_weak else ' in all'}"
    fan = plot_predicted_steps({} if change.changes else found.measured, steps)
    words = [source, kind, found.job.strategy, batch, f"{found.job.network.inside.words} ({found.link.source})"]
    return Document(
        title="Prediction",
        question="What would other numbers of ranks give?",
        setting=" · ".join([*words, *change.changes]),
        sections=(
            Section(tables=(make_step_table(found, steps, change),), charts=(fan, plot_predicted_speedup(steps))),
            Section(
                heading="Where a step goes",
                tables=(make_parts_table(steps),),
                charts=(plot_predicted_parts(steps, PART_NAMES),),
            ),
        ),
        findings=as_findings(summarise(found, steps, change)),
        cautions=tuple(find_cautions(found, steps, change)),
    )


def make_step_table(found: MeasuredJob, steps: Sequence[ScaledStep], change: WhatIf) -> Table:
    columns = (
        Column(key="ranks", header="ranks", quantity="count"),
        Column(key="step_seconds", header="step", quantity="seconds"),
        Column(key="measured_seconds", header="measured", quantity="seconds", unit_of="step_seconds"),
        Column(key="throughput", header="samples/s", quantity="rate"),
        Column(key="speedup", header="speedup", quantity="ratio"),
        Column(key="efficiency", header="efficiency", quantity="share"),
        Column(key="exposed", header="exposed comm", quantity="share"),
        Column(key="dominant", header="least known", align="left"),
    )
    rows = [
        (
            Cell(value=one.num_ranks),
            show(one.step),
            *make_row(None if change.changes else found.measured.get(one.num_ranks)),
            show(one.throughput),
            show(one.speedup),
            show(one.efficiency),
            show(one.exposed),
            Cell(value=one.dominant),
        )
        for one in steps
    ]
    basis = "over one rank with the same work on each" if found.is_weak else "over one rank with the whole batch"
    notes = (INTERVAL_NOTE + "; of the measured step 95 %", f"speedup and efficiency are {basis}")
    return Table(columns=columns, rows=tuple(rows), notes=notes)


def make_parts_table(steps: Sequence[ScaledStep]) -> Table:
    names = PART_NAMES
    columns = (
        Column(key="ranks", header="ranks", quantity="count"),
        *(
            Column(key=f"{key}_seconds", header=header, quantity="seconds", unit_of="backward_seconds")
            for key, header in names.items()
        ),
        Column(key="communication_seconds", header="all comm", quantity="seconds", unit_of="backward_seconds"),
    )
    rows = [
        make_row(
            one.num_ranks,
            *(getattr(one.parts, f"{key}_seconds") for key in names),
            one.parts.communication_seconds,
        )
        for one in steps
    ]
    notes = (
        "the parts add up to the step; of all communication, what is not exposed is hidden behind backward",
        "rest: what two ranks took beyond the other parts, taken as it is",
    )
    return Table(columns=columns, rows=tuple(rows), notes=notes)


def show(prediction: Prediction | None) -> Cell:
    """A cell with its interval; None is unknown."""
    if prediction is None:
        return Cell()
    return Cell(value=prediction.value, low=prediction.low, high=prediction.high)


def summarise(found: MeasuredJob, steps: Sequence[ScaledStep], change: WhatIf) -> Iterator[str]:
    last = max(steps, key=lambda one: one.num_ranks)
    low, high = (format_quantity("ratio", value) for value in (last.speedup.low, last.speedup.high))
    under = f" with {', '.join(change.changes)}" if change.changes else ""
    yield (
        f"On {last.num_ranks} ranks{under} the job would be {format_quantity('ratio', last.speedup.value)} times as"
        f" fast as on one ({low} to {high}), an efficiency of {format_share(last.efficiency.value)}: a step of"
        f" {format_seconds(last.step.value)}, of which {format_share(last.exposed.value)} is exposed communication."
    )
    yield (
        f"What is known least there is {GROUP_WORDS[last.dominant]}: it makes"
        f" {format_share(last.shares[last.dominant])} of the prediction's variance."
    )
    fastest = min(steps, key=lambda one: one.step.value)
    if fastest is not last and not found.is_weak:
        grown = last.parts.exposed_seconds - fastest.parts.exposed_seconds
        waited = last.parts.straggler_seconds - fastest.parts.straggler_seconds
        cause = "communication" if grown > waited else "waiting for the slowest rank"
        yield f"Beyond {fastest.num_ranks} ranks a step gets longer: {cause} grows by more than computing shrinks."


def find_cautions(found: MeasuredJob, steps: Sequence[ScaledStep], change: WhatIf) -> Iterator[Caution]:
    most = max(found.measured, default=2)
    if max(one.num_ranks for one in steps) > FAR * most:
        yield Caution(
            message=f"{max(one.num_ranks for one in steps)} ranks are far from the {most} that were measured: what"
            " appears only there (congestion, failures, input of all) is in no interval",
            next_step="measure a larger size, and predict from that",
        )
    if change.link is None and change.between is None and found.job.network.cores is None:
        yield Caution(
            message="ranks beyond those measured are taken to have cores and a link of their own, as the two had",
            next_step="say --link for another link, --ranks-per-node and --node-link for nodes, or --cores for one"
            " host that all share",
        )
    if change.compression != "none":
        yield Caution(
            message=f"{change.compression} counts by the bytes that it saves, not by the work of compressing",
            next_step=f"measure it: --gradient-hook {change.compression}",
        )
    if found.job.residual_seconds > 0.1 * max(estimate.value for estimate in found.measured.values()):
        yield Caution(
            message=f"two ranks took {format_seconds(found.job.residual_seconds)} more than the model explains",
            next_step="measure the link with scalelab collectives --ranks 2 and give it as --collectives",
        )
