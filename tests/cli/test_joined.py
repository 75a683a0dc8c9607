"""`scalelab train` and `resume` started once per rank by launchers that do not say where ranks meet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scalelab import FakeLauncher, Job, Sampling, StrongScaling, run_study
from scalelab.errors import RankUnknown
from scalelab.launch.joined import find_member, meet
from scalelab.launch.local import LocalLauncher
from scalelab.launch.ranks.discovery import Membership
from tests.cli.commands import answer, make_environment
from tests.launch.lent import lend_ranks
from tests.launch.programs import find_mpiexec
from tests.launch.ranks.launches import LAYOUTS, hydra, torchrun
from tests.launch.ranks.launches import slurm as slurm_variables
from tests.slurm import Cluster

SMALL = ["train", "--workload", "mlp", "--dim", "32", "--depth", "2", "--global-batch-size", "12", "--steps", "4"]


def start(prefix: list[str], *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, "-m", "scalelab", *arguments],
        cwd=cwd, env=make_environment(**variables), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def read_losses(runs_dir: Path) -> list[tuple[str, str, str]]:
    (file,) = runs_dir.glob("*/trials/*/samples.csv")
    rows = [line.split(",") for line in file.read_text().splitlines()[1:]]
    return [(row[0], row[1], row[-1]) for row in rows]


@pytest.fixture(scope="module")
def local_losses(launcher: LocalLauncher, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, str]]:
    """What two ranks of the local launcher train."""
    place = tmp_path_factory.mktemp("local")
    with lend_ranks(launcher):
        done = answer(*SMALL, "--ranks", "2", cwd=place)
    assert done.returncode == 0, done.stderr
    return read_losses(place / "runs")


@pytest.mark.ranks
@pytest.mark.slow
def test_mpiexec_trains_what_the_local_launcher_does(tmp_path: Path, local_losses: list[tuple[str, str, str]]) -> None:
    done = start([find_mpiexec("mpich"), "-n", "2"], *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_losses(tmp_path / "runs") == local_losses
    assert len(list((tmp_path / "runs").iterdir())) == 1, "where ranks met is no longer of interest"


@pytest.mark.ranks
@pytest.mark.slow
def test_srun_trains_what_the_local_launcher_does(
    tmp_path: Path, slurm: Cluster, local_losses: list[tuple[str, str, str]]
) -> None:
    done = start(["srun", "--ntasks=2"], *SMALL, cwd=tmp_path, **slurm.variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_losses(tmp_path / "runs") == local_losses


def test_a_study_started_by_rank_is_refused(tmp_path: Path) -> None:
    for command in (["run", "strong-scaling"], ["reproduce", "polaris"], ["collectives"]):
        done = answer(*command, cwd=tmp_path, **hydra(LAYOUTS["two nodes"][5]))
        assert done.returncode == 2
        assert "MPICH started this as rank 5 of 8" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_study_does_not_mind_a_number_of_ranks_that_a_script_exports(tmp_path: Path) -> None:
    study = ["run", "strong-scaling", "--workload", "mlp", "--dim", "8", "--depth", "1", "--ranks", "1", "--dry-run"]
    done = answer(*study, cwd=tmp_path, WORLD_SIZE="8")
    assert done.returncode == 0, done.stderr
    assert answer(*SMALL, cwd=tmp_path, WORLD_SIZE="8").returncode == 2, "a training would be rank 0 of 1"


def test_a_shell_of_several_tasks_is_told_how_to_have_one(tmp_path: Path) -> None:
    shell = slurm_variables(LAYOUTS["two nodes"][0]) | {"SLURM_PTY_PORT": "4711"}
    done = answer("run", "strong-scaling", cwd=tmp_path, **shell)
    assert done.returncode == 2
    assert "srun --pty shell needs one task" in " ".join(done.stderr.split())


def test_only_a_training_is_resumed_by_rank(tmp_path: Path) -> None:
    study = StrongScaling(job=Job(workload="mlp"), sampling=Sampling(rounds=2))
    run_study(study, runs_dir=tmp_path / "runs", launcher=FakeLauncher(lambda trial: 0.1))
    for one in LAYOUTS["two nodes"][:2]:
        done = answer("resume", cwd=tmp_path, **hydra(one))
        assert done.returncode == 2, "on every rank, so that none waits for another"
        assert "without MPICH; it starts its ranks itself" in done.stderr


def test_one_task_alone_is_nobodys_rank_but_torchruns() -> None:
    alone = LAYOUTS["one task"][0]
    assert find_member(hydra(alone)) is None
    assert find_member(slurm_variables(alone)) is None
    assert find_member(torchrun(alone)) is not None, "which may start it again"


def test_ranks_that_cannot_find_each_other_say_what_to_set(tmp_path: Path) -> None:
    member = Membership(launcher="MPICH", rank=5, num_ranks=8, local_rank=1, num_local_ranks=4)
    with pytest.raises(RankUnknown, match=r"rank 5 of 8 \(MPICH\).*MASTER_ADDR.*MASTER_PORT"):
        meet(member, tmp_path, {})
