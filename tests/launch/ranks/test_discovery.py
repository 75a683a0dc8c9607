"""Who a process is under every launcher: every rank of two nodes, uneven nodes, ranks dealt out in turn, one task."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from scalelab.errors import RankUnknown
from scalelab.launch.ranks.claims import SOURCES, Claim, read_horovod, read_slurm
from scalelab.launch.ranks.discovery import (
    _check_only_node,
    _complete,
    _name_agent,
    _refuse_alone,
    _refuse_driver,
    find_membership,
    list_claims,
    name_launch,
)
from scalelab.launch.ranks.mpi import guess_local_rank
from tests.launch.ranks.launches import (
    LAUNCHERS,
    LAYOUTS,
    Seat,
    Variables,
    hydra,
    ompi,
    slurm,
    torchrun,
    world,
    write_apinfo,
)

CASES = [(launcher, layout) for launcher in LAUNCHERS for layout in LAYOUTS]
INNER = ("torchrun", "Open MPI", "MPICH", "Intel MPI", "MVAPICH", "MVAPICH2", "Flux")
ONE_LAUNCH = (("Open MPI", "LSF jsrun"), ("Flux", "PALS"))
"""The second sets, or has set, the first one's names for the same launch: they must agree."""
NESTED = [(one, other) for one in INNER for other in ("Slurm", "PALS", "LSF jsrun") if (one, other) not in ONE_LAUNCH]


def seat(rank: int, layout: str = "two nodes") -> Seat:
    return LAYOUTS[layout][rank]


@pytest.mark.parametrize(("launcher", "layout"), CASES)
def test_every_rank_of_every_launcher_is_found(launcher: str, layout: str) -> None:
    for one in LAYOUTS[layout]:
        found = find_membership(LAUNCHERS[launcher](one))
        assert found is not None
        assert (found.rank, found.num_ranks, found.local_rank) == (one.rank, one.num_ranks, one.local_rank)
        assert found.num_local_ranks in (one.num_local_ranks, None)
        assert found.node in (one.node, None)
        assert found.num_nodes in (one.num_nodes, None)
        assert found.launcher == launcher


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "Flux"])
def test_every_launcher_but_flux_says_how_many_ranks_a_node_has(launcher: str) -> None:
    for one in LAYOUTS["two nodes"]:
        found = find_membership(LAUNCHERS[launcher](one))
        assert found is not None
        assert found.num_local_ranks == one.num_local_ranks


@pytest.mark.parametrize("launcher", ["torchrun", "Slurm", "PALS"])
@pytest.mark.parametrize("layout", ["two nodes", "uneven", "in turn"])
def test_some_launchers_say_which_node_this_is(launcher: str, layout: str) -> None:
    for one in LAYOUTS[layout]:
        found = find_membership(LAUNCHERS[launcher](one))
        assert found is not None
        assert found.node == one.node


@pytest.mark.parametrize(("inner", "outer"), NESTED)
def test_the_innermost_launcher_wins(inner: str, outer: str) -> None:
    """One process per node, from which another launcher started the ranks: variables of the outer one are left."""
    for one in LAYOUTS["two nodes"]:
        daemon = Seat(rank=one.node, num_ranks=2, local_rank=0, num_local_ranks=1, node=one.node, num_nodes=2)
        found = find_membership(LAUNCHERS[outer](daemon) | LAUNCHERS[inner](one))
        assert found is not None
        assert (found.launcher, found.rank, found.num_ranks) == (inner, one.rank, 8)
        assert found.local_rank == one.local_rank
        assert outer in found.outer


def test_flux_knows_how_many_are_on_a_node_where_there_is_no_choice() -> None:
    alone = find_membership(LAUNCHERS["Flux"](seat(0, "one task")))
    assert alone is not None
    assert (alone.num_local_ranks, alone.node) == (1, 0)
    spread = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_NNODES": "2"}
    one_each = find_membership(spread)
    assert one_each is not None
    assert (one_each.num_local_ranks, one_each.local_rank) == (1, 0)


NOBODY: dict[str, Variables] = {
    "a shell": {"PATH": "/usr/bin"},
    "the script of a Slurm job": {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"},
    "the shell of salloc": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"},
    "the shell of salloc on a node": slurm(seat(0, "one task")) | {"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "8"},
    "srun -n 1 --pty bash": slurm(seat(0, "one task")) | {"SLURM_PTY_PORT": "4711", "SLURM_NTASKS": "8"},
    "the same with PMI": slurm(seat(0, "one task")) | {"SLURM_PTY_PORT": "1", "PMI_RANK": "0", "PMI_SIZE": "1"},
    "an interactive PBS job": {"PBS_JOBID": "7", "PBS_ENVIRONMENT": "PBS_INTERACTIVE", "PBS_NODEFILE": "/none"},
    "an interactive LSF job": {"LSB_JOBID": "7", "LSB_INTERACTIVE": "Y", "LSB_MCPU_HOSTS": "batch 1 n1 42"},
    "an array job of AWS Batch": {"AWS_BATCH_JOB_ARRAY_INDEX": "3", "AWS_BATCH_JOB_ID": "j:3"},
    "the script of flux batch": {"FLUX_URI": "local:///run/flux", "FLUX_ENCLOSING_ID": "f1"},
}


@pytest.mark.parametrize("case", NOBODY)
def test_who_was_not_launched_is_no_rank(case: str) -> None:
    assert find_membership(NOBODY[case]) is None


def test_launchers_work_in_an_interactive_shell_of_slurm() -> None:
    shell = slurm(seat(0, "one task")) | {"SLURM_PTY_PORT": "4711"}
    for inner in ("torchrun", "Open MPI", "MPICH"):
        found = find_membership(shell | LAUNCHERS[inner](seat(5)))
        assert found is not None
        assert (found.launcher, found.rank) == (inner, 5)
    step = find_membership(slurm(seat(5)) | {"SLURM_PTY_PORT": "4711"})
    assert step is not None
    assert step.rank == 5


def test_ranks_that_pmi_or_pals_starts_from_a_shell_of_slurm_are_no_shells() -> None:
    shell = slurm(seat(0, "one task")) | {"SLURM_STEP_ID": "4294967290"}
    for inner in ("PALS", "PMI"):
        for rank in (0, 5):
            found = find_membership(shell | LAUNCHERS[inner](seat(rank)))
            assert found is not None
            assert (found.launcher, found.rank, found.num_ranks) == (inner, rank, 8)
    with pytest.raises(RankUnknown, match="PMIX_RANK"):
        find_membership(shell | {"PMIX_RANK": "3"})


def test_ancestors_that_are_hidden_leave_a_launch_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr("psutil.Process.parents", refuse)
    found = find_membership(hydra(Seat(0, 2, 0, 2, 0, 1)))
    assert found is not None
    assert found.launch is None


def test_on_several_nodes_a_launch_of_mpich_is_named_by_where_its_mpiexec_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def name(proxy_id: str, rank: int) -> str | None:
        command = ["hydra_pmi_proxy", "--control-port", "login1:38445", "--rmk", "user", "--proxy-id", proxy_id]
        proxy = SimpleNamespace(name=lambda: "hydra_pmi_proxy", cmdline=lambda: command)
        monkeypatch.setattr("psutil.Process.parents", lambda _: [proxy])
        found = find_membership(hydra(seat(rank)))
        assert found is not None
        return found.launch

    assert name("0", 0) == name("1", 5) == "hydra.login1-38445"


def test_every_source_of_a_launch_is_listed_by_itself() -> None:
    claims = list_claims(LAUNCHERS["PALS"](seat(5)) | {"PMIX_RANK": "5"})
    assert [(claim.source, claim.rank, claim.num_ranks) for claim in claims] == [
        ("PALS", 5, 8),
        ("PMI", 5, 8),
        ("PMIx", 5, None),
    ]
    assert list_claims({"PATH": "/usr/bin"}) == ()


REFUSED: dict[str, tuple[Variables, str]] = {
    "PMIx alone": ({"PMIX_RANK": "3"}, "PMIX_RANK"),
    "no number of ranks": ({"OMPI_COMM_WORLD_RANK": "3"}, "OMPI_COMM_WORLD_RANK"),
    "RANK alone": ({"RANK": "3"}, "WORLD_SIZE"),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "3"}, "RANK"),
    "no number": ({"RANK": "x", "WORLD_SIZE": "3"}, "RANK='x'"),
    "rank beyond": ({"RANK": "3", "WORLD_SIZE": "3"}, "out of range for world size 3"),
    "left over from a script": (slurm(seat(5)) | {"RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE"),
    "a size left over from a script": (slurm(seat(5)) | {"WORLD_SIZE": "4"}, "WORLD_SIZE"),
    "a rank left over from a script": (ompi(seat(5)) | {"RANK": "0"}, "RANK"),
    "a larger job left over from a script": (slurm(seat(5)) | {"RANK": "0", "WORLD_SIZE": "16"}, "WORLD_SIZE"),
    "the only rank around all tasks": (ompi(Seat(0, 1, 0, 1, 0, 1)) | slurm(seat(5)), "OMPI_COMM_WORLD_SIZE"),
    "the only rank around all of PALS": (LAUNCHERS["PALS"](seat(5)) | hydra(Seat(0, 1, 0, 1, 0, 1)), "PALS_RANKID"),
    "PMI against Slurm": (slurm(seat(5)) | {"PMI_RANK": "0", "PMI_SIZE": "8"}, "PMI_RANK"),
    "PALS against Slurm": (slurm(seat(5)) | {"PALS_RANKID": "4"}, "PALS_RANKID"),
    "PMI against PALS": (LAUNCHERS["PALS"](seat(5)) | {"PMI_RANK": "4"}, "PMI_RANK"),
    "jsrun against Open MPI": (world("JSM_NAMESPACE", seat(1)) | ompi(seat(5)), "JSM_NAMESPACE_RANK"),
    "tasks that do not add up": (slurm(seat(5)) | {"SLURM_STEP_NUM_TASKS": "9"}, "4(x2)"),
    "tasks that are no list": (slurm(seat(5)) | {"SLURM_STEP_TASKS_PER_NODE": "four"}, "four"),
    "tasks on more nodes than anybody has": (slurm(seat(5)) | {"SLURM_STEP_TASKS_PER_NODE": "1(x99999999)"}, "nodes"),
    "a node beyond the list": (slurm(seat(5)) | {"SLURM_NODEID": "2"}, "SLURM_NODEID"),
    "a rank that is not among its node's": (slurm(seat(5)) | {"SLURM_GTIDS": "0,1,2,3"}, "SLURM_GTIDS"),
    "a node with other ranks than counted": (slurm(seat(5)) | {"SLURM_GTIDS": "4,5"}, "SLURM_GTIDS"),
    "a step over components": (slurm(seat(5)) | {"SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE"),
    "more local ranks than ranks": (world("OMPI_COMM_WORLD", Seat(0, 2, 0, 4, 0, 1)), "local ranks"),
    "a local rank beyond": (hydra(Seat(5, 8, 4, 4, 1, 2)), "MPI_LOCALRANKID"),
    "more nodes than ranks": ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1", "FLUX_JOB_NNODES": "2"}, "FLUX_JOB_NNODES"),
    "all ranks on a node that is not the only one": (
        {"PALS_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PMI_SIZE": "4", "PALS_NODEID": "1"}, "PALS_NODEID"
    ),
    "all ranks on one of two nodes": (
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, "GROUP_WORLD_SIZE"
    ),
    "an Indexed Job without a size": ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX"),
    "a task of Slurm whose step is hidden": ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "3"}, "SLURM_PROCID"),
    "a host that SageMaker does not list": ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, "SM_CURRENT_HOST"),
    "hosts that are no list": ({"SM_HOSTS": "a", "SM_CURRENT_HOST": "a"}, "SM_HOSTS"),
    "mpirun that a rank of torchrun started": (torchrun(Seat(0, 1, 0, 1, 0, 1)) | ompi(seat(5)), "env -u TORCHELASTIC"),
    "the same with MPICH": (torchrun(Seat(1, 2, 1, 2, 0, 1)) | hydra(seat(5)), "MPI_LOCALRANKID"),
    "PALS without a list of nodes": ({"PALS_RANKID": "5", "PALS_LOCAL_SIZE": "4"}, "PALS_RANKID"),
    "a list of nodes that is not there": (
        {"PALS_RANKID": "5", "PALS_LOCAL_SIZE": "4", "PBS_NODEFILE": "/no/such"}, "PBS_NODEFILE"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name(case: str) -> None:
    variables, named = REFUSED[case]
    with pytest.raises(RankUnknown) as refusal:
        find_membership(variables)
    assert named in str(refusal.value)


ONE_PER_HOST: dict[str, Variables] = {
    "HTCondor": {"_CONDOR_PROCNO": "2", "_CONDOR_NPROCS": "4"},
    "SageMaker": {"SM_HOSTS": '["algo-1", "algo-3", "algo-2", "algo-4"]', "SM_CURRENT_HOST": "algo-3"},
    "AWS Batch": {
        "AWS_BATCH_JOB_NODE_INDEX": "2",
        "AWS_BATCH_JOB_NUM_NODES": "4",
    },
    "Kubernetes": {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"},
}


@pytest.mark.parametrize("source", ONE_PER_HOST)
def test_a_process_per_host_is_a_rank(source: str) -> None:
    found = find_membership(ONE_PER_HOST[source])
    assert found is not None
    assert (found.launcher, found.rank, found.num_ranks) == (source, 2, 4)
    inside = find_membership(ONE_PER_HOST[source] | {"RANK": "9", "WORLD_SIZE": "16"})
    assert inside is not None
    assert (inside.launcher, inside.rank, inside.num_ranks) == ("environment", 9, 16)
    by_torchrun = find_membership(ONE_PER_HOST[source] | torchrun(seat(5)))
    assert by_torchrun is not None
    assert (by_torchrun.launcher, by_torchrun.rank, by_torchrun.outer) == ("torchrun", 5, (source,))


def test_horovod_has_nodes_where_all_have_as_many_ranks() -> None:
    even = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
    even |= {"HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2"}
    found = find_membership(even)
    assert found is not None
    assert (found.launcher, found.rank, found.num_ranks, found.local_rank) == ("Horovod", 3, 4, 1)
    assert (found.node, found.num_nodes) == (1, 2)
    uneven = find_membership(even | {"HOROVOD_SIZE": "5"})
    assert uneven is not None
    assert (uneven.node, uneven.num_nodes) == (None, None)


def test_a_task_of_slurm_whose_step_is_hidden_is_a_rank() -> None:
    for rank in ("0", "3"):
        found = find_membership({"SLURM_PROCID": rank, "SLURM_NTASKS": "4", "SLURM_LOCALID": rank})
        assert found is not None
        assert (found.launcher, found.rank, found.num_ranks) == ("Slurm", int(rank), 4)


def test_the_only_rank_of_torchrun_or_of_a_script_may_be_inside_any_task() -> None:
    alone, task = Seat(0, 1, 0, 1, 0, 1), slurm(seat(5))
    by_torchrun = find_membership(task | torchrun(alone))
    assert by_torchrun is not None
    assert (by_torchrun.launcher, by_torchrun.num_ranks, by_torchrun.outer) == ("torchrun", 1, ("Slurm",))
    said = find_membership(task | ompi(alone) | {"RANK": "0", "WORLD_SIZE": "1"})
    assert said is not None
    assert (said.launcher, said.num_ranks, said.agreeing) == ("Open MPI", 1, ("PMIx", "environment"))


def test_a_broken_launch_further_out_is_nobodys_business() -> None:
    broken = slurm(seat(1)) | {"SLURM_HET_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "four"}
    found = find_membership(broken | torchrun(seat(5)))
    assert found is not None
    assert (found.launcher, found.rank) == ("torchrun", 5)


def test_a_scripts_own_rank_agrees_or_describes_a_larger_job() -> None:
    same = find_membership(slurm(seat(5)) | {"RANK": "5", "WORLD_SIZE": "8"})
    assert same is not None
    assert (same.launcher, same.agreeing) == ("Slurm", ("environment",))
    own = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    larger = find_membership(slurm(Seat(1, 2, 0, 1, 1, 2)) | own)
    assert larger is not None
    assert (larger.launcher, larger.rank, larger.num_ranks, larger.local_rank) == ("environment", 5, 8, 1)
    alone = find_membership({"RANK": "1", "WORLD_SIZE": "2"})
    assert alone is not None
    assert (alone.rank, alone.num_ranks, alone.local_rank) == (1, 2, None)


def name_aurora(tmp_path: Path, nodes: str) -> Variables:
    """Rank 13 of PALS on Aurora, which says no number of ranks in any variable."""
    file = tmp_path / "nodes"
    file.write_text(nodes)
    pals = {"PALS_RANKID": "13", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "1", "PALS_LOCAL_SIZE": "12"}
    return pals | {"PMIX_RANK": "13", "PBS_NODEFILE": str(file)}


def test_aurora_does_not_take_all_nodes_of_the_job_for_those_of_the_launch(tmp_path: Path) -> None:
    """mpiexec -n 24 -ppn 12 inside a job of four nodes has 24 ranks, not 48."""
    variables = name_aurora(tmp_path, "x1\nx2\nx3\nx4\n")
    with pytest.raises(RankUnknown) as refusal:
        find_membership(variables)
    for name in ("PALS_LOCAL_SIZE=12", "PBS_NODEFILE=", "PALS_APINFO", "WORLD_SIZE"):
        assert name in str(refusal.value)
    found = find_membership(variables | {"WORLD_SIZE": "24"})
    assert found is not None
    assert (found.rank, found.num_ranks, found.local_rank, found.num_local_ranks, found.node) == (13, 24, 1, 12, 1)


def test_on_the_only_node_of_a_job_aurora_has_its_number_of_ranks(tmp_path: Path) -> None:
    alone = {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "3", "PALS_NODEID": "0", "PMIX_RANK": "3"}
    found = find_membership(name_aurora(tmp_path, "x4001c0\n") | alone)
    assert found is not None
    assert (found.rank, found.num_ranks, found.local_rank, found.num_nodes) == (3, 12, 3, 1)
    assert "PBS_NODEFILE" in found.variables


def test_pals_own_file_is_right_where_nodes_are_uneven(tmp_path: Path) -> None:
    """By PALS_LOCAL_SIZE times the nodes, ranks of the first node would think of 8 and those of the second of 4."""
    nodes = tmp_path / "nodes"
    nodes.write_text("x4001c0\nx4002c0\n")
    file = write_apinfo(tmp_path / "apinfo", [(one.local_rank, one.node) for one in LAYOUTS["uneven"]])
    for one in LAYOUTS["uneven"]:
        pals = {"PALS_RANKID": str(one.rank), "PALS_LOCAL_SIZE": str(one.num_local_ranks), "PBS_NODEFILE": str(nodes)}
        found = find_membership(pals | {"PALS_APINFO": str(file)})
        assert found is not None
        assert (found.num_ranks, found.local_rank, found.num_local_ranks) == (6, one.local_rank, one.num_local_ranks)
        assert (found.node, found.num_nodes) == (one.node, 2)


def test_pals_own_file_is_checked_against_its_variables(tmp_path: Path) -> None:
    file = write_apinfo(tmp_path / "apinfo", [(0, 0), (1, 0)])
    with pytest.raises(RankUnknown, match="PALS_APINFO"):
        find_membership({"PALS_RANKID": "2", "PALS_APINFO": str(file)})
    with pytest.raises(RankUnknown, match="PALS_LOCAL_SIZE"):
        find_membership({"PALS_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PALS_APINFO": str(file)})


@pytest.mark.parametrize("damage", ["other version", "cut", "missing"])
def test_a_file_of_pals_that_cannot_be_read_is_not_believed(tmp_path: Path, damage: str) -> None:
    file = write_apinfo(tmp_path / "apinfo", [(0, 0), (1, 0)], version=2 if damage == "other version" else 1)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:150])
    if damage == "missing":
        file.unlink()
    with pytest.raises(RankUnknown, match="but no world size"):
        find_membership({"PALS_RANKID": "1", "PALS_APINFO": str(file)})


def test_slurm_on_a_cray_ex_sets_the_names_of_pals_too() -> None:
    one = seat(5)
    cray = {"PALS_RANKID": "5", "PALS_NODEID": "1", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "5", "PMI_SIZE": "8"}
    found = find_membership(slurm(one) | cray | {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"})
    assert found is not None
    assert (found.launcher, found.rank, found.num_ranks) == ("Slurm", 5, 8)
    assert found.agreeing == ("PALS", "PMI")


def test_the_rank_alone_gives_the_wrong_device() -> None:
    """P2's short cut: on uneven nodes two ranks of a node get the same device, and so do ranks dealt out in turn."""
    for layout, num_devices in (("uneven", 3), ("in turn", 4)):
        on_first = [one for one in LAYOUTS[layout] if one.node == 0]
        guessed = [guess_local_rank(one.rank, num_devices) for one in on_first]
        assert len(set(guessed)) < len(guessed)
        assert len({one.local_rank for one in on_first}) == len(on_first)


@pytest.mark.parametrize("children", [[4, 4], [4, 2], [1, 5]])
@pytest.mark.parametrize("is_in_turn", [False, True])
def test_ranks_that_a_script_starts_in_every_task_are_found(children: list[int], is_in_turn: bool) -> None:
    tasks = [task for task, count in enumerate(children) for _ in range(count)]
    if is_in_turn:
        tasks = [task for turn in range(max(children)) for task, count in enumerate(children) if turn < count]
    for rank, task in enumerate(tasks):
        own = {"RANK": str(rank), "WORLD_SIZE": str(len(tasks))}
        found = find_membership(slurm(Seat(task, 2, 0, 1, task, 2)) | own)
        assert found is not None
        assert (found.launcher, found.rank, found.num_ranks) == ("environment", rank, len(tasks))


def test_two_torchruns_with_the_same_port_have_different_names() -> None:
    def name(agent: str, rank: int) -> str | None:
        one = Seat(rank, 2, rank, 2, 0, 1)
        found = find_membership(
            torchrun(one) | {"TORCHELASTIC_ERROR_FILE": f"/tmp/torchelastic_x/{agent}/attempt_0/{rank}/error.json"}
        )
        assert found is not None
        return found.launch

    assert name("none_a", 0) == name("none_a", 1) != name("none_b", 1)


def test_on_the_only_node_a_rank_is_its_local_rank() -> None:
    claim = Claim(source="PMI", rank=2, num_ranks=4, num_nodes=1, variables=("PMI_RANK",))
    done = _complete(claim)
    assert (done.local_rank, done.num_local_ranks, done.num_nodes, done.node) == (2, 4, 1, 0)


def test_a_task_of_unknown_number_around_the_only_rank_is_taken_for_the_only_one() -> None:
    """Only a rank above 0, or more than one of them, says that there are others."""
    only = Claim(source="PMI", rank=0, num_ranks=1, variables=("PMI_RANK",))
    _refuse_alone(only, [Claim(source="PALS", rank=0, num_ranks=None, variables=("PALS_RANKID",))])
    for rank, num_ranks in ((1, None), (0, 2)):
        with pytest.raises(RankUnknown, match="PMI reports rank 0 of 1"):
            _refuse_alone(only, [Claim(source="PALS", rank=rank, num_ranks=num_ranks, variables=("PALS_RANKID",))])


@pytest.mark.parametrize(
    ("more", "words"),
    [({}, "PALS_APINFO is not set"), ({"PALS_APINFO": "/no/such"}, "PALS_APINFO='/no/such' cannot be read")],
)
def test_several_nodes_without_a_number_of_ranks_say_what_is_lacking(
    more: dict[str, str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "nodes").write_text("x1\nx2\n")
    variables = {"PALS_RANKID": "5", "PALS_LOCAL_SIZE": "4", "PBS_NODEFILE": str(tmp_path / "nodes")} | more
    with pytest.raises(RankUnknown, match=words):
        find_membership(variables)


@pytest.mark.parametrize(("nodes", "found"), [("2", (1, 2)), ("3", (None, None)), ("0", (None, None))])
def test_horovods_nodes_count_where_they_multiply_to_all_ranks(
    nodes: str, found: tuple[int | None, int | None]
) -> None:
    variables = {
        "HOROVOD_RANK": "2", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": nodes,
    }  # fmt: skip
    claim = read_horovod(variables)
    assert claim is not None
    assert (claim.node, claim.num_nodes) == found
    alone = read_horovod(variables | {"HOROVOD_LOCAL_SIZE": "4", "HOROVOD_CROSS_SIZE": "0"})
    assert alone is not None
    assert (alone.node, alone.num_nodes) == (None, None)


def test_sources_are_launchers_parts_of_one_or_systems_of_a_process_per_host() -> None:
    assert {name for name, source in SOURCES.items() if source.is_elastic} == {"torchrun"}
    assert {name for name, source in SOURCES.items() if source.is_part} == {"PALS's file", "PMI", "PMIx"}
    per_host = {"HTCondor", "SageMaker", "AWS Batch", "Kubernetes"}
    assert {name for name, source in SOURCES.items() if source.is_per_host} == per_host


@pytest.mark.parametrize(("node", "num_nodes", "words"), [(None, 2, "node – of 2 "), (1, None, "node 1 of – ")])
def test_all_ranks_on_one_of_several_nodes_are_refused(node: int | None, num_nodes: int | None, words: str) -> None:
    with pytest.raises(RankUnknown, match=words):
        _check_only_node(4, node, num_nodes, "X")
    _check_only_node(4, 0, 1, "X")
    _check_only_node(4, None, None, "X")


@pytest.mark.parametrize(
    ("file", "names"),
    [("/tmp/run/attempt_0/3/error.json", ["run"]), ("run/attempt_0/3/error.json", ["run"]),
     ("attempt_0/3/error.json", []), ("/tmp/run/attempt_0/3/other.json", []), ("", [])],
)  # fmt: skip
def test_an_agent_of_torchrun_is_named_by_the_directory_of_its_run(file: str, names: list[str]) -> None:
    assert _name_agent({"TORCHELASTIC_ERROR_FILE": file}) == names


def test_the_only_rank_of_its_node_is_number_0_there() -> None:
    alone = _complete(Claim(source="Flux", rank=1, num_ranks=2, num_local_ranks=1, num_nodes=2))
    assert (alone.local_rank, alone.node) == (0, None)
    one_each = _complete(Claim(source="Flux", rank=1, num_ranks=2, num_nodes=2))
    assert (one_each.num_local_ranks, one_each.local_rank) == (1, 0)


@pytest.mark.parametrize(("num_nodes", "name"), [(1, "7.12"), (2, "hydra.login1-38445"), (None, "hydra.login1-38445")])
def test_on_one_node_a_launch_of_mpich_is_named_by_its_starter(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int | None, name: str
) -> None:
    command = ["hydra_pmi_proxy", "--control-port", "login1:38445"]
    proxy = SimpleNamespace(pid=7, name=lambda: "hydra_pmi_proxy", create_time=lambda: 12.9, cmdline=lambda: command)
    shell = SimpleNamespace(name=lambda: "bash")
    monkeypatch.setattr("psutil.Process.parents", lambda _: [shell, proxy])
    assert name_launch(Claim(source="MPICH", rank=0, num_ranks=4, num_nodes=num_nodes), {}) == name


@pytest.mark.parametrize(
    ("more", "num_ranks", "num_local_ranks"),
    [
        ({"SLURM_NODEID": "1"}, 5, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,2"}, 5, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,2", "SLURM_NODEID": "1"}, 5, 2),
        ({"SLURM_GTIDS": "3,4"}, 5, 2),
    ],
)
def test_a_task_of_slurm_counts_those_beside_it_where_two_variables_say_it(
    more: Variables, num_ranks: int, num_local_ranks: int | None
) -> None:
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "5"}
    found = read_slurm({**step, **more})
    assert found is not None
    assert (found.num_ranks, found.num_local_ranks) == (num_ranks, num_local_ranks)


@pytest.mark.parametrize("more", [{"SLURM_STEP_TASKS_PER_NODE": "3,3"}, {"SLURM_GTIDS": "0,1,2"}])
def test_a_task_of_slurm_whose_variables_contradict_each_other_is_refused(more: Variables) -> None:
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "5"}
    with pytest.raises(RankUnknown, match="start with srun, or unset them"):
        read_slurm({**step, **more})


@pytest.mark.parametrize(
    ("num_outer", "num_inner", "is_refused"),
    [(2, 2, False), (2, 3, True), (3, 2, False), (None, 2, True), (2, None, False)],
)
def test_only_more_ranks_of_mpi_than_of_torchrun_leave_it_open_which_started_the_other(
    num_outer: int | None, num_inner: int | None, is_refused: bool
) -> None:
    outer = Claim(source="torchrun", rank=0, num_ranks=num_outer, variables=("RANK",))
    inner = Claim(source="Open MPI", rank=1, num_ranks=num_inner, variables=("OMPI_COMM_WORLD_RANK",))
    _refuse_driver(replace(outer, source="Slurm"), [inner])
    with pytest.raises(RankUnknown, match="which started the other") if is_refused else nullcontext():
        _refuse_driver(outer, [inner])
