"""Compilation: what it costs, what it saves, when it pays, and what is said where it cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import StepShape
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.findings import MAIN
from scalelab.runs.experiment import run_study
from scalelab.studies.compile import BREAK_EVEN, Compile
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from tests.studies.answers import find_kinds, find_row, say_all, set_machine, warn_all
from tests.studies.sweeps import FEW, Shared, make_results, plan_names, run

JOB = Job(workload="mlp", options={"dim": 16, "depth": 2}, device="cpu", threads_per_rank=1)
EAGER_SECONDS = 0.1
COLD_SECONDS, WARM_SECONDS = 20.0, 5.0


@pytest.fixture(autouse=True)
def a_machine_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16)
    monkeypatch.setattr("scalelab.studies.compile.shutil.which", lambda name: f"bin/{name}")


def make(**fields: Any) -> Compile:
    return Compile(**({"job": JOB, "sampling": FEW} | fields))


def take_ratio(ratio: float) -> Callable[[Trial], float]:
    return lambda trial: EAGER_SECONDS * (ratio if trial.shape.compile else 1.0)


def compile_first(result: TrialResult) -> TrialResult:
    """A second until the first step, which is longer by the compiler's time: less where its cache is filled."""
    if not result.trial.shape.compile:
        return replace(result, first_step_seconds=1.0)
    seconds = COLD_SECONDS if result.trial.round == 1 else WARM_SECONDS
    samples = (s._replace(step_seconds=s.step_seconds + seconds) if s.step == 0 else s for s in result.samples)
    return replace(result, first_step_seconds=1.0, samples=tuple(samples))


def test_the_rows_differ_in_the_compiler_only() -> None:
    assert plan_names(make()) == ["eager", "control", "compiled"]
    eager, _, compiled = make().plan()[:3]
    assert replace(compiled, configuration="eager", label="eager", shape=StepShape()) == eager


def test_the_cost_comes_back_after_cost_over_saving(tmp_path: Path) -> None:
    document = run(make(), tmp_path, take_ratio(0.5), change=compile_first)
    first, later = (find_row(document.tables[1], name) for name in ("first launch", "later launches"))
    # The first steps' own warm-up is 3.3 steps longer than settled, at half the time when compiled.
    less = 3.3 * EAGER_SECONDS / 2
    assert first["cost_seconds"].value == pytest.approx(COLD_SECONDS - less)
    assert later["cost_seconds"].value == pytest.approx(WARM_SECONDS - less)
    assert first["saving_seconds"].value == pytest.approx(EAGER_SECONDS / 2)
    assert first["break_even_steps"].value == pytest.approx((COLD_SECONDS - less) / (EAGER_SECONDS / 2))
    verdict, paid = document.findings[0], find_kinds(document, BREAK_EVEN)["first launch"]
    assert (verdict.kind, verdict.subject, verdict.weight) == ("verdict", "compiled", MAIN)
    assert verdict.values["ratio"].value == pytest.approx(0.5)
    assert paid.values["steps"].value == first["break_even_steps"].value


def test_the_time_to_the_first_step_is_told_for_the_first_launch_and_the_later_ones(tmp_path: Path) -> None:
    row = find_row(run(make(), tmp_path, take_ratio(1.0), change=compile_first).tables[0], "compiled")
    assert row["first_start_seconds"].value == pytest.approx(1.0 + COLD_SECONDS + 3.5 * EAGER_SECONDS)
    assert row["later_start_seconds"].value == pytest.approx(1.0 + WARM_SECONDS + 3.5 * EAGER_SECONDS)
    assert row["loss_difference"].value == 0.0


def test_what_is_slower_never_pays(tmp_path: Path) -> None:
    document = run(make(), tmp_path, take_ratio(1.5), change=compile_first)
    assert find_row(document.tables[1], "first launch")["break_even_steps"].value is None
    assert document.findings[0].values["verdict"] == "slower"
    paid = find_kinds(document, BREAK_EVEN)["first launch"]
    assert paid.values["steps"] is None
    assert paid.text.endswith("never breaks even.")


def test_without_a_sure_saving_nobody_can_say(tmp_path: Path) -> None:
    document = run(make(), tmp_path, take_ratio(1.0), change=compile_first, noise=0.05)
    assert "it may never break even" in say_all(document)


def test_without_a_compiler_the_row_is_not_run_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalelab.studies.compile.shutil.which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    document = run(make(), tmp_path, take_ratio(1.0))
    assert find_row(document.tables[0], "compiled")["step_seconds"].value == "not run"
    assert "there is no g++: install one, or name it in CXX" in warn_all(document)
    assert document.summary == ()
    assert isinstance(find_row(document.tables[0], "eager")["step_seconds"].value, float)


def test_the_compiler_that_is_looked_for_is_the_one_that_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "special-c++")
    monkeypatch.setattr("scalelab.studies.compile.shutil.which", lambda name: None)
    study = make()
    compiled = next(trial for trial in study.plan() if trial.shape.compile)
    assert "no special-c++" in (study.refuse(compiled, []) or "")
    assert study.refuse(replace(compiled, device="cuda"), []) is None


def test_a_failed_compilation_and_nothing_at_all_are_told(tmp_path: Path) -> None:
    document = run(make(), tmp_path, failures={"compiled": Status.INVALID})
    assert find_row(document.tables[0], "compiled")["step_seconds"].value == "invalid"
    assert find_kinds(document, "failed")["compiled"].values["status"] == "invalid"
    study = make()
    assert study.conclude([]).summary == ()
    assert len(study.conclude(make_results(study, Status.CRASHED, "it fell")).tables) == 1


def test_fields_that_cannot_work_are_refused() -> None:
    with pytest.raises(UsageError, match="--compile: this study varies it"):
        make(job=replace(JOB, shape=StepShape(compile=True)))


@pytest.mark.ranks
@pytest.mark.slow
def test_a_real_compilation_is_measured(tmp_path: Path, launcher: LocalLauncher) -> None:
    sampling = Sampling(rounds=1, steps=3, phase_steps=0, comm_free_steps=0, control=False)
    _, document = run_study(make(sampling=sampling, batch_per_rank=4), runs_dir=tmp_path, launcher=Shared(launcher))
    row = find_row(document.tables[0], "compiled")
    assert isinstance(row["step_seconds"].value, float)
    assert row["loss_difference"].value == pytest.approx(0.0, abs=1e-5)
