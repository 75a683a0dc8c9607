"""Layouts, from played launches: every mesh that fits is a row, and what does not fit is left out with its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.records.observations import Message, MessageBasis, RankReport
from scalelab.records.settings import Spreading
from scalelab.records.strategy import PipelineTimes
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Document, Section
from scalelab.runs.experiment import run_study
from scalelab.studies.shared.cautions import SAME_SAMPLES
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from scalelab.studies.shared.sweep import FASTEST
from scalelab.studies.strategies.layouts import BUBBLE, LEAST_SENT, LEFT_OUT, Layouts
from scalelab.studies.strategies.planned import PLAN_RANKING
from tests.studies.answers import AlteredLauncher, find_kinds, find_row, set_machine

JOB = Job(workload="gpt2", options={"dropout": 0.0}, device="cpu", threads_per_rank=1)
SAMPLING = Sampling(rounds=4, steps=12, phase_steps=0, comm_free_steps=0)
SECONDS = {"dp4": 0.2, "control": 0.2, "pp2-dp2": 0.1}


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 4)


def make_study(**fields: Any) -> Layouts:
    return Layouts(**({"job": JOB, "sampling": SAMPLING, "ranks": 4, "global_batch": 8} | fields))


def count_bytes(result: TrialResult) -> TrialResult:
    """What each rank reports: replicas send 1000 bytes over all, a pipeline 10 over its own axis."""
    mesh = result.trial.mesh
    messages = [Message(kind="all_reduce", count=1, payload_bytes=1000, purpose="gradients", phase="backward")]
    pipeline = None
    if mesh.pp > 1:
        messages = [Message(kind="send", count=1, payload_bytes=10, purpose="activations", phase="forward", axis="pp")]
        seconds = {"schedule_seconds": (1.0,) * 3, "busy_seconds": (0.6, 0.7, 0.8)}
        times = seconds | {"num_ranks": mesh.pp, "num_micro_batches": 4}
        pipeline = PipelineTimes(**times)  # type: ignore[arg-type]
    basis = MessageBasis(gradient_bytes=1000, num_gradients=250)
    report = RankReport(rank=0, messages=tuple(messages), message_basis=basis, pipeline=pipeline)
    return replace(result, ranks=(report,))


def take(trial: Trial) -> float:
    return SECONDS.get(trial.configuration, 0.3)


def find_section(document: Document, heading: str) -> Section:
    return next(section for section in document.sections if section.heading == heading)


def answer(study: Layouts, runs_dir: Path) -> Document:
    return run_study(study, runs_dir=runs_dir, launcher=AlteredLauncher(count_bytes, step_seconds=take))[1]


def test_every_mesh_of_four_ranks_is_a_row_with_its_strategy() -> None:
    of_meshes = [trial for trial in make_study().plan() if trial.num_ranks == 4 and trial.configuration != "control"]
    planned = {trial.label: trial.strategy for trial in of_meshes}
    assert next(iter(planned)) == "dp=4"
    assert planned["fsdp=4"] == "fsdp2"
    assert planned["dp=2,fsdp=2"] == "hsdp"
    assert planned["fsdp=2,tp=2"] == "tp"
    assert planned["pp=2,tp=2"] == "pp"
    assert len(planned) == 10


@pytest.mark.parametrize(
    ("fields", "mesh", "reason"),
    [
        ({"ranks": 8, "global_batch": 16}, "tp=8", "tp=8: 8 ranks do not divide the 4 heads of the model"),
        ({"ranks": 8, "global_batch": 16}, "pp=8", "pp=8: 8 stages do not divide the 4 blocks of the model"),
        ({"global_batch": 6}, "dp=4", "4 data ranks do not divide the global batch of 6"),
        ({"global_batch": 2}, "pp=4", "4 stages, and 2 samples"),
        ({"job": Job(workload="lenet", device="cpu")}, "tp=4", "tp=4: no plan for tensor parallelism"),
        ({"job": Job(workload="transformer", device="cpu")}, "pp=4", "pp=4: no plan for a pipeline"),
    ],
)
def test_a_mesh_that_does_not_fit_is_left_out_with_its_reason(fields: dict[str, Any], mesh: str, reason: str) -> None:
    fitting, left_out = make_study(**fields).sort_meshes()
    assert mesh not in [one.text for one in fitting]
    assert reason in left_out[mesh]


def test_an_own_model_is_split_where_its_file_says_how(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def build():\n    ...\n\n\ndef parallelize(model, mesh):\n    ...\n")
    fitting, left_out = make_study(job=replace(JOB, workload=f"{own}:build", options={})).sort_meshes()
    assert "tp=4" in [mesh.text for mesh in fitting]
    assert left_out["pp=4"] == "pp=4: no plan for a pipeline (write split(model, num_stages) beside build)"


def test_what_is_left_out_is_warned_of_once_per_reason(tmp_path: Path) -> None:
    document = answer(make_study(job=replace(JOB, workload="transformer", options={}), global_batch=4), tmp_path)
    (caution,) = [one for one in document.cautions if one.kind == LEFT_OUT.name]
    assert caution.values["layouts"] == len(
        make_study(job=replace(JOB, workload="transformer", options={})).sort_meshes()[1]
    )
    assert caution.message.count("no plan for a pipeline") == 1
    assert "pp=4" in caution.message
    assert not [one for one in answer(make_study(), tmp_path).cautions if one.kind == LEFT_OUT.name]


def test_what_was_played_is_what_is_said(tmp_path: Path) -> None:
    document = answer(make_study(), tmp_path)
    main, by_axis = document.tables[0], find_section(document, "Sent per step by axis").tables[0]
    assert find_row(main, "dp=4")["wire_bytes"].value == 1500
    assert find_row(main, "pp=2,dp=2")["wire_bytes"].value == 10
    assert find_row(main, "pp=2,dp=2")["idle_share"].value == pytest.approx(0.3)
    idle = find_row(main, "pp=2,dp=2")["idle_share"]
    assert idle.low is not None
    assert idle.high is not None
    assert 0 <= idle.low < 0.3 < idle.high <= 1
    assert find_row(main, "pp=2,dp=2")["bubble_share"].value == pytest.approx(0.2)
    assert find_row(main, "dp=4")["idle_share"].value is None
    assert find_row(by_axis, "dp=4")["dp_bytes"].value == 1500
    assert find_row(by_axis, "pp=2,dp=2")["pp_bytes"].value == 10
    assert list(find_kinds(document, FASTEST)) == ["pp=2,dp=2"]
    assert {one.values["wire_bytes"] for one in find_kinds(document, LEAST_SENT).values()} == {10}
    assert {one.values["theory"] for one in find_kinds(document, BUBBLE).values()} == {0.2, 3 / 7}


def test_ranks_that_share_a_sample_may_have_the_same_loss(tmp_path: Path) -> None:
    def equal_losses(result: TrialResult) -> TrialResult:
        samples = tuple(sample._replace(loss=float(sample.step)) for sample in result.samples)
        return replace(count_bytes(result), samples=samples)

    launcher = AlteredLauncher(equal_losses, step_seconds=take)
    document = run_study(make_study(), runs_dir=tmp_path, launcher=launcher)[1]
    named = set(find_kinds(document, SAME_SAMPLES))
    assert "dp=4" in named, "each of these has samples of its own"
    assert not named & {"tp=4", "pp=4"}


def test_a_mesh_of_ones_own_is_refused() -> None:
    with pytest.raises(UsageError, match="--mesh tp=4: this study measures every mesh"):
        make_study(job=replace(JOB, spreading=Spreading(mesh="tp=4")))
    with pytest.raises(UsageError, match="--ranks must be at least 2, got 1"):
        make_study(ranks=1)


def play_phases(result: TrialResult) -> TrialResult:
    """Messages as before, and a hundredth of a step in the optimizer where phases are timed."""
    samples = tuple(
        sample._replace(optimizer_seconds=sample.step_seconds / 100) if sample.optimizer_seconds is not None else sample
        for sample in result.samples
    )
    return replace(count_bytes(result), samples=samples)


def take_by_work(trial: Trial) -> float:
    """Perfect data parallelism; split layers and pipelines take three times as long as they should."""
    seconds = 0.04 * trial.global_batch / trial.num_ranks
    return seconds * (3 if trial.mesh.tp > 1 or trial.mesh.pp > 1 else 1)


def test_plan_stands_beside_what_was_measured_with_its_error(tmp_path: Path) -> None:
    launcher = AlteredLauncher(play_phases, step_seconds=take_by_work)
    document = run_study(make_study(), runs_dir=tmp_path, launcher=launcher)[1]
    table = find_section(document, "Plan beside measured").tables[0]
    assert len(table.rows) == 10
    replicas, split = find_row(table, "dp=4"), find_row(table, "tp=4")
    assert abs(replicas["error"].value) < 0.15, "one rank alone, divided by four"
    assert split["error"].value < -0.5
    assert replicas["measured_seconds"].value == pytest.approx(0.08, rel=0.01)
    (ranking,) = find_kinds(document, PLAN_RANKING).values()
    assert ranking.values["num_layouts"] == 10
    assert ranking.values["correlation"] > 0


def test_one_rank_and_the_link_are_measured_for_plan_but_are_no_rows(tmp_path: Path) -> None:
    study = make_study(global_batch=8)
    trials = study.plan()
    alone = {trial.configuration: trial.global_batch for trial in trials if trial.num_ranks == 1}
    assert alone == {"one-rank": 8, "one-rank-few": 1}
    assert {trial.num_ranks for trial in trials if trial.configuration == "link"} == {2}
    labels = [row[0].value for row in answer(study, tmp_path).tables[0].rows]
    assert not [label for label in labels if "rank" in label or "all-reduce" in label]


def test_a_model_that_plan_does_not_know_has_no_plan(tmp_path: Path) -> None:
    job = Job(workload="mlp", options={"dim": 8, "depth": 4}, device="cpu", threads_per_rank=1)
    study = make_study(job=job, ranks=2)
    assert {trial.num_ranks for trial in study.plan()} == {2}
    assert "Plan beside measured" not in [section.heading for section in answer(study, tmp_path).sections]


def test_only_the_meshes_that_are_asked_for_are_measured() -> None:
    planned = [trial.label for trial in make_study(meshes=("tp=4", "dp=2,tp=2")).plan() if trial.num_ranks == 4]
    assert list(dict.fromkeys(planned)) == ["tp=4", "control", "dp=2,tp=2"]
    with pytest.raises(UsageError, match="--meshes tp=2 has 2 ranks, not --ranks 4"):
        make_study(meshes=("tp=2",))
