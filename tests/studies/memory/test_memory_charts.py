"""The figures of the memory study."""

from __future__ import annotations

import pytest

from scalelab.records.observations import MemoryReport, RankReport
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Chart, Document
from scalelab.studies.memory.study import Memory
from scalelab.studies.shared.job import Job
from tests.report.charts.figures import draw, list_texts, list_values
from tests.studies.answers import set_machine


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


def test_memory_is_in_pieces_and_the_forecast_stands_beside_the_measurement() -> None:
    study = make_study()
    charts = list_charts(study.conclude([play(trial) for trial in study.plan()]))
    chart, peaks = charts["Memory by category"], charts["Peak memory"]
    pieces = [piece for piece in list_values(chart, "bar") if piece["name"] == "single, batch 4"]
    assert [piece["series"] for piece in pieces] == ["parameters", "gradients", "activations"]
    assert {value["series"] for value in list_values(peaks, "bar")} == {"forecast", "measured"}
    assert "out of memory" in list(list_texts(peaks))
    draw(chart)
    draw(peaks)


def test_the_device_is_a_line_beside_the_forecasts() -> None:
    study = make_study()
    chart = list_charts(study.conclude([play(trial) for trial in study.plan()]))["Forecast against a device of 12 MB"]
    assert [value["value"] for value in list_values(chart, "rule")] == [12]
    draw(chart)


def test_nothing_known_of_memory_is_no_figure() -> None:
    assert not [chart for section in make_study().conclude([]).sections for chart in section.charts]
