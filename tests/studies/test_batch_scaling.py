"""Batch scaling: one set of trials, two readings, a model beside the measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.records.trial import Status, Trial
from scalelab.report.document import Document
from scalelab.runs.experiment import run_study
from scalelab.studies.batch_scaling import BatchScaling
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from tests.studies.answers import covers, find_finding, find_row, list_kinds, set_machine
from tests.studies.sweeps import plan_names

JOB = Job(workload="mlp", options={"dim": 8, "depth": 2}, device="cpu")
SAMPLING = Sampling(rounds=6, steps=16, phase_steps=0, comm_free_steps=4)
FIXED, SLOPE, EXCHANGE = 0.010, 0.001, 0.004


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16)


def make(**fields: Any) -> BatchScaling:
    return BatchScaling(**({"job": JOB, "sampling": SAMPLING} | fields))


def exchange(trial: Trial) -> float:
    return 0.0 if trial.strategy == "single" else EXCHANGE


def work(trial: Trial) -> float:
    return FIXED + SLOPE * trial.batch_per_rank + exchange(trial)


def answer(study: BatchScaling, runs_dir: Path, **fields: Any) -> Document:
    launcher = FakeLauncher(work, comm_seconds=exchange, **fields)
    return run_study(study, runs_dir=runs_dir, launcher=launcher)[1]


def test_both_readings_share_their_trials() -> None:
    names = plan_names(make())
    assert names == [
        "single-b32", "control", "single-b64", "single-b128", "single-b256",
        "ddp-2-b32", "ddp-2-b64", "ddp-2-b128", "ddp-2-b256", "ddp-2-b512",
    ]  # fmt: skip
    assert "ddp-2-b512" not in plan_names(make(reading="global"))
    assert "ddp-2-b32" not in plan_names(make(reading="per-rank"))


def test_a_batch_read_as_global_is_strong_scaling_and_per_rank_weak(tmp_path: Path) -> None:
    document = answer(make(), tmp_path)
    strong, weak, model = document.tables
    for batch in (32, 64, 128, 256):
        alone = FIXED + SLOPE * batch
        half, whole = FIXED + SLOPE * batch / 2 + EXCHANGE, FIXED + SLOPE * batch + EXCHANGE
        assert covers(find_row(strong, batch)["speedup"], alone / half)
        assert covers(find_row(weak, batch)["speedup"], 2 * alone / whole)
        assert find_row(strong, batch)["efficiency"].value == pytest.approx(alone / half / 2)
        assert find_row(weak, batch)["samples_per_second"].value == pytest.approx(2 * batch / whole)
    assert all(row[-1].value == pytest.approx(0, abs=1e-6) for row in model.rows)
    assert find_finding(document, "model-error").values["largest"] == pytest.approx(0, abs=1e-6)
    assert {one.subject for one in document.findings if one.kind == "speedup-by-batch"} == {"global", "per-rank"}


def test_a_job_that_grows_in_proportion_saturates_at_once(tmp_path: Path) -> None:
    launcher = FakeLauncher(lambda trial: SLOPE * trial.batch_per_rank)
    _, document = run_study(make(reading="global"), runs_dir=tmp_path, launcher=launcher)
    assert find_finding(document, "doubling").values["global_batch"] == 32


def test_a_job_of_fixed_cost_does_not_saturate(tmp_path: Path) -> None:
    launcher = FakeLauncher(lambda _: FIXED)
    _, document = run_study(make(reading="global"), runs_dir=tmp_path, launcher=launcher)
    assert find_finding(document, "doubling").values["global_batch"] is None


def test_batches_none_of_which_is_twice_another_say_nothing_of_doublings(tmp_path: Path) -> None:
    launcher = FakeLauncher(lambda trial: SLOPE * trial.batch_per_rank)
    _, document = run_study(make(reading="global", batches=(32, 96)), runs_dir=tmp_path, launcher=launcher)
    assert "doubling" not in list_kinds(document)


def test_a_batch_that_failed_leaves_the_other_rows(tmp_path: Path) -> None:
    document = answer(make(), tmp_path, failures={"ddp-2-b256": Status.OUT_OF_MEMORY})
    strong = document.tables[0]
    assert find_row(strong, 256)["step_seconds"].value == "out of memory"
    assert find_row(strong, 256)["speedup"].value is None
    assert find_row(strong, 128)["speedup"].value is not None


def test_without_results_it_concludes_with_empty_rows() -> None:
    document = make().conclude([])
    assert all(cell.value is None for row in document.tables[0].rows for cell in row[1:])
    assert not document.summary


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"ranks": 1}, "--ranks must be"), ({"batches": (33,)}, "33"), ({"batches": (64, 32)}, "64 32")],
)
def test_what_cannot_be_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(**fields)


def test_a_batch_per_rank_need_not_be_divisible() -> None:
    assert make(batches=(33,), reading="per-rank").plan()
