"""Scaling of a training script with a fake launcher: the samples that its ranks counted, not those of the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.errors import UsageError
from scalelab.records.observations import RankReport, ScriptReport
from scalelab.records.tasks import StepPlan
from scalelab.records.trial import TrialResult
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.script import ScriptSource
from tests.studies.answers import (
    ONE_RANK_SECONDS,
    AlteredLauncher,
    answer,
    find_caution,
    find_finding,
    find_row,
    list_kinds,
    make_strong,
    set_machine,
)

JOB = Job(script=ScriptSource(target="/train.py", arguments=("--batch-size", "{batch_per_rank}")))


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16)


def count_passes(passes: Callable[[int], int]) -> Callable[[TrialResult], TrialResult]:
    """Results of a script that takes the planned batch in so many passes, by number of ranks."""

    def alter(result: TrialResult) -> TrialResult:
        batch, number = result.trial.batch_per_rank, passes(result.trial.num_ranks)
        seen = ScriptReport(num_optimizers=1, num_passes=number, num_samples=batch * number, batch_samples=batch)
        return replace(
            result, ranks=tuple(RankReport(rank=rank, script=seen) for rank in range(result.trial.num_ranks))
        )

    return alter


def test_accumulated_batches_count_in_every_rate(tmp_path: Path) -> None:
    launcher = AlteredLauncher(count_passes(lambda _: 4))
    _, document = answer(make_strong(job=JOB), tmp_path, launcher)
    for num_ranks in (1, 2, 4):
        row = find_row(document.tables[0], f"script × {num_ranks}")
        assert row["samples_per_second"].value == pytest.approx(4 * 64 * num_ranks / ONE_RANK_SECONDS)
        assert row["speedup"].value == pytest.approx(num_ranks)
    assert "4 backward passes per step: 256 samples" in document.setting
    assert find_finding(document, "amdahl").values["serial_fraction"].value == pytest.approx(0.0, abs=1e-9)
    assert "script × 1 measured twice" in find_finding(document, "control").text


def test_a_script_that_divides_its_passes_too_is_compared_by_samples(tmp_path: Path) -> None:
    launcher = AlteredLauncher(count_passes(lambda num_ranks: 4 // num_ranks))
    _, document = answer(make_strong(job=JOB), tmp_path, launcher)
    row = find_row(document.tables[0], "script × 4")
    assert row["samples_per_second"].value == pytest.approx(4 * 64 / ONE_RANK_SECONDS)
    assert row["speedup"].value == pytest.approx(1.0)
    message = find_caution(document, "unequal-work").message
    assert "script × 1 takes 256 in 4 passes, script × 2 takes 128 in 2 passes" in message
    assert "amdahl" not in list_kinds(document)


@pytest.mark.parametrize("has_group", [True, False])
def test_ranks_that_train_models_of_their_own_have_no_speedup(tmp_path: Path, has_group: bool) -> None:
    def alter(result: TrialResult) -> TrialResult:
        seen = ScriptReport(num_optimizers=1, num_passes=1, has_group=has_group, is_joined=False)
        ranks = tuple(RankReport(rank=rank, script=seen) for rank in range(result.trial.num_ranks))
        return replace(result, ranks=ranks)

    _, document = answer(make_strong(job=JOB), tmp_path, AlteredLauncher(alter))
    assert find_row(document.tables[0], "script × 2")["speedup"].value is None
    assert {one.kind for one in document.findings} == {"separate-models"}
    assert document.findings[0].text.startswith("The 2 ranks trained 2 separate models, not one")
    why = "the ranks sent each other nothing" if has_group else "the script has no process group"
    messages = [one.message for one in document.cautions if one.kind == "ranks-alone"]
    assert messages[0] == f"script × 2: {why}: each rank trains its own model"


@pytest.mark.parametrize(("num_evaluations", "is_named"), [(3, False), (9, True)])
def test_work_that_many_steps_have_besides_is_named(tmp_path: Path, num_evaluations: int, is_named: bool) -> None:
    def alter(result: TrialResult) -> TrialResult:
        seen = ScriptReport(num_optimizers=1, num_passes=1, num_samples=64, num_evaluations=num_evaluations)
        ranks = tuple(RankReport(rank=rank, script=seen) for rank in range(result.trial.num_ranks))
        return replace(result, ranks=ranks)

    _, document = answer(make_strong(job=JOB), tmp_path, AlteredLauncher(alter))
    messages = [one.message for one in document.cautions if one.kind == "steps-apart"]
    assert bool(messages) is is_named
    assert all("steps included an evaluation, a rollout or a checkpoint" in one for one in messages)


def test_a_placeholder_may_be_multiplied_and_divided() -> None:
    words = ("--tokens={global_batch*64}", "--envs", "{batch_per_rank/4}", '{"a": {ranks}}', "{{ranks}}")
    task = ScriptSource(target="/t.py", arguments=words).make_task(StepPlan(), batch_per_rank=8, num_ranks=2, seed=0)
    assert task.arguments == ("--tokens=1024", "--envs", "2", '{"a": 2}', "{{ranks}}")
    assert task.is_told_batch
    said = r"\{batch_per_rank/3\}: batch_per_rank is 8, which 3 does not divide: choose another batch size"
    with pytest.raises(UsageError, match=said):
        ScriptSource(target="/t.py", arguments=("{batch_per_rank/3}",)).make_task(
            StepPlan(), batch_per_rank=8, num_ranks=2, seed=0
        )


def test_ranks_that_share_samples_count_them_once(tmp_path: Path) -> None:
    def alter(result: TrialResult) -> TrialResult:
        num_ranks = result.trial.num_ranks
        seen = ScriptReport(num_optimizers=1, num_passes=1, num_samples=64, num_sharing=num_ranks)
        return replace(result, ranks=tuple(RankReport(rank=rank, script=seen) for rank in range(num_ranks)))

    _, document = answer(make_strong(job=JOB), tmp_path, AlteredLauncher(alter))
    row = find_row(document.tables[0], "script × 4")
    assert row["samples_per_second"].value == pytest.approx(4 * 64 / ONE_RANK_SECONDS)
    assert "same-samples" not in list_kinds(document)


@pytest.mark.parametrize(("marks", "is_warned"), [((5, 5, 5, 5), True), ((5, 6, 7, 8), False)])
def test_one_loss_over_all_ranks_is_no_sign_of_the_same_samples(
    marks: tuple[int, ...], is_warned: bool, tmp_path: Path
) -> None:
    def alter(result: TrialResult) -> TrialResult:
        reports = [ScriptReport(num_optimizers=1, num_passes=1, num_samples=64, input_mark=mark) for mark in marks]
        ranks = tuple(RankReport(rank=n, script=reports[n]) for n in range(result.trial.num_ranks))
        samples = tuple(one._replace(loss=1 / (one.step + 1)) for one in result.samples)
        return replace(result, ranks=ranks, samples=samples)

    _, document = answer(make_strong(job=JOB), tmp_path, AlteredLauncher(alter))
    assert ("same-samples" in list_kinds(document)) == is_warned
