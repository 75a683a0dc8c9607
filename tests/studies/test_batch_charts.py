"""Throughput and memory against the batch, and the search for the largest one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scalelab.records.observations import RankReport
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Chart
from scalelab.studies.batch_size.charts import draw_search
from scalelab.studies.batch_size.study import BatchSize
from scalelab.studies.max_batch.answer import BatchSearch
from scalelab.studies.shared.job import Job
from tests.report.charts.figures import draw, list_layers, list_texts, list_values
from tests.studies.sweeps import FEW, run

LIMIT = 300_000_000
MLP = Job(workload="mlp", device="cpu", threads_per_rank=1)


def limit_memory(result: TrialResult) -> TrialResult:
    """What takes 10 MB a sample, up to a limit."""
    trial = result.trial
    used = 50_000_000 + 10_000_000 * trial.global_batch
    if used > LIMIT:
        return TrialResult(trial=trial, status=Status.OUT_OF_MEMORY, reason="no room")
    rank = RankReport(rank=0, peak_memory_bytes=used + 100_000_000, limited_bytes=used, limit_bytes=LIMIT)
    return replace(result, ranks=(rank,))


def measure(tmp_path: Path, *batches: int) -> dict[str, Chart]:
    study = BatchSize(batches=batches, job=MLP, sampling=FEW)
    document = run(study, tmp_path, lambda trial: 0.01 + 0.001 * trial.global_batch, change=limit_memory)
    return {chart.title: chart for section in document.sections for chart in section.charts}


def test_batches_that_failed_are_shown_as_such_in_every_figure(tmp_path: Path) -> None:
    charts = measure(tmp_path, 1, 4, 16, 32, 64)
    wanted = ("Throughput against the batch", "Memory against the batch", "Step against the batch")
    for title in wanted:
        chart = charts[title]
        crosses = [layer for layer in list_layers(chart, "point") if layer["mark"].get("shape") == "cross"]
        found = [(value["batch"], value["status"]) for layer in crosses for value in layer["data"]["values"]]
        assert found == [(32, "out of memory"), (64, "not run")]
        assert "32 (out of memory), 64 (not run)" in chart.caption
        assert "out of memory" in draw(chart)


def test_memory_is_drawn_beside_the_limit_that_counts_it(tmp_path: Path) -> None:
    chart = measure(tmp_path, 1, 4, 16, 32)["Memory against the batch"]
    assert "limit 300 MB" in list(list_texts(chart))
    series = {value["series"] for value in list_values(chart, "point") if "series" in value}
    assert series == {"peak memory", "counted by the limit"}


def test_the_fit_and_the_batch_that_saturates_it_are_drawn(tmp_path: Path) -> None:
    charts = measure(tmp_path, 1, 4, 8, 16)
    throughput = charts["Throughput against the batch"]
    assert "beyond what is drawn" in throughput.caption
    lines = {value["series"] for value in list_values(throughput, "line")}
    assert "batch / (t₀ + c · batch)" in lines
    start = next(value for value in list_values(charts["Step against the batch"], "line") if value["batch"] == 0)
    assert round(start["step_seconds"]) == 10


def test_a_batch_that_failed_once_has_its_point_and_its_cross(tmp_path: Path) -> None:
    def change(result: TrialResult) -> TrialResult:
        if result.trial.global_batch == 4 and result.trial.round == 2:
            return TrialResult(trial=result.trial, status=Status.CRASHED, reason="x")
        return result

    document = run(BatchSize(batches=(1, 2, 4), job=MLP, sampling=FEW), tmp_path, change=change)
    chart = document.sections[0].charts[0]
    assert "4 (crashed in 1 of 6 launches)" in chart.caption
    points = [value["batch"] for value in list_values(chart, "point") if "rate" in value]
    assert points == [1, 2, 4]


def make_probe(batch: int) -> TrialResult:
    trial = Trial(configuration=f"batch-{batch}", workload="mlp", global_batch=batch, memory_limit_bytes=LIMIT)
    return limit_memory(TrialResult(trial=trial, status=Status.COMPLETED))


def test_a_search_is_drawn_by_memory_and_in_its_order() -> None:
    memory, search = draw_search(BatchSearch(results=tuple(map(make_probe, (4, 16, 25, 26)))))
    assert "26 (out of memory)" in memory.caption
    assert "limit 300 MB" in list(list_texts(memory))
    assert [value["batch"] for value in list_values(search, "point")] == [4, 16, 25, 26]
    assert [value["series"] for value in list_values(search, "point")][-1] == "did not fit"
    draw(memory)
    draw(search)


def test_a_search_of_one_probe_has_no_figures() -> None:
    assert draw_search(BatchSearch(results=(make_probe(4),))) == ()
    assert draw_search(BatchSearch(results=())) == ()
