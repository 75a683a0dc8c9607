"""The commands of clusters, word for word, without running any."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import LaunchFailed
from scalelab.launch.starters import (
    TORCHRUN_PORTS,
    RankSpread,
    StepCommand,
    choose_port,
    clean_variables,
    find_interpreter,
    find_program,
    place_ranks,
    run_torchrun,
    tell_kind,
)
from scalelab.launch.stepped import LaunchStep
from scalelab.records.launchers import MPI, STARTERS, Allocation, load
from tests.worker.trials import make_trial

TWO_BY_FOUR = RankSpread(num_ranks=8, num_nodes=2, ranks_per_node=4, cores_per_rank=16, cores_per_node=64)


def make_words(kind: str, program: str, spread: RankSpread) -> StepCommand:
    command: StepCommand = load(STARTERS[kind].step)(program, spread)
    return command


def write_program(directory: Path, words: str) -> str:
    path = directory / "mpiexec"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{words}\nEND\n")
    path.chmod(0o755)
    return str(path)


def make_allocation(**fields: Any) -> Allocation:
    return Allocation(**({"scheduler": "slurm", "job_id": "7", "num_nodes": 2, "first_node": "a1"} | fields))


def place(num_ranks: int, allocation: Allocation | None, ranks_per_node: int | None = None) -> tuple[int, int]:
    found = place_ranks(num_ranks, allocation, ranks_per_node=ranks_per_node, cores_per_rank=1, has_gpus=False)
    return found.num_nodes, found.ranks_per_node


def test_srun_gets_tasks_nodes_and_cores() -> None:
    words = make_words("srun", "/usr/bin/srun", TWO_BY_FOUR).words
    assert words[:5] == ("/usr/bin/srun", "--ntasks=8", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=16")
    assert {"--overlap", "--kill-on-bad-exit=1"} <= set(words)


def test_srun_may_put_more_ranks_on_a_node_than_it_has_cores() -> None:
    words = make_words("srun", "srun", RankSpread(num_ranks=4, ranks_per_node=4, cores_per_node=2)).words
    assert "--overcommit" in words
    assert not [word for word in words if "cpus-per-task" in word]


def test_hydra_gets_ranks_per_node_and_the_whole_environment() -> None:
    for kind in ("mpich", "intel"):
        words = make_words(kind, "mpiexec", TWO_BY_FOUR).words
        assert words[-4:] == ("-ppn", "4", "-n", "8")
        assert "-genvall" in words
    assert make_words("intel", "mpiexec", TWO_BY_FOUR).variables["I_MPI_JOB_RESPECT_PROCESS_PLACEMENT"] == "off"


@pytest.mark.parametrize(("user", "is_root"), [(0, True), (1000, False)])
def test_open_mpi_may_run_as_root_only_where_one_is(monkeypatch: pytest.MonkeyPatch, user: int, is_root: bool) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    command = make_words("openmpi", "mpiexec", RankSpread(num_ranks=2, ranks_per_node=2))
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in command.variables) is is_root
    assert command.words == ("mpiexec", "--bind-to", "none", "-n", "2")


def test_open_mpi_hands_on_what_other_nodes_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET", "x")
    words = make_words("openmpi", "mpiexec", TWO_BY_FOUR).words
    named = {words[i + 1] for i, word in enumerate(words) if word == "-x"}
    assert {"NCCL_DEBUG", "PATH"} <= named
    assert "SECRET" not in named
    assert words[words.index("-N") + 1] == "4"


def test_pals_and_jsrun_have_words_of_their_own() -> None:
    assert make_words("pals", "mpiexec", TWO_BY_FOUR).words[1:5] == ("-n", "8", "--ppn", "4")
    words = make_words("jsrun", "jsrun", TWO_BY_FOUR).words
    assert words[1:5] == ("--nrs=8", "--rs_per_host=4", "--tasks_per_rs=1", "--cpu_per_rs=16")
    with_gpus = RankSpread(num_ranks=2, ranks_per_node=2, has_gpus=True)
    assert "--gpu_per_rs=1" in make_words("jsrun", "jsrun", with_gpus).words


def test_nodes_are_filled_one_after_the_other() -> None:
    full = make_allocation(tasks_per_node=4)
    assert [place(n, full) for n in (1, 4, 5, 8)] == [(1, 1), (1, 4), (2, 4), (2, 4)]
    assert place(8, make_allocation()) == (2, 4)
    assert place(12, full) == (2, 6)
    assert place(4, full, ranks_per_node=2) == (2, 2)
    assert place(6, None) == (1, 6)


def test_too_few_nodes_are_told_with_what_would_fit() -> None:
    with pytest.raises(LaunchFailed, match=r"8 ranks with --ranks-per-node 2 need 4 nodes, job 7 has 2.*per-node 4"):
        place(8, make_allocation(), ranks_per_node=2)
    with pytest.raises(LaunchFailed, match="need 2 nodes, this is one"):
        place(2, None, ranks_per_node=1)


def test_torchruns_of_several_nodes_meet_on_the_first() -> None:
    words = run_torchrun(TWO_BY_FOUR, first_node="a1", port=0, name="x", scratch="/tmp/s")
    meeting = f"--rdzv-endpoint=a1:{choose_port('x', 'a1')}"
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d", meeting, "--rdzv-id=x"} <= {*words}
    named = run_torchrun(TWO_BY_FOUR, first_node="a1", port=4567, name="x", scratch="/tmp/s")
    assert "--rdzv-endpoint=a1:4567" in named
    alone = RankSpread(num_ranks=2, ranks_per_node=2)
    assert "--rdzv-endpoint=127.0.0.1:0" in run_torchrun(alone, first_node="", port=0, name="x", scratch="/tmp/s")


def test_two_launches_meet_on_different_ports_and_none_that_is_taken() -> None:
    assert choose_port("scalelab-a-1", "a1") != choose_port("scalelab-a-2", "a1")
    here = socket.gethostname()
    first = choose_port("x", here)
    with socket.socket() as taken:
        taken.bind(("", first))
        assert choose_port("x", here) in TORCHRUN_PORTS
        assert choose_port("x", here) != first


def test_the_python_of_a_container_is_its_own_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_interpreter() == (sys.executable,)
    monkeypatch.setenv("SCALELAB_RANK_PREFIX", "apptainer exec x.sif")
    assert find_interpreter() == ("apptainer", "exec", "x.sif", "python3")
    monkeypatch.setenv("SCALELAB_RANK_PYTHON", "/opt/python")
    assert find_interpreter() == ("apptainer", "exec", "x.sif", "/opt/python")


def test_torchrun_cannot_share_out_unevenly() -> None:
    with pytest.raises(LaunchFailed, match="5 ranks do not divide over 2 nodes"):
        run_torchrun(
            RankSpread(num_ranks=5, num_nodes=2, ranks_per_node=4), first_node="a", port=0, name="x", scratch="s"
        )


def test_a_torchrun_is_started_once_on_every_node() -> None:
    step = LaunchStep(kind="srun", program="srun", allocation=make_allocation(tasks_per_node=2), is_torchrun=True)
    words = step.make_command(make_trial(num_ranks=4), "n", ("module", "directory", "launch"), "s").words
    assert words[1:4] == ("--ntasks=2", "--nodes=2", "--ntasks-per-node=1")
    assert words[-4:] == ("-m", "module", "directory", "launch")
    assert "--nproc-per-node=2" in words


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("mpich", "HYDRA build details:\n    Version:   4.2"),
        ("intel", "Intel(R) MPI Library for Linux* OS, Version 2021.18"),
        ("openmpi", "mpiexec (OpenRTE) 4.1.4"),
        ("openmpi", "mpirun (Open MPI) 5.0.11"),
        ("pals", "PALS mpiexec version 1.2.12"),
    ],
)
def test_an_mpiexec_is_told_by_its_own_words(tmp_path: Path, kind: str, words: str) -> None:
    assert tell_kind(write_program(tmp_path, words), MPI) == kind


def test_an_unknown_mpiexec_is_refused_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match=r"'mpiexec of my own 3', which is not MPICH"):
        tell_kind(write_program(tmp_path, "mpiexec of my own 3"), MPI)


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(LaunchFailed, match="--mpiexec /nowhere/mpiexec is not executable"):
        find_program("mpiexec", "--mpiexec", "/nowhere/mpiexec")
    with pytest.raises(LaunchFailed, match=r"jsrun-of-none is not on PATH: load the module that provides it$"):
        find_program("jsrun-of-none")


def test_a_command_that_pip_installed_is_found_beside_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mpiexec-of-pip"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert find_program("mpiexec-of-pip") == str(program)


def test_variables_of_an_earlier_launch_are_not_handed_on() -> None:
    kept = {"MASTER_ADDR": "a", "HOME": "h"}
    assert clean_variables({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"} | kept) == kept
