"""Batch size: throughput, memory and the limit, with a fake launcher and with real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.observations import RankReport
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Chart
from scalelab.runs.experiment import find_failed, run_study
from scalelab.studies.batch_size import BatchSize
from scalelab.studies.catalogue import read_study
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from tests.report.charts.figures import draw, list_layers, list_values
from tests.studies.answers import covers, find_caution, find_finding, find_row, set_machine, warn_all
from tests.studies.sweeps import FEW, Shared, SweepLauncher, plan_names, run

JOB = Job(workload="mlp", options={"dim": 8, "depth": 2}, device="cpu")
FIXED, SLOPE = 0.010, 0.001


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16)


def make(**fields: Any) -> BatchSize:
    return BatchSize(**({"job": JOB, "sampling": FEW, "batches": (4, 8, 16, 32)} | fields))


def grow(trial: Trial) -> float:
    return FIXED + SLOPE * trial.batch_per_rank


def test_the_line_that_is_played_is_the_one_that_is_found(tmp_path: Path) -> None:
    document = run(make(), tmp_path, grow)
    main, line = document.tables
    for batch in (4, 8, 16, 32):
        row = find_row(main, f"batch {batch}")
        assert row["samples_per_second"].value == pytest.approx(batch / (FIXED + SLOPE * batch))
        assert find_row(line, batch)["distance"].value == pytest.approx(0, abs=1e-6)
    assert find_row(main, "batch 4")["gain"].value == 1.0
    assert covers(find_row(main, "batch 32")["gain"], 32 / 4 * 0.014 / 0.042)
    saturation = find_finding(document, "saturation")
    assert saturation.values["half_batch"].value == pytest.approx(FIXED / SLOPE)
    assert saturation.values["reached"] == pytest.approx(32 * SLOPE / (FIXED + 32 * SLOPE))
    assert "an extrapolation" in saturation.text
    cost = find_finding(document, "step-cost").values
    assert (cost["fixed_seconds"].value, cost["sample_seconds"].value) == pytest.approx((FIXED, SLOPE))
    assert find_finding(document, "memory-limit").values == {"largest": 32, "failed": None}
    assert (document.findings[0].kind, document.findings[0].subject) == ("highest-throughput", "batch 32")


def test_tokens_are_counted_where_samples_have_them(tmp_path: Path) -> None:
    document = run(make(job=Job(workload="gpt2", device="cpu")), tmp_path, lambda _: 0.5)
    assert find_row(document.tables[0], "batch 8")["tokens_per_second"].value == pytest.approx(8 * 64 / 0.5)


def test_nothing_larger_than_what_was_out_of_memory_is_tried(tmp_path: Path) -> None:
    launcher = SweepLauncher(grow, failures={"batch-16": Status.OUT_OF_MEMORY})
    store, document = run_study(make(), runs_dir=tmp_path, launcher=launcher)
    assert launcher.launched.count("batch-16-r1") == 1
    assert not [name for name in launcher.launched if name.startswith("batch-32")]
    assert "batch-16-r2" not in launcher.launched
    main = document.tables[0]
    assert find_row(main, "batch 16")["step_seconds"].value == "out of memory"
    assert find_row(main, "batch 32")["step_seconds"].value == "not run"
    assert find_row(main, "batch 8")["step_seconds"].value == pytest.approx(FIXED + 8 * SLOPE)
    assert "batch 16 was out of memory, and 32 is larger" in warn_all(document)
    assert find_finding(document, "memory-limit", "batch 16").values == {"largest": 8, "failed": 16}
    assert len(find_failed(store, read_study(store))) == 2 * FEW.rounds


def test_a_failure_that_is_not_memory_stops_no_larger_batch(tmp_path: Path) -> None:
    launcher = SweepLauncher(grow, failures={"batch-8": Status.INVALID})
    _, document = run_study(make(), runs_dir=tmp_path, launcher=launcher)
    assert find_row(document.tables[0], "batch 8")["step_seconds"].value == "invalid"
    assert find_row(document.tables[0], "batch 32")["gain"].value is not None


def test_a_curve_is_not_called_a_line(tmp_path: Path) -> None:
    document = run(make(), tmp_path, lambda trial: 0.001 * trial.batch_per_rank**1.7)
    assert find_caution(document, "poor-fit").values["residual"] > 0.1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batches": ()}, "--batches"),
        ({"batches": (8, 4)}, "8 4"),
        ({"batches": (0, 4)}, "0"),
        ({"ranks": 0}, "--ranks"),
    ],
)
def test_batches_that_cannot_be_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(**fields)


def test_the_batch_is_that_of_every_rank() -> None:
    study = make(ranks=2)
    assert plan_names(study) == ["batch-4", "control", "batch-8", "batch-16", "batch-32"]
    assert {trial.global_batch for trial in study.plan()} == {8, 16, 32, 64}
    assert {trial.strategy for trial in study.plan()} == {"ddp"}


@pytest.mark.ranks
def test_a_real_batch_that_is_too_large_ends_the_sweep(launcher: LocalLauncher, tmp_path: Path) -> None:
    job = Job(workload="mlp", options={"dim": 64, "depth": 2}, threads_per_rank=1, memory_limit="150MB", device="cpu")
    sampling = Sampling(rounds=1, steps=3, phase_steps=0, comm_free_steps=0, control=False)
    study = BatchSize(batches=(8, 1_000_000, 2_000_000), job=job, sampling=sampling)
    _, document = run_study(study, runs_dir=tmp_path, launcher=Shared(launcher))
    steps = [row[1].value for row in document.tables[0].rows]
    assert steps[1:] == ["out of memory", "not run"]
    assert isinstance(steps[0], float)


LIMIT = 300_000_000


def limit_memory(result: TrialResult) -> TrialResult:
    """What takes 10 MB a sample, up to a limit."""
    trial = result.trial
    used = 50_000_000 + 10_000_000 * trial.global_batch
    if used > LIMIT:
        return TrialResult(trial=trial, status=Status.OUT_OF_MEMORY, reason="no room")
    rank = RankReport(rank=0, peak_memory_bytes=used + 100_000_000, limited_bytes=used, limit_bytes=LIMIT)
    return replace(result, ranks=(rank,))


def draw_charts(tmp_path: Path, *batches: int) -> dict[str, Chart]:
    study = BatchSize(batches=batches, job=JOB, sampling=FEW)
    document = run(study, tmp_path, lambda trial: 0.01 + 0.001 * trial.global_batch, change=limit_memory)
    return {chart.title: chart for section in document.sections for chart in section.charts}


def list_series(chart: Chart) -> set[str]:
    return {value["series"] for value in list_values(chart, "line")}


def test_batches_that_failed_keep_their_place(tmp_path: Path) -> None:
    charts = draw_charts(tmp_path, 1, 4, 16, 32, 64)
    chart = charts["Throughput by batch"]
    crosses = [layer for layer in list_layers(chart, "point") if layer["mark"].get("shape") == "cross"]
    found = [(value["batch"], value["status"]) for layer in crosses for value in layer["data"]["values"]]
    assert found == [(32, "out of memory"), (64, "not run")]
    for title in ("Throughput by batch", "Memory by batch"):
        assert "batch 32 (out of memory), batch 64 (not run)" in charts[title].caption
        assert "<svg" in draw(charts[title])


def test_memory_is_drawn_beside_the_limit_that_counts_it(tmp_path: Path) -> None:
    chart = draw_charts(tmp_path, 1, 4, 16, 32)["Memory by batch"]
    assert "limit, 300 MB" in chart.caption
    assert {value["series"] for value in list_values(chart, "bar")} == {"peak memory", "counted by the limit"}
    assert 300 in [value["value"] for value in list_values(chart, "rule") if "name" not in value]


def test_the_fit_and_the_batch_that_saturates_it_are_drawn(tmp_path: Path) -> None:
    charts = draw_charts(tmp_path, 1, 4, 8, 16)
    assert list_series(charts["Throughput by batch"]) == {"measured", "batch / (t₀ + c · batch)"}
    saturating = run(
        BatchSize(batches=(1, 64, 1024), job=JOB, sampling=FEW),
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

    document = run(BatchSize(batches=(1, 2, 4), job=JOB, sampling=FEW), tmp_path, change=change)
    chart = document.sections[0].charts[0]
    assert "batch 4 (crashed)" in chart.caption
    points = [value["batch"] for value in list_values(chart, "point") if "rate" in value]
    assert points == [1, 2, 4]
