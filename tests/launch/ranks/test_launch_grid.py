"""Every launcher in every situation that jobs are started in: each rank is found rightly, or refused by name.

Launchers alone on two nodes, uneven nodes, ranks dealt out in turn and a single task are in `test_discovery.py`, and
mpi4py alone in `test_mpi.py`. Here are the sites that set more than one launcher's names, and what is left in the
environment by the job around a launch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.errors import RankUnknown
from scalelab.launch.ranks.discovery import Membership, find_membership
from scalelab.launch.ranks.mpi import guess_local_rank
from tests.launch.ranks.launches import LAUNCHERS, LAYOUTS, Seat, Variables, aurora, cray_ex, slurm, write_apinfo

INNER = ("torchrun", "Open MPI", "MPICH", "Intel MPI", "MVAPICH", "MVAPICH2")
"""What is started by hand inside a job."""
ONE_TASK = LAYOUTS["one task"][0]
AROUND: dict[str, Variables] = {
    "a script of Slurm": {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"},
    "the shell of salloc": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"},
    "the shell of salloc on a node": slurm(ONE_TASK) | {"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "8"},
    "srun --pty bash": slurm(ONE_TASK) | {"SLURM_PTY_PORT": "4711"},
    "an interactive PBS job": {"PBS_JOBID": "7", "PBS_ENVIRONMENT": "PBS_INTERACTIVE", "PBS_NODEFILE": "/none"},
    "an interactive LSF job": {"LSB_JOBID": "7", "LSB_INTERACTIVE": "Y", "LSB_MCPU_HOSTS": "batch 1 n1 42"},
    "a script of Flux": {"FLUX_URI": "local:///run/flux", "FLUX_ENCLOSING_ID": "f1"},
}


def check(found: Membership | None, seat: Seat) -> None:
    assert found is not None
    assert (found.rank, found.num_ranks, found.local_rank) == (seat.rank, seat.num_ranks, seat.local_rank)
    assert found.num_local_ranks in (seat.num_local_ranks, None)
    assert found.node in (seat.node, None)
    assert found.num_nodes in (seat.num_nodes, None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("inner", INNER)
def test_a_launch_inside_a_job_is_found_whatever_the_job_has_set(inner: str, around: str, layout: str) -> None:
    for seat in LAYOUTS[layout]:
        found = find_membership(AROUND[around] | LAUNCHERS[inner](seat))
        check(found, seat)
        assert found is not None
        assert found.launcher == inner


@pytest.mark.parametrize("layout", ["two nodes", "uneven", "in turn"])
@pytest.mark.parametrize("inner", [name for name in INNER if name != "torchrun"])
def test_mpirun_whose_daemons_slurm_has_started_is_found(inner: str, layout: str) -> None:
    """mpirun inside an allocation has srun start one daemon on every node: Slurm's variables are the daemon's."""
    for seat in LAYOUTS[layout]:
        daemon = Seat(rank=seat.node, num_ranks=2, local_rank=0, num_local_ranks=1, node=seat.node, num_nodes=2)
        found = find_membership(slurm(daemon) | LAUNCHERS[inner](seat))
        check(found, seat)
        assert found is not None
        assert (found.launcher, found.outer) == (inner, ("Slurm",))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slurm_on_a_cray_ex_agrees_with_the_names_of_pals(layout: str) -> None:
    for seat in LAYOUTS[layout]:
        found = find_membership(cray_ex(seat))
        check(found, seat)
        assert found is not None
        assert (found.launcher, found.agreeing) == ("Slurm", ("PALS", "PMI"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_aurora_is_right_by_the_file_of_pals_and_refused_without_it(layout: str, tmp_path: Path) -> None:
    nodes, file = tmp_path / "nodes", tmp_path / "apinfo"
    nodes.write_text("x1\nx2\nx3\n")  # the launch uses fewer than the job has
    write_apinfo(file, [(seat.local_rank, seat.node) for seat in LAYOUTS[layout]])
    for seat in LAYOUTS[layout]:
        variables = aurora(seat) | {"PBS_NODEFILE": str(nodes)}
        check(find_membership(variables | {"PALS_APINFO": str(file)}), seat)
        with pytest.raises(RankUnknown, match=r"PALS_LOCAL_SIZE.*PBS_NODEFILE.*PALS_APINFO"):
            find_membership(variables)


@pytest.mark.parametrize(("layout", "num_devices", "is_right"), [
    ("two nodes", 4, True), ("one task", 4, True), ("uneven", 4, True), ("uneven", 3, False), ("in turn", 4, False),
])  # fmt: skip
def test_the_rank_modulo_devices_is_right_only_where_nodes_are_full_and_in_order(
    layout: str, num_devices: int, is_right: bool
) -> None:
    guessed = [guess_local_rank(seat.rank, num_devices) for seat in LAYOUTS[layout]]
    assert (guessed == [seat.local_rank for seat in LAYOUTS[layout]]) is is_right
