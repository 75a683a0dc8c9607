"""Whole runs through a real Slurm, as a user types them: waited for, left alone, refused, interrupted."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from scalelab.cli.resume import reopen_waiting
from scalelab.launch.fake import FakeLauncher
from scalelab.records.launchers import BatchNote
from scalelab.records.store import RunStore, find_runs
from scalelab.records.trial import Trial, TrialResult, not_run
from scalelab.runs.scheduler import run_trials
from tests.cli.commands import answer, finished_trials, start_scalelab, wait_until
from tests.launch.batch.test_batch_jobs import play_program
from tests.records import make_store
from tests.slurm import Cluster

SMALL = ["--workload", "mlp", "--dim", "16", "--depth", "2", "--global-batch-size", "8", "--steps", "4", "--no-control"]
STUDY = [
    "run",
    "strong-scaling",
    *SMALL,
    "--phase-steps",
    "0",
    "--comm-free-steps",
    "0",
    "--profile-steps",
    "0",
    "--rounds",
    "1",
]
SLURM = ["--launcher", "slurm", "--poll", "0.2s"]
ON_SLURM = [*STUDY, *SLURM, "--threads-per-rank", "1"]
PAIR = [
    *(
        "run",
        "throughput",
        "--workload",
        "mlp",
        "--dim",
        "16",
        "--depth",
        "2",
        "--ranks",
        "2",
        "--batch-size-per-rank",
        "4",
    ),
    *("--steps", "4", "--phase-steps", "0", "--comm-free-steps", "0", "--profile-steps", "0", "--rounds", "1"),
    *("--warmup", "1", "--threads-per-rank", "1"),
]
"""One trial of two ranks."""


@pytest.fixture
def place(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, beside a Slurm."""
    slurm.join(monkeypatch)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def open_last(place: Path) -> RunStore:
    return RunStore.open(find_runs(place / "runs")[-1])


def read_losses(place: Path) -> dict[str, dict[int, float]]:
    return {result.trial.name: result.losses() for result in open_last(place).results()[0]}


def test_a_dry_run_shows_the_scripts_and_submits_nothing(place: Path, slurm: Cluster) -> None:
    shown = answer(*ON_SLURM, "--nodes", "2", "--ranks", "1", "2", "--account", "mine", "--dry-run", cwd=place)
    assert shown.returncode == 0, shown.stderr
    for line in ("#SBATCH --nodes=2", "#SBATCH --ntasks=2", '#SBATCH --account="mine"', "not submitted"):
        assert line in shown.stdout
    assert f"-m scalelab resume {place}/runs/RUN" in shown.stdout
    assert slurm.list_jobs() == []
    assert not (place / "runs").exists()


def test_a_dry_run_needs_no_batch_system(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    study = ["pbs", "--nodes", "2", "--ranks", "1", "2", "--job-per-trial", "--dry-run"]
    shown = answer(*STUDY, "--launcher", *study, cwd=place)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("Job script for pbs (not submitted)") == 3
    assert "--only ddp-2-r1" in shown.stdout


def test_a_run_that_slurm_refuses_has_rows_that_were_not_run(place: Path) -> None:
    refused = answer(*ON_SLURM, "--nodes", "99", "--ranks", "1", "2", cwd=place)
    assert refused.returncode == 1
    assert "was not run: sbatch: error: Batch job submission failed" in refused.stderr
    results, _ = open_last(place).results()
    assert len(results) == 3
    assert {result.status for result in results} == {"not_run"}
    assert all("sbatch: error" in result.reason for result in results)
    assert "fix what the reason names, then scalelab resume" in refused.stderr
    assert "3 failed" in answer("list", cwd=place).stdout
    assert "not run" in answer("show", "last", cwd=place).stdout


def test_collectives_are_submitted_like_every_study(place: Path) -> None:
    shown = answer("collectives", "--launcher", "pbs", "--ranks", "2", "4", "--nodes", "2", "--dry-run", cwd=place)
    assert shown.returncode == 0, shown.stderr
    assert '#PBS -l "select=2:ncpus=' in shown.stdout
    assert ":mpiprocs=2" in shown.stdout
    assert f"-m scalelab resume {place}/runs/RUN" in shown.stdout


def test_what_was_refused_is_submitted_again_by_resume(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = place / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    for name in ("qdel", "qstat"):
        play_program(programs, name, "")
    play_program(programs, "qsub", "qsub: Unauthorized Request\n", 1)
    refused = answer(*STUDY, "--launcher", "pbs", "--ranks", "1", "2", cwd=place)
    assert refused.returncode == 1
    assert "fix what the reason names, then scalelab resume runs/" in refused.stderr
    again = answer("resume", "last", cwd=place)
    assert again.returncode == 1
    assert "was not run: qsub: Unauthorized Request" in again.stderr
    play_program(programs, "qsub", "7.host\n")
    taken = answer("resume", "last", "--queue", "small", "--detach", cwd=place)
    assert taken.returncode == 0, taken.stderr
    assert taken.stdout.startswith("Submitted job 7.host for runs/")
    store = open_last(place)
    assert not any(store.has_result(name) for name in store.record.trials)
    assert json.loads((store.path / "job.json").read_text())["site"]["queue"] == "small"


def test_what_cannot_be_run_stays_so_and_what_was_refused_comes_again(tmp_path: Path) -> None:
    store = make_store(tmp_path / "runs")
    first, second, third = store.trials()
    store.save_result(not_run(first, "too large for any machine"))
    store.save_result(not_run(second, "sbatch: error", BatchNote(scheduler="slurm", may_come=True)))
    store.save_result(not_run(third, "cancelled", BatchNote(scheduler="slurm", job="7")))
    reopen_waiting(store)
    assert [store.has_result(trial.name) for trial in (first, second, third)] == [True, False, True]


def test_later_rounds_of_what_was_refused_come_again_too(tmp_path: Path) -> None:
    store = make_store(tmp_path / "runs")
    note = BatchNote(scheduler="slurm", may_come=True)

    class Refusing(FakeLauncher):
        def launch(self, trial: Trial, directory: Path) -> TrialResult:
            assert directory.is_dir()
            return not_run(trial, "sbatch: error", note)

    results = run_trials(store, Refusing(lambda _: 0.01), lambda _: None)
    assert [result.batch for result in results] == [note] * 3


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([*STUDY, "--ranks", "1", "--wall-time", "1h"], "--wall-time needs a batch system, but --launcher is local"),
        (["reproduce", "scaling", "--wall-time", "1h"], "--wall-time has no effect: a recipe is not submitted"),
        (["reproduce", "polaris", "--only", "P9", "--detach"], "--detach has no effect: a recipe is not submitted"),
        (["reproduce", "polaris", "--launcher", "slurm"], "reproduce has no --launcher: every row has its own"),
    ],
)
def test_flags_of_a_batch_system_are_refused_without_one(place: Path, command: list[str], words: str) -> None:
    refused = answer(*command, cwd=place)
    assert refused.returncode == 2
    assert words in refused.stderr
    assert not (place / "runs").exists()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.usefixtures("shared_ranks")
def test_a_run_that_was_left_alone_gives_the_losses_of_the_local_launcher(place: Path, slurm: Cluster) -> None:
    local = answer(*PAIR, cwd=place)
    assert local.returncode == 0, local.stderr
    expected = read_losses(place)
    refused = answer(*PAIR, *SLURM, "--detach", "--json", "x.json", cwd=place)
    assert "--detach returns before there is an answer: use --json with" in refused.stderr
    left = answer(*PAIR, *SLURM, "--detach", cwd=place)
    assert left.returncode == 0, left.stderr
    (number,) = slurm.list_jobs()
    assert left.stdout.startswith(f"Submitted job {number} for runs/")
    assert f"slurm job {number} " in answer("list", cwd=place).stdout
    assert "when its batch job has ended" in " ".join(answer("show", "last", "--full", cwd=place).stdout.split())
    busy = answer("resume", "last", cwd=place)
    assert busy.returncode == 1
    assert f"slurm job {number} of run" in busy.stderr
    slurm.wait_until_empty(90)
    listed = answer("list", "--json", cwd=place).stdout.splitlines()[-1]
    assert json.loads(listed)["state"] == "complete"
    assert read_losses(place) == expected
    assert answer("show", "last", cwd=place).returncode == 0
    assert answer("resume", "last", cwd=place).returncode == 0


@pytest.mark.ranks
@pytest.mark.slow
def test_a_trial_with_a_job_of_its_own_is_waited_for_and_its_ranks_have_the_prefix(place: Path) -> None:
    prefix = place / "container.sh"
    prefix.write_text(f'#!/bin/sh\necho "$SLURM_PROCID" >>{place}/ranks.txt\nexec "$@"\n')
    prefix.chmod(0o755)
    train = ["train", "--workload", "mlp", "--dim", "16", "--depth", "2", "--global-batch-size", "8", "--steps", "3"]
    on_slurm = ["--ranks", "2", "--launcher", "slurm", "--poll", "0.2s", "--job-per-trial", "--container", str(prefix)]
    done = answer(*train, *on_slurm, "--python", sys.executable, cwd=place)
    assert done.returncode == 0, done.stderr
    store = open_last(place)
    record = json.loads((store.path / "job.json").read_text())
    assert [job["trial"] for job in record["jobs"]] == list(store.record.trials) == ["train-r1"]
    assert done.stderr.count("is ended") == 1
    assert sorted((place / "ranks.txt").read_text().split()) == ["0", "1"]
    assert (store.path / "batch" / "scalelab-train-r1.sh").is_file()


@pytest.mark.ranks
@pytest.mark.slow
def test_ctrl_c_cancels_the_job_and_leaves_no_process_and_what_was_measured(place: Path, slurm: Cluster) -> None:
    command = start_scalelab(*ON_SLURM, "--ranks", "1", "2", "--rounds", "30", cwd=place)
    wait_until(lambda: len(finished_trials(place / "runs")) >= 1)
    run = str(open_last(place).path)
    assert find_at_work(run), "the job should be at work"
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 130
    assert "(slurm) was cancelled\nInterrupted; results so far are kept" in errors
    slurm.wait_until_empty(30)
    wait_until(lambda: not find_at_work(run), seconds=20)
    assert finished_trials(place / "runs")
    assert "ended" in answer("list", cwd=place).stdout


def find_at_work(run: str) -> list[psutil.Process]:
    """Processes that have the run in their command, wherever their parents are."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(run in word for word in words):
            found.append(process)
    return found
