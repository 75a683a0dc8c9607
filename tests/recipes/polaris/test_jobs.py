"""P9: a job of two nodes is submitted, and what becomes of it is the row: by Slurm, by a played PBS, by nobody."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from scalelab.recipes.feasibility import NO_BATCH_SYSTEM
from scalelab.recipes.polaris.jobs import describe_job, make_submitted, quote_refusal
from scalelab.recipes.reproduce import Reproduce
from scalelab.records.launchers import BatchNote
from scalelab.records.store import RunStore, find_runs
from scalelab.records.trial import Status, TrialResult, not_run
from tests.cli.commands import answer
from tests.launch.batch.test_batch_jobs import play_program
from tests.pbs import read_directives
from tests.slurm import Cluster

P9 = ["reproduce", "polaris", "--only", "P9", "--device", "cpu", "--poll", "0.1s"]
LIMITS = "qsub: Job violates queue and/or server resource limits"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs of a batch system are found, and no others."""
    place = tmp_path / "bin"
    place.mkdir()
    for name in ("cat", "cp", "sh"):
        (place / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(name, raising=False)
    return place


def play_qsub(programs: Path, text: str, code: int) -> None:
    """A qsub that keeps the script it is given."""
    play_program(programs, "qsub", text, code)
    (programs / "qsub").write_text(f'#!/bin/sh\ncp "$1" {programs}/script\ncat {programs}/qsub.txt\nexit {code}\n')


def read_result(place: Path) -> TrialResult:
    ((result,), _) = RunStore.open(find_runs(place / "runs")[-1]).results()
    return result


def read_words(text: str) -> str:
    """Printed text without its line breaks."""
    return " ".join(text.split())


def test_a_job_that_pbs_refuses_is_a_row_that_was_not_run_in_its_words(programs: Path, tmp_path: Path) -> None:
    for name in ("qdel", "qstat"):
        play_program(programs, name, "")
    play_qsub(programs, f"{LIMITS}\n", 1)
    done = answer(*P9, "--account", "mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"A job of 2 nodes was submitted to pbs and rejected: {LIMITS} (published: qsub was rejected" in read_words(
        done.stdout
    )
    assert "1 trial got no batch job: scalelab resume last submits them again" in done.stderr
    result = read_result(tmp_path)
    assert (result.status, result.reason) == (Status.NOT_RUN, LIMITS)
    assert result.batch == BatchNote(scheduler="pbs", may_come=True)
    asked = read_directives((programs / "script").read_text())
    assert {"select=2:system=polaris", "place=scatter", "walltime=0:10:0"} <= set(asked["l"])
    assert (asked["q"], asked["A"]) == (["debug"], ["mine"])


def test_a_job_that_pbs_takes_and_does_not_begin_is_a_row_with_its_number(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "config" / "scalelab").mkdir(parents=True)
    (tmp_path / "config" / "scalelab" / "site.toml").write_text('account = "theirs"\nqueue = "small"\n')
    play_qsub(programs, "7.host\n", 0)
    play_program(programs, "qdel", "")
    play_program(programs, "qstat", '{"Jobs": {"7.host": {"job_state": "Q"}}}')
    gone = f"#!/bin/sh\nif [ -e {programs}/gone ]; then echo 'Unknown Job Id 7.host' >&2; exit 153; fi\n"
    (programs / "qstat").write_text(f"{gone}cat {programs}/qstat.txt\n")
    (programs / "qdel").write_text(f"#!/bin/sh\n: >{programs}/gone\n")
    done = answer(*P9, "--queue-timeout", "0.1s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path)
    assert f"submitted to pbs as job 7.host and was not run: {result.reason}" in read_words(done.stdout)
    assert result.batch == BatchNote(scheduler="pbs", job="7.host", may_come=True)
    asked = read_directives((programs / "script").read_text())
    assert (asked["q"], asked["A"]) == (["small"], ["theirs"]), "the site's own file says what is asked for"
    assert not any("polaris" in value for value in asked["l"])


def test_without_a_batch_system_the_row_says_so(programs: Path, tmp_path: Path) -> None:
    assert programs.is_dir()
    done = answer(*P9[:-2], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"No job of 2 nodes was submitted: {NO_BATCH_SYSTEM}" in read_words(done.stdout)
    result = read_result(tmp_path)
    assert (result.status, result.reason, result.batch) == (Status.NOT_RUN, NO_BATCH_SYSTEM, None)


def join(slurm: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slurm.join(monkeypatch)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_a_slurm_of_one_node_refuses_the_job_of_two(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(slurm, monkeypatch, tmp_path)
    done = answer(*P9, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "submitted to slurm and rejected: sbatch: error: Batch job submission failed" in read_words(done.stdout)
    assert read_result(tmp_path).batch == BatchNote(scheduler="slurm", may_come=True)
    assert slurm.list_jobs() == []


@pytest.mark.ranks
@pytest.mark.slow
def test_a_job_that_was_refused_is_submitted_again_by_resume_and_runs(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(slurm, monkeypatch, tmp_path)
    assert answer(*P9, cwd=tmp_path).returncode == 0
    file = RunStore.open(find_runs(tmp_path / "runs")[-1]).trial_directory("p9.job.train-r1") / "trial.json"
    trial = json.loads(file.read_text())
    assert trial["ranks_per_node"] == 1
    file.write_text(json.dumps(trial | {"ranks_per_node": 2}))  # both ranks on the only node that there is
    done = answer("resume", "last", "--poll", "0.2s", "--wall-time", "5min", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path)
    assert (result.status, {rank.launcher for rank in result.ranks}) == (Status.COMPLETED, {"Slurm"})
    assert result.batch is not None
    assert f"A job of 2 nodes was submitted to slurm as job {result.batch.job} and ran" in read_words(done.stdout)


@pytest.mark.parametrize(("size", "ranks", "per_node"), [("small", 2, 1), ("full", 8, 4)])
def test_the_job_is_of_two_nodes_in_both_sizes(size: str, ranks: int, per_node: int) -> None:
    (trial,) = make_submitted(size, "pbs").plan()  # type: ignore[arg-type]
    assert (trial.num_ranks, trial.ranks_per_node, trial.launcher) == (ranks, per_node, "pbs")


def test_what_became_of_the_job_is_said_with_its_number() -> None:
    (trial,) = make_submitted("small", "pbs").plan()
    note = BatchNote(scheduler="pbs", job="7.host")
    lost = TrialResult(trial=trial, status=Status.CRASHED, reason="it fell", batch=note)
    assert describe_job(lost).startswith("A job of 2 nodes was submitted to pbs as job 7.host and crashed: it fell")


def test_a_submit_command_that_fails_is_no_batch_system_that_rejects() -> None:
    reason = f"{'sbatch: error: Unknown host ' * 9}sbatch: fatal: Could not establish a configuration source"
    (trial,) = make_submitted("small", "slurm").plan()
    result = TrialResult(trial=trial, status=Status.NOT_RUN, reason=reason, batch=BatchNote(scheduler="slurm"))
    assert describe_job(result).startswith("Not submitted: the submit command of slurm is here, but it")
    assert list(quote_refusal(result)) == [f"In the words of slurm: {reason}."]


def test_a_refusal_is_quoted_once() -> None:
    (trial,) = make_submitted("small", "pbs").plan()
    refused = TrialResult(trial=trial, status=Status.NOT_RUN, reason=LIMITS, batch=BatchNote(scheduler="pbs"))
    assert f"rejected: {LIMITS}" in describe_job(refused)
    assert list(quote_refusal(refused)) == []


def test_without_pbs_it_is_said_that_the_job_is_for_pbs() -> None:
    (slurm,), (pbs,) = (make_submitted("small", name).plan() for name in ("slurm", "pbs"))  # type: ignore[arg-type]
    words = describe_job(not_run(slurm, "--launcher slurm starts ranks only inside a slurm job"))
    assert "there is no PBS here; the batch system found is slurm" in words
    assert "--launcher" not in words
    assert "submitted: qsub is not on PATH (published" in describe_job(not_run(pbs, "qsub is not on PATH"))


def test_a_row_that_is_a_job_asks_for_what_the_recipe_says_and_others_for_nothing() -> None:
    reproduce = Reproduce(recipe="polaris", only=("P1", "P9"), device="cpu")
    sites = {trial.configuration.split(".")[0]: reproduce.find_site(trial) for trial in reproduce.plan()}
    assert sites["p9"] is not None
    assert (sites["p9"].wall_time, sites["p9"].account) == ("10min", None)
    assert sites["p1"] is None
