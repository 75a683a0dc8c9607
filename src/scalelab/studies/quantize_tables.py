"""The tables of `quantize`: accuracy by stage, size and latency, what every layer does to the answer, what ran."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.quantized import Quantized
from scalelab.report.document import Column, Section, Table, make_row
from scalelab.studies.quantize_answer import (
    Latency,
    LayerBlame,
    StageAnswer,
    find_size,
    rank_layers,
)

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
