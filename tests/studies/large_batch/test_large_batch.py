"""Large batch, from played trainings and from real ones."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.errors import UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import Optimization, StepShape
from scalelab.records.trial import Status, Trial
from scalelab.report.document import Document
from scalelab.report.findings import MAIN
from scalelab.runs.experiment import find_failed, run_study
from scalelab.studies.catalogue import read_study
from scalelab.studies.large_batch.answer import group_learning
from scalelab.studies.large_batch.study import LargeBatch
from scalelab.studies.shared.expectation import Expectation, render_plan
from scalelab.studies.shared.job import Job
from tests.records import make_result
from tests.studies.answers import find_caution, find_finding, find_row, list_kinds, set_machine
from tests.studies.large_batch.trainings import LearningLauncher

ROOT = Path(__file__).parents[3]
JOB = Job(workload="lenet", device="cpu", threads_per_rank=1)
REACHED = {"small": 0.95, "large": 0.60, "scaled": 0.90, "warmed": 0.95, "noise": 0.95}


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 4)


def make_study(**fields: Any) -> LargeBatch:
    return LargeBatch(**({"job": JOB, "seeds": 4, "epochs": 3} | fields))


def learn(trial: Trial, epoch: int) -> float:
    """Every way to train has its own end; seeds shift all of them alike."""
    assert trial.training_run is not None
    return REACHED[trial.configuration] - 0.01 * (trial.seed % 3) - 0.001 * ((trial.training_run.epochs or 0) - epoch)


def answer(study: LargeBatch, runs_dir: Path, launcher: FakeLauncher | None = None) -> Document:
    return run_study(study, runs_dir=runs_dir, launcher=launcher or LearningLauncher(learn))[1]


def test_the_ways_to_train_differ_in_batch_rate_and_warm_up_and_in_nothing_else() -> None:
    trials = {trial.configuration: trial for trial in make_study(job=Job(workload="lenet", seed=5)).plan()[:5]}
    assert list(trials) == ["small", "large", "scaled", "warmed", "noise"]
    assert [trial.global_batch for trial in trials.values()] == [32, 512, 512, 512, 32]
    assert {trial.optimization.lr for trial in trials.values()} == {0.01}
    assert [trial.optimization.lr_base_batch for trial in trials.values()] == [None, None, 32, 32, None]
    assert [trial.optimization.lr_warmup_epochs for trial in trials.values()] == [0, 0, 0, 2, 0]
    assert [trial.accumulation for trial in trials.values()] == [1, 1, 1, 1, 4]
    assert [trial.instruments for trial in trials.values()] == [(), (), (), (), ("gradient_noise",)]
    for trial in trials.values():
        assert trial.training_run is not None
        assert (trial.training_run.epochs, trial.training_run.keep) == (3, 0)
        assert (trial.seed, trial.options["data"]) == (5, "digits")


def test_every_seed_trains_all_of_them_once() -> None:
    trials = make_study(seeds=3).plan()
    assert len({trial.name for trial in trials}) == len(trials) == 15
    assert {(trial.round, trial.seed) for trial in trials} == {(1, 0), (2, 1), (3, 2)}


def test_a_small_batch_that_cannot_be_cut_is_trained_without_a_look_at_noise() -> None:
    assert "noise" not in {trial.configuration for trial in make_study(small_batch=1).plan()}
    assert make_study(small_batch=7).noise_batch == 1
    assert make_study(small_batch=6, large_batch=12).noise_batch == 1
    assert make_study(small_batch=128).noise_batch == 32


def test_passes_are_for_the_batches_that_do_not_fit() -> None:
    job = Job(workload="lenet", shape=StepShape(micro_batch=128))
    passes = {trial.configuration: trial.accumulation for trial in make_study(job=job).plan()}
    assert passes == {"small": 1, "large": 4, "scaled": 4, "warmed": 4, "noise": 4}


def test_a_learning_rate_of_ones_own_is_kept() -> None:
    job = Job(workload="lenet", optimization=Optimization(lr=0.5))
    assert {trial.optimization.lr for trial in make_study(job=job).plan()} == {0.5}
    assert {trial.optimization.lr for trial in make_study(job=Job(workload="resnet18")).plan()} == {None}


def test_what_was_lost_and_won_back_is_said_with_numbers(tmp_path: Path) -> None:
    document = answer(make_study(), tmp_path)
    main = document.tables[0]
    assert [row[0].value for row in main.rows] == ["small batch", "large batch", "+ linear scaling", "+ warm-up"]
    row = find_row(main, "large batch")
    assert row["over_small"].value == pytest.approx(-0.35)
    assert row["over_small"].high == pytest.approx(-0.35), "what seeds share cancels"
    assert row["accuracy"].low != row["accuracy"].high
    assert row["over_large"].value is None
    assert find_row(main, "+ warm-up")["over_large"].value == pytest.approx(0.35)
    first = find_finding(document, "batch-accuracy", "large batch")
    assert (first.weight, first.values["verdict"]) == (MAIN, "lost accuracy")
    assert "the large batch lost 35.00" in first.text
    assert "batch 32, 96 updates" in first.text
    assert "batch 512, 6 updates" in first.text
    scaling = find_finding(document, "remedy", "+ linear scaling")
    assert scaling.values["recovery"] == "recovered in part"
    assert "won 30.00" in scaling.text
    assert "5.00 ± 0.00 points below the small batch; the loss is recovered in part" in scaling.text
    warmup = find_finding(document, "remedy", "+ warm-up")
    assert warmup.values["recovery"] == "recovered"
    assert "no different from the small batch; the loss is recovered" in warmup.text


def test_accuracy_and_loss_stand_by_epoch(tmp_path: Path) -> None:
    document = answer(make_study(), tmp_path)
    accuracy, loss = (table for table in document.tables if table.title)
    assert [row[0].value for row in accuracy.rows] == [1, 2, 3]
    assert find_row(accuracy, 2)["large_accuracy"].value == pytest.approx(0.60 - 0.001 - 0.0075, abs=0.003)
    assert find_row(loss, 2)["small_loss"].value == pytest.approx(0.5)


def test_a_known_noise_scale_recovery_in_every_epoch(tmp_path: Path) -> None:
    document = answer(make_study(), tmp_path)
    noise = document.tables[-1]
    assert [row[0].value for row in noise.rows] == [1, 2, 3, "all"]
    for row in noise.rows:
        assert [cell.value for cell in row[1:]] == pytest.approx([0.5, 40.0, 80.0])
    words = find_finding(document, "noise-scale").text
    assert "The gradient noise scale is 80 (80 to 80) samples" in words
    assert "batch 32 is below it" in words
    assert "batch 512 is above it" in words
    samples = find_finding(document, "noise-scale-prediction", "batch 512").values["samples_ratio"]
    assert isinstance(samples, Estimate)
    assert samples.value == pytest.approx((80 + 512) / (80 + 32))


def test_a_gradient_lost_in_noise_is_a_warning(tmp_path: Path) -> None:
    document = answer(make_study(), tmp_path, LearningLauncher(learn, gradient_square=-0.1))
    assert {row[3].value for row in document.tables[-1].rows} == {None}
    assert "no-noise-scale" in list_kinds(document)
    assert "noise-scale" not in list_kinds(document)


def test_divergence_is_a_finding(tmp_path: Path) -> None:
    launcher = LearningLauncher(learn, diverges=lambda trial: trial.configuration == "scaled" and trial.seed > 1)
    document = answer(make_study(), tmp_path, launcher)
    assert find_finding(document, "diverged", "+ linear scaling").values == {"diverged": 2, "runs": 4}
    row = find_row(document.tables[0], "+ linear scaling")
    assert row["run"].mark == "‡"
    assert row["accuracy"].value is not None
    assert find_row(document.tables[1], "+ linear scaling")["train_loss"].value is None
    assert find_row(document.tables[3], 3)["scaled_loss"].value is None


def test_a_network_that_died_has_diverged_though_its_loss_is_finite() -> None:
    trial = make_study().plan()[0]
    calm = make_result(trial)
    first, *rest = calm.samples
    blown = replace(calm, samples=(first, rest[0]._replace(loss=50.0), *rest[1:]))
    assert group_learning([calm])["small"].diverged == set()
    assert group_learning([blown])["small"].diverged == {0}


def test_luck_is_not_called_a_loss(tmp_path: Path) -> None:
    def guess(trial: Trial, _: int) -> float:
        return 0.9 + 0.03 * (trial.seed % 2 if trial.global_batch > 32 else trial.seed // 2)

    document = answer(make_study(), tmp_path, LearningLauncher(guess))
    assert find_finding(document, "batch-accuracy").values["verdict"] == "unresolved"


def test_equal_trainings_do_not_differ(tmp_path: Path) -> None:
    document = answer(make_study(), tmp_path, LearningLauncher(lambda *_: 0.9))
    assert find_finding(document, "batch-accuracy").values["verdict"] == "no difference"
    assert not [one for one in document.findings if one.values.get("recovery")]


def test_one_seed_has_no_interval_and_says_so(tmp_path: Path) -> None:
    document = answer(make_study(seeds=1), tmp_path)
    assert find_row(document.tables[0], "large batch")["over_small"].low is None
    assert find_finding(document, "batch-accuracy").values["verdict"] == "unresolved"
    assert find_caution(document, "few-seeds").values == {"seeds": 1}


def test_trainings_that_still_learn_are_compared_in_speed_and_not_in_where_they_end(tmp_path: Path) -> None:
    document = answer(make_study(), tmp_path, LearningLauncher(lambda _, epoch: 0.1 * epoch))
    rising = find_caution(document, "not-converged")
    assert rising.values["rise"] == pytest.approx(0.1)
    assert "small batch by 10 %" in rising.message
    assert "not-trained" in list_kinds(document)
    assert "not-converged" not in list_kinds(answer(make_study(), tmp_path))


@pytest.mark.parametrize("status", [Status.INVALID, Status.OUT_OF_MEMORY, Status.CRASHED])
@pytest.mark.parametrize("name", ["small", "large", "warmed", "noise"])
def test_one_that_fails_leaves_the_others_their_numbers(tmp_path: Path, name: str, status: Status) -> None:
    store, document = run_study(
        make_study(), runs_dir=tmp_path, launcher=LearningLauncher(learn, failures={name: status})
    )
    assert find_caution(document, "failed").values["status"] == status.value
    labels = {"small": "small batch", "large": "large batch", "warmed": "+ warm-up"}
    for configuration, label in labels.items():
        value = find_row(document.tables[0], label)["accuracy"].value
        assert value == (status.words if configuration == name else pytest.approx(REACHED[configuration], abs=0.02))
    assert find_failed(store, read_study(store))


def test_nothing_measured_is_a_document_too() -> None:
    document = make_study().conclude([])
    assert document.summary == ()
    assert document.title == "Large batch"


def test_a_launcher_that_plays_no_curve_leaves_cells_empty(tmp_path: Path) -> None:
    document = answer(make_study(), tmp_path, FakeLauncher(lambda _: 0.1))
    assert find_row(document.tables[0], "small batch")["accuracy"].value is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"large_batch": 32}, "--large-batch 32 is not larger than --small-batch 32"),
        ({"warmup_epochs": 9.0}, "--warmup-epochs 9 does not end within --epochs 3"),
        ({"warmup_epochs": -1.0}, "--warmup-epochs"),
        ({"ranks": 3}, "--small-batch 32 cannot be divided over 3 ranks"),
        ({"seeds": 0}, "--seeds must be at least"),
        ({"job": Job(workload="lenet", optimization=Optimization(lr_warmup=5))}, "--lr-warmup 5 is set by this study"),
    ],
)
def test_fields_that_cannot_work_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_study(**fields)


def test_a_workload_without_images_is_refused_with_those_that_have_some() -> None:
    with pytest.raises(UsageError, match=r"--workload mlp has no test images.*use lenet, resnet18 or your own"):
        make_study(job=Job(workload="mlp")).plan()


def test_no_warm_up_leaves_its_row_out() -> None:
    assert "warmed" not in {trial.configuration for trial in make_study(warmup_epochs=0.0).plan()}


def test_a_plan_is_told_in_epochs() -> None:
    text = render_plan(make_study().plan(), Expectation(seconds=None, source="unknown"))
    assert "batch 512 per rank, 3 epochs" in text
    assert "steps" not in text


def test_every_column_is_explained_on_the_page(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "studies" / "large-batch.md").read_text(encoding="utf-8")
    for table in answer(make_study(), tmp_path).tables:
        for column in table.columns:
            assert re.search(rf"\| {re.escape(column.header)} ", text), column.header


@pytest.mark.ranks
def test_real_digits_are_learnt_by_the_small_batch_first(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "close", lambda: None)  # other tests use it too
    study = make_study(job=JOB, epochs=1, seeds=1, small_batch=16, large_batch=720, warmup_epochs=1.0)
    store, document = run_study(study, runs_dir=tmp_path, launcher=launcher)
    assert not find_failed(store, read_study(store))
    rows = {label: find_row(document.tables[0], label) for label in ("small batch", "large batch")}
    small, large = (rows[label]["accuracy"].value for label in rows)
    assert isinstance(small, float)
    assert isinstance(large, float)
    assert small > large + 0.1
    assert find_row(document.tables[1], "large batch")["num_updates"].value == 2
    assert find_row(document.tables[1], "+ warm-up")["learning_rate"].value == "4.50e-01"
    assert "noise-scale" in list_kinds(document)
    assert not list(tmp_path.rglob("checkpoints"))
