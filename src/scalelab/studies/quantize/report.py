"""The tables and figures of quantize: accuracy by stage, size and latency, layers, and what ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scalelab.analysis.paired import PairedCounts, estimate_share
from scalelab.records.quantized import Histogram, LayerReport, Quantized
from scalelab.report.charts.amounts import HistogramBins, list_marks, plot_amounts, plot_histogram
from scalelab.report.charts.column_charts import draw_columns, keep_charts
from scalelab.report.charts.plot import Axis, Row, plot_lines
from scalelab.report.document import Chart, Section, Table
from scalelab.report.findings import Known
from scalelab.report.tables import (
    Field,
    bytes_column,
    count_column,
    make_column,
    make_table,
    ratio_column,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.quantize.answer import Latency, LayerBlame, StageAnswer, find_size, rank_layers

PAIRED_NOTE = "± is a 95 % interval over test samples (Newcombe for pairs, Wilson for shares)"
ROUNDS_NOTE = "± is a 95 % interval over rounds of one process, on one thread, in random order"
RUNTIME_TITLES = {
    "onnxruntime-float32": "onnxruntime, float32",
    "onnxruntime-int8": "onnxruntime, int8",
    "eager-float32": "torch, float32",
    "eager-int8": "torch, int8",
}
FILE_ENDINGS = {"onnxruntime-float32": "float32.onnx", "onnxruntime-int8": "int8.onnx"}
MOST_LAYERS = 24
"""More bars do not fit on a page; the worst are drawn."""
MOST_HISTOGRAMS = 6
ROUNDS = "Lines at the points are 95 % intervals over rounds of one process, on one thread."
KIND_WORDS = {"before": "before ReLU", "after": "after ReLU"}
RESULTS = "activations"
"""A layer's output where nothing is known before its ReLU, or it has none."""


def make_sections(quantized: Quantized, answers: Sequence[StageAnswer], latencies: Sequence[Latency]) -> list[Section]:
    """All tables and figures that the record is enough for."""
    sections = [Section(tables=(make_stage_table(answers),), charts=draw_stages(answers))]
    files = make_size_table(quantized)
    drawn = keep_charts(draw_columns(files, ["size_bytes"], title="Size of the stored models", caption=""))
    if latencies:
        speeds = make_speed_table(quantized, latencies)
        sections.append(
            Section(heading="Size and speed", tables=(speeds,), charts=(*draw_latencies(latencies), *drawn))
        )
    elif quantized.sizes:
        sections.append(Section(heading="Size", tables=(files,), charts=drawn))
    if quantized.layers:
        blames = rank_layers(quantized)
        charts = (*draw_layers(quantized, blames), *draw_histograms(quantized, blames))
        sections.append(Section(heading="Layers", tables=(make_blame_table(quantized, blames),), charts=charts))
    if any(layer.kernel or layer.seconds for layer in quantized.layers):
        sections.append(Section(heading="What ran", tables=(make_kernel_table(quantized),)))
    if quantized.remarks:
        sections.append(Section(heading="Remarks", paragraphs=quantized.remarks))
    return sections


def make_stage_table(answers: Sequence[StageAnswer]) -> Table:
    """What every way to run the model gets right, beside float."""

    def count(read: Callable[[PairedCounts], int]) -> Callable[[StageAnswer], Known]:
        return lambda answer: read(answer.counts) if answer.counts and answer.agreement else None

    notes = [f"{answer.stage.title}: {answer.stage.note}" for answer in answers if answer.stage.note]
    return make_table(
        answers,
        text_column("stage", "stage", lambda answer: answer.stage.title),
        make_column(
            "accuracy", "accuracy", "accuracy", lambda answer: answer.counts.accuracy if answer.counts else None
        ),
        make_column(
            "accuracy", "change", "change", lambda answer: answer.difference, note="accuracy less that in float, points"
        ),
        count_column("won", "won", count(lambda counts: counts.won), note="float wrong, this right"),
        count_column("lost", "lost", count(lambda counts: counts.lost), note="float right, this wrong"),
        make_column(
            "accuracy", "agreement", "same class", lambda answer: answer.agreement, note="as in float, right or wrong"
        ),
        notes=(PAIRED_NOTE, *notes),
    )


def make_speed_table(quantized: Quantized, latencies: Sequence[Latency]) -> Table:
    """Size and latency of every runtime, one pair of columns for each batch size."""
    found = {(latency.runtime, latency.batch): latency for latency in latencies}

    def read_latency(batch: int, read: Callable[[Latency], Known]) -> Callable[[str], Known]:
        return lambda runtime: read(found[runtime, batch]) if (runtime, batch) in found else None

    columns: list[Field[str]] = []
    for batch in sorted({latency.batch for latency in latencies}):
        seconds = read_latency(batch, lambda latency: latency.seconds)
        speedup = read_latency(batch, lambda latency: latency.speedup)
        columns.append(seconds_column(f"latency_{batch}_seconds", f"batch {batch}", seconds))
        columns.append(ratio_column(f"speedup_{batch}", f"speedup {batch}", speedup))
    return make_table(
        dict.fromkeys(latency.runtime for latency in latencies),
        text_column("runtime", "runtime", lambda runtime: RUNTIME_TITLES.get(runtime, runtime)),
        bytes_column(
            "size_bytes",
            "size",
            lambda runtime: find_size(quantized, FILE_ENDINGS[runtime]) if runtime in FILE_ENDINGS else None,
        ),
        *columns,
        notes=(ROUNDS_NOTE, f"speedup: over {name_reference(latencies)}"),
    )


def name_reference(latencies: Sequence[Latency]) -> str:
    """The runtime that others are compared with."""
    return next((RUNTIME_TITLES.get(one.runtime, one.runtime) for one in latencies if one.speedup is None), "float32")


def make_size_table(quantized: Quantized) -> Table:
    """What was stored."""
    return make_table(
        quantized.sizes,
        text_column("file", "file", lambda entry: entry[0]),
        bytes_column("size_bytes", "size", lambda entry: entry[1]),
    )


def make_blame_table(quantized: Quantized, blames: Sequence[LayerBlame]) -> Table:
    """What int8 does to every layer, and what the layer then does to the logits; the worst first."""
    tested = next((layer.num_tested for layer in quantized.layers if layer.num_tested), None)
    notes = [
        "SQNR: of its output, with everything before it in int8; alone: only this layer; logits: of the logits, with"
        " only this layer",
        "clipped: outputs outside its range; dead: output channels that never change",
        "outlier: the largest weight of a channel over the next one, where that is largest",
    ]
    if tested:
        notes.insert(0, f"only this, all but this: change in accuracy, in points, on {tested} samples")
    return make_table(
        blames,
        text_column("layer", "layer", lambda blame: blame.layer.name),
        share_column("noise_share", "noise", lambda blame: blame.noise_share, note="share of the noise in the logits"),
        make_column("accuracy", "only", "only this", lambda blame: blame.only),
        make_column("accuracy", "without", "all but this", lambda blame: blame.without),
        make_column("number", "sqnr", "SQNR dB", lambda blame: blame.layer.sqnr),
        make_column("number", "sqnr_alone", "alone dB", lambda blame: blame.layer.sqnr_alone),
        make_column("number", "output_sqnr", "logits dB", lambda blame: blame.layer.output_sqnr),
        share_column("clipped_share", "clipped", lambda blame: blame.layer.clipped_share),
        count_column("dead_outputs", "dead", lambda blame: blame.layer.dead_outputs),
        ratio_column("weight_gap", "outlier", lambda blame: blame.layer.weight_gap),
        notes=notes,
    )


def make_kernel_table(quantized: Quantized) -> Table:
    """What really ran, by the runtime's own profile."""

    def compare(layer: LayerReport) -> float | None:
        return layer.float_seconds / layer.seconds if layer.seconds and layer.float_seconds else None

    return make_table(
        quantized.layers,
        text_column("layer", "layer", lambda layer: layer.name),
        text_column("op", "operation", lambda layer: layer.op),
        count_column("num_weights", "weights", lambda layer: layer.num_weights or None),
        text_column("kernel", "kernel", lambda layer: layer.kernel or None),
        seconds_column("seconds", "int8", lambda layer: layer.seconds),
        seconds_column("float_seconds", "float32", lambda layer: layer.float_seconds, unit_of="seconds"),
        ratio_column("speedup", "speedup", compare),
        notes=("times of one batch by onnxruntime's profiler, without intervals",),
    )


def draw_stages(answers: Sequence[StageAnswer]) -> tuple[Chart, ...]:
    """Accuracy of every stage, and its change against float."""
    known = [(answer.stage, answer.counts, answer.difference) for answer in answers if answer.counts is not None]
    levels: list[Row] = [
        {"name": stage.title, "accuracy": estimate_share(counts.both + counts.won, counts.num_samples), "series": "",
         "key": stage.name}
        for stage, counts, _ in known
    ]  # fmt: skip
    changes: list[Row] = [
        {"name": stage.title, "change": difference, "series": "", "key": stage.name}
        for stage, _, difference in known
        if difference is not None
    ]
    return keep_charts(
        plot_amounts(
            title="Accuracy by stage",
            x=Axis(field="accuracy", title="accuracy", quantity="accuracy", from_zero=False),
            rows=levels,
            caption="Thin lines are 95 % intervals of each accuracy (Wilson's); the axis does not start at zero. All"
            " stages saw the same samples, so the change below is more precise.",
        ),
        plot_amounts(
            title="Change against float",
            x=Axis(field="change", title="change in accuracy", quantity="accuracy", from_zero=False, is_signed=True),
            rows=changes,
            reference=0.0,
            caption="In points, with 95 % intervals for pairs (Newcombe's); an interval that crosses the dashed line"
            " does not show a change.",
        ),
    )


def draw_latencies(latencies: Sequence[Latency]) -> tuple[Chart, ...]:
    """Latency against the batch, by runtime."""
    rows: list[Row] = [
        {
            "batch": latency.batch,
            "seconds": latency.seconds,
            "series": RUNTIME_TITLES.get(latency.runtime, latency.runtime),
            "key": latency.runtime,
        }
        for latency in latencies
    ]
    batches = sorted({latency.batch for latency in latencies})
    if len(rows) < 2:
        return ()
    if len(batches) < 2:
        named: list[Row] = [dict(row) | {"name": row["series"], "series": ""} for row in rows]
        seconds = Axis(field="seconds", title=f"latency at batch {batches[0]}", quantity="seconds")
        chart = plot_amounts(title="Latency by runtime", x=seconds, rows=named, caption=ROUNDS)
        return keep_charts(chart)
    chart = plot_lines(
        title="Latency by runtime and batch",
        x=Axis(field="batch", title="batch", quantity="count", is_log=True, ticks=tuple(map(float, batches))),
        y=Axis(field="seconds", title="latency", quantity="seconds", is_log=True),
        rows=rows,
        caption=f"{ROUNDS} Both axes are logarithmic.",
    )
    return keep_charts(chart)


def draw_layers(quantized: Quantized, blames: Sequence[LayerBlame]) -> tuple[Chart, ...]:
    """What every layer does to the logits, and how well its own numbers survive."""
    shown = blames[:MOST_LAYERS]
    known = [
        one for one in shown if (one.layer.sqnr, one.layer.sqnr_alone, one.layer.output_sqnr) != (None, None, None)
    ]
    left_out = f" The {MOST_LAYERS} worst of {len(blames)} layers." if len(blames) > len(shown) else ""
    ratios = {
        "sqnr": "everything before it in int8 too",
        "sqnr_alone": "only this layer in int8",
        "output_sqnr": "the logits, only this layer in int8",
    }
    return keep_charts(
        draw_columns(
            make_blame_table(quantized, shown),
            ["noise_share"],
            title="Noise in the logits by layer",
            axis_title="share of the noise in the logits",
            caption=f"Each layer alone in int8, the worst first; without intervals.{left_out}",
        ),
        draw_columns(
            make_blame_table(quantized, known),
            ratios,
            title="Signal over quantization noise by layer",
            axis_title="SQNR in decibels",
            from_zero=False,
            caption="Ten decibels more is a tenth of the noise: layers further left lose more. Layers that do not round"
            f" are left out.{left_out}",
        ),
    )


def draw_histograms(quantized: Quantized, blames: Sequence[LayerBlame]) -> tuple[Chart, ...]:
    """Weights and outputs of the layers that matter most, with the chosen range."""
    found: dict[str, dict[str, Histogram]] = {}
    for histogram in quantized.histograms:
        found.setdefault(histogram.layer, {})[histogram.kind] = histogram
    names = list(found)
    if len(names) > MOST_HISTOGRAMS:
        ranked = [one.layer.name for one in blames if one.layer.name in found]
        worst = [*ranked, *(name for name in names if name not in ranked)][:MOST_HISTOGRAMS]
        names = [name for name in names if name in worst]
    left_out = "" if len(names) == len(found) else f" The {len(names)} worst of {len(found)} layers are drawn."
    charts = [chart for name in names for chart in draw_layer(name, found[name], left_out)]
    return keep_charts(*charts)


def draw_layer(
    name: str, kinds: dict[str, Histogram], left_out: str = "", *, is_log: bool = True, is_labelled: bool = True
) -> list[Chart | None]:
    charts = []
    results = {KIND_WORDS[kind]: kinds[kind] for kind in KIND_WORDS if kind in kinds}
    if "after" in kinds and ("before" not in kinds or kinds["after"].least < 0):
        results = {RESULTS: kinds["after"]}
    for what, group in (("weights", {"weights": kinds["weights"]} if "weights" in kinds else {}), (RESULTS, results)):
        if group:
            last = list(group.values())[-1]
            charts.append(
                plot_histogram(
                    title=f"{name}: {what}",
                    axis_title=what.removesuffix("s") + ("" if is_labelled else " (solid: range, dashed: ± 3σ)"),
                    bins={
                        word: HistogramBins(low=one.low, high=one.high, counts=one.counts)
                        for word, one in group.items()
                    },
                    marks=_list_ranges(last),
                    caption=_describe_range(last, list(group)[-1], is_log=is_log) + left_out,
                    is_log=is_log,
                    is_labelled=is_labelled,
                )
            )
    return charts


def _list_ranges(histogram: Histogram) -> list[Row]:
    """The ends of the chosen range, and the mean ± three deviations where they are near what is drawn."""
    three = 3 * histogram.deviation
    width = histogram.high - histogram.low
    sigma = [("deviation", "−3σ", histogram.mean - three), ("deviation", "+3σ", histogram.mean + three)]
    sigma = sigma[1:] if histogram.least >= 0 else sigma  # nothing lies below 0
    near = [one for one in sigma if histogram.low - width / 2 <= one[2] <= histogram.high + width / 2]
    chosen = [("chosen", "range", histogram.chosen_low), ("chosen", "range", histogram.chosen_high)]
    return [dict(mark) for mark in list_marks([*chosen, *near])]


def _describe_range(histogram: Histogram, word: str, *, is_log: bool) -> str:
    axis = f"Counts on a {'logarithmic' if is_log else 'linear'} axis"
    of = f" {word}" if word in KIND_WORDS.values() else f" of the {word}"
    if histogram.chosen_low is None and histogram.chosen_high is None:
        return f"{axis}; dashed: mean ± 3 standard deviations{of}. It is not quantized: no range."
    return f"{axis}; solid lines: the chosen range{of}; dashed: mean ± 3 standard deviations{of}."
