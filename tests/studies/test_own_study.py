"""A study of the user's own: run, resumed, shown and reported like those of scalelab; a failing one leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scalelab import FakeLauncher, Job, RunStore, Sampling, run_study
from scalelab.cli.app import main
from scalelab.errors import StudyFailed, UnknownName, UsageError
from scalelab.records.trial import Trial
from scalelab.runs.experiment import execute_run, start_run
from scalelab.runs.scheduler import ignore_event
from scalelab.studies.catalogue import derive_document, load_study, read_study
from tests.cli.commands import answer

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_study.py"
QUICK = {"job": Job(workload="mlp"), "sampling": Sampling(rounds=3, comm_free_steps=0)}


def take(trial: Trial) -> float:
    return 0.1 * (trial.shape.micro_batch or 64) / 64


def copy_example(directory: Path, *changes: tuple[str, str]) -> str:
    """The example in its own directory, with some of its text changed; returns the name of its class."""
    text = EXAMPLE.read_text(encoding="utf-8")
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (directory / "mine.py").write_text(text, encoding="utf-8")
    return f"{directory / 'mine.py'}:Accumulation"


def test_a_run_remembers_where_its_class_is(tmp_path: Path) -> None:
    place = copy_example(tmp_path)
    study = load_study(place)(passes=(1, 2), **QUICK)
    store, document = run_study(study, runs_dir=tmp_path / "runs", launcher=FakeLauncher(take))
    assert document.title == "Accumulation"
    assert [row[0].value for row in document.tables[0].rows] == ["1 pass", "control", "2 passes"]
    assert (store.record.study, store.record.study_class) == ("accumulation", place)
    assert store.name.endswith("-accumulation")
    assert read_study(RunStore.open(store.path)) == study
    assert derive_document(store) == document


def test_a_stopped_run_is_resumed(tmp_path: Path) -> None:
    store = start_run(load_study(copy_example(tmp_path))(**QUICK), tmp_path / "runs", [])
    document = execute_run(store, read_study(store), FakeLauncher(take), ignore_event)
    assert document.findings
    assert all(store.has_result(name) for name in store.record.trials)


def test_the_stored_answer_is_shown_without_the_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = load_study(copy_example(tmp_path))(**QUICK)
    store, document = run_study(study, runs_dir=tmp_path / "runs", launcher=FakeLauncher(take))
    (tmp_path / "mine.py").unlink()
    with pytest.raises(SystemExit) as ended:
        main(["show", str(store.path), "--json", "-"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["title"] == document.title
    (first, *others) = derive_document(RunStore.open(store.path)).cautions
    assert first.kind == "stored-answer"
    assert tuple(others) == document.cautions
    with pytest.raises(UsageError, match=r"there is no file .*mine\.py"):
        read_study(store)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("for passes in sorted", "for passes in sortid"), r"^Accumulation\.plan raised NameError: name 'sortid'"),
        (("self.batch_per_rank // passes", "0"), "--micro-batch must be at least 1, got 0"),
    ],
)
def test_a_plan_that_fails_leaves_no_run(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    study = load_study(copy_example(tmp_path, change))(**QUICK)
    with pytest.raises((StudyFailed, UsageError), match=words):
        run_study(study, runs_dir=tmp_path / "runs", launcher=FakeLauncher(take))
    assert not (tmp_path / "runs").exists()


def test_a_conclusion_that_fails_keeps_the_results_and_is_told_with_its_traceback(tmp_path: Path) -> None:
    study = load_study(copy_example(tmp_path, ("name_fastest(sweep,", "name_fastest(swept,")))(**QUICK)
    with pytest.raises(StudyFailed, match=r"^Accumulation\.conclude raised NameError: name 'swept'") as caught:
        run_study(study, runs_dir=tmp_path / "runs", launcher=FakeLauncher(take))
    assert "mine.py" in caught.value.__notes__[0]
    copy_example(tmp_path)
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    ("place", "error", "words"),
    [
        ("nothing.py:Mine", UsageError, "there is no file"),
        ("json:dumps", UnknownName, "unknown study class in json 'dumps'"),
        (f"{EXAMPLE}:Accumulaton", UnknownName, "Did you mean 'Accumulation'"),
        ("no.such.module:Mine", UsageError, "no.such.module cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_class_that_is_not_there_is_named(place: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        load_study(place)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.usefixtures("shared_ranks")
def test_a_file_is_run_as_a_study_is(tmp_path: Path) -> None:
    place = copy_example(tmp_path)
    done = answer(
        *(
            "run",
            place,
            "--workload",
            "mlp",
            "--dim",
            "16",
            "--depth",
            "2",
            "--passes",
            "2",
            "--batch-size-per-rank",
            "8",
        ),
        *("--rounds", "1", "--steps", "4", "--no-control"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Accumulation: What does gradient accumulation cost")
    listed = answer("list", cwd=tmp_path).stdout
    assert "accumulation" in listed
    assert "complete" in listed
    assert answer("resume", cwd=tmp_path).returncode == 0
    assert answer("report", "--markdown", "-", cwd=tmp_path).stdout.startswith("# Accumulation")
