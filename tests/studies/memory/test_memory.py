"""The study of memory, from ranks that are played: rows, findings, fits, and what happens when something is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.records.environment import Gpu
from scalelab.records.observations import MemoryReport, RankReport
from scalelab.records.tasks import Forecast
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Document
from scalelab.report.findings import MAIN
from scalelab.runs.experiment import find_failed, run_study
from scalelab.studies.catalogue import read_study
from scalelab.studies.memory.study import Memory
from scalelab.studies.shared.arms import group_arms
from scalelab.studies.shared.cautions import find_cautions
from tests.studies.answers import (
    JOB,
    AlteredLauncher,
    find_caution,
    find_finding,
    find_row,
    list_kinds,
    set_machine,
)

STATES = {"parameters": 100, "optimizer": 200}


def make_study(**fields: Any) -> Memory:
    return Memory(**({"job": JOB, "batches": (4, 8)} | fields))


def play_memory(result: TrialResult) -> TrialResult:
    """Activations of 100 bytes a sample; DDP's buckets; a forecast that is 1 % too low."""
    trial = result.trial
    sizes = STATES | {"activations": 100 * trial.batch_per_rank}
    if trial.strategy == "ddp":
        sizes["buckets"] = 100
    peak = sum(sizes.values())
    if trial.is_forecast:
        report = MemoryReport(peak_bytes=round(0.99 * peak), peak_phase="backward", by_category=sizes)
        return replace(result, samples=(), ranks=(RankReport(rank=0, memory=report, num_parameters=25),))
    report = MemoryReport(peak_bytes=peak, peak_phase="backward", current_bytes=300, by_category=sizes)
    ranks = [
        RankReport(rank=rank, memory=report, peak_memory_bytes=10_000 + rank, start_memory_bytes=9000)
        for rank in range(trial.num_processes)
    ]
    return replace(result, ranks=tuple(ranks))


def answer(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, launcher: FakeLauncher | None = None, **fields: Any
) -> Document:
    set_machine(monkeypatch, 2)
    return run_study(make_study(**fields), runs_dir=runs_dir, launcher=launcher or AlteredLauncher(play_memory))[1]


def test_every_configuration_is_forecast_first_and_then_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 2)
    trials = make_study(strategies=("single", "ddp"), batches=(8, 4)).plan()
    assert [trial.configuration for trial in trials] == [
        *("forecast-single-1-b4", "forecast-single-1-b8", "forecast-ddp-2-b4", "forecast-ddp-2-b8"),
        *("single-1-b4", "single-1-b8", "ddp-2-b4", "ddp-2-b8"),
    ]
    assert {trial.num_processes for trial in trials if trial.is_forecast} == {1}
    assert trials[-1].global_batch == 16
    assert trials[-1].instruments == ("memory",)


def test_forecast_and_measurement_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, categories, reading = answer(tmp_path, monkeypatch).tables
    row = find_row(main, "ddp × 2, batch 8")
    assert row["peak_bytes"].value == 1200
    assert row["forecast_bytes"].value == 1188
    assert row["forecast_error"].value == pytest.approx(-0.01)
    assert find_row(categories, "ddp × 2, batch 8")["buckets_bytes"].value == 100
    assert find_row(categories, "single, batch 8")["buckets_bytes"].value == 0
    assert "gradients_bytes" not in [column.key for column in categories.columns]
    states = find_row(reading, "single, batch 8")
    assert states["states_bytes"].value == 100 + 100 + 200
    assert states["current_bytes"].value == 300
    assert find_row(reading, "ddp × 2, batch 8")["process_bytes"].value == 10_001


def test_the_findings_say_peak_share_growth_and_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = answer(tmp_path, monkeypatch, strategies=("single", "ddp"))
    main = document.findings[0]
    assert main.text == (
        "single, batch 8, peaks at 1.10 kB per rank in backward: 73 % activations, 18 % optimizer, 9.1 % parameters."
    )
    assert main.values == {"peak_bytes": 1100, "phase": "backward", "is_measured": True}
    found = {one.kind: one for one in document.findings}
    assert found["memory-states"].values == {"states_bytes": 400, "share": pytest.approx(4 / 11)}
    assert found["memory-after-step"].values == {"current_bytes": 300, "share": pytest.approx(3 / 11)}
    assert found["forecast-error"].values == {"error": pytest.approx(0.01), "rows": 4}
    assert found["memory-strategies"].subject == "ddp × 2, batch 8"
    assert found["memory-strategies"].values["change_bytes"] == 100
    assert "100 B more per rank than single, batch 8 (9.1 %)" in found["memory-strategies"].text
    assert found["memory-per-sample"].values == {"bytes_per_sample": 100}
    assert found["process-memory"].values == {"process_bytes": 10_000, "start_bytes": 9000}
    assert [one.kind for one in document.findings if one.weight == MAIN] == ["memory"]


def test_a_device_is_said_to_hold_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = answer(tmp_path, monkeypatch, strategies=("single", "ddp"), device_memory="800B")
    fits = document.tables[-1]
    assert find_row(fits, "single, batch 4")["fits"].value == "yes"
    assert find_row(fits, "single, batch 4")["margin_bytes"].value == 800 - 693
    assert find_row(fits, "single, batch 8")["fits"].value == "no"
    assert find_row(fits, "single, batch 8")["used_share"].value == pytest.approx(1089 / 800)
    single = find_finding(document, "fits", "single")
    assert single.values == {"batch": 4, "margin_bytes": 107}
    assert single.text == (
        "single fits into 800 B at batch 4 per rank with 107 B (13 %) to spare; batch 8 needs 1.09 kB, 289 B too much"
        " (forecast)."
    )
    assert "forecast-limits" in list_kinds(document)


@pytest.mark.parametrize(
    ("device", "batch", "words"),
    [("500B", None, "single does not fit into 500 B: batch 4 needs 693 B"), ("1MB", 8, "at every given batch")],
)
def test_nothing_and_everything_may_fit(
    device: str, batch: int | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = answer(tmp_path, monkeypatch, strategies=("single",), device_memory=device)
    assert document.findings[0].values["batch"] == batch
    assert words in document.findings[0].text


def test_what_the_machine_cannot_hold_is_not_run_and_still_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine(monkeypatch, 2)
    monkeypatch.setattr("scalelab.studies.memory.study.read_available_memory", lambda: 1500)
    store, document = run_study(make_study(), runs_dir=tmp_path, launcher=AlteredLauncher(play_memory))
    main, categories, _ = document.tables
    assert find_row(main, "single, batch 8")["peak_bytes"].value == 1100
    row = find_row(main, "ddp × 2, batch 8")
    assert row["peak_bytes"].value == "not run"
    assert row["forecast_bytes"].value == 1188
    marks = {cells[0].value: cells[0].mark for cells in categories.rows}
    assert marks["ddp × 2, batch 8"] == "°"
    assert marks["single, batch 8"] == ""
    refused = find_caution(document, "not-run", "ddp × 2, batch 8")
    assert "does not fit into this machine: 2 ranks of 1.19 kB by forecast" in refused.message
    assert find_failed(store, read_study(store)) == []


def test_a_failing_row_leaves_the_others_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = AlteredLauncher(
        lambda result: play_memory(result) if result.status is Status.COMPLETED else result,
        failures={"ddp-2-b8": Status.OUT_OF_MEMORY},
    )
    document = answer(tmp_path, monkeypatch, launcher)
    row = find_row(document.tables[0], "ddp × 2, batch 8")
    assert row["peak_bytes"].value == "out of memory"
    assert row["forecast_bytes"].value == 1188
    assert find_row(document.tables[0], "ddp × 2, batch 4")["peak_bytes"].value == 800
    assert find_caution(document, "failed").subject == "ddp × 2, batch 8"


def test_a_workload_that_cannot_be_forecast_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(result: TrialResult) -> TrialResult:
        if not result.trial.is_forecast:
            return play_memory(result)
        return TrialResult(trial=result.trial, status=Status.INVALID, reason="it reads tensor values")

    set_machine(monkeypatch, 2)
    store, document = run_study(make_study(), runs_dir=tmp_path, launcher=AlteredLauncher(refuse))
    assert find_row(document.tables[0], "single, batch 8")["forecast_bytes"].value is None
    assert find_row(document.tables[0], "single, batch 8")["peak_bytes"].value == 1100
    assert find_failed(store, read_study(store)) == []
    (caution,) = document.cautions
    assert (caution.kind, caution.message) == ("no-forecast", "it reads tensor values")


def test_ranks_that_say_nothing_of_memory_make_empty_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = answer(tmp_path, monkeypatch, FakeLauncher(lambda _: 0.1))
    assert find_row(document.tables[0], "single, batch 4")["peak_bytes"].value == "–"
    assert [one.kind for one in document.findings] == ["not-measured"]


def test_no_result_at_all_is_a_document_too() -> None:
    document = make_study().conclude([])
    assert document.tables[0].rows == ()
    assert document.cautions == ()


def test_a_forecast_that_is_far_off_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lower(result: TrialResult) -> TrialResult:
        played = play_memory(result)
        memory = played.ranks[0].memory
        if not result.trial.is_forecast or memory is None:
            return played
        return replace(played, ranks=(replace(played.ranks[0], memory=replace(memory, peak_bytes=900)),))

    document = answer(tmp_path, monkeypatch, AlteredLauncher(lower), strategies=("single",))
    assert find_caution(document, "forecast-off").values["error"] == pytest.approx(900 / 700 - 1)


def test_arms_and_cautions_cope_with_a_completed_trial_without_samples() -> None:
    trial = Trial(configuration="forecast-x", workload="mlp", task=Forecast())
    arms = group_arms([TrialResult(trial=trial, status=Status.COMPLETED)], None)
    assert not arms["forecast-x"].is_measured
    assert find_cautions(arms.values()) == ()


def test_more_ranks_than_gpus_are_forecast_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(name="a GPU", memory_bytes=40_000_000_000, driver="1")
    for place in ("scalelab.studies.shared.job.find_gpus", "scalelab.studies.memory.study.find_gpus"):
        monkeypatch.setattr(place, lambda: (gpu,))
    study = make_study(job=replace(JOB, device="cuda"), ranks=8, batches=(4,))
    assert [trial.configuration for trial in study.plan()] == [
        *("forecast-single-1-b4", "forecast-ddp-8-b4", "forecast-fsdp-full-8-b4"),
        "single-1-b4",
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"strategies": ()}, "--strategies needs at least one name"),
        ({"strategies": ("dp",)}, "--strategies dp has no memory rules"),
        ({"ranks": 0}, "--ranks must be"),
        ({"batches": ()}, "--batches needs at least one number"),
        ({"batches": (4, 4)}, "names a batch twice"),
        ({"batches": (0,)}, "--batches must be"),
        ({"device_memory": "much"}, "--device-memory"),
    ],
)
def test_what_cannot_work_is_refused_with_flag_and_value(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_study(**fields)
