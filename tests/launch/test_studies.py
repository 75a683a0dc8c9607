"""The same study under every launcher that is here: the losses are those of the local one, to the last bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scalelab.launch.local import LocalLauncher
from scalelab.records.store import RunStore, find_runs
from scalelab.records.trial import Status
from scalelab.runs.experiment import run_study
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.script import ScriptSource
from scalelab.studies.shared.study import Sampling
from scalelab.studies.throughput import Throughput
from tests.cli.commands import make_environment
from tests.launch.lent import lend_ranks
from tests.launch.programs import find_mpiexec
from tests.slurm import Cluster
from tests.worker.script.scripts import write_script

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
SAMPLING = Sampling(rounds=1, steps=4, phase_steps=0, comm_free_steps=0, profile_steps=0, control=False)
FLAGS = [
    *(
        "--workload",
        "mlp",
        "--dim",
        "16",
        "--depth",
        "2",
        "--batch-size-per-rank",
        "4",
        "--ranks",
        "2",
        "--rounds",
        "1",
    ),
    *("--steps", "4", "--warmup", "1", "--phase-steps", "0", "--comm-free-steps", "0", "--profile-steps", "0"),
]
"""The study as a user types it."""


def make_job(**fields: Any) -> Job:
    return Job(workload="mlp", options={"dim": 16, "depth": 2}, **fields)


def make_pair(**fields: Any) -> Throughput:
    """A study of one configuration: two ranks of ddp."""
    return Throughput(job=make_job(**fields), ranks=2, batch_per_rank=4, sampling=SAMPLING)


def read_losses(store: RunStore) -> dict[str, dict[int, float]]:
    """The losses of every configuration, all of which completed."""
    results, damaged = store.results()
    assert not damaged
    assert [result.reason for result in results if result.status is not Status.COMPLETED] == []
    return {result.trial.configuration: result.losses() for result in results}


@pytest.fixture(scope="module")
def expected(launcher: LocalLauncher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    """The losses of ranks that the forkserver made."""
    with lend_ranks(launcher):
        return read_losses(run_study(make_pair(), runs_dir=tmp_path_factory.mktemp("local"))[0])


@pytest.mark.parametrize("name", ["torchrun", "openmpi", "intel"])
def test_a_study_learns_the_same_under_a_launcher(
    name: str, expected: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    is_torchrun = name == "torchrun"
    fields = {"launcher": name} if is_torchrun else {"launcher": "mpi", "mpiexec": find_mpiexec(name)}
    store, _ = run_study(make_pair(**fields), runs_dir=tmp_path)
    assert read_losses(store) == expected
    result = store.result("throughput-r1")
    assert {rank.exit_code for rank in result.ranks} == {0}
    assert len({rank.cores for rank in result.ranks}) == (2 if not result.trial.is_oversubscribed else 1)
    assert len({rank.host for rank in result.ranks}) == 1


def test_a_script_is_measured_under_a_launcher(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"launcher": "mpi", "mpiexec": find_mpiexec("mpich")}
    script = ScriptSource(
        target=str(write_script(tmp_path)), arguments=("--batch-size", "{batch_per_rank}"), directory=str(tmp_path)
    )
    study = Throughput(job=Job(script=script, **fields), ranks=2, batch_per_rank=4, sampling=SAMPLING)
    store, _ = run_study(study, runs_dir=tmp_path / "runs")
    result = store.result("throughput-r1")
    assert (result.status, result.reason) == (Status.COMPLETED, "")
    for rank in range(2):
        printed = [float(line) for line in (tmp_path / f"losses{rank}.txt").read_text().split()]
        seen = [one.loss for one in result.samples if one.rank == rank]
        assert seen == printed[: len(seen)]
        assert seen


def test_a_study_learns_the_same_in_an_allocation_of_slurm(
    slurm: Cluster, expected: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "scalelab", "run", "throughput", *FLAGS, "--launcher", "slurm"]
    done = subprocess.run(
        ["salloc", "--quiet", "--ntasks=2", *command], cwd=tmp_path, env=make_environment(**slurm.variables),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = find_runs(tmp_path / "runs")
    assert read_losses(RunStore.open(path)) == expected
