"""Optimizers, from played launches and from real ones: what is played, and what torch keeps, is what is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.launch.local import LocalLauncher
from scalelab.records.observations import RankReport
from scalelab.records.settings import Optimization
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Document
from scalelab.report.findings import MAIN
from scalelab.runs.experiment import run_study
from scalelab.studies.optimizers import STATE, UPDATE_SHARE, Optimizers
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from scalelab.studies.shared.sweep import VERDICT
from tests.studies.answers import AlteredLauncher, find_kinds, find_row, set_machine, warn_all

JOB = Job(workload="mlp", options={"dim": 8, "depth": 2}, device="cpu", threads_per_rank=1)
SAMPLING = Sampling(rounds=6, steps=12, phase_steps=2, comm_free_steps=0)
FACTORS = {"sgd": 1.0, "control": 1.0, "nesterov": 1.02, "adagrad": 1.0, "adadelta": 1.5, "adam": 1.3}
NUM_PARAMETERS = 2 * (8 * 8 + 8)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 4)


def make_study(**fields: Any) -> Optimizers:
    return Optimizers(**({"job": JOB, "sampling": SAMPLING, "batch_per_rank": 8} | fields))


def take(trial: Trial) -> float:
    return 0.1 * FACTORS[trial.configuration]


def keep(result: TrialResult) -> TrialResult:
    """What each rank reports."""
    state = 4 * NUM_PARAMETERS * (2 if result.trial.optimization.optimizer == "adam" else 0)
    return replace(result, ranks=(RankReport(rank=0, num_parameters=NUM_PARAMETERS, optimizer_bytes=state),))


def answer(study: Optimizers, runs_dir: Path, launcher: FakeLauncher | None = None) -> Document:
    return run_study(study, runs_dir=runs_dir, launcher=launcher or AlteredLauncher(keep, step_seconds=take))[1]


def test_every_row_has_its_own_optimizer_and_the_control_that_of_the_first() -> None:
    trials = make_study().plan()[:6]
    chosen = {trial.configuration: trial.optimization.optimizer for trial in trials}
    assert chosen == {"sgd": "sgd", "control": "sgd"} | {n: n for n in ("nesterov", "adagrad", "adadelta", "adam")}


def test_times_are_compared_with_the_first_and_the_dearest_is_named_first(tmp_path: Path) -> None:
    document = answer(make_study(), tmp_path)
    main = document.tables[0]
    assert find_row(main, "sgd")["step_ratio"].value == 1.0
    assert find_row(main, "adadelta")["step_ratio"].value == pytest.approx(1.5)
    assert find_row(main, "adam")["optimizer_seconds"].value == pytest.approx(0.1 * 0.13)
    assert find_row(main, "adam")["samples_per_second"].value == pytest.approx(8 / 0.13)
    first, verdicts = document.findings[0], find_kinds(document, VERDICT)
    assert (first.kind, first.subject, first.weight) == ("verdict", "adadelta", MAIN)
    assert first.values["ratio"].value == pytest.approx(1.5)
    assert (first.values["verdict"], verdicts["adagrad"].values["verdict"]) == ("slower", "no difference")
    assert find_kinds(document, UPDATE_SHARE)["sgd"].values["share"].value == pytest.approx(0.1)


def test_what_is_kept_stands_beside_what_was_forecast(tmp_path: Path) -> None:
    document = answer(make_study(), tmp_path)
    kept = document.tables[1]
    assert "control" not in [row[0].value for row in kept.rows]
    adam = find_row(kept, "adam")
    assert adam["state_bytes"].value == adam["forecast_bytes"].value == 8 * NUM_PARAMETERS
    assert find_row(kept, "sgd")["forecast_bytes"].value == 0
    assert find_row(kept, "sgd")["last_loss"].value == pytest.approx(1 / 14)
    assert find_kinds(document, STATE)["adam"].values == {"least_bytes": 0, "most_bytes": 8 * NUM_PARAMETERS}


def test_a_momentum_is_for_those_that_have_one() -> None:
    job = replace(JOB, optimization=Optimization(optimizer="sgd", momentum=0.5, lr=0.1))
    trials = {trial.configuration: trial.optimization for trial in make_study(job=job).plan()[:6]}
    momenta = {name: chosen.momentum for name, chosen in trials.items()}
    assert momenta["sgd"] == momenta["nesterov"] == 0.5
    assert {momenta[name] for name in ("adagrad", "adadelta", "adam")} == {None}
    assert {chosen.lr for chosen in trials.values()} == {0.1}


@pytest.mark.parametrize("status", [Status.INVALID, Status.OUT_OF_MEMORY])
def test_one_that_fails_keeps_its_row(tmp_path: Path, status: Status) -> None:
    document = answer(make_study(), tmp_path, FakeLauncher(take, failures={"adam": status}))
    assert find_row(document.tables[0], "adam")["step_seconds"].value == status.words
    assert find_row(document.tables[0], "adadelta")["step_ratio"].value == pytest.approx(1.5)
    assert status.words in warn_all(document)


def test_without_a_reference_or_results_there_is_still_a_document(tmp_path: Path) -> None:
    document = answer(make_study(), tmp_path, FakeLauncher(take, failures={"sgd": Status.CRASHED}))
    assert find_row(document.tables[0], "adam")["step_ratio"].value is None
    assert document.summary == ()
    assert make_study().conclude([]).summary == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizers": ()}, "--optimizers needs at least one"),
        ({"optimizers": ("adam", "adam")}, "--optimizers adam adam names one twice"),
        ({"job": replace(JOB, optimization=Optimization(optimizer="adam"))}, "--optimizer adam: this study varies"),
        ({"batch_per_rank": 0}, "--batch-size-per-rank must be"),
    ],
)
def test_fields_that_cannot_work_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_study(**fields)


@pytest.mark.ranks
def test_torch_keeps_what_was_forecast(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the counters of steps: four bytes for each of the four tensors of the model."""
    monkeypatch.setattr(launcher, "close", lambda: None)  # other tests use it too
    sampling = Sampling(rounds=1, steps=2, phase_steps=2, comm_free_steps=0, control=False)
    names = ("sgd", "nesterov", "adagrad", "adadelta", "adam", "adamw")
    document = answer(make_study(optimizers=names, sampling=sampling), tmp_path, launcher)
    for name in names:
        row = find_row(document.tables[1], name)
        assert isinstance(row["state_bytes"].value, int)
        assert isinstance(row["forecast_bytes"].value, int)
        assert 0 <= row["state_bytes"].value - row["forecast_bytes"].value <= 16
        assert row["last_loss"].value is not None


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["fsdp-full", "fsdp2"])
def test_sharded_ranks_keep_a_piece_each(
    strategy: str, launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "close", lambda: None)
    sampling = Sampling(rounds=1, steps=2, phase_steps=0, comm_free_steps=0, control=False)
    study = make_study(optimizers=("adam",), ranks=2, strategy=strategy, sampling=sampling)
    row = find_row(answer(study, tmp_path, launcher).tables[1], "adam")
    assert row["forecast_bytes"].value == 4 * NUM_PARAMETERS
    assert row["state_bytes"].value == pytest.approx(4 * NUM_PARAMETERS, abs=64)
