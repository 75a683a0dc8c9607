"""The documents of `scalelab predict RUN`: a measured job at other sizes, and with `--best` the fastest settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from scalelab.analysis.estimate import Estimate, Prediction
from scalelab.answers.prediction.predicted_job import MeasuredJob, ScalingRun
from scalelab.predict.scaled_job import ScaledStep
from scalelab.predict.what_if import Candidate, Need, WhatIf, fit_need
from scalelab.report.charts.amounts import plot_amounts
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.column_charts import MEASURED, PREDICTED, draw_stacks, keep_charts, plot_fan
from scalelab.report.document import Chart, Document, Section, Table
from scalelab.report.findings import DETAIL, MAIN, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import (
    bytes_column,
    count_column,
    make_table,
    rate_column,
    ratio_column,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.shared.cautions import EXTRAPOLATED
from scalelab.units import format_count, format_quantity, format_seconds, format_share, is_known

PREDICTION = FindingKind(
    "prediction",
    "Prediction for a size or setting that was not run, with an 80 % interval",
    MAIN,
    ("num_ranks", "speedup", "efficiency", "step_seconds", "throughput", "exposed_share"),
)
UNCERTAINTY = FindingKind(
    "main-uncertainty", "The input that contributes most to a prediction's variance", REASON, ("input", "share")
)
GAIN = FindingKind("gain", "Throughput over that of the most measured ranks", REASON, ("num_ranks", "throughput_ratio"))
SCALING_LIMIT = FindingKind("scaling-limit", "Beyond this many ranks the step gets longer", REASON, ("num_ranks",))
FASTEST = FindingKind("fastest-setting", "The fastest of what was compared", MAIN, ("throughput", "exposed_share"))
TIES = FindingKind("ties", "How many others are as fast, within the tolerance", DETAIL, ("num_others", "tolerance"))
LEFT_OUT = FindingKind("left-out", "Settings that do not fit in memory, or may not", DETAIL, ("num_left_out",))
CONFIRMED = FindingKind(
    "confirmation", "A predicted setting as measured here", REASON, ("throughput", "error", "is_inside")
)
OWN_LINKS = CautionKind("assumed-resources", "Every added rank is assumed to have its own cores and link")
HOOK_COST = CautionKind("uncounted-work", "The work of compressing gradients is not part of the prediction")
RESIDUAL = CautionKind("model-residual", "Two ranks took longer than the model explains", "noise", ("seconds",))
UNKNOWN_MEMORY = CautionKind("unknown-memory", "Memory of some settings is not known")
OTHER_BATCH = CautionKind("other-batch", "The batch changes what the model learns", "wrong-work", ("batch",))

PREDICTION_NOTE = "± is the 80 % interval of the prediction"
BAND = "The band is the 80 % interval of the prediction"
PART_NAMES = {
    "input": "input",
    "forward": "forward",
    "backward": "backward",
    "bubble": "bubble",
    "exposed": "exposed comm",
    "optimizer": "optimizer",
    "straggler": "straggler wait",
    "crowding": "core wait",
    "rest": "rest",
}
"""The parts of a step, as tables and charts call them."""
GROUP_WORDS = {
    "compute": "single-rank compute time",
    "latency": "link latency",
    "bandwidth": "link bandwidth",
    "contention": "how much communication slows compute",
    "jitter": "step-to-step variation of a rank",
    "residual": "time on 2 ranks that the model does not explain",
    "pair": "the step time measured on 2 ranks",
}
"""The inputs of a prediction, in words."""
FAR = 16
"""Times the measured ranks."""
CLOSE = 0.02
"""Throughputs that differ by less are called equal."""
MOST_CANDIDATES = 12


def describe_prediction(found: MeasuredJob, steps: Sequence[ScaledStep], change: WhatIf, source: str) -> Document:
    """Predicted sizes beside the measured ones."""
    kind = "weak scaling" if found.is_weak else "strong scaling"
    batch = f"{'batch per rank' if found.is_weak else 'global batch'} {change.batch or found.batch}"
    link = f"link {found.job.network.inside.words} ({found.link.source})"
    table, parts = make_step_table(found, steps, change), make_parts_table(steps)
    return Document(
        title="Prediction",
        question="How fast would this job run at other rank counts?",
        setting=" · ".join([source, kind, found.job.strategy, batch, link, *change.changes]),
        sections=(
            Section(
                tables=(table,),
                charts=(
                    draw_fan(table, {"step_seconds": PREDICTED, "measured_seconds": MEASURED}, "Step time"),
                    draw_fan(table, {"speedup": PREDICTED}, "Speedup over 1 rank", ideal=1.0),
                ),
            ),
            Section(heading="Step breakdown", tables=(parts,), charts=keep_charts(draw_parts(parts))),
        ),
        findings=tuple(summarise(found, steps, change)),
        cautions=tuple(find_cautions(found, steps, change)),
    )


def make_step_table(found: MeasuredJob, steps: Sequence[ScaledStep], change: WhatIf) -> Table:
    measured = {} if change.changes else found.measured
    one_rank = f"{found.job.strategy} × 1"
    basis = f"{one_rank} with the {'same batch per rank' if found.is_weak else 'whole batch'}"
    return make_table(
        steps,
        count_column("ranks", "ranks", lambda one: one.num_ranks),
        seconds_column("step_seconds", "step", lambda one: one.step),
        seconds_column("measured_seconds", "measured", lambda one: measured.get(one.num_ranks), unit_of="step_seconds"),
        rate_column("throughput", "samples/s", lambda one: one.throughput),
        ratio_column("speedup", "speedup", lambda one: one.speedup),
        share_column("efficiency", "efficiency", lambda one: one.efficiency),
        share_column("exposed", "exposed comm / step", lambda one: one.exposed),
        text_column("dominant", "main uncertainty", lambda one: one.dominant, is_detail=True),
        notes=(
            f"{PREDICTION_NOTE}; 95 % for measured steps",
            f"speedup and efficiency: over {basis}, not over the plain loop",
        ),
    )


def make_parts_table(steps: Sequence[ScaledStep]) -> Table:
    shown = [key for key in PART_NAMES if key != "bubble" or any(one.parts.bubble_seconds for one in steps)]
    keys = {f"{key}_seconds": PART_NAMES[key] for key in shown} | {"communication_seconds": "all comm"}
    return make_table(
        steps,
        count_column("ranks", "ranks", lambda one: one.num_ranks),
        *(
            seconds_column(key, header, partial(read_part, key), unit_of="backward_seconds")
            for key, header in keys.items()
        ),
        notes=(
            "the parts up to rest add up to the step; all comm = exposed + hidden behind backward",
            "rest: time on 2 ranks that the other parts do not explain, kept constant",
        ),
    )


def read_part(key: str, one: ScaledStep) -> float:
    return float(getattr(one.parts, key))


def draw_fan(
    table: Table, series: Mapping[str, str], title: str, *, caption: str = "", ideal: float | None = None
) -> Chart:
    """Columns of a table by its first one, measured or predicted; a row without numbers but with words has failed."""
    x, *others = table.columns
    keys = list(series)
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for name, *cells in table.rows:
        by_key = {column.key: cell for column, cell in zip(others, cells, strict=True)}
        known = {key: by_key[key].estimate for key in keys}
        rows += [{"series": series[key], "ranks": name.value, keys[0]: found} for key, found in known.items() if found]
        words = next((cell.value for cell in cells if isinstance(cell.value, str)), None)
        if not any(known.values()) and words is not None:
            failed.append({"series": series[keys[0]], "ranks": name.value, "status": words})
    bars = "; error bars of measured points are 95 % CIs" if MEASURED in {row["series"] for row in rows} else ""
    quantity = next(column.quantity for column in others if column.key == keys[0])
    return plot_fan(
        title=f"{title} by {x.header}",
        y=Axis(field=keys[0], title=title.lower(), quantity=quantity, is_log=True),
        rows=rows,
        failed=failed,
        x_title=x.header,
        caption=f"{BAND}{bars}.{caption}",
        ideal=ideal,
    )


def draw_parts(table: Table) -> Chart | None:
    """A stacked bar per rank count; parts that are nowhere visible are left out."""
    columns = {column.key: [row[n].estimate for row in table.rows] for n, column in enumerate(table.columns) if n}
    longest = {key: max((one.value for one in own if one), default=0.0) for key, own in columns.items()}
    most = max(longest.values(), default=0.0)
    return draw_stacks(
        table,
        [key for key, value in longest.items() if value > 0.002 * most and key != "communication_seconds"],
        title="Step breakdown by ranks",
        axis_title="time in a step",
        caption="The parts add up to the predicted step.",
    )


def summarise(found: MeasuredJob, steps: Sequence[ScaledStep], change: WhatIf) -> Iterator[Finding]:
    last = max(steps, key=lambda one: one.num_ranks)
    subject = f"{found.job.strategy} × {last.num_ranks}"
    under = f" with {', '.join(change.changes)}" if change.changes else ""
    yield PREDICTION(
        subject,
        f"On {format_count(last.num_ranks, 'rank')}{under} the speedup over {found.job.strategy} × 1 would be"
        f" {format_ratio(last.speedup)}, an efficiency of"
        f" {format_share(last.efficiency.value)}. A step would take {format_seconds(last.step.value)},"
        f" {format_share(last.exposed.value)} of it exposed communication.",
        num_ranks=last.num_ranks,
        speedup=last.speedup,
        efficiency=last.efficiency,
        step_seconds=last.step,
        throughput=last.throughput,
        exposed_share=last.exposed,
    )
    if not change.changes:
        yield from compare_with_measured(found, last)
    share = last.shares[last.dominant]
    words = GROUP_WORDS[last.dominant]
    yield UNCERTAINTY(
        subject,
        f"{words[0].upper()}{words[1:]} is the main uncertainty ({format_share(share)} of the variance).",
        input=last.dominant,
        share=share,
    )
    fastest = min(steps, key=lambda one: one.step.value)
    if fastest is not last and not found.is_weak:
        exposed = last.parts.exposed_seconds - fastest.parts.exposed_seconds
        waited = last.parts.straggler_seconds - fastest.parts.straggler_seconds
        cause = "communication" if exposed > waited else "waiting for the slowest rank"
        yield SCALING_LIMIT(
            f"{found.job.strategy} × {fastest.num_ranks}",
            f"Beyond {format_count(fastest.num_ranks, 'rank')} the step gets longer: {cause} grows more"
            " than compute shrinks.",
            num_ranks=fastest.num_ranks,
        )


def compare_with_measured(found: MeasuredJob, last: ScaledStep) -> Iterator[Finding]:
    """Whether more ranks are worth it: what they give over the most that was measured."""
    most = max(found.measured, default=last.num_ranks)
    if most >= last.num_ranks:
        return
    ranks = last.num_ranks / most
    now = found.measured[most].value * (ranks if found.is_weak else 1.0)
    gain = last.step.map(lambda seconds: now / seconds)
    half = ": less than half of the ideal" if gain.high < 1 + (ranks - 1) / 2 else ""
    text = f"{ranks:.3g} times the {most} measured ranks would give {format_ratio(gain)} times their throughput{half}."
    yield GAIN(f"{found.job.strategy} × {last.num_ranks}", text, num_ranks=last.num_ranks, throughput_ratio=gain)


def format_ratio(estimate: Prediction) -> str:
    value, low, high = (format_quantity("ratio", number) for number in (estimate.value, estimate.low, estimate.high))
    return f"{value if is_known(estimate) else 'unknown'} ({low} to {high})"


def find_cautions(found: MeasuredJob, steps: Sequence[ScaledStep], change: WhatIf) -> Iterator[Caution]:
    most, largest = max(found.measured, default=2), max(one.num_ranks for one in steps)
    if largest > FAR * most:
        yield EXTRAPOLATED(
            f"{found.job.strategy} × {largest}",
            f"{largest} ranks is far beyond the {most} measured: the interval does not cover effects that appear only"
            " there (congestion, failures, shared input)",
            "measure a larger size and predict from that",
            ranks=largest,
            largest_ranks=most,
        )
    if change.link is None and change.between is None and found.job.network.cores is None:
        yield OWN_LINKS(
            "",
            "assumes that every added rank has its own cores and the same link as the 2 measured",
            "use --link for another link, --ranks-per-node and --node-link for nodes, --cores if ranks share one host",
        )
    if change.compression != "none":
        yield HOOK_COST(
            "",
            f"the {change.compression} communication hook counts by the bytes it saves, not by the work it does",
            f"measure it: scalelab run strong-scaling --comm-hook {change.compression}",
        )
    residual = found.job.residual_seconds
    if residual > 0.1 * max(estimate.value for estimate in found.measured.values()):
        yield RESIDUAL(
            f"{found.job.strategy} × 2",
            f"2 ranks took {format_seconds(residual)} longer than the model explains",
            "measure the link with `scalelab collectives --ranks 2` and pass that run as --collectives",
            seconds=residual,
        )


def find_need(run: ScalingRun) -> Need | None:
    """Memory of a rank, by batch of a pass."""
    peaks: dict[float, float] = {}
    for arm in run.arms.values():
        if arm.peak_memory_bytes is not None:
            batch = float(arm.trial.batch_per_pass)
            peaks[batch] = max(peaks.get(batch, 0.0), float(arm.peak_memory_bytes))
    return fit_need(peaks)


def name_change(one: Candidate) -> str:
    return ", ".join(one.change.changes) or "as measured"


def describe_best(
    found: MeasuredJob,
    best: Sequence[Candidate],
    num_left_out: int,
    source: str,
    confirmed: Mapping[int, Estimate] | None = None,
) -> Document:
    """`confirmed`: measured samples per second by place in the list."""
    measured = confirmed or {}
    table = make_table(
        list(enumerate(best, start=1)),
        count_column("place", "", lambda row: row[0]),
        text_column("change", "settings", lambda row: name_change(row[1])),
        rate_column("throughput", "samples/s", lambda row: row[1].step.throughput),
        None
        if confirmed is None
        else rate_column("measured", "measured", lambda row: measured.get(row[0]), unit_of="throughput"),
        seconds_column("step_seconds", "step", lambda row: row[1].step.step),
        share_column("exposed", "exposed comm / step", lambda row: row[1].step.exposed),
        bytes_column("memory_bytes", "memory/rank", lambda row: row[1].need_bytes),
        notes=(PREDICTION_NOTE, "memory: a line through the measured peaks, without an interval"),
    )
    return Document(
        title="Prediction",
        question=f"Which settings would be fastest on {format_count(best[0].step.num_ranks, 'rank')}?",
        setting=f"{source} · {found.job.strategy} · link {found.job.network.inside.words} ({found.link.source})",
        sections=(Section(tables=(table,), charts=keep_charts(draw_candidates(table))),),
        findings=tuple(summarise_best(best, num_left_out, measured)),
        cautions=tuple(find_best_cautions(best, found.batch)),
    )


def draw_candidates(table: Table) -> Chart | None:
    """Predicted throughput of the best settings, and measured throughput of those that were run."""
    keys = [column.key for column in table.columns]
    rows: list[dict[str, Any]] = []
    for row in table.rows[:MOST_CANDIDATES]:
        cells = dict(zip(keys, row, strict=True))
        bar = f"{cells['place'].value}. {cells['change'].value}"
        rows.append({"name": bar, "series": PREDICTED, "rate": cells["throughput"].estimate})
        if "measured" in cells and cells["measured"].estimate is not None:
            rows.append({"name": bar, "series": MEASURED, "rate": cells["measured"].estimate})
    more = f" {len(table.rows) - MOST_CANDIDATES} more are in the table." if len(table.rows) > MOST_CANDIDATES else ""
    return plot_amounts(
        title="Throughput by settings",
        x=Axis(field="rate", title="samples per second", quantity="rate"),
        rows=rows,
        caption=f"Thin lines are 80 % intervals of predictions and 95 % CIs of measurements.{more}",
    )


def summarise_best(
    best: Sequence[Candidate], num_left_out: int, confirmed: Mapping[int, Estimate]
) -> Iterator[Finding]:
    first = best[0]
    yield FASTEST(
        name_change(first),
        f"Fastest: {name_change(first)}, at {format_quantity('rate', first.step.throughput)} samples/s, with"
        f" {format_share(first.step.exposed.value)} of the step exposed communication.",
        throughput=first.step.throughput,
        exposed_share=first.step.exposed,
    )
    for place, measured in confirmed.items():
        predicted = best[place - 1].step.throughput
        error, is_inside = measured.value / predicted.value - 1, predicted.holds(measured.value)
        yield CONFIRMED(
            name_change(best[place - 1]),
            f"Measured here, setting {place} reached {format_quantity('rate', measured.value)} samples/s,"
            f" {format_share(abs(error))} {'above' if error > 0 else 'below'} the prediction,"
            f" {'inside' if is_inside else 'outside'} its interval.",
            throughput=measured,
            error=error,
            is_inside=is_inside,
        )
    rates = [one.step.throughput.value for one in best]
    num_close = sum(rate > (1 - CLOSE) * rates[0] for rate in rates[1:])
    if num_close:
        text = f"{num_close} of the others are within {format_share(CLOSE)} of it: choose the simplest."
        yield TIES(name_change(first), text, num_others=num_close, tolerance=CLOSE)
    if num_left_out:
        text = f"Left out: {format_count(num_left_out, 'combination')}, because they do not fit in memory, or may not."
        yield LEFT_OUT("", text, num_left_out=num_left_out)


def find_best_cautions(best: Sequence[Candidate], batch: int) -> Iterator[Caution]:
    if best[0].change.batch != batch:
        yield OTHER_BATCH(
            name_change(best[0]),
            f"a batch other than {batch} changes what the model learns, not only its speed",
            f"see `scalelab run large-batch`, or keep the batch with --batch {batch}",
            batch=best[0].change.batch,
        )
    if any(one.need_bytes is None for one in best):
        yield UNKNOWN_MEMORY(
            "",
            "the memory of some settings is unknown: only one batch was measured",
            "use `scalelab run memory`, or --memory 16GB to leave out what may not fit",
        )
