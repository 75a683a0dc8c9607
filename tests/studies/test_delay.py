"""`delay`: steps that obey Amdahl's law with the delay as serial part are found to, others not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.records.settings import Perturbation
from scalelab.records.trial import Status, Trial
from scalelab.report.document import Cell, Document
from scalelab.report.findings import MAIN, select
from scalelab.runs.experiment import run_study
from scalelab.studies.delay import Delay
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from tests.studies.answers import JOB, covers, find_caution, find_finding, find_row, set_machine

SAMPLING = Sampling(rounds=6, steps=12, phase_steps=0, comm_free_steps=0)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 4)


def make_study(**fields: Any) -> Delay:
    return Delay(**({"job": JOB, "sampling": SAMPLING, "ranks": (1, 2, 4), "delays": ("0ms", "100ms")} | fields))


def add_up(trial: Trial) -> float:
    """0.4 s of work, a twentieth of it serial, and the delay."""
    return 0.4 * (0.05 + 0.95 / trial.num_ranks) + trial.perturbation.seconds


def conclude(study: Delay, directory: Path, launcher: FakeLauncher | None = None) -> Document:
    return run_study(study, runs_dir=directory, launcher=launcher or FakeLauncher(add_up))[1]


def find_overlay(document: Document, num_ranks: int, delay: float) -> dict[str, Cell]:
    _, overlay = document.tables
    (row,) = (row for row in overlay.rows if (row[0].value, row[1].value) == (num_ranks, delay))
    return {column.key: cell for column, cell in zip(overlay.columns, row, strict=True)}


def test_a_delay_that_adds_up_is_the_laws(tmp_path: Path) -> None:
    document = conclude(make_study(), tmp_path, FakeLauncher(add_up, noise=0.02, seed=1))
    row = find_overlay(document, 4, 0.1)
    assert covers(row["measured"], 0.5 / (0.115 + 0.1))
    assert covers(row["over_calibrated"], 1.0)
    assert row["verdict"].value == "no difference"
    assert covers(row["ideal"], 0.5 / 0.2)
    assert row["ideal_verdict"].value == "less"


def test_without_noise_the_distance_from_the_calibrated_law_is_nothing(tmp_path: Path) -> None:
    row = find_overlay(conclude(make_study(), tmp_path), 2, 0.1)
    assert row["over_calibrated"].value == pytest.approx(1)
    assert row["ideal"].value == pytest.approx(0.5 / 0.3)


def test_a_delay_that_ranks_hide_is_more_than_the_law(tmp_path: Path) -> None:
    def hide(trial: Trial) -> float:
        return 0.4 / trial.num_ranks + (trial.perturbation.seconds if trial.num_ranks == 1 else 0.0)

    row = find_overlay(conclude(make_study(), tmp_path, FakeLauncher(hide)), 4, 0.1)
    assert row["verdict"].value == "more"


def test_the_summary_begins_with_what_the_delay_does_to_the_speedup(tmp_path: Path) -> None:
    document = conclude(make_study(), tmp_path)
    speedup = find_finding(document, "speedup", "ddp × 4 + 100 ms")
    assert (document.findings[0], speedup.weight) == (speedup, MAIN)
    assert speedup.values["speedup"].value == pytest.approx(0.5 / 0.215)
    assert find_finding(document, "delay-added", "100 ms").values["seconds"].value == pytest.approx(0.1)
    law = max(select(document.findings, "amdahl-overlay", "ddp × 4 + 100 ms"), key=lambda finding: finding.weight)
    assert law.values["verdict"] == "no difference"


def test_no_delay_and_one_rank_are_always_measured() -> None:
    trials = make_study(ranks=(2,), delays=("5ms",)).plan()
    rows = {(trial.num_ranks, trial.perturbation.seconds) for trial in trials}
    assert rows == {(1, 0.0), (2, 0.0), (1, 0.005), (2, 0.005)}
    assert {trial.perturbation.delay_rank for trial in trials} == {None}
    assert sum(trial.configuration == "control" for trial in trials) == SAMPLING.rounds


def test_the_phase_is_that_of_the_job() -> None:
    job = Job(workload="mlp", device="cpu", perturbation=Perturbation(delay_phase="input"))
    assert {trial.perturbation.delay_phase for trial in make_study(job=job).plan()} == {"input"}


def test_rows_that_failed_leave_the_others(tmp_path: Path) -> None:
    failing = FakeLauncher(add_up, failures={"ddp-4": Status.TIMED_OUT})
    document = conclude(make_study(), tmp_path, failing)
    assert find_row(document.tables[0], "ddp × 4")["step_seconds"].value == "timed out"
    row = find_overlay(document, 4, 0.1)
    assert row["calibrated"].value is None
    assert row["ideal"].value is not None
    assert find_caution(document, "failed", "ddp × 4").values["status"] == "timed_out"
    assert make_study().conclude([]).tables[0].rows == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"delays": ()}, "--delays"),
        ({"delays": ("10ms", "0.01s")}, "each once"),
        ({"delays": ("soon",)}, "'soon' is not a valid duration"),
        ({"job": Job(workload="mlp", perturbation=Perturbation(delay="5ms"))}, "--delays 0ms 5ms"),
        ({"job": Job(workload="mlp", perturbation=Perturbation(delay_rank=0))}, "scalelab run straggler"),
        ({"ranks": (3,)}, "3"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_study(**fields)
