"""The tables of `quantize`: accuracy by stage, size and latency, what every layer does to the answer, what ran.

The figures of `quantize`: accuracy, latency, layers, and the numbers that ranges were chosen for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scalelab.analysis.paired import estimate_share
from scalelab.records.quantized import Histogram, Quantized
from scalelab.report.charts.amounts import plot_amounts
from scalelab.report.charts.histogram import Bins, list_marks, plot_histogram
from scalelab.report.charts.plot import Axis, Row, plot_lines
from scalelab.report.document import Chart, Column, Section, Table, make_row
from scalelab.studies.quantize.answer import (
    Latency,
    LayerBlame,
    StageAnswer,
    find_size,
    rank_layers,
)
from scalelab.studies.shared.sweep import keep_charts

PAIRED_NOTE = "± is a 95 % interval over test samples, its longer arm (Newcombe's for pairs; Wilson's for a share)"
ROUNDS_NOTE = "± is a 95 % interval over rounds of this one process, on one thread, in random order"
RUNTIME_TITLES = {
    "onnxruntime-float32": "onnxruntime, float32",
    "onnxruntime-int8": "onnxruntime, int8",
    "eager-float32": "torch, float32",
    "eager-int8": "torch, int8",
}
FILE_ENDINGS = {"onnxruntime-float32": "float32.onnx", "onnxruntime-int8": "int8.onnx"}


def make_stage_table(answers: Sequence[StageAnswer]) -> Table:
    """What every way to execute the model gets right, beside float."""
    columns = (
        Column(key="stage", header="stage", align="left"),
        Column(key="accuracy", header="accuracy", quantity="accuracy"),
        Column(key="change", header="change", quantity="accuracy", note="accuracy less that in float, in points"),
        Column(key="won", header="won", quantity="count", note="samples that float got wrong and this gets right"),
        Column(key="lost", header="lost", quantity="count", note="samples that float got right and this gets wrong"),
        Column(key="agreement", header="same class", quantity="accuracy", note="as in float, right or wrong"),
    )
    rows = tuple(
        make_row(
            answer.stage.title,
            answer.counts.accuracy if answer.counts else None,
            answer.difference,
            answer.counts.won if answer.counts and answer.agreement else None,
            answer.counts.lost if answer.counts and answer.agreement else None,
            answer.agreement,
        )
        for answer in answers
    )
    notes = [f"{answer.stage.title}: {answer.stage.note}" for answer in answers if answer.stage.note]
    return Table(columns=columns, rows=rows, notes=(PAIRED_NOTE, *notes))


def make_speed_table(quantized: Quantized, latencies: Sequence[Latency]) -> Table:
    """Size and latency of every runtime, one pair of columns for each batch size."""
    batches = sorted({latency.batch for latency in latencies})
    columns = [
        Column(key="runtime", header="runtime", align="left"),
        Column(key="size_bytes", header="size", quantity="bytes"),
    ]
    for batch in batches:
        columns.append(Column(key=f"latency_{batch}_seconds", header=f"batch {batch}", quantity="seconds"))
        columns.append(Column(key=f"speedup_{batch}", header=f"speedup {batch}", quantity="ratio"))
    found = {(latency.runtime, latency.batch): latency for latency in latencies}
    rows = []
    for runtime in dict.fromkeys(latency.runtime for latency in latencies):
        ending = FILE_ENDINGS.get(runtime)
        cells: list[object] = [find_size(quantized, ending) if ending else None]
        for batch in batches:
            latency = found.get((runtime, batch))
            cells += [latency.seconds, latency.speedup] if latency else [None, None]
        rows.append(make_row(RUNTIME_TITLES.get(runtime, runtime), *cells))  # type: ignore[arg-type]
    notes = (ROUNDS_NOTE, f"speedup: over {name_reference(latencies)}")
    return Table(columns=tuple(columns), rows=tuple(rows), notes=notes)


def name_reference(latencies: Sequence[Latency]) -> str:
    """The runtime that others are compared with, in words."""
    return next((RUNTIME_TITLES.get(one.runtime, one.runtime) for one in latencies if one.speedup is None), "float32")


def make_size_table(quantized: Quantized) -> Table:
    """What was stored, where nothing was timed."""
    columns = (
        Column(key="file", header="file", align="left"),
        Column(key="size_bytes", header="size", quantity="bytes"),
    )
    return Table(columns=columns, rows=tuple(make_row(name, num_bytes) for name, num_bytes in quantized.sizes))


def make_blame_table(quantized: Quantized, blames: Sequence[LayerBlame]) -> Table:
    """What int8 does to every layer, and what the layer then does to the answer; the worst first."""
    columns = (
        Column(key="layer", header="layer", align="left"),
        Column(key="noise_share", header="noise", quantity="share", note="its share of the noise in the logits"),
        Column(key="only", header="only this", quantity="accuracy"),
        Column(key="without", header="all but this", quantity="accuracy"),
        Column(key="sqnr", header="SQNR dB", quantity="number"),
        Column(key="sqnr_alone", header="alone dB", quantity="number"),
        Column(key="output_sqnr", header="answer dB", quantity="number"),
        Column(key="clipped_share", header="clipped", quantity="share"),
        Column(key="dead_outputs", header="dead", quantity="count"),
        Column(key="weight_gap", header="outlier", quantity="ratio"),
    )
    rows = tuple(
        make_row(
            blame.layer.name,
            blame.noise_share,
            blame.only,
            blame.without,
            blame.layer.sqnr,
            blame.layer.sqnr_alone,
            blame.layer.output_sqnr,
            blame.layer.clipped_share,
            blame.layer.dead_outputs,
            blame.layer.weight_gap,
        )
        for blame in blames
    )
    return Table(columns=columns, rows=rows, notes=tuple(_explain_blame(quantized)))


def _explain_blame(quantized: Quantized) -> list[str]:
    tested = next((layer.num_tested for layer in quantized.layers if layer.num_tested), None)
    notes = [
        "SQNR: of its result, with everything before it in int8; alone: only it; answer: of the logits, with only it",
        "clipped: of its results, those outside of its range; dead: output channels that never change",
        "outlier: the largest weight of a channel over the next one, where that is most",
    ]
    if tested:
        notes.insert(0, f"only this, all but this: change in accuracy, in points, on {tested} samples")
    return notes


def make_kernel_table(quantized: Quantized) -> Table:
    """What really ran, by the runtime's own profile."""
    columns = (
        Column(key="layer", header="layer", align="left"),
        Column(key="op", header="operation", align="left"),
        Column(key="num_weights", header="weights", quantity="count"),
        Column(key="kernel", header="kernel", align="left"),
        Column(key="seconds", header="int8", quantity="seconds"),
        Column(key="float_seconds", header="float32", quantity="seconds", unit_of="seconds"),
        Column(key="speedup", header="speedup", quantity="ratio"),
    )
    rows = tuple(
        make_row(
            layer.name,
            layer.op,
            layer.num_weights or None,
            layer.kernel or None,
            layer.seconds,
            layer.float_seconds,
            layer.float_seconds / layer.seconds if layer.seconds and layer.float_seconds else None,
        )
        for layer in quantized.layers
    )
    return Table(columns=columns, rows=rows, notes=("times of one batch by onnxruntime's profile, without intervals",))


def make_sections(quantized: Quantized, answers: Sequence[StageAnswer], latencies: Sequence[Latency]) -> list[Section]:
    """All tables that the record is enough for."""
    sections = [Section(tables=(make_stage_table(answers),))]
    if latencies:
        sections.append(Section(heading="Size and speed", tables=(make_speed_table(quantized, latencies),)))
    elif quantized.sizes:
        sections.append(Section(heading="Size", tables=(make_size_table(quantized),)))
    if quantized.layers:
        blames = rank_layers(quantized)
        sections.append(Section(heading="Layers", tables=(make_blame_table(quantized, blames),)))
    if any(layer.kernel or layer.seconds for layer in quantized.layers):
        sections.append(Section(heading="What ran", tables=(make_kernel_table(quantized),)))
    if quantized.remarks:
        sections.append(Section(heading="Remarks", paragraphs=quantized.remarks))
    return sections


MOST_LAYERS = 24
"""More bars do not fit onto a page; the worst are drawn."""
MOST_HISTOGRAMS = 6
ROUNDS = "Lines at the points are 95 % intervals over rounds of one process, on one thread."
KIND_WORDS = {"before": "before ReLU", "after": "after ReLU"}
RESULTS = "results"
"""What is after a layer where nothing is known of before its ReLU, or it has none."""


def add_charts(
    sections: Sequence[Section], quantized: Quantized, answers: Sequence[StageAnswer], latencies: Sequence[Latency]
) -> list[Section]:
    """The sections with their figures; histograms are with the layers that they are of."""
    blames = rank_layers(quantized)
    drawn = {
        "": draw_stages(answers),
        "Size and speed": (*draw_latencies(latencies), *draw_files(quantized)),
        "Size": draw_files(quantized),
        "Layers": (*draw_layers(blames), *draw_histograms(quantized, blames)),
    }
    return [replace(section, charts=(*section.charts, *drawn.get(section.heading, ()))) for section in sections]


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
            caption="Thin lines are 95 % intervals of each share by itself (Wilson's); the axis does not begin at zero."
            " All stages saw the same samples, so that the change below is known better than the two it is made of.",
        ),
        plot_amounts(
            title="Change against float",
            x=Axis(field="change", title="change in accuracy", quantity="accuracy", from_zero=False, is_signed=True),
            rows=changes,
            reference=0.0,
            caption="Points of accuracy, with 95 % intervals for pairs (Newcombe's); an interval that crosses the"
            " dashed line decides nothing.",
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


def draw_files(quantized: Quantized) -> tuple[Chart, ...]:
    rows: list[Row] = [
        {"name": name, "size_bytes": num_bytes, "series": "", "key": name} for name, num_bytes in quantized.sizes
    ]
    size = Axis(field="size_bytes", title="size", quantity="bytes")
    return keep_charts(plot_amounts(title="Size of the stored models", x=size, rows=rows, caption="Exact."))


def draw_layers(blames: Sequence[LayerBlame]) -> tuple[Chart, ...]:
    """What every layer does to the answer, and how well its own numbers survive."""
    shown = blames[:MOST_LAYERS]
    left_out = f" The {MOST_LAYERS} worst of {len(blames)} layers." if len(blames) > len(shown) else ""
    shares: list[Row] = [
        {"name": one.layer.name, "noise_share": one.noise_share, "series": "", "key": one.layer.name,
         "status": "" if one.noise_share is not None else "makes none, or nobody looked"}
        for one in shown
    ]  # fmt: skip
    ratios: list[Row] = [
        {"name": one.layer.name, "sqnr": value, "series": series, "key": one.layer.name,
         "status": "" if value is not None else "–"}
        for one in shown
        if (one.layer.sqnr, one.layer.sqnr_alone, one.layer.output_sqnr) != (None, None, None)
        for series, value in (
            ("everything before it in int8 too", one.layer.sqnr),
            ("only this layer in int8", one.layer.sqnr_alone),
            ("the answer, only this layer in int8", one.layer.output_sqnr),
        )
    ]  # fmt: skip
    return keep_charts(
        plot_amounts(
            title="Noise in the answer by layer",
            x=Axis(field="noise_share", title="share of the noise in the logits", quantity="share"),
            rows=shares,
            caption=f"Each layer alone in int8, the worst first; without intervals.{left_out}",
        ),
        plot_amounts(
            title="Signal over quantization noise by layer",
            x=Axis(field="sqnr", title="SQNR in decibels", quantity="number", from_zero=False),
            rows=ratios,
            caption="Ten decibels more are a tenth of the noise: what lies further left has lost more. Without"
            f" intervals; layers that do not round are left out.{left_out}",
        ),
    )


def draw_histograms(quantized: Quantized, blames: Sequence[LayerBlame]) -> tuple[Chart, ...]:
    """Weights and results of the layers that matter most, with the range that was chosen."""
    found: dict[str, dict[str, Histogram]] = {}
    for histogram in quantized.histograms:
        found.setdefault(histogram.layer, {})[histogram.kind] = histogram
    names = list(found)
    if len(names) > MOST_HISTOGRAMS:
        ranked = [one.layer.name for one in blames if one.layer.name in found]
        worst = [*ranked, *(name for name in names if name not in ranked)][:MOST_HISTOGRAMS]
        names = [name for name in names if name in worst]
    left_out = "" if len(names) == len(found) else f" The {len(names)} worst of {len(found)} layers are drawn."
    charts = [chart for name in names for chart in _draw_layer(name, found[name], left_out)]
    return keep_charts(*charts)


def _draw_layer(name: str, kinds: dict[str, Histogram], left_out: str) -> list[Chart | None]:
    charts = []
    results = {KIND_WORDS[kind]: kinds[kind] for kind in KIND_WORDS if kind in kinds}
    if "after" in kinds and "before" not in kinds:
        results = {RESULTS: kinds["after"]}
    for what, group in (("weights", {"weights": kinds["weights"]} if "weights" in kinds else {}), (RESULTS, results)):
        if group:
            last = list(group.values())[-1]
            charts.append(
                plot_histogram(
                    title=f"{name}: {what}",
                    axis_title="weight" if what == "weights" else "result",
                    bins={word: Bins(low=one.low, high=one.high, counts=one.counts) for word, one in group.items()},
                    marks=_list_ranges(last),
                    caption=_describe_range(last, list(group)[-1]) + left_out,
                )
            )
    return charts


def _list_ranges(histogram: Histogram) -> list[Row]:
    """The ends of the chosen range, and three deviations to both sides, as far as they are near what is drawn."""
    three = 3 * histogram.deviation
    width = histogram.high - histogram.low
    sigma = [("deviation", "mean − 3σ", histogram.mean - three), ("deviation", "mean + 3σ", histogram.mean + three)]
    near = [one for one in sigma if histogram.low - width / 2 <= one[2] <= histogram.high + width / 2]
    chosen = [("chosen", "range", histogram.chosen_low), ("chosen", "range", histogram.chosen_high)]
    return [dict(mark) for mark in list_marks([*chosen, *near])]


def _describe_range(histogram: Histogram, word: str) -> str:
    of = f" of what is {word}" if word in KIND_WORDS.values() else f" of the {word}"
    if histogram.chosen_low is None and histogram.chosen_high is None:
        return f"Counts on a logarithmic axis; dashed: mean ± 3 standard deviations{of}. Not rounded, so no range."
    return f"Counts on a logarithmic axis; whole lines: the chosen range{of}; dashed: mean ± 3 standard deviations."
