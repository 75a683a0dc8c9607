"""Which launcher a job gets, by its flag and by where it runs."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import LaunchFailed, UsageError
from scalelab.launch.launcher import choose_launcher
from scalelab.launch.local import LocalLauncher
from scalelab.launch.stepped import LaunchStep, StepLauncher, find_step
from scalelab.recipes.feasibility import find_launcher_obstacle
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.studies.scaling.study import StrongScaling, WeakScaling
from scalelab.studies.shared.job import Job
from tests.launch.played import write_mpiexec

TWO_NODES = {
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "a[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
}


def put_on_path(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = directory / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))
    return str(path)


def test_without_a_flag_it_is_the_local_one() -> None:
    assert isinstance(choose_launcher(Job(), []), LocalLauncher)


def test_mpi_is_the_mpiexec_that_is_named_or_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = write_mpiexec(tmp_path)
    launcher = choose_launcher(Job(launcher="mpi", mpiexec=program), [])
    assert isinstance(launcher, StepLauncher)
    assert (launcher.step.kind, launcher.step.program) == ("mpich", program)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert find_step(Job(launcher="mpi"), {}).program == program


def test_torchrun_needs_another_command_only_on_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_step(Job(launcher="torchrun"), {}).kind == ""
    here = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": socket.gethostname()}
    assert find_step(Job(launcher="torchrun"), TWO_NODES | here).kind == ""
    assert find_step(Job(launcher="torchrun"), {"PBS_JOBID": "1"}).kind == ""
    srun = put_on_path("srun", tmp_path, monkeypatch)
    step = find_step(Job(launcher="torchrun"), TWO_NODES)
    assert (step.kind, step.program, step.is_torchrun) == ("srun", srun, True)


def test_torchrun_does_not_take_a_login_node_for_the_only_node_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path("srun", tmp_path, monkeypatch)
    put_on_path("jsrun", tmp_path, monkeypatch)
    elsewhere = TWO_NODES | {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "nid001"}
    assert find_step(Job(launcher="torchrun"), elsewhere).kind == "srun"
    on_launch_node = {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": f"{socket.gethostname()} 1 n1 42"}
    assert find_step(Job(launcher="torchrun"), on_launch_node).kind == "jsrun"


def test_a_batch_system_starts_ranks_by_its_own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_step(Job(launcher="pbs", mpiexec=write_mpiexec(tmp_path)), {"PBS_JOBID": "1"}).kind == "mpich"
    put_on_path("srun", tmp_path, monkeypatch)
    assert find_step(Job(launcher="slurm"), TWO_NODES).kind == "srun"
    put_on_path("jsrun", tmp_path, monkeypatch)
    assert find_step(Job(launcher="lsf"), {"LSB_JOBID": "1"}).kind == "jsrun"


def test_a_trials_own_mpiexec_and_ranks_per_node_reach_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = write_mpiexec(tmp_path)
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    steps: list[LaunchStep] = []

    def launch(launcher: StepLauncher, trial: Trial, _: Path) -> TrialResult:
        steps.append(launcher.step)
        return TrialResult(trial=trial, status=Status.COMPLETED)

    monkeypatch.setattr(StepLauncher, "launch", launch)
    study = WeakScaling(job=Job(launcher="mpi", mpiexec=program, ranks_per_node=3), ranks=(2,), batch_per_rank=4)
    trial = study.plan()[-1]
    assert find_launcher_obstacle("mpi", trial.mpiexec) is None
    assert "is not executable" in str(find_launcher_obstacle("mpi", str(tmp_path / "none")))
    result = choose_launcher(Job(), [trial]).launch(trial, tmp_path)
    assert result.status is Status.COMPLETED
    assert [(step.program, step.ranks_per_node) for step in steps] == [(program, 3)]


@pytest.mark.parametrize("name", ["slurm", "pbs", "lsf"])
def test_outside_its_allocation_a_batch_system_starts_nothing(name: Any) -> None:
    elsewhere = {} if name == "slurm" else TWO_NODES
    with pytest.raises(LaunchFailed, match=f"--launcher {name} starts ranks only inside a {name} job"):
        find_step(Job(launcher=name), elsewhere)


def test_ranks_of_several_nodes_share_the_cores_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("scalelab.studies.shared.job.count_cores", lambda: 64)
    study = StrongScaling(job=Job(workload="mlp", launcher="mpi"), ranks=(1, 4), global_batch=8)
    trials = {trial.num_ranks: trial for trial in study.plan()}
    assert trials[4].threads_per_rank == 1
    assert not trials[4].is_oversubscribed


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mpiexec": "/opt/mpiexec"}, "--mpiexec /opt/mpiexec needs --launcher mpi"),
        ({"ranks_per_node": 2}, "--ranks-per-node 2 has no effect with --launcher local"),
        ({"launcher": "mpi", "ranks_per_node": 0}, "--ranks-per-node must be"),
        ({"launcher": "mpi", "ranks_per_host": 2}, "--ranks-per-host 2 needs --launcher hosts"),
        ({"launcher": "mpi", "link": "1gbit"}, "--link 1gbit needs --launcher hosts"),
    ],
)
def test_flags_of_another_launcher_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Job(**fields)
