"""Throughput and memory against the batch, and the search for the largest one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scalelab.records.observations import RankReport
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Chart
from scalelab.studies.batch_size import BatchSize
from scalelab.studies.max_batch.answer import BatchSearch
from scalelab.studies.max_batch.study import draw_probes, draw_search, make_probe_table
from scalelab.studies.shared.job import Job
from tests.report.charts.figures import draw, list_layers, list_values
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


def list_series(chart: Chart) -> set[str]:
    return {value["series"] for value in list_values(chart, "line")}


def test_batches_that_failed_keep_their_place(tmp_path: Path) -> None:
    charts = measure(tmp_path, 1, 4, 16, 32, 64)
    chart = charts["Throughput by batch"]
    crosses = [layer for layer in list_layers(chart, "point") if layer["mark"].get("shape") == "cross"]
    found = [(value["batch"], value["status"]) for layer in crosses for value in layer["data"]["values"]]
    assert found == [(32, "out of memory"), (64, "not run")]
    for title in ("Throughput by batch", "Memory by batch"):
        assert "batch 32 (out of memory), batch 64 (not run)" in charts[title].caption
        assert "<svg" in draw(charts[title])


def test_memory_is_drawn_beside_the_limit_that_counts_it(tmp_path: Path) -> None:
    chart = measure(tmp_path, 1, 4, 16, 32)["Memory by batch"]
    assert "limit, 300 MB" in chart.caption
    assert {value["series"] for value in list_values(chart, "bar")} == {"peak memory", "counted by the limit"}
    assert 300 in [value["value"] for value in list_values(chart, "rule") if "name" not in value]


def test_the_fit_and_the_batch_that_saturates_it_are_drawn(tmp_path: Path) -> None:
    charts = measure(tmp_path, 1, 4, 8, 16)
    assert list_series(charts["Throughput by batch"]) == {"measured", "batch / (t₀ + c · batch)"}
    saturating = run(
        BatchSize(batches=(1, 64, 1024), job=MLP, sampling=FEW),
        tmp_path / "saturating",
        lambda trial: 0.001 + 0.001 * trial.global_batch,
    )
    assert "95 % of the maximum" in list_series(saturating.sections[0].charts[0])
    line = [value for value in list_values(charts["Step time by batch"], "line") if value["batch"] == 16]
    assert [round(value["value"]) for value in line] == [26]


def test_a_batch_that_failed_once_has_its_point_and_its_cross(tmp_path: Path) -> None:
    def change(result: TrialResult) -> TrialResult:
        if result.trial.global_batch == 4 and result.trial.round == 2:
            return TrialResult(trial=result.trial, status=Status.CRASHED, reason="x")
        return result

    document = run(BatchSize(batches=(1, 2, 4), job=MLP, sampling=FEW), tmp_path, change=change)
    chart = document.sections[0].charts[0]
    assert "batch 4 (crashed)" in chart.caption
    points = [value["batch"] for value in list_values(chart, "point") if "rate" in value]
    assert points == [1, 2, 4]


def make_probe(batch: int) -> TrialResult:
    trial = Trial(configuration=f"batch-{batch}", workload="mlp", global_batch=batch, memory_limit_bytes=LIMIT)
    return limit_memory(TrialResult(trial=trial, status=Status.COMPLETED))


def test_a_search_is_drawn_by_memory_and_in_its_order() -> None:
    found = BatchSearch(results=tuple(map(make_probe, (4, 16, 25, 26))))
    memory, search = draw_probes(make_probe_table(found), found), draw_search(found)
    assert memory is not None
    assert search is not None
    assert "limit 300 MB" in list_series(memory)
    assert [value["batch"] for value in list_values(search, "point")] == [4, 16, 25, 26]
    assert [value["series"] for value in list_values(search, "point")] == ["ran", "ran", "ran", "out of memory"]
    assert "largest, 25" in list_series(search)
    draw(memory)
    draw(search)


def test_a_search_of_one_probe_has_no_figures() -> None:
    for results in ((make_probe(4),), ()):
        found = BatchSearch(results=results)
        assert draw_probes(make_probe_table(found), found) is None
        assert draw_search(found) is None
