"""Reproducibility: what a seed fixes, what first steps cost, how many launches a precision takes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from scalelab.analysis.quality import Warmup
from scalelab.errors import UsageError
from scalelab.launch.fake import WARMUP_FACTORS
from scalelab.launch.local import LocalLauncher
from scalelab.records.trial import Status, TrialResult
from scalelab.report.findings import MAIN, Finding
from scalelab.runs.experiment import run_study
from scalelab.studies.reproducibility import Repeats, Reproducibility, describe_mean
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from tests.studies.answers import find_finding, find_row, set_machine
from tests.studies.sweeps import FEW, Shared, make_results, plan_names, run, with_losses

JOB = Job(workload="mlp", options={"dim": 8, "depth": 2}, device="cpu", seed=7)


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16)


def make(**fields: Any) -> Reproducibility:
    return Reproducibility(**({"job": JOB, "sampling": FEW} | fields))


def draw_losses(result: TrialResult) -> TrialResult:
    """Losses that the seed decides."""
    return with_losses(result, [1.0 / (1 + step + result.trial.seed) for step in range(20)])


def lose_a_bit(result: TrialResult) -> TrialResult:
    """The same, but for the last bit of step 3 in one launch."""
    drawn = draw_losses(result)
    if result.trial.name != "seed-7-r2":
        return drawn
    losses = list(drawn.losses().values())
    return with_losses(drawn, [*losses[:3], losses[3] * (1 + 2**-52), *losses[4:]])


def test_seeds_begin_with_that_of_the_job() -> None:
    assert plan_names(make(seeds=3)) == ["seed-7", "control", "seed-8", "seed-9"]
    assert {trial.seed for trial in make(seeds=3).plan()} == {7, 8, 9}


def test_the_same_seed_is_bit_equal_and_another_is_not(tmp_path: Path) -> None:
    document = run(make(), tmp_path, change=draw_losses)
    main = document.tables[0]
    assert find_row(main, "seed 7")["repeats"].value == "bit-equal"
    assert find_row(main, "control")["against_first"].value == "bit-equal"
    assert find_row(main, "seed 8")["against_first"].value == "differ from step 0 on"
    same = document.findings[0]
    assert (same.kind, same.weight, same.values) == ("losses-equal", MAIN, {"is_equal": True, "first_step": None})
    assert find_finding(document, "seed-effect", "seed 8").values == {"step": 0}


def test_a_single_bit_is_found_with_its_step(tmp_path: Path) -> None:
    document = run(make(), tmp_path, change=lose_a_bit)
    assert find_row(document.tables[0], "seed 7")["repeats"].value == "differ from step 3 on"
    assert find_finding(document, "losses-equal").values == {"is_equal": False, "first_step": 3}


def test_a_seed_that_reaches_nothing_is_named(tmp_path: Path) -> None:
    assert find_finding(run(make(), tmp_path), "seed-effect", "seed 8").values == {"step": None}


def test_the_first_steps_are_held_against_the_rest(tmp_path: Path) -> None:
    document = run(make(dropped=5), tmp_path)
    steps = document.tables[1]
    for number, factor in enumerate((*WARMUP_FACTORS, 1.0, 1.0)):
        assert find_row(steps, str(number))["rest_ratio"].value == pytest.approx(factor)
    first = statistics.median((*WARMUP_FACTORS, 1.0, 1.0))
    assert find_row(steps, "0 to 4")["rest_ratio"].value == pytest.approx(first)
    found = find_finding(document, "warmup")
    assert (found.values["found"], found.values["dropped"]) == (3, 5)
    assert found.values["ratio"].value == pytest.approx(first)
    assert found.text.endswith("dropping 5 is enough.")


def test_dropping_too_few_is_told(tmp_path: Path) -> None:
    found = find_finding(run(make(dropped=1), tmp_path), "warmup")
    assert found.values["ratio"].value == pytest.approx(WARMUP_FACTORS[0])
    assert found.text.endswith("dropping 1 is too few.")


def test_ways_to_time_are_compared(tmp_path: Path) -> None:
    document = run(make(), tmp_path)
    ways = document.tables[2]
    whole = (sum(WARMUP_FACTORS) + 13) / 16
    assert find_row(ways, "mean of all steps")["against_last"].value == pytest.approx(whole)
    assert find_row(ways, "mean without the first 5")["against_last"].value == pytest.approx(1.0)
    assert find_row(ways, "median of 12 launches")["against_last"].value == pytest.approx(1.0)
    assert find_finding(document, "mean-error").values["error"].value == pytest.approx(whole - 1)


def test_noise_asks_for_more_launches_the_finer_the_precision(tmp_path: Path) -> None:
    document = run(make(sampling=Sampling(rounds=12, steps=30)), tmp_path, noise=0.06)
    table = document.tables[3]
    fine, coarse = find_row(table, "± 1.0 %"), find_row(table, "± 5.0 %")
    assert isinstance(fine["launches"].value, int)
    assert isinstance(coarse["launches"].value, int)
    assert fine["launches"].value > 5 * coarse["launches"].value
    assert fine["least"].value <= fine["launches"].value <= (fine["most"].value or 10_000)
    assert find_finding(document, "launch-spread").values["spread"].value > 0


def test_one_launch_says_nothing_about_launches(tmp_path: Path) -> None:
    document = run(make(seeds=1, sampling=Sampling(rounds=1, steps=16, control=False)), tmp_path)
    assert find_row(document.tables[0], "seed 7")["repeats"].value is None
    assert len(document.tables) == 3
    assert find_finding(document, "launch-spread").values == {}


def test_failures_and_nothing_at_all_are_told() -> None:
    study = make()
    document = study.conclude(make_results(study, Status.CRASHED, "it fell"))
    assert find_row(document.tables[0], "seed 7")["step_seconds"].value == "crashed"
    assert document.summary == ()
    assert study.conclude([]).tables[0].rows == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dropped": 0}, "--dropped must be"),
        ({"dropped": 16}, "leaves nothing of --steps 16"),
        ({"seeds": 0}, "--seeds must be"),
        ({"global_batch": 5, "ranks": 2}, "--global-batch-size 5"),
    ],
)
def test_fields_that_cannot_work_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(**fields)


@pytest.mark.ranks
def test_real_launches_with_the_same_seed_are_bit_equal_on_two_ranks(tmp_path: Path, launcher: LocalLauncher) -> None:
    sampling = Sampling(rounds=2, steps=8, phase_steps=0, comm_free_steps=0, control=False)
    job = Job(workload="mlp", options={"dim": 16, "depth": 2}, device="cpu", threads_per_rank=1)
    study = Reproducibility(job=job, sampling=sampling, ranks=2, global_batch=8)
    _, document = run_study(study, runs_dir=tmp_path, launcher=Shared(launcher))
    assert find_finding(document, "losses-equal").values["is_equal"]
    assert find_finding(document, "seed-effect").values == {"step": 0}


def time_first_steps(*changes: float) -> Finding:
    launches = [[1.0 + change, *[1.0] * 9] for change in changes]
    return describe_mean(
        Repeats(
            launches=launches, dropped=1, warmup=Warmup(num_steps=1, is_settled=True), unequal_step=None, num_steps=10
        )
    )


def test_a_mean_that_is_shorter_with_the_first_steps_is_called_shorter() -> None:
    found = time_first_steps(-0.5, -0.4, -0.45, -0.5, -0.4, -0.45)
    assert found.values["error"].value == pytest.approx(-0.045, abs=1e-3)
    assert "shorter" in found.text


def test_an_effect_on_the_mean_whose_interval_is_wider_than_itself_is_unknown() -> None:
    found = time_first_steps(-0.5, -0.4, 0.2, -0.3, 0.1, -0.2)
    assert found.values["error"].low < found.values["error"].value < 0 < found.values["error"].high
    assert "unknown" in found.text
