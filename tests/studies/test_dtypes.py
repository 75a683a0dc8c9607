"""Data types: which rows there are, what they are held against, and that no failure is mislabelled."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import NothingMeasured, UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import StepShape
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.findings import MAIN
from scalelab.runs.experiment import run_study
from scalelab.studies.dtypes import EXPLANATION, Dtypes
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.losses import LOSSES_EQUAL
from scalelab.studies.shared.study import Sampling
from scalelab.studies.shared.sweep import VERDICT
from tests.studies.answers import find_kinds, find_row, set_machine
from tests.studies.sweeps import FEW, SMALL_TRANSFORMER, Shared, plan_names, run, with_losses

JOB = Job(workload="mlp", options={"dim": 8, "depth": 2}, device="cpu")
SHORT = Sampling(rounds=1, steps=3, phase_steps=0, comm_free_steps=0, control=False)


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16)


def make(**fields: Any) -> Dtypes:
    return Dtypes(**({"job": JOB, "sampling": FEW} | fields))


def take_by_type(trial: Trial) -> float:
    return {"float32": 0.1, "bfloat16": 0.05, "float16": 0.3}[trial.dtype]


def test_sixteen_bits_are_cast_and_autocast_and_float32_comes_first() -> None:
    names = ["float32", "control", "bfloat16-cast", "bfloat16-autocast", "float16-cast", "float16-autocast"]
    assert plan_names(make()) == names
    trials = {trial.configuration: trial for trial in make().plan()}
    assert (trials["float16-autocast"].dtype, trials["float16-autocast"].shape.autocast) == ("float16", True)
    assert (trials["float16-cast"].dtype, trials["float16-cast"].shape.autocast) == ("float16", False)


def test_float32_is_measured_also_where_it_is_not_named_and_wide_types_have_no_autocast() -> None:
    assert plan_names(make(dtypes=("float64", "tf32"))) == ["float32", "control", "float64", "tf32"]
    assert plan_names(make(dtypes=("bfloat16",), modes=("autocast",))) == ["float32", "control", "bfloat16-autocast"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtypes": ()}, "--dtypes"),
        ({"modes": ("cast", "cast")}, "--modes must name .* got cast cast"),
        ({"dtypes": ("float64",), "modes": ("autocast",)}, "float64 has no autocast"),
        ({"job": replace(JOB, dtype="bfloat16")}, "use --dtypes"),
        ({"job": replace(JOB, dtype="bfloat16", shape=StepShape(autocast=True))}, "use --dtypes"),
        ({"batch_per_rank": 0}, "--batch-size-per-rank must be"),
    ],
)
def test_fields_that_cannot_work_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(**fields)


def test_the_fastest_type_is_named_with_its_ratio_and_slow_ones_are_explained(tmp_path: Path) -> None:
    document = run(make(), tmp_path, take_by_type)
    main = document.tables[0]
    assert find_row(main, "bfloat16 cast")["step_ratio"].value == pytest.approx(0.5)
    assert find_row(main, "float16 autocast")["step_ratio"].value == pytest.approx(3.0)
    fastest = document.findings[0]
    assert (fastest.kind, fastest.subject, fastest.weight) == ("fastest", "bfloat16 cast", MAIN)
    assert fastest.values["ratio"].value == pytest.approx(0.5)
    assert find_kinds(document, VERDICT)["float16 cast"].values["verdict"] == "slower"
    assert list(find_kinds(document, EXPLANATION)) == ["float16 cast, float16 autocast"]


def test_where_nothing_is_faster_that_is_said(tmp_path: Path) -> None:
    slower = run(make(), tmp_path / "a", lambda trial: 0.1 if trial.dtype == "float32" else 0.2)
    assert (slower.findings[0].kind, slower.findings[0].subject) == ("fastest", "float32")
    same = run(make(), tmp_path / "b")
    assert (same.findings[0].kind, same.findings[0].subject) == ("fastest", "")


def test_losses_are_held_against_float32_within_the_types_tolerance(tmp_path: Path) -> None:
    ends = {"float32": 2.0, "bfloat16-cast": 2.02, "bfloat16-autocast": 2.1, "float16-cast": math.nan}

    def change(result: TrialResult) -> TrialResult:
        return with_losses(result, [2.5, 2.4, ends.get(result.trial.configuration, 2.0)])

    document = run(make(), tmp_path, change=change)
    main = document.tables[0]
    rows = {name: find_row(main, name) for name in ("float32", "bfloat16 cast", "bfloat16 autocast", "float16 cast")}
    assert [row["trains"].value for row in rows.values()] == ["as float32", "as float32", "differently", "not finite"]
    assert rows["bfloat16 cast"]["loss_difference"].value == pytest.approx(0.01)
    assert rows["float16 cast"]["last_loss"].value is None
    equal = {label: found.values["is_equal"] for label, found in find_kinds(document, LOSSES_EQUAL).items()}
    assert equal == {
        "bfloat16 cast": True, "bfloat16 autocast": False, "float16 cast": False, "float16 autocast": True,
    }  # fmt: skip


def test_a_failed_type_is_a_row_and_the_rest_is_answered(tmp_path: Path) -> None:
    document = run(make(), tmp_path, take_by_type, failures={"float16-cast": Status.INVALID})
    assert find_row(document.tables[0], "float16 cast")["step_seconds"].value == "invalid"
    assert document.findings[0].subject == "bfloat16 cast"


def test_without_float32_there_are_no_ratios_and_no_results_give_no_words(tmp_path: Path) -> None:
    document = run(make(), tmp_path, failures={"float32": Status.OUT_OF_MEMORY, "control": Status.OUT_OF_MEMORY})
    assert find_row(document.tables[0], "bfloat16 cast")["step_ratio"].value is None
    assert make().conclude([]).summary == ()


@pytest.mark.ranks
def test_a_shape_error_is_invalid_in_every_type_and_never_out_of_memory(
    tmp_path: Path, launcher: LocalLauncher
) -> None:
    options = {**SMALL_TRANSFORMER.options, "features": 32}
    job = replace(SMALL_TRANSFORMER, options=options, sees_failure=True)
    study = make(job=job, sampling=SHORT, batch_per_rank=4)
    with pytest.raises(NothingMeasured, match="was invalid: RuntimeError: the feature number"):
        run_study(study, runs_dir=tmp_path, launcher=Shared(launcher))


@pytest.mark.ranks
def test_every_type_runs_on_this_machine(tmp_path: Path, launcher: LocalLauncher) -> None:
    study = make(job=SMALL_TRANSFORMER, sampling=SHORT, batch_per_rank=4, dtypes=("bfloat16", "float16", "float64"))
    _, document = run_study(study, runs_dir=tmp_path, launcher=Shared(launcher))
    main = document.tables[0]
    assert [row[0].value for row in main.rows][-1] == "float64"
    assert all(isinstance(row[1].value, float) for row in main.rows)
    assert find_row(main, "float64")["trains"].value == "as float32"
