"""The document of `scalelab predict RUN --best`: combinations ranked, and perhaps confirmed by running them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.answers.prediction.job import MeasuredJob
from scalelab.answers.prediction.report import INTERVAL_NOTE, plot_candidates, show
from scalelab.predict.what_if import Candidate, Need, fit_need
from scalelab.report.document import Cell, Column, Document, Section, Table, make_row
from scalelab.report.findings import Caution, as_findings
from scalelab.studies.scaling.answer import ScalingAnswer
from scalelab.units import format_quantity, format_share

CLOSE = 0.02
"""Rates that differ by less are not told apart."""


def find_need(answer: ScalingAnswer) -> Need | None:
    """What a rank of the run needed, by batch of a pass."""
    peaks: dict[float, float] = {}
    for arm in answer.spread:
        if arm.peak_memory_bytes is not None:
            batch = float(arm.trial.batch_per_pass)
            peaks[batch] = max(peaks.get(batch, 0.0), float(arm.peak_memory_bytes))
    return fit_need(peaks)


def describe_best(
    found: MeasuredJob,
    best: Sequence[Candidate],
    num_left_out: int,
    source: str,
    confirmed: Mapping[int, Estimate] | None = None,
) -> Document:
    """`confirmed`: samples per second as measured, by place in the list."""
    num_ranks = best[0].step.num_ranks
    columns = [
        Column(key="place", header="", quantity="count"),
        Column(key="change", header="what is changed", align="left"),
        Column(key="throughput", header="samples/s", quantity="rate"),
        Column(key="step_seconds", header="step", quantity="seconds"),
        Column(key="exposed", header="exposed comm", quantity="share"),
        Column(key="memory_bytes", header="memory of a rank", quantity="bytes"),
    ]
    if confirmed is not None:
        columns.append(Column(key="measured", header="measured samples/s", quantity="rate", unit_of="throughput"))
    rows = []
    for place, one in enumerate(best, start=1):
        row = [
            Cell(value=place),
            Cell(value=", ".join(one.change.changes) or "nothing"),
            show(one.step.throughput),
            show(one.step.step),
            show(one.step.exposed),
            *make_row(one.need_bytes),
        ]
        if confirmed is not None:
            row += make_row(confirmed.get(place))
        rows.append(tuple(row))
    notes = (INTERVAL_NOTE, "memory by a line through what was measured; it has no interval")
    return Document(
        title="Prediction",
        question=f"What would be fastest on {num_ranks} ranks?",
        setting=f"{source} · {found.job.strategy} · {found.job.network.inside.words} ({found.link.source})",
        sections=(
            Section(
                tables=(Table(columns=tuple(columns), rows=tuple(rows), notes=notes),),
                charts=(plot_candidates(best, confirmed),),
            ),
        ),
        findings=as_findings(summarise_best(best, num_left_out, confirmed)),
        cautions=tuple(find_doubts(best, found.batch)),
    )


def summarise_best(best: Sequence[Candidate], num_left_out: int, confirmed: Mapping[int, Estimate] | None) -> list[str]:
    first = best[0]
    said = [
        f"{', '.join(first.change.changes) or 'What is there already'} should be fastest:"
        f" {format_quantity('rate', first.step.throughput.value)} samples/s, with"
        f" {format_share(first.step.exposed.value)} of the step exposed communication."
    ]
    close = [one for one in best[1:] if one.step.throughput.value > (1 - CLOSE) * first.step.throughput.value]
    if close:
        said.append(f"{len(close)} of the others are within {format_share(CLOSE)} of it: take the simplest.")
    if num_left_out:
        said.append(f"{num_left_out} combinations do not fit into memory, or nobody knows whether they do.")
    for place, measured in (confirmed or {}).items():
        one = best[place - 1]
        missed = measured.value / one.step.throughput.value - 1
        inside = "inside" if one.step.throughput.holds(measured.value) else "outside"
        said.append(
            f"Run here, place {place} gave {format_quantity('rate', measured.value)} samples/s,"
            f" {format_share(abs(missed))} {'more' if missed > 0 else 'less'} than predicted, {inside} the interval."
        )
    return said


def find_doubts(best: Sequence[Candidate], batch: int) -> list[Caution]:
    found = []
    if any(one.need_bytes is None for one in best):
        found.append(
            Caution(
                message="what some of these need in memory is not known: only one batch was measured",
                next_step="look with scalelab run memory, or give --memory 16GB to leave out what may not fit",
            )
        )
    if best[0].change.batch != batch:
        found.append(
            Caution(
                message=f"another batch than {batch} is another training: samples per second are not all that counts",
                next_step=f"scalelab run large-batch tells what it learns, and --batch {batch} keeps the batch",
            )
        )
    return found
