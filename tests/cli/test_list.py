"""Runs in a list, runs that are deleted, and a comparison as a job of CI."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scalelab.cli.app import main
from scalelab.errors import UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.records.store import RunStore, find_runs
from scalelab.records.trial import Status
from scalelab.runs.experiment import execute_run, start_run
from scalelab.runs.scheduler import ignore_event
from scalelab.studies.max_batch.study import MaxBatch
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from tests.studies.answers import make_strong
from tests.studies.memories import MemoryLauncher


def make_run(runs_dir: Path, name: str | None = None, note: str = "") -> RunStore:
    study = make_strong()
    store = start_run(study, runs_dir, ["scalelab"], name=name, note=note)
    execute_run(store, study, FakeLauncher(lambda trial: 0.1 / trial.num_ranks), ignore_event)
    return store


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


def test_a_run_is_listed_with_its_note_or_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    make_run(tmp_path, "base-line", "before the change")
    code, text = answer(capsys, "list", "--runs-dir", str(tmp_path))
    lines = text.splitlines()
    assert code == 0
    assert lines[2].startswith("  ddp on 2 ranks ran 2")
    assert lines[3].split()[0].endswith("-base-line")
    assert lines[4] == "  before the change"


def test_a_run_is_deleted_by_its_whole_name_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_run(tmp_path, "base-line")
    code, text = answer(capsys, "rm", "base-line", "--runs-dir", str(tmp_path))
    assert (code, text) == (
        2,
        f"error: base-line is not the whole name of a run: did you mean scalelab rm {store.name}\n",
    )
    assert answer(capsys, "rm", store.name, "--runs-dir", str(tmp_path)) == (0, f"Deleted {store.path}\n")
    assert not store.path.exists()


def test_a_run_that_is_being_executed_is_not_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_run(tmp_path)
    with store.claim():
        code, _ = answer(capsys, "rm", store.name, "--runs-dir", str(tmp_path))
        assert code != 0
    assert (store.path / "run.json").is_file()


def test_prune_deletes_only_runs_in_which_every_trial_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = make_run(tmp_path), make_run(tmp_path)
    for name in bad.record.trials:
        file = bad.trial_directory(name) / "result.json"
        stored = json.loads(file.read_text()) | {"status": "crashed", "reason": "out of file handles"}
        file.write_text(json.dumps(stored))
    (bad.path / "document.json").unlink(missing_ok=True)
    listed = answer(capsys, "list", "--runs-dir", str(tmp_path))[1].splitlines()
    assert listed[4] == "  crashed: out of file handles", "the run says why it failed"
    assert bad.name in answer(capsys, "prune", "--runs-dir", str(tmp_path))[1]
    assert find_runs(tmp_path) == [good.path, bad.path]
    assert answer(capsys, "prune", "--failed", "--runs-dir", str(tmp_path))[0] == 0
    assert find_runs(tmp_path) == [good.path]


def test_prune_knows_what_was_interrupted_and_deletes_it_only_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, stopped = make_run(tmp_path), make_run(tmp_path)
    (stopped.trial_directory(stopped.record.trials[-1]) / "result.json").unlink()
    num = len(stopped.record.trials)
    listed = answer(capsys, "prune", "--runs-dir", str(tmp_path))[1].splitlines()
    assert listed[0] == f"{stopped.name}  interrupted after {num - 1} of {num} trials"
    answer(capsys, "prune", "--failed", "--runs-dir", str(tmp_path))
    assert find_runs(tmp_path) == [good.path, stopped.path]
    answer(capsys, "prune", "--interrupted", "--runs-dir", str(tmp_path))
    assert find_runs(tmp_path) == [good.path]


def test_a_name_that_is_no_part_of_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--name 'a/b' must be letters"):
        make_run(tmp_path, "a/b")
    assert not list(tmp_path.iterdir())


def play_run(runs_dir: Path, name: str, slower: float) -> str:
    """Twelve rounds of the plain loop and of ddp, which takes so many times as long as it should."""
    study = make_strong(sampling=Sampling(rounds=12))
    store = start_run(study, runs_dir, ["scalelab"], name=name)
    launcher = FakeLauncher(lambda trial: 0.1 if trial.strategy == "single" else 0.1 * slower, noise=0.002)
    execute_run(store, study, launcher, ignore_event)
    return store.name


def test_a_slowdown_fails_the_job_of_ci_and_equal_runs_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, same, slow = (play_run(tmp_path, *one) for one in (("base", 1.0), ("same", 1.0), ("slow", 1.2)))
    ends = {}
    for name in (same, slow):
        file = tmp_path / f"{name}.xml"
        flags = ("--fail-if-slower", "10%", "--junit", str(file), "--runs-dir", str(tmp_path))
        code, text = answer(capsys, "compare", base, name, *flags)
        suite = ElementTree.parse(file).getroot()
        ends[name] = (code, int(suite.get("failures", "")))
        assert text.splitlines()[-1].startswith("passed" if name == same else "slower")
    assert ends == {same: (0, 0), slow: (3, 3)}


def test_a_row_that_is_gone_is_unresolved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = play_run(tmp_path, "base", 1.0)
    study = make_strong(sampling=Sampling(rounds=12), ranks=(1, 2))
    fewer = start_run(study, tmp_path, ["scalelab"], name="fewer")
    execute_run(fewer, study, FakeLauncher(lambda _: 0.1, noise=0.002), ignore_event)
    code, text = answer(capsys, "compare", base, fewer.name, "--fail-if-slower", "10%", "--runs-dir", str(tmp_path))
    assert (code, text.splitlines()[-1]) == (4, "unresolved at --fail-if-slower 10 %: ddp × 4")


@pytest.mark.parametrize("typed", ["5", "much", "-5%", "0%"])
def test_a_threshold_that_is_no_percentage_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: str
) -> None:
    code, text = answer(capsys, "compare", "a", "b", f"--fail-if-slower={typed}", "--runs-dir", str(tmp_path))
    assert code == 2
    assert text == f"error: --fail-if-slower {typed!r} is not a valid percentage: use a form such as 5%\n"


def test_one_run_is_compared_with_the_one_before_of_the_same_study_and_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = play_run(tmp_path, "base", 1.0)
    other = make_strong(job=Job(workload="lenet", device="cpu"))
    execute_run(start_run(other, tmp_path, ["scalelab"]), other, FakeLauncher(lambda _: 0.1), ignore_event)
    code, text = answer(capsys, "compare", "last", "--runs-dir", str(tmp_path))
    assert (code, text.endswith("name two, scalelab compare A B\n")) == (2, True)
    slow = play_run(tmp_path, "slow", 1.5)
    code, text = answer(capsys, "compare", "last", "--runs-dir", str(tmp_path), "--json", "-")
    assert code == 0
    assert text.index(base) < text.index(slow)


def test_a_probe_that_is_meant_to_fail_is_not_listed_as_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = MaxBatch(job=Job(workload="mlp", memory_limit="1GB", device="cpu"))
    store = start_run(study, tmp_path, ["scalelab"])
    execute_run(store, study, MemoryLauncher(lambda trial, _: 1e8 + 9e6 * trial.batch_per_rank), ignore_event)
    statuses = [result.status for result in store.results()[0]]
    assert Status.OUT_OF_MEMORY in statuses
    line = answer(capsys, "list", "--runs-dir", str(tmp_path))[1].splitlines()[1]
    assert line.split()[-1] == "complete"
