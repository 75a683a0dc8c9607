"""Loader workers, from played launches and from real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.cli.study_flags import parse_study
from scalelab.data.images import load_digits
from scalelab.errors import UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.launch.local import LocalLauncher
from scalelab.records.environment import count_cores
from scalelab.records.trial import Status, StepKind, StepSample, Trial, TrialResult
from scalelab.report.document import Document
from scalelab.runs.experiment import find_failed, run_study
from scalelab.studies.catalogue import read_study
from scalelab.studies.loader_workers import CROWDED, LOADER_WAIT, LoaderWorkers
from scalelab.studies.shared.job import DIGITS_IMAGES, Job
from scalelab.studies.shared.study import Sampling
from scalelab.studies.shared.sweep import VERDICT
from tests.studies.answers import AlteredLauncher, find_kinds, find_row, set_machine

pytest.importorskip("sklearn.datasets")  # here, because it sets environment variables

JOB = Job(workload="lenet", device="cpu", threads_per_rank=1)
SAMPLING = Sampling(rounds=6, steps=12, phase_steps=4, comm_free_steps=0)
TRAIN_SECONDS = 0.08
OWN = "def build(batch_size, {extra}):\n    raise NotImplementedError\n"


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 4)
    monkeypatch.setattr("scalelab.studies.loader_workers.count_cores", lambda: 4)


def make_study(**fields: Any) -> LoaderWorkers:
    return LoaderWorkers(**({"job": JOB, "sampling": SAMPLING, "batch_per_rank": 32} | fields))


def wait_for_batch(trial: Trial) -> float:
    """20 ms without workers, a quarter of that with one; more only get in each other's way."""
    workers = int(trial.options["workers"])
    return {0: 0.02, 1: 0.005, 2: 0.005, 4: 0.03}[workers]


def take(trial: Trial) -> float:
    return TRAIN_SECONDS + wait_for_batch(trial)


def split(result: TrialResult) -> TrialResult:
    """The phases as they are played."""

    def divide(sample: StepSample) -> StepSample:
        if sample.kind is not StepKind.PHASES:
            return sample
        parts = (wait_for_batch(result.trial), 0.5 * TRAIN_SECONDS, 0.4 * TRAIN_SECONDS, 0.1 * TRAIN_SECONDS)
        names = ("input_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")
        return sample._replace(**dict(zip(names, parts, strict=True)))

    return replace(result, samples=tuple(map(divide, result.samples)))


def answer(study: LoaderWorkers, runs_dir: Path, launcher: FakeLauncher | None = None) -> Document:
    return run_study(study, runs_dir=runs_dir, launcher=launcher or AlteredLauncher(split, step_seconds=take))[1]


@pytest.mark.usefixtures("four_cores")
def test_rows_differ_in_workers_only_and_none_is_always_there() -> None:
    trials = make_study(workers=(4, 1)).plan()[:4]
    assert {trial.configuration: trial.options["workers"] for trial in trials} == {
        "workers-0": 0,
        "control": 0,
        "workers-1": 1,
        "workers-4": 4,
    }
    assert {trial.options["data"] for trial in trials} == {"digits"}


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("threads", "ranks", "expected"), [(1, 1, (1, 3)), (None, 1, (2, 2)), (None, 2, (1, 1)), (4, 1, (4, 0))]
)
def test_cores_that_a_rank_does_not_compute_on_are_its_workers(
    threads: int | None, ranks: int, expected: tuple[int, int]
) -> None:
    study = make_study(job=replace(JOB, threads_per_rank=threads), ranks=ranks)
    found = {(trial.threads_per_rank, trial.spare_cores_per_rank) for trial in study.plan()}
    assert found == {expected}


@pytest.mark.usefixtures("four_cores")
def test_a_step_is_split_into_waiting_and_training(tmp_path: Path) -> None:
    document = answer(make_study(), tmp_path)
    main, epochs = document.tables
    none, one = find_row(main, "0 workers"), find_row(main, "1 worker")
    assert none["load_seconds"].value == pytest.approx(0.02)
    assert none["train_seconds"].value == pytest.approx(TRAIN_SECONDS)
    assert none["load_share"].value == pytest.approx(0.2)
    assert none["step_ratio"].value == 1.0
    assert one["step_ratio"].value == pytest.approx(0.85)
    row = find_row(epochs, "1 worker")
    assert row["epoch_seconds"].value == pytest.approx(DIGITS_IMAGES // 32 * 0.085)
    assert row["epoch_train_seconds"].value == pytest.approx(DIGITS_IMAGES // 32 * TRAIN_SECONDS)
    assert row["first_step_seconds"].value == pytest.approx(3.5 * 0.085), (
        "the fake's first step takes 3.5 times as long"
    )


@pytest.mark.usefixtures("four_cores")
def test_the_fewest_that_are_fastest_are_named_and_those_that_hurt(tmp_path: Path) -> None:
    document = answer(make_study(), tmp_path)
    best, waits = document.findings[0], find_kinds(document, LOADER_WAIT)
    assert (best.kind, best.subject) == ("fastest", "1 worker")
    assert best.values["ratio"].value == pytest.approx(0.85)
    assert waits["0 workers"].values["wait_seconds"].value == pytest.approx(0.02)
    assert waits["1 worker"].values["wait_seconds"].value == pytest.approx(0.005)
    slower = find_kinds(document, VERDICT)["4 workers"]
    assert (slower.values["verdict"], slower.values["ratio"].value) == ("slower", pytest.approx(1.1))


@pytest.mark.usefixtures("four_cores")
def test_workers_that_do_not_help_are_not_recommended(tmp_path: Path) -> None:
    best = answer(make_study(), tmp_path, FakeLauncher(lambda _: 0.1)).findings[0]
    assert (best.kind, best.subject, best.values["verdict"]) == ("fastest", "0 workers", "no difference")
    noisy = FakeLauncher(lambda _: 0.1, noise=0.3)
    assert answer(make_study(), tmp_path, noisy).findings[0].subject == ""


@pytest.mark.usefixtures("four_cores")
def test_workers_without_a_core_of_their_own_are_a_warning(tmp_path: Path) -> None:
    assert find_kinds(answer(make_study(), tmp_path), CROWDED)["4"].values == {"free_cores": 3}
    full = make_study(job=replace(JOB, threads_per_rank=4), workers=(0, 1))
    assert find_kinds(answer(full, tmp_path), CROWDED)["1"].values == {"free_cores": 0}
    few = make_study(workers=(0, 2))
    assert not find_kinds(answer(few, tmp_path), CROWDED)


@pytest.mark.usefixtures("four_cores")
def test_one_that_fails_keeps_its_row(tmp_path: Path) -> None:
    launcher = FakeLauncher(take, failures={"workers-2": Status.CRASHED})
    document = answer(make_study(), tmp_path, launcher)
    assert find_row(document.tables[0], "2 workers")["step_seconds"].value == "crashed"
    assert find_row(document.tables[0], "1 worker")["step_ratio"].value == pytest.approx(0.85)
    assert make_study().conclude([]).summary == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"workers": ()}, "--workers needs at least one number"),
        ({"workers": (1, 1)}, "--workers 1 1 names a number twice"),
        ({"workers": (-1,)}, "--workers must be at least"),
    ],
)
def test_fields_that_cannot_work_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_study(**fields)


def test_a_workload_without_the_option_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--workload mlp has no option 'workers'.*use lenet, resnet18 or your own"):
        make_study(job=Job(workload="mlp")).plan()
    (tmp_path / "own.py").write_text(OWN.format(extra="width=4"))
    with pytest.raises(UsageError, match=r"own\.py:build has no option 'workers': let build"):
        make_study(job=Job(workload=f"{tmp_path / 'own.py'}:build")).plan()
    (tmp_path / "own.py").write_text(OWN.format(extra="workers=0"))
    own = make_study(job=Job(workload=f"{tmp_path / 'own.py'}:build", threads_per_rank=1))
    assert [trial.options["workers"] for trial in own.plan()[:5]] == [0, 0, 1, 2, 4]
    (tmp_path / "own.py").unlink()
    assert own.conclude([]).title == "Loader workers", "a run can be shown where the file is not"


@pytest.mark.parametrize("workload", ["lenet", "own"])
def test_the_flag_is_the_study_s_and_the_option_has_none(workload: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.format(extra="workers, width=4"))
    name = f"{tmp_path / 'own.py'}:build" if workload == "own" else workload
    study, _ = parse_study("loader-workers", ["--workload", name, "--workers", "0", "3", "--threads-per-rank", "1"])
    assert isinstance(study, LoaderWorkers)
    assert study.workers == (0, 3)
    assert [trial.options["workers"] for trial in study.plan()[:3]] == [0, 0, 3]


def test_the_digits_are_as_many_as_is_said() -> None:
    assert len(load_digits("train")) == DIGITS_IMAGES


@pytest.mark.ranks
def test_workers_give_the_very_same_training(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "close", lambda: None)  # other tests use it too
    sampling = Sampling(rounds=1, steps=4, phase_steps=2, comm_free_steps=0, control=False)
    study = make_study(workers=(0, 1), sampling=sampling, batch_per_rank=16)
    store, document = run_study(study, runs_dir=tmp_path, launcher=launcher)
    assert not find_failed(store, read_study(store))
    none, one = store.results()[0]
    assert none.losses() == one.losses()
    assert find_row(document.tables[0], "1 worker")["load_seconds"].value is not None
    for result in (none, one):
        assert len(result.ranks[0].cores) == min(count_cores(), 1 + result.trial.spare_cores_per_rank)
