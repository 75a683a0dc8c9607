"""How long a study should take: as earlier runs took, or by arithmetic, or unknown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.launch.fake import FakeLauncher
from scalelab.records.observations import RankReport
from scalelab.records.store import RunStore, find_runs
from scalelab.records.trial import Status, StepKind, StepSample, Trial, TrialResult
from scalelab.studies.max_batch.study import MaxBatch
from scalelab.studies.shared import expectation
from scalelab.studies.shared.expectation import (
    ANSWER_SECONDS,
    LAUNCH_SECONDS,
    START_SECONDS,
    Expectation,
    can_try,
    count_steps,
    expect_seconds,
    find_earlier_seconds,
    measure_matmul_speed,
    read_try,
    render_plan,
    shorten_trial,
)
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from tests.studies.answers import SAMPLING, AlteredLauncher, answer, make_strong, set_machine, share_evenly


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 4)
    monkeypatch.setattr(expectation, "count_cores", lambda: 4)
    monkeypatch.setattr(expectation, "measure_matmul_speed", lambda: 1e6)


def take(result: TrialResult) -> TrialResult:
    """A launch takes ten seconds per rank, and a little more in every round."""
    return replace(result, wall_seconds=10.0 * result.trial.num_ranks + result.trial.round)


def test_an_earlier_run_of_the_same_trials_is_the_guide(tmp_path: Path) -> None:
    study = make_strong()
    answer(study, tmp_path, AlteredLauncher(take))
    expected = expect_seconds(study.plan(), find_runs(tmp_path))
    # Three configurations of one rank, one of two, one of four; the median of the rounds 1 to 6 is 3.5.
    per_round = 3 * 13.5 + 23.5 + 43.5
    assert expected.seconds == pytest.approx(START_SECONDS + ANSWER_SECONDS + 6 * per_round)
    assert "earlier runs" in expected.source


def test_rounds_limits_and_seeds_do_not_matter_and_everything_else_does(tmp_path: Path) -> None:
    answer(make_strong(), tmp_path, AlteredLauncher(take))
    runs, job = find_runs(tmp_path), make_strong().job
    alike = make_strong(job=replace(job, seed=5, timeout="3min"), sampling=replace(SAMPLING, rounds=2))
    assert set(find_earlier_seconds(alike.plan(), runs)) == {"single-1", "control", "ddp-1", "ddp-2", "ddp-4"}
    for other in (
        make_strong(global_batch=128),
        make_strong(job=replace(job, dtype="float64")),
        make_strong(job=replace(job, options={"dim": 9, "depth": 2})),
        make_strong(sampling=replace(SAMPLING, steps=50)),
    ):
        assert find_earlier_seconds(other.plan(), runs) == {}


def test_trials_that_failed_or_are_damaged_are_no_guide(tmp_path: Path) -> None:
    launcher = FakeLauncher(share_evenly, failures={"ddp-2": Status.CRASHED})
    store, _ = answer(make_strong(), tmp_path, launcher)
    for number in range(1, 7):
        file = store.trial_directory(f"ddp-4-r{number}") / "result.json"
        file.write_text("damaged" if number % 2 else json.dumps({"status": "completed", "trial": {}}))
    for number in range(1, 6):
        file = store.trial_directory(f"ddp-1-r{number}") / "result.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"wall_seconds": None}))
    known = find_earlier_seconds(make_strong().plan(), find_runs(tmp_path))
    assert set(known) == {"single-1", "control", "ddp-1"}


def test_a_run_without_control_is_a_guide_for_one_with_it(tmp_path: Path) -> None:
    answer(make_strong(sampling=replace(SAMPLING, control=False)), tmp_path, AlteredLauncher(take))
    assert find_earlier_seconds(make_strong().plan(), find_runs(tmp_path))["control"] == pytest.approx(13.5)


def test_an_earlier_run_of_some_trials_only_is_not_enough(tmp_path: Path) -> None:
    answer(make_strong(ranks=(1, 2)), tmp_path, AlteredLauncher(take))
    study = make_strong(ranks=(1, 2, 4))
    assert "FLOPs" in expect_seconds(study.plan(), find_runs(tmp_path)).source


def test_a_built_in_workload_is_estimated_from_its_operations() -> None:
    study = make_strong(ranks=(1, 2), sampling=Sampling(rounds=1, steps=10, phase_steps=0, comm_free_steps=0))
    expected = expect_seconds(study.plan(), [])
    # Two layers of 8 × 8, six operations per weight and sample, 64 samples, ten steps, on two cores per rank.
    one_rank = 6 * 2 * 64 * 64 * 10 / (2 * 1e6)
    assert expected.seconds == pytest.approx(START_SECONDS + 4 * LAUNCH_SECONDS + 3 * one_rank + one_rank / 2)
    assert "factor of about three" in expected.source


def test_ranks_that_share_cores_take_longer() -> None:
    sampling = Sampling(rounds=1, control=False)
    fair, crowded = (make_strong(ranks=(n,), sampling=sampling) for n in (4, 8))
    job = replace(fair.job, threads_per_rank=1)
    seconds = [expect_seconds(replace(study, job=job).plan(), []).seconds for study in (fair, crowded)]
    # Eight ranks on four cores have half the batch each and half a core each.
    assert seconds[0] == pytest.approx(seconds[1])


def test_an_own_workload_is_unknown_and_bounded_by_its_time_limits(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build(batch_size): ...\n")
    study = make_strong(job=Job(workload=f"{tmp_path}/own.py", device="cpu", timeout="2min"), ranks=(1, 2))
    expected = expect_seconds(study.plan(), [])
    assert expected.seconds is None
    assert "at most 48 min, by --timeout" in expected.source


def test_only_recent_runs_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = make_strong()
    answer(study, tmp_path, AlteredLauncher(take))
    monkeypatch.setattr(expectation, "RUNS_LOOKED_AT", 1)
    assert "earlier" in expect_seconds(study.plan(), find_runs(tmp_path)).source
    later = [tmp_path / "another"]
    assert "FLOPs" in expect_seconds(study.plan(), [*find_runs(tmp_path), *later]).source


def test_a_plan_lists_every_trial_and_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 2)
    trials = make_strong(sampling=Sampling(rounds=1)).plan()
    model, _, *lines = render_plan(trials, Expectation(seconds=80.0, source="by magic")).splitlines()
    assert model == "mlp · 144 parameters · float32 · cpu"
    assert [line.split()[1] for line in lines[:5]] == [trial.name for trial in trials]
    assert "ddp, 4 ranks, batch 16 per rank" in lines[4]
    assert lines[4].endswith("oversubscribed")
    assert "single, 1 rank, batch 64 per rank" in lines[0]
    assert lines[-1] == "5 trials, about 1 min 20 s (by magic). Nothing was run."


def test_an_unknown_time_is_a_dash() -> None:
    text = render_plan(make_strong().plan(), Expectation(seconds=None, source="unknown"))
    assert text.endswith("30 trials, time unknown (unknown). Nothing was run.\n")


def test_the_speed_of_a_matrix_product_is_a_finite_number() -> None:
    assert 1e6 < measure_matmul_speed() < 1e15


def test_an_unfinished_run_is_a_guide_as_far_as_it_went(tmp_path: Path) -> None:
    store, _ = answer(make_strong(), tmp_path, AlteredLauncher(take))
    for name in store.record.trials:
        if not name.endswith("-r1"):
            (store.trial_directory(name) / "result.json").unlink()
    known = find_earlier_seconds(make_strong().plan(), [RunStore.open(store.path).path])
    assert known["ddp-4"] == pytest.approx(41.0)


class Tries:
    """Plays a few steps: a launch takes a second besides them, the first step three times as long as the others."""

    def __init__(self, status: Status = Status.COMPLETED) -> None:
        self.tried: list[Trial] = []
        self._status = status

    def __call__(self, trial: Trial) -> TrialResult:
        self.tried.append(trial)
        step = 0.01 * trial.batch_per_rank
        samples = tuple(
            StepSample(
                rank=0,
                step=number,
                kind=StepKind.CLEAN,
                start_seconds=0.0,
                step_seconds=step * (3 - 2 * min(number, 1)),
            )
            for number in range(4)
        )
        reason = "" if self._status is Status.COMPLETED else "no such module"
        ranks = (RankReport(rank=0, num_parameters=1234),)
        return TrialResult(
            trial=trial,
            status=self._status,
            reason=reason,
            samples=samples,
            ranks=ranks,
            wall_seconds=1.0 + ((count_steps(trial) or 0) + 2) * step,
        )


def test_a_few_steps_tell_where_no_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    tries, study = Tries(), make_strong(ranks=(1, 2))
    trials = study.plan()
    expected = expect_seconds(trials, [], tries)
    assert [one.configuration for one in tries.tried] == ["single-1", "ddp-1", "ddp-2"]
    assert all(one.step_plan and one.step_plan.num_steps == 4 and not one.instruments for one in tries.tried)
    by_trial = [1 + 0.02 * one.batch_per_rank + (count_steps(one) or 0) * 0.01 * one.batch_per_rank for one in trials]
    assert expected.seconds == pytest.approx(ANSWER_SECONDS + sum(by_trial), rel=0.01)
    assert (expected.source, expected.num_parameters) == ("from test launches of 3 configurations", (1234,))


def test_of_a_huge_network_of_equal_layers_fewer_and_narrower_ones_are_tried() -> None:
    job = replace(make_strong().job, workload="mlp", options={"dim": 8192, "depth": 6})
    trials = make_strong(ranks=(1,), job=job).plan()
    short, thinned = shorten_trial(trials[0])
    assert (short.options["depth"], short.options["dim"]) == (1, 4472)
    assert thinned == pytest.approx(6 * (8192 / 4472) ** 2, rel=1e-3)
    tries = Tries()
    deep, flat = (read_try(trials[0], tries(trials[0]), factor) for factor in (6.0, 1.0))
    assert deep.step_seconds == pytest.approx(6 * flat.step_seconds)
    assert deep.launch_seconds == pytest.approx(LAUNCH_SECONDS + 6 * (flat.launch_seconds - LAUNCH_SECONDS))


def test_a_short_trial_is_tried_as_planned_with_its_instruments(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = make_strong(ranks=(1, 2)).plan()
    launches: list[Trial] = []

    def attempt(trial: Trial) -> TrialResult:
        launches.append(trial)
        tried = Tries()(trial)
        return tried if trial.step_plan and trial.step_plan.num_steps == 4 else replace(tried, wall_seconds=7.0)

    monkeypatch.setattr(expectation, "SHORT_SECONDS", 1000.0)
    expected = expect_seconds(trials, [], attempt)
    assert launches[1] == trials[0]
    assert len(launches) == 2 * 3, "the control is the plain loop again"
    assert expected.seconds == pytest.approx(ANSWER_SECONDS + 7.0 * len(trials), rel=0.01)


def test_what_there_is_no_time_to_try_follows_from_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expectation, "MOST_TRYING_SECONDS", -1.0)
    tries, trials = Tries(), make_strong(ranks=(1, 2)).plan()
    expected = expect_seconds(trials, [], tries)
    assert len(tries.tried) == 1
    everything = expect_seconds(trials, [], Tries())
    assert expected.seconds == pytest.approx(everything.seconds, rel=0.3)


def test_a_configuration_that_ran_before_is_not_tried(tmp_path: Path) -> None:
    job = replace(make_strong().job, threads_per_rank=1)
    answer(make_strong(ranks=(1, 2), job=job), tmp_path, AlteredLauncher(take))
    tries = Tries()
    expect_seconds(make_strong(ranks=(1, 2, 4), job=job).plan(), find_runs(tmp_path), tries)
    assert [one.configuration for one in tries.tried] == ["ddp-4"]


def test_a_try_that_fails_is_the_answer() -> None:
    expected = expect_seconds(make_strong().plan(), [], Tries(Status.INVALID))
    assert expected.seconds is None
    assert expected.source == "a test launch of single-1 was invalid: no such module"


def test_other_machines_are_not_tried_and_a_search_has_no_end_yet() -> None:
    assert not can_try(replace(make_strong().plan()[0], launcher="slurm"))
    search = MaxBatch(job=Job(workload="mlp", device="cpu", memory_limit="1GB"))
    assert expect_seconds(search.plan(), [], Tries()).source == "its results decide what runs next"


def test_a_plan_begins_with_the_model_and_its_size() -> None:
    own = [replace(trial, workload="/somewhere/net.py:build", options={}) for trial in make_strong().plan()]
    expected = Expectation(seconds=1.0, source="by magic", num_parameters=(1234,))
    assert render_plan(own, expected).splitlines()[0] == "net.py:build · 1,234 parameters · float32 · cpu"
