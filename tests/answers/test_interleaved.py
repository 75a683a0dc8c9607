"""Two studies measured in turns: the plan, the paired answer, revisions, interpreters and what is left behind."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.answers.interleaved import Interleaved, SidedLauncher, make_interleaved
from scalelab.cli.app import run_verb
from scalelab.cli.compare import main
from scalelab.errors import UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.launch.local import LocalLauncher
from scalelab.records.store import RunStore, find_runs
from scalelab.records.tasks import Measure
from scalelab.records.trial import Trial, TrialResult
from scalelab.runs.experiment import run_study, start_run
from scalelab.studies.catalogue import derive_document, read_study
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from scalelab.studies.throughput import Throughput
from tests.launch.lent import lend_ranks
from tests.studies.answers import make_strong, set_machine

WORKLOAD = """
def build(batch_size):
    raise NotImplementedError("played")
"""


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16)


def store_run(runs_dir: Path, study: Any = None) -> RunStore:
    return start_run(study or make_strong(ranks=(1, 2)), runs_dir, ["scalelab"])


def play(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Trial], float], noise: float = 0.005) -> None:
    fake = FakeLauncher(seconds, noise=noise)
    monkeypatch.setattr("scalelab.answers.interleaved.choose_launcher", lambda *_: fake)


def wander(factor: float) -> Callable[[Trial], float]:
    """A machine that gets slower by a tenth in every round; B takes `factor` times as long as A."""
    return lambda trial: 1.1**trial.round * (factor if trial.configuration.startswith("b-") else 1.0) / trial.num_ranks


def test_both_sides_take_turns_next_to_each_other(tmp_path: Path) -> None:
    study = make_interleaved([store_run(tmp_path), store_run(tmp_path)], runs_dir=tmp_path, rounds=3)
    trials = study.plan()
    assert {trial.round for trial in trials} == {1, 2, 3}
    assert not any("control" in trial.name for trial in trials)
    for first, second in zip(trials[::2], trials[1::2], strict=True):
        assert first.configuration[2:] == second.configuration[2:]
        assert (first.configuration[0], second.configuration[0]) == (("a", "b") if first.round % 2 else ("b", "a"))


@pytest.mark.parametrize(("factor", "code", "word"), [(1.0, 0, "passed"), (1.06, 3, "slower")])
def test_a_machine_that_wanders_does_not_matter(
    factor: float,
    code: int,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [store_run(tmp_path).name for _ in range(2)]
    play(monkeypatch, wander(factor))
    comment, junit = tmp_path / "comment.md", tmp_path / "junit.xml"
    words = [*names, "--interleave", "--runs-dir", str(tmp_path), "--fail-if-slower", "5%"]
    assert main([*words, "--junit", str(junit), "--markdown", str(comment)]) == code
    assert word in capsys.readouterr().err
    assert "ddp × 2" in comment.read_text()
    assert ("<failure" in junit.read_text()) == (code == 3)
    store = RunStore.open(find_runs(tmp_path)[-1])
    assert store.record.study == "compare"
    ratios = [finding.values["ratio"].value for finding in derive_document(store).findings]  # type: ignore[union-attr]
    assert ratios == pytest.approx([factor] * 3, rel=0.01)


@pytest.mark.parametrize(
    ("shifts", "last_round"), [([1.03] * 16, 8), ([*[1.03] * 3, 0.98, *[1.03] * 12], 12), ([1.4, 1 / 1.4] * 8, 16)]
)
def test_rounds_are_added_while_a_row_is_unresolved(shifts: list[float], last_round: int, tmp_path: Path) -> None:
    stores = [store_run(tmp_path, make_strong(ranks=(1,))) for _ in range(2)]
    study = make_interleaved(stores, runs_dir=tmp_path, rounds=8)

    def play_trial(trial: Trial) -> float:
        return shifts[trial.round - 1] if trial.configuration.startswith("b-") else 1.0

    store, document = run_study(study, runs_dir=tmp_path, launcher=FakeLauncher(play_trial, noise=0.001))
    assert store.trials()[-1].round == last_round
    said = {str(finding.values["verdict"]) for finding in document.findings if "verdict" in finding.values}
    assert said == {"unresolved" if last_round == 16 else "slower"}
    assert not replace(study, most_rounds=None).plan_more(store.results()[0])


def test_only_steps_that_are_compared_are_measured(tmp_path: Path) -> None:
    study = make_interleaved([store_run(tmp_path)], runs_dir=tmp_path, rounds=3)
    plans = [trial.task.plan for trial in study.plan() if isinstance(trial.task, Measure)]
    assert {(one.phase_steps, one.comm_free_steps, one.profiled_steps) for one in plans} == {(0, 0, 0)}


def test_ctrl_c_keeps_what_was_measured_and_resume_measures_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [store_run(tmp_path).name for _ in range(2)]
    interrupted: list[str] = []

    def interrupt(trial: Trial) -> float:
        if trial.round == 4 and not interrupted:
            interrupted.append(trial.name)
            raise KeyboardInterrupt
        return wander(1.0)(trial)

    play(monkeypatch, interrupt)
    assert main([*names, "--interleave", "--runs-dir", str(tmp_path)]) == 130
    store = RunStore.open(find_runs(tmp_path)[-1])
    assert len(store.results()[0]) == 18
    assert derive_document(store).tables[0].rows
    from scalelab.cli.resume import main as resume

    assert resume([store.name, "--runs-dir", str(tmp_path)]) == 0
    assert len(store.results()[0]) == len(store.record.trials)


def git(directory: Path, *words: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(["git", *who, *words], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A workload in two revisions, and a third in the working tree."""
    place = tmp_path / "code"
    (place / "nets").mkdir(parents=True)
    git(place, "init", "--quiet")
    for number in (1, 2):
        (place / "nets" / "net.py").write_text(f"NUMBER = {number}\n{WORKLOAD}")
        git(place, "add", ".")
        git(place, "commit", "--quiet", "-m", str(number))
    (place / "nets" / "net.py").write_text(f"NUMBER = 3\n{WORKLOAD}")
    return place


class ReadingLauncher(FakeLauncher):
    """Notes which revision of the file every trial would have trained."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__(lambda _: 0.1)
        self.seen: list[tuple[str, str]] = []
        self._fails_at = fails_at

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        file = Path(trial.workload.rpartition(":")[0])
        self.seen.append((trial.configuration[0], file.read_text().splitlines()[0]))
        if len(self.seen) == self._fails_at:
            raise KeyboardInterrupt
        return super().launch(trial, directory)


def make_own(repository: Path) -> Throughput:
    job = Job(workload=f"{repository / 'nets' / 'net.py'}:build", device="cpu")
    return Throughput(job=job, sampling=Sampling(rounds=3, steps=6), batch_per_rank=8)


@pytest.mark.parametrize(("at", "seen"), [(("HEAD~1",), ("1", "3")), (("HEAD~1", "HEAD"), ("1", "2"))])
def test_revisions_are_measured_as_they_were_and_their_worktrees_removed(
    at: tuple[str, ...], seen: tuple[str, str], repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_dir = tmp_path / "runs"
    name = store_run(runs_dir, make_own(repository)).name
    launcher = ReadingLauncher()
    monkeypatch.setattr("scalelab.answers.interleaved.choose_launcher", lambda *_: launcher)
    assert main([name, *(word for one in at for word in ("--at", one)), "--runs-dir", str(runs_dir)]) == 0
    assert set(launcher.seen) == {("a", f"NUMBER = {seen[0]}"), ("b", f"NUMBER = {seen[1]}")}
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert not (runs_dir / ".worktrees").exists()
    (row,) = derive_document(RunStore.open(find_runs(runs_dir)[-1])).tables[0].rows
    assert row[-1].value == "no difference"


def test_a_worktree_does_not_outlive_an_interrupted_comparison(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_dir = tmp_path / "runs"
    name = store_run(runs_dir, make_own(repository)).name
    launcher = ReadingLauncher(fails_at=3)
    monkeypatch.setattr("scalelab.answers.interleaved.choose_launcher", lambda *_: launcher)
    assert main([name, "--at", "HEAD", "--runs-dir", str(runs_dir)]) == 130
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    store = RunStore.open(find_runs(runs_dir)[-1])
    study = read_study(store)
    assert isinstance(study, Interleaved)
    again = SidedLauncher(study, store.trials())
    launcher.seen.clear()
    for trial in store.trials()[2:4]:
        again.launch(trial, tmp_path)
    assert set(launcher.seen) == {("a", "NUMBER = 2"), ("b", "NUMBER = 3")}
    again.close()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.05, 3)])
def test_the_documented_job_catches_a_slowdown_of_five_percent_and_stays_green_without(
    factor: float, code: int, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of docs/how-to/ci.md, played with launches that differ by 3 %."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "ci.md"
    job = page.read_text().partition("```yaml")[2].partition("```")[0]
    run, compare = re.findall(r"scalelab (run|compare)((?: .*|\n {10}--.*)+)", job)
    (repository / "train.py").write_text(WORKLOAD)
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "three")
    monkeypatch.chdir(repository)
    fake = FakeLauncher(wander(factor), noise=0.03)
    monkeypatch.setattr("scalelab.launch.launcher.choose_launcher", lambda *_: fake)
    monkeypatch.setattr("scalelab.answers.interleaved.choose_launcher", lambda *_: fake)
    assert run_verb([run[0], *run[1].split()]) == 0
    words = compare[1].replace("$BASE", "HEAD").split()
    assert run_verb([compare[0], *words]) == code
    assert "train.py:build" in (repository / "comment.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--interleave",), "is the first run of strong-scaling of mlp"),
        (("--at", "HEAD"), "--at HEAD needs a workload or script of your own"),
        (("--python", "/nowhere/python"), "--python /nowhere/python cannot be run"),
        (("--python", "/bin/false"), "--python /bin/false: no output; install both there"),
        (("--at", "x", "--at", "y", "--at", "z"), "--at takes one or two revisions, got 3"),
        (("SAME", "--rounds", "3"), "--rounds needs --interleave"),
        (("SAME",), "are the same run"),
    ],
)
def test_what_cannot_be_measured_again_is_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    name = store_run(tmp_path).name
    with pytest.raises(UsageError, match=message):
        main([name, *(name if word == "SAME" else word for word in words), "--runs-dir", str(tmp_path)])
    assert len(find_runs(tmp_path)) == 1


def test_an_unknown_revision_is_refused_with_the_words_of_git(repository: Path, tmp_path: Path) -> None:
    store = store_run(tmp_path / "runs", make_own(repository))
    with pytest.raises(UsageError, match=r"--at v9: git rev-parse failed.*: is it a branch, tag or commit of "):
        make_interleaved([store], revisions=["v9"], runs_dir=tmp_path / "runs")


def test_a_study_that_searches_cannot_take_turns(tmp_path: Path) -> None:
    from scalelab.studies.max_batch.study import MaxBatch

    job = Job(workload="mlp", options={"dim": 8, "depth": 2}, device="cpu")
    store = store_run(tmp_path, MaxBatch(job=job))
    with pytest.raises(UsageError, match=r"cannot measure .* again round by round: it is a max-batch run"):
        make_interleaved([store], revisions=["HEAD"], runs_dir=tmp_path)


@pytest.mark.ranks
def test_another_interpreter_runs_the_ranks_of_b(tmp_path: Path, launcher: LocalLauncher) -> None:
    job = Job(workload="mlp", options={"dim": 8, "depth": 2}, device="cpu", threads_per_rank=1)
    study = Throughput(job=job, sampling=Sampling(rounds=2, steps=3, phase_steps=0, comm_free_steps=0))
    name = store_run(tmp_path, study).name
    python = tmp_path / "python"
    log = tmp_path / "log"
    python.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with lend_ranks(launcher):
        assert main([name, "--python", str(python), "--runs-dir", str(tmp_path)]) == 0
    assert "scalelab.worker.forkserver" in log.read_text()
    store = RunStore.open(find_runs(tmp_path)[-1])
    assert [result.trial.configuration[0] for result in store.results()[0]][:4] == ["a", "b", "b", "a"]
    assert {result.status for result in store.results()[0]} == {"completed"}


def test_run_study_takes_a_comparison_like_any_study(tmp_path: Path) -> None:
    study = make_interleaved([store_run(tmp_path)], revisions=(), runs_dir=tmp_path, rounds=6)
    _, document = run_study(study, runs_dir=tmp_path, launcher=FakeLauncher(wander(1.0), noise=0.002))
    assert {str(row[-1].value) for row in document.tables[0].rows} == {"no difference"}
