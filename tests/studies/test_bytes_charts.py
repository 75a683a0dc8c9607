"""The figures of studies that count bytes: memory, messages, storage formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.records.observations import MemoryReport, RankReport
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Chart, Document
from scalelab.studies.memory.answer import collect_rows
from scalelab.studies.memory.report import draw_categories
from scalelab.studies.memory.study import Memory
from scalelab.studies.shared.job import Job
from tests.report.charts.figures import draw, list_texts, list_values
from tests.studies.answers import set_machine
from tests.studies.spreads import conclude, make_messages
from tests.studies.test_io_formats import measure
from tests.studies.test_messages import SENT


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 2)


def list_charts(document: Document) -> dict[str, Chart]:
    return {chart.title: chart for section in document.sections for chart in section.charts}


def play(trial: Trial) -> TrialResult:
    """Forecasts and measurements of a step; batch 8 of ddp does not fit."""
    if not trial.is_forecast and trial.strategy == "ddp" and trial.batch_per_rank == 8:
        return TrialResult(trial=trial, status=Status.OUT_OF_MEMORY, reason="no room")
    sizes = {"parameters": 4_000_000, "gradients": 4_000_000, "activations": 1_000_000 * trial.batch_per_rank}
    memory = MemoryReport(peak_bytes=sum(sizes.values()), by_category=sizes)
    return TrialResult(trial=trial, status=Status.COMPLETED, ranks=(RankReport(rank=0, memory=memory),))


def make_study() -> Memory:
    job = Job(workload="mlp", device="cpu", threads_per_rank=1)
    return Memory(strategies=("single", "ddp"), device_memory="12MB", job=job)


def test_memory_is_in_pieces_with_the_forecast_above_the_measurement() -> None:
    study = make_study()
    charts = list_charts(study.conclude([play(trial) for trial in study.plan()]))
    chart = charts["Memory by category"]
    pieces = [
        piece
        for piece in list_values(chart, "bar")
        if (piece["name"], piece["side"]) == ("single, batch 4", "measured")
    ]
    assert [piece["series"] for piece in pieces] == ["parameters", "gradients", "activations"]
    assert "measured: out of memory" in list(list_texts(chart))
    assert "forecast 16 MB" in list(list_texts(chart))
    draw(chart)


def test_the_device_is_a_line_beside_the_forecasts() -> None:
    study = make_study()
    chart = list_charts(study.conclude([play(trial) for trial in study.plan()]))["Beside a device of 12 MB"]
    assert [value["value"] for value in list_values(chart, "rule")] == [12]
    draw(chart)


def test_nothing_known_of_memory_is_no_figure() -> None:
    assert draw_categories(collect_rows([])) == ()


def test_messages_are_drawn_beside_theory_and_by_kind(tmp_path: Path) -> None:
    charts = list_charts(conclude(make_messages(), tmp_path, SENT))
    payload = charts["Bytes of one step"]
    assert {value["series"] for value in list_values(payload, "bar")} == {
        "payload, counted", "payload by theory", "on the wire",
    }  # fmt: skip
    kinds = charts["Payload of one step by kind"]
    assert "all-reduce of gradients" in {value["series"] for value in list_values(kinds, "bar")}
    draw(payload)
    draw(kinds)


def test_formats_are_drawn_by_epoch_size_and_pass(tmp_path: Path) -> None:
    _, document = measure(tmp_path, train=True, workers=(0, 1))
    charts = list_charts(document)
    epochs = charts["An epoch by format"]
    assert {value["series"] for value in list_values(epochs, "point")} == {"in memory", "lazily", "eagerly", "naively"}
    assert {"A batch by order and access", "Samples per second by workers", "A training step by format"} <= set(charts)
    for chart in charts.values():
        draw(chart)
