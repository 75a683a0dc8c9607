"""What each launcher says about the rank of a process, in environment variables.

A claim is what one of them says; `SOURCES` has a record of every launcher, the innermost first. Facts:

    torchrun     RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK (the node), beside TORCHELASTIC_RUN_ID
    Open MPI     OMPI_COMM_WORLD_*; its NODE_RANK counts the ranks of one node, not an index of nodes
    MVAPICH      MV2_COMM_WORLD_*, from version 3 on MVP_COMM_WORLD_*
    MPICH        PMI_RANK and PMI_SIZE beside MPI_LOCALRANKID and MPI_LOCALNRANKS, which only Hydra sets
    Intel MPI    the same, and I_MPI_*
    LSF jsrun    JSM_NAMESPACE_*
    Flux         FLUX_TASK_RANK, FLUX_JOB_SIZE, FLUX_TASK_LOCAL_ID, FLUX_JOB_NNODES; ranks per node are unknown
    Slurm        SLURM_PROCID and others, of a task only where SLURM_STEP_ID stands too: a job script has SLURM_PROCID=0
                 without being a task. SLURM_GTIDS lists the tasks of the node. SLURM_NTASKS_PER_NODE is there only when
                 the flag was given, and SLURM_NTASKS may be the job's, so that neither comes first
                 Without a step, a SLURM_PROCID above 0, or one without SLURM_JOB_ID, cannot be a job script's
    Horovod      HOROVOD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE; _CROSS_RANK is the node where all have as many ranks
    HTCondor     _CONDOR_PROCNO and _CONDOR_NPROCS, of a parallel-universe job
    SageMaker    SM_HOSTS and SM_CURRENT_HOST, one process per host
    AWS Batch    AWS_BATCH_JOB_NODE_INDEX and _NUM_NODES, one process per node; an array index is not a rank
    Kubernetes   JOB_COMPLETION_INDEX of an Indexed Job, without a world size
    PALS         PALS_*, and PMI_* beside it on Polaris; the file PALS_APINFO has the whole job (`read_apinfo`).
                 Slurm and Flux set these too on a Cray EX
    PMI          PMI_RANK and PMI_SIZE alone: srun --mpi=pmi2
    PMIx         PMIX_RANK alone, which is not enough
    environment  RANK and WORLD_SIZE alone: a script of the user
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from scalelab.errors import RankUnknown
from scalelab.launch.ranks.allocation import expand_tasks, read_apinfo

Variables = Mapping[str, str]

TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
SHELL_STEPS = ("4294967290", "4294967291")
"""SLURM_INTERACTIVE_STEP and SLURM_BATCH_SCRIPT of slurm.h: the shell of salloc, and that of a job's script."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one launcher says."""

    source: str
    rank: int
    num_ranks: int | None = None
    local_rank: int | None = None
    num_local_ranks: int | None = None
    node: int | None = None
    num_nodes: int | None = None
    variables: tuple[str, ...] = ()
    """The ones that were read, for messages."""


@dataclass
class VariableReader:
    """Reads numbers from variables and remembers which."""

    variables: Variables
    seen: list[str]

    def number(self, *names: str) -> int | None:
        """The first of them that is set; None: none is."""
        for name in names:
            text = self.variables.get(name, "").strip()
            if text:
                self.seen.append(name)
                try:
                    return int(text)
                except ValueError:
                    raise RankUnknown(
                        f"{name}={text!r} is not a valid number: unset it, or start with a launcher"
                    ) from None
        return None

    def claim(self, source: str, rank: int, **found: int | None) -> Claim:
        return Claim(source=source, rank=rank, variables=tuple(self.seen), **found)


def read_torchrun(variables: Variables) -> Claim | None:
    if not variables.get("TORCHELASTIC_RUN_ID"):
        return None
    return _read_rank_and_world("torchrun", variables)


def read_environment(variables: Variables) -> Claim | None:
    if not (variables.get("RANK") and variables.get("WORLD_SIZE")):
        return None
    return _read_rank_and_world("environment", variables)


def _read_rank_and_world(source: str, variables: Variables) -> Claim | None:
    read = VariableReader(variables, [])
    rank = read.number("RANK")
    if rank is None:
        return None
    return read.claim(
        source,
        rank,
        num_ranks=read.number("WORLD_SIZE"),
        local_rank=read.number("LOCAL_RANK"),
        num_local_ranks=read.number("LOCAL_WORLD_SIZE"),
        node=read.number("GROUP_RANK"),
        num_nodes=read.number("GROUP_WORLD_SIZE"),
    )


def _read_world(source: str, prefix: str) -> Callable[[Variables], Claim | None]:
    """A launcher whose variables are PREFIX_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE."""

    def read_it(variables: Variables) -> Claim | None:
        read = VariableReader(variables, [])
        rank = read.number(f"{prefix}_RANK")
        if rank is None:
            return None
        return read.claim(
            source,
            rank,
            num_ranks=read.number(f"{prefix}_SIZE"),
            local_rank=read.number(f"{prefix}_LOCAL_RANK"),
            num_local_ranks=read.number(f"{prefix}_LOCAL_SIZE"),
        )

    return read_it


def read_intel(variables: Variables) -> Claim | None:
    return _read_hydra("Intel MPI", variables) if variables.get("I_MPI_HYDRA_UUID") else None


def read_mpich(variables: Variables) -> Claim | None:
    return None if variables.get("I_MPI_HYDRA_UUID") else _read_hydra("MPICH", variables)


def _read_hydra(source: str, variables: Variables) -> Claim | None:
    read = VariableReader(variables, [])
    local_rank = read.number("MPI_LOCALRANKID")
    rank = read.number("PMI_RANK")
    if local_rank is None or rank is None:
        return None
    return read.claim(
        source,
        rank,
        num_ranks=read.number("PMI_SIZE"),
        local_rank=local_rank,
        num_local_ranks=read.number("MPI_LOCALNRANKS"),
    )


def read_pals(variables: Variables) -> Claim | None:
    read = VariableReader(variables, [])
    rank = read.number("PALS_RANKID")
    if rank is None:
        return None
    return read.claim(
        "PALS",
        rank,
        num_ranks=read.number("PMI_SIZE"),
        local_rank=read.number("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        num_local_ranks=read.number("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        node=read.number("PALS_NODEID"),
    )


def read_pals_file(variables: Variables) -> Claim | None:
    """What PALS has written for the job, where this rank can read it."""
    read = VariableReader(variables, [])
    rank = read.number("PALS_RANKID")
    places = read_apinfo(Path(variables["PALS_APINFO"])) if variables.get("PALS_APINFO") else None
    if rank is None or places is None:
        return None
    read.seen.append("PALS_APINFO")
    if not 0 <= rank < len(places):
        raise RankUnknown(
            f"PALS_APINFO={variables['PALS_APINFO']!r} has {len(places)} ranks, but PALS_RANKID is {rank}: unset both"
        )
    local_rank, node = places[rank]
    return read.claim(
        "PALS's file",
        rank,
        num_ranks=len(places),
        local_rank=local_rank,
        num_local_ranks=sum(place[1] == node for place in places),
        node=node,
        num_nodes=len({place[1] for place in places}),
    )


def read_flux(variables: Variables) -> Claim | None:
    read = VariableReader(variables, [])
    rank = read.number("FLUX_TASK_RANK")
    if rank is None:
        return None
    return read.claim(
        "Flux",
        rank,
        num_ranks=read.number("FLUX_JOB_SIZE"),
        local_rank=read.number("FLUX_TASK_LOCAL_ID"),
        num_nodes=read.number("FLUX_JOB_NNODES"),
    )


def read_slurm(variables: Variables) -> Claim | None:
    """A task of a step; None in a job script and in an interactive shell."""
    read = VariableReader(variables, [])
    rank = read.number("SLURM_PROCID")
    if rank is None or is_shell(variables):
        return None
    if not variables.get("SLURM_STEP_ID") and rank == 0 and variables.get("SLURM_JOB_ID"):
        return None
    node = read.number("SLURM_NODEID")
    num_ranks, num_nodes = _read_tasks(read, node), read.number("SLURM_STEP_NUM_NODES")
    _refuse_components(variables)
    return read.claim(
        "Slurm",
        rank,
        num_ranks=num_ranks,
        local_rank=read.number("SLURM_LOCALID"),
        num_local_ranks=_count_local_tasks(read, rank, node),
        node=node,
        num_nodes=num_nodes,
    )


def is_shell(variables: Variables) -> bool:
    """Whether Slurm started an interactive shell, not a rank: salloc's, or `srun -n 1 --pty bash`."""
    is_alone = variables.get("SLURM_STEP_NUM_TASKS") == "1"
    return variables.get("SLURM_STEP_ID", "") in SHELL_STEPS or (is_alone and bool(variables.get("SLURM_PTY_PORT")))


def _read_tasks(read: VariableReader, node: int | None) -> int | None:
    """The number of tasks of the step, which two variables must agree on."""
    num_ranks = read.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    text = read.variables.get(TASKS_PER_NODE)
    if not text:
        return num_ranks
    counts = expand_tasks(text, variable=TASKS_PER_NODE)
    if num_ranks is not None and sum(counts) != num_ranks:
        raise RankUnknown(
            f"{TASKS_PER_NODE}={text!r} adds up to {sum(counts)} tasks, but {read.seen[-1]} is {num_ranks}: start with"
            " srun, or unset them"
        )
    if node is not None and node >= len(counts):
        raise RankUnknown(
            f"SLURM_NODEID={node} is out of range for the {len(counts)} nodes of {TASKS_PER_NODE}={text!r}: unset both"
        )
    return sum(counts)


def _count_local_tasks(read: VariableReader, rank: int, node: int | None) -> int | None:
    """How many tasks of the step are on this node, by the list of them and by the counts of all nodes."""
    text, listed = read.variables.get(TASKS_PER_NODE), read.variables.get("SLURM_GTIDS")
    counted = None
    if text and node is not None:
        read.seen.append(TASKS_PER_NODE)
        counted = expand_tasks(text, variable=TASKS_PER_NODE)[node]
    if not listed:
        return counted
    read.seen.append("SLURM_GTIDS")
    tasks = listed.split(",")
    if str(rank) not in tasks or counted not in (None, len(tasks)):
        raise RankUnknown(
            f"SLURM_GTIDS={listed!r} does not match the {counted or 'tasks'} of this node, which include rank {rank}"
            f" (SLURM_PROCID, {TASKS_PER_NODE}): start with srun, or unset them"
        )
    return len(tasks)


def _refuse_components(variables: Variables) -> None:
    """In a step over several components of a heterogeneous job the numbers are one component's."""
    if variables.get("SLURM_HET_SIZE", "0").strip() not in ("", "0", "1") and not variables.get("PMI_SIZE"):
        raise RankUnknown(
            f"SLURM_HET_SIZE={variables['SLURM_HET_SIZE']}: a step of a heterogeneous job can span several components,"
            " but Slurm's variables count only one: set RANK and WORLD_SIZE and unset SLURM_STEP_ID, or use torchrun"
        )


def read_horovod(variables: Variables) -> Claim | None:
    """A process of horovodrun; started over MPI, it has MPI's variables instead."""
    claim = _read_world("Horovod", "HOROVOD")(variables)
    if claim is None:
        return None
    read = VariableReader(variables, list(claim.variables))
    node, num_nodes = read.number("HOROVOD_CROSS_RANK"), read.number("HOROVOD_CROSS_SIZE")
    is_even = None not in (num_nodes, claim.num_local_ranks, claim.num_ranks) and (
        (num_nodes or 0) * (claim.num_local_ranks or 0) == claim.num_ranks
    )
    found = {"node": node, "num_nodes": num_nodes} if is_even else {}
    return replace(claim, **found, variables=tuple(read.seen))  # type: ignore[arg-type]


def _read_per_host(source: str, index: str, count: str) -> Callable[[Variables], Claim | None]:
    """A system that starts one process per machine: its index is a rank, and a node."""

    def read_it(variables: Variables) -> Claim | None:
        read = VariableReader(variables, [])
        rank = read.number(index)
        if rank is None:
            return None
        return read.claim(source, rank, num_ranks=read.number(count) if count else None)

    return read_it


def read_sagemaker(variables: Variables) -> Claim | None:
    """A process per host: its place in the sorted list of hosts."""
    current, listed = variables.get("SM_CURRENT_HOST"), variables.get("SM_HOSTS")
    if not current or not listed:
        return None
    try:
        hosts = sorted(map(str, json.loads(listed)))
        rank = hosts.index(current)
    except (TypeError, ValueError):
        raise RankUnknown(f"SM_HOSTS={listed!r} does not list SM_CURRENT_HOST={current!r}: unset both") from None
    names = ("SM_HOSTS", "SM_CURRENT_HOST")
    return Claim(source="SageMaker", rank=rank, num_ranks=len(hosts), variables=names)


def read_pmix(variables: Variables) -> Claim | None:
    read = VariableReader(variables, [])
    rank = read.number("PMIX_RANK")
    return None if rank is None else read.claim("PMIx", rank)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A launcher, or a part of one, as its ranks see it in variables."""

    name: str
    read: Callable[[Variables], Claim | None]
    agrees: tuple[str, ...] = ()
    """Sources that speak of the same launch, and so must agree with this one."""
    launch_names: tuple[str, ...] = ()
    """Variables that together name a launch, the same on all its ranks and no other's."""
    is_part: bool = False
    """Whether it is part of a launch and no launcher."""
    is_per_host: bool = False
    """Whether it starts one process per machine, in which RANK and WORLD_SIZE may be set for further ones."""
    is_elastic: bool = False
    """Whether its agents listen at MASTER_ADDR and MASTER_PORT, and may start ranks again."""


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            name="torchrun",
            read=read_torchrun,
            launch_names=("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
            is_elastic=True,
        ),
        Source(
            name="Horovod",
            read=read_horovod,
            launch_names=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        ),
        Source(
            name="Open MPI",
            read=_read_world("Open MPI", "OMPI_COMM_WORLD"),
            agrees=("LSF jsrun", "PMIx"),
            launch_names=("PMIX_NAMESPACE",),
        ),
        Source(name="MVAPICH", read=_read_world("MVAPICH", "MVP_COMM_WORLD")),
        Source(name="MVAPICH2", read=_read_world("MVAPICH2", "MV2_COMM_WORLD")),
        Source(name="Intel MPI", read=read_intel, launch_names=("I_MPI_HYDRA_UUID",)),
        Source(name="MPICH", read=read_mpich),
        Source(name="Flux", read=read_flux, agrees=("PALS", "PALS's file", "PMI"), launch_names=("FLUX_JOB_ID",)),
        Source(
            name="LSF jsrun",
            read=_read_world("LSF jsrun", "JSM_NAMESPACE"),
            agrees=("PMIx",),
            launch_names=("LSB_JOBID", "PMIX_NAMESPACE"),
        ),
        Source(
            name="Slurm",
            read=read_slurm,
            agrees=("PALS", "PALS's file", "PMI", "PMIx"),
            launch_names=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        ),
        Source(name="PALS", read=read_pals, agrees=("PALS's file", "PMI", "PMIx"), launch_names=("PALS_APID",)),
        Source(name="PALS's file", read=read_pals_file, is_part=True),
        Source(name="PMI", read=_read_world("PMI", "PMI"), agrees=("PMIx",), launch_names=("PMI_JOBID",), is_part=True),
        Source(name="PMIx", read=read_pmix, is_part=True),
        Source(name="HTCondor", read=_read_per_host("HTCondor", "_CONDOR_PROCNO", "_CONDOR_NPROCS"), is_per_host=True),
        Source(name="SageMaker", read=read_sagemaker, launch_names=("TRAINING_JOB_NAME",), is_per_host=True),
        Source(
            name="AWS Batch",
            read=_read_per_host("AWS Batch", "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
            is_per_host=True,
        ),
        Source(name="Kubernetes", read=_read_per_host("Kubernetes", "JOB_COMPLETION_INDEX", ""), is_per_host=True),
    )
}
"""Innermost first: a launcher inside another's job sets its variables beside the other's."""
