"""`scalelab doctor` alone, and as every rank of torchrun, of three MPI libraries and of a real Slurm."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from scalelab.cli import doctor_ranks
from scalelab.cli.doctor_checks import Grade
from scalelab.cli.doctor_host import ask_mpi, look_at_network, look_at_rank, look_at_threads
from scalelab.cli.doctor_ranks import RankLine, examine_rank, report_mistakes
from scalelab.measure.roofs import list_backends
from scalelab.ranks.discovery import Membership
from scalelab.ranks.placement import Placement
from tests.cli.commands import make_environment, scalelab
from tests.launchers.programs import PLACE, WHEELS, find_mpiexec
from tests.slurm import Cluster

COMMAND = [sys.executable, "-m", "scalelab", "doctor"]


def run(command: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=make_environment(**variables), capture_output=True, text=True, timeout=120, check=False
    )


def read_lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What `--json` printed; launchers may print words of their own besides."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check_pair(lines: list[dict[str, Any]], launcher: str, host: str) -> None:
    """Two ranks of one node, in order, each with its mask."""
    members = [line["member"] for line in lines]
    assert [member["rank"] for member in members] == [0, 1]
    assert [member["local_rank"] for member in members] == [0, 1]
    for line in lines:
        assert (line["member"]["launcher"], line["member"]["num_ranks"]) == (launcher, 2)
        assert (line["member"]["node"], line["member"]["num_nodes"]) == (0, 1)
        assert line["placement"]["host"] == host
        assert set(line["placement"]["cores"]) <= os.sched_getaffinity(0)


@pytest.fixture
def host() -> str:
    return os.uname().nodename


@pytest.mark.ranks
def test_every_rank_of_torchrun_has_a_line(tmp_path: Path, host: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*torchrun, "-m", "scalelab", "doctor", "--quick", "--json"], tmp_path)
    check_pair(read_lines(done), "torchrun", host)
    assert not list((tmp_path / "runs").iterdir()), "nothing is left behind"


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "launcher"), [("mpich", "MPICH"), ("intel", "Intel MPI"), ("openmpi", "Open MPI")])
def test_every_rank_of_every_mpi_has_a_line_and_mpi_itself_agrees(
    kind: str, launcher: str, tmp_path: Path, host: str
) -> None:
    mpiexec = find_mpiexec(kind)
    libraries = str(PLACE / WHEELS[kind] / "lib")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpiexec, "-n", "2", *COMMAND, "--quick", "--json", "--mpi"]
    lines = read_lines(run(command, tmp_path, LD_LIBRARY_PATH=libraries, **as_root))
    check_pair(lines, launcher, host)
    assert [line["difference"] for line in lines] == ["", ""]


@pytest.mark.ranks
@pytest.mark.parametrize(("flag", "agreeing"), [("none", []), ("pmi2", ["PMI"]), ("cray_shasta", ["PALS"])])
def test_every_task_of_slurm_has_a_line(
    flag: str, agreeing: list[str], slurm: Cluster, tmp_path: Path, host: str
) -> None:
    if flag not in slurm.ask("srun", "--mpi=list"):
        pytest.skip(f"this Slurm was built without mpi/{flag}")
    command = ["srun", "--ntasks=2", f"--mpi={flag}", *COMMAND, "--quick", "--json"]
    lines = read_lines(run(command, tmp_path, **slurm.variables))
    check_pair(lines, "Slurm", host)
    assert all(set(agreeing) <= set(line["member"]["agreeing"]) for line in lines)


@pytest.mark.ranks
def test_a_script_of_slurm_is_no_rank_and_knows_its_job(slurm: Cluster, tmp_path: Path) -> None:
    done = run(["salloc", "--ntasks=2", *COMMAND, "--quick"], tmp_path, **slurm.variables)
    assert "no rank, inside job" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_doctor_measures_the_roofs_with_torch_and_without(tmp_path: Path) -> None:
    program = "import sys; sys.modules['torch'] = None; from scalelab.measure.roofs import measure_roofs; import json;"
    bare = run([sys.executable, "-c", f"{program} print(json.dumps(measure_roofs()))"], tmp_path)
    with_torch = run([sys.executable, "-m", "scalelab.measure.roofs"], tmp_path)
    for done, library in ((bare, "numpy"), (with_torch, "torch")):
        found = json.loads(done.stdout)
        assert found["library"].startswith(library), done.stderr
        assert found["memory_bytes_per_second"] > 1e8
        assert found["flops_per_second"] > 1e8
    assert "gloo" in json.loads(with_torch.stdout)["backends"]


def test_contradicting_variables_are_a_check_that_failed(tmp_path: Path) -> None:
    done = scalelab("doctor", "--quick", "--json", cwd=tmp_path, RANK="0")
    checks = {check["name"]: check for check in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 1
    assert checks["rank"]["grade"] == "✗"
    assert "WORLD_SIZE" in checks["rank"]["detail"]
    assert checks["cores"]["detail"].startswith("mask 0x")


def test_who_launched_a_process_is_told() -> None:
    assert "nobody" in look_at_rank({}).detail
    task = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    told = look_at_rank(task | {"PMI_RANK": "0", "PMI_SIZE": "1"}).detail
    assert told == "rank 0 of 1, local 0 of 1, node 0 of 1 (Slurm, as PMI says)"
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert look_at_rank(job).detail == "no rank, inside job 7 of slurm with 2 nodes"


def test_more_threads_than_cores_are_warned_of() -> None:
    assert look_at_threads({}).grade is Grade.OK
    many = look_at_threads({"OMP_NUM_THREADS": "4096"})
    assert many.grade is Grade.WARNING
    assert many.next_step == f"export OMP_NUM_THREADS={len(os.sched_getaffinity(0))}"


def test_a_host_without_any_network_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "lo 127.0.0.1" in look_at_network().detail
    monkeypatch.setattr("psutil.net_if_addrs", dict)
    assert look_at_network().grade is Grade.FAILED


def test_mpi_that_disagrees_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Membership(launcher="mpi4py", rank=0, num_ranks=1, local_rank=0)
    monkeypatch.setattr("scalelab.cli.doctor_host.find_by_mpi", lambda: alone)
    assert ask_mpi(None).grade is Grade.OK
    check = ask_mpi(Membership(launcher="PMI", rank=0, num_ranks=4))
    assert check.grade is Grade.FAILED
    assert "num_ranks 4 or 1" in check.detail


def make_member(rank: int, launch: str | None = "7.0") -> Membership:
    return Membership(launcher="Slurm", rank=rank, num_ranks=2, local_rank=rank, launch=launch)


def test_a_rank_that_says_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_ranks, "WAIT_SECONDS", 0.1)
    out = io.StringIO()
    code = examine_rank(
        Console(file=out, width=200), make_member(0), tmp_path, is_quick=True, asks_mpi=False, is_json=False
    )
    assert code == 1
    assert "of 2 ranks nothing came from 1" in out.getvalue()
    assert not list(tmp_path.iterdir())


def test_a_launch_without_a_name_has_every_rank_print_its_own_line(tmp_path: Path) -> None:
    out = io.StringIO()
    code = examine_rank(
        Console(file=out, width=200), make_member(1, None), tmp_path, is_quick=True, asks_mpi=False, is_json=False
    )
    assert code == 0
    assert out.getvalue().startswith("rank 1 of 2, local 1 of –, node – of – (Slurm)")
    assert not list(tmp_path.iterdir())


def test_overlapping_masks_are_a_warning_and_no_failure() -> None:
    out = io.StringIO()
    placements = [Placement(rank=rank, host="n1", cores=(0, 1)) for rank in range(2)]
    lines = [RankLine(member=make_member(own.rank), placement=own) for own in placements]
    assert report_mistakes(Console(file=out, width=200), lines, 2, is_json=False) == 0
    assert "ranks 0 and 1 of n1 share cores 0-1" in out.getvalue()


def test_an_allocation_whose_files_are_hidden_is_a_warning_and_no_failure() -> None:
    check = look_at_rank({"PBS_JOBID": "7", "PBS_NODEFILE": "/no/such"})
    assert check.grade is Grade.WARNING
    assert "PBS_NODEFILE='/no/such'" in check.detail


def test_a_torch_without_distributed_has_no_backends() -> None:
    assert list_backends(SimpleNamespace(is_available=lambda: False)) == []
    older = SimpleNamespace(is_available=lambda: True, is_gloo_available=lambda: True, is_nccl_available=lambda: False)
    assert list_backends(older) == ["gloo"]
