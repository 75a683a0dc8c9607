"""Dimensions: rows, exponents, and combinations that torch refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.trial import Status, Trial
from scalelab.report.findings import MAIN
from scalelab.runs.experiment import find_failed, run_study
from scalelab.studies.catalogue import read_study
from scalelab.studies.dimensions import GROWTH, REFUSED, Dimensions
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from scalelab.workloads.catalogue import make_options
from tests.studies.answers import find_kinds, find_row, set_machine, warn_all
from tests.studies.sweeps import FEW, SMALL_TRANSFORMER, Shared, make_results, plan_names, run


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16)


def make(*vary: str, **fields: Any) -> Dimensions:
    job = Job(workload="mlp", options={"dim": 64, "depth": 2}, device="cpu")
    return Dimensions(vary=vary, **({"job": job, "sampling": FEW} | fields))


def grow_with_square(trial: Trial) -> float:
    return 1e-6 * int(trial.options["dim"]) ** 2 * int(trial.options["depth"])


def test_one_dimension_at_a_time_leaves_the_others_at_the_base() -> None:
    study = make("dim=32,64,128", "depth=2,4")
    assert plan_names(study) == ["base", "control", "dim-32", "dim-128", "depth-4"]
    options = {trial.configuration: trial.options for trial in study.plan()}
    assert options["dim-128"] == {"dim": 128, "depth": 2}
    assert options["depth-4"] == {"dim": 64, "depth": 4}


def test_a_grid_has_all_combinations_but_the_base() -> None:
    names = plan_names(make("dim=32,64", "depth=2,4", grid=True))
    assert names == ["base", "control", "dim-32-depth-2", "dim-32-depth-4", "dim-64-depth-4"]


def test_joined_options_move_together() -> None:
    study = Dimensions(vary=("features+d_model=8,32",), job=SMALL_TRANSFORMER, sampling=FEW)
    options = {trial.configuration: trial.options for trial in study.plan()}
    assert options["features.d_model-32"]["features"] == options["features.d_model-32"]["d_model"] == 32


def test_the_default_study_can_be_planned() -> None:
    assert plan_names(Dimensions()) == ["base", "control", "features.d_model-256", "tgt_length-50"]


def test_exponents_are_those_of_the_formula(tmp_path: Path) -> None:
    document = run(make("dim=32,64,128", "depth=2,4"), tmp_path, grow_with_square)
    growth = document.tables[1]
    dim, depth = find_row(growth, "dim"), find_row(growth, "depth")
    assert dim["step_exponent"].value == pytest.approx(2.0)
    assert depth["step_exponent"].value == pytest.approx(1.0)
    assert dim["operations_exponent"].value == pytest.approx(2.0)
    assert 1.9 < float(dim["parameters_exponent"].value or 0) < 2.0
    assert dim["residual_ratio"].value == pytest.approx(0.0, abs=1e-9)
    assert depth["residual_ratio"].value is None
    assert (document.findings[0].subject, document.findings[0].weight) == ("dim", MAIN)
    grown = find_kinds(document, GROWTH)
    assert grown["dim"].values["exponent"].value == pytest.approx(2.0)
    assert "grows more than in proportion" in grown["dim"].text
    assert "grows in proportion" in grown["depth"].text


def test_a_noisy_exponent_has_an_interval_that_covers_the_truth(tmp_path: Path) -> None:
    document = run(make("dim=32,128"), tmp_path, grow_with_square, noise=0.05)
    cell = find_row(document.tables[1], "dim")["step_exponent"]
    assert cell.low is not None
    assert cell.high is not None
    assert cell.low < 2.0 < cell.high


def test_rows_have_parameters_and_operations_in_closed_form(tmp_path: Path) -> None:
    row = find_row(run(make("dim=128"), tmp_path, grow_with_square).tables[0], "dim = 128")
    options = make_options("mlp", {"dim": 128, "depth": 2})
    assert row["num_parameters"].value == options.count_parameters()
    assert row["operations_per_sample"].value == options.flops_per_sample()
    step = 1e-6 * 128**2 * 2
    assert row["operations_per_second"].value == pytest.approx(32 * options.flops_per_sample() / step)
    assert row["step_ratio"].value == pytest.approx(4.0)


def test_a_row_that_ran_out_of_memory_leaves_the_rest(tmp_path: Path) -> None:
    failures = {"dim-128": Status.OUT_OF_MEMORY}
    document = run(make("dim=32,128"), tmp_path, grow_with_square, failures=failures)
    assert find_row(document.tables[0], "dim = 128")["step_seconds"].value == "out of memory"
    assert find_row(document.tables[1], "dim")["step_exponent"].value == pytest.approx(2.0)
    assert not find_kinds(document, REFUSED)
    assert find_kinds(document, "failed")["dim = 128"].values["status"] == "out_of_memory"


def test_words_and_truths_are_compared_without_an_exponent(tmp_path: Path) -> None:
    study = Dimensions(vary=("size=tiny",), job=Job(workload="gpt2", options={"size": "small"}), sampling=FEW)
    document = run(study, tmp_path)
    assert len(document.tables) == 1
    assert find_row(document.tables[0], "size = tiny")["step_seconds"].value == pytest.approx(0.1)


def test_nothing_at_all_can_be_concluded_from_nothing() -> None:
    document = make("dim=32").conclude([])
    assert document.tables[0].rows == ()
    assert document.summary == ()


@pytest.mark.parametrize(
    ("vary", "fields", "words"),
    [
        ((), {}, "--vary needs"),
        (("wide=1",), {}, "Known: depth, dim"),
        (("dim=1",), {"batch_per_rank": 0}, "--batch-size-per-rank must be"),
        (("dim=1",), {"ranks": 0}, "--ranks must be"),
    ],
)
def test_fields_that_cannot_work_are_refused(vary: tuple[str, ...], fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(*vary, **fields)


def test_a_grid_refuses_two_dimensions_of_one_option() -> None:
    with pytest.raises(UsageError, match="--grid cannot combine two dimensions of features"):
        Dimensions(vary=("features=8", "features+d_model=8"), job=SMALL_TRANSFORMER, grid=True)


def test_a_base_that_cannot_work_is_refused_before_anything_runs() -> None:
    job = replace(SMALL_TRANSFORMER, options={**SMALL_TRANSFORMER.options, "features": 32})
    with pytest.raises(UsageError, match="--features 32 and --d-model 16 must be equal"):
        Dimensions(vary=("tgt_length=2",), job=job).plan()


def test_what_is_known_not_to_work_is_no_warning_and_what_is_not_is_one() -> None:
    study = Dimensions(vary=("features=32", "tgt_length=8"), job=SMALL_TRANSFORMER, sampling=FEW)
    assert "features" not in warn_all(study.conclude(make_results(study, Status.INVALID, "no")))
    assert "tgt_length" in warn_all(study.conclude(make_results(study, Status.INVALID, "no")))
    assert "features" in warn_all(study.conclude(make_results(study, Status.OUT_OF_MEMORY, "no")))


@pytest.mark.ranks
def test_features_that_are_not_those_of_the_model_are_invalid_in_torchs_own_words(
    tmp_path: Path, launcher: LocalLauncher
) -> None:
    sampling = Sampling(rounds=2, steps=4, phase_steps=0, comm_free_steps=0, control=False)
    study = Dimensions(vary=("features=32", "tgt_length=8"), job=SMALL_TRANSFORMER, sampling=sampling, batch_per_rank=4)
    store, document = run_study(study, runs_dir=tmp_path, launcher=Shared(launcher))
    assert find_row(document.tables[0], "features = 32")["step_seconds"].value == "invalid"
    assert "must be equal to d_model" in str(find_kinds(document, REFUSED)["features = 32"].values["reason"])
    assert isinstance(find_row(document.tables[0], "tgt_length = 8")["step_seconds"].value, float)
    assert {result.trial.configuration for result in find_failed(store, read_study(store))} == {"features-32"}
    assert "features" not in warn_all(document)
