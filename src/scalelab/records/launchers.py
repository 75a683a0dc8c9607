"""Every launcher in one record: what starts its ranks, which flags it takes, how it submits, and what was tried.

A launcher is a record here and a class with `check`, `launch` and `close`, made by its classmethod `open(job)`. Those
that start ranks by a command share one class, `StepLauncher`: they bring a starter, a function from a spread of ranks
to the words of the command. A launcher with a batch system submits a job where it is not inside an allocation.
Nothing is imported here: `module:name` is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

LauncherName = Literal["local", "hosts", "torchrun", "mpi", "slurm", "pbs", "lsf", "ray", "k8s"]
Scheduler = Literal["slurm", "pbs", "lsf"]
"""Launchers that have a batch system."""


@dataclass(frozen=True, kw_only=True)
class Starter:
    """A command that starts processes on nodes."""

    program: str
    step: str
    """The function that makes the command."""
    version_words: tuple[str, ...] = ()
    """What it prints as its version, where several programs have its name."""
    finds_nodes: bool = False
    """Whether it finds nodes by itself, outside any allocation."""
    tried: str = ""
    """The version that the tests ran; empty: none."""


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """A batch system."""

    submit: str
    """The program that takes jobs."""
    executor: str
    """The class that writes job scripts, submits them and asks for their states."""
    job_variable: str
    """Holds the number of the job that a process is in."""
    read_allocation: str
    """The function that reads the nodes of that job from variables."""
    time_words: str
    """What it says of a job that exceeded its wall time."""
    wall_unit_seconds: int = 1
    """In which it counts wall time."""
    restart_variable: str = ""
    """Counts how often it has started the job again; empty: there is none."""


@dataclass(frozen=True, kw_only=True)
class LauncherRecord:
    """What is known of a launcher."""

    type: str
    """Its class."""
    starters: tuple[str, ...] = ()
    """By which its ranks are started on nodes: one, or all that have the name of its program."""
    is_on_this_machine: bool = False
    """Whether ranks are on this machine alone: there are no nodes to place them on."""
    emulates_hosts: bool = False
    """Whether --link and --ranks-per-host say how ranks are spread."""
    takes_mpiexec: bool = False
    """Whether --mpiexec chooses the command."""
    starts_torchrun: bool = False
    """Whether the command starts a torchrun on every node, and that the ranks."""
    batch: BatchFacts | None = None
    manifests: str = ""
    """The function that writes what users submit by themselves; empty: there is none."""
    manifest_flags: tuple[str, ...] = ()
    """The flags of a batch job that it reads."""


MPI = ("openmpi", "intel", "pals", "mpich")
"""The kinds of mpiexec; the first whose version words match wins."""
STARTERS: dict[str, Starter] = {
    "srun": Starter(program="srun", step="scalelab.launch.starters:step_srun", tried="Slurm 22.05"),
    "openmpi": Starter(
        program="mpiexec",
        step="scalelab.launch.starters:step_openmpi",
        version_words=("Open MPI", "OpenRTE", "PRRTE"),
        tried="Open MPI 5.0",
    ),
    "intel": Starter(
        program="mpiexec",
        step="scalelab.launch.starters:step_intel",
        version_words=("Intel(R) MPI",),
        tried="Intel MPI 2021.18",
    ),
    "pals": Starter(program="mpiexec", step="scalelab.launch.starters:step_pals", version_words=("PALS",)),
    "mpich": Starter(
        program="mpiexec", step="scalelab.launch.starters:step_mpich", version_words=("HYDRA",), tried="MPICH 5.0"
    ),
    "jsrun": Starter(program="jsrun", step="scalelab.launch.starters:step_jsrun"),
    "ray": Starter(program="ray", step="scalelab.launch.ray:step_ray", finds_nodes=True, tried="Ray 2.60"),
    "k8s": Starter(program="", step="scalelab.launch.k8s:step_k8s", finds_nodes=True),
}
STEP_LAUNCHER = "scalelab.launch.stepped:StepLauncher"
LAUNCHERS: dict[str, LauncherRecord] = {
    "local": LauncherRecord(type="scalelab.launch.local:LocalLauncher", is_on_this_machine=True),
    "hosts": LauncherRecord(type="scalelab.launch.hosts:HostsLauncher", is_on_this_machine=True, emulates_hosts=True),
    "torchrun": LauncherRecord(type=STEP_LAUNCHER, takes_mpiexec=True, starts_torchrun=True),
    "mpi": LauncherRecord(type=STEP_LAUNCHER, starters=MPI, takes_mpiexec=True),
    "slurm": LauncherRecord(
        type=STEP_LAUNCHER,
        starters=("srun",),
        batch=BatchFacts(
            submit="sbatch",
            executor="scalelab.launch.batch.executors:Slurm",
            job_variable="SLURM_JOB_ID",
            read_allocation="scalelab.launch.ranks.allocation:read_slurm",
            time_words="TimeLimit",
            restart_variable="SLURM_RESTART_COUNT",
        ),
    ),
    "pbs": LauncherRecord(
        type=STEP_LAUNCHER,
        starters=MPI,
        takes_mpiexec=True,
        batch=BatchFacts(
            submit="qsub",
            executor="scalelab.launch.batch.executors:Pbs",
            job_variable="PBS_JOBID",
            read_allocation="scalelab.launch.ranks.allocation:read_pbs",
            time_words="walltime",
        ),
    ),
    "lsf": LauncherRecord(
        type=STEP_LAUNCHER,
        starters=("jsrun",),
        batch=BatchFacts(
            submit="bsub",
            executor="scalelab.launch.batch.executors:Lsf",
            job_variable="LSB_JOBID",
            read_allocation="scalelab.launch.ranks.allocation:read_lsf",
            time_words="TERM_RUNLIMIT",
            wall_unit_seconds=60,
        ),
    ),
    "ray": LauncherRecord(type=STEP_LAUNCHER, starters=("ray",)),
    "k8s": LauncherRecord(
        type="scalelab.launch.k8s:K8sLauncher",
        manifests="scalelab.launch.batch.manifests:write_manifests",
        manifest_flags=("--container", "--filesystems", "--queue", "--wall-time"),
    ),
}
SCHEDULERS: tuple[Scheduler, ...] = get_args(Scheduler)


def find_batch(name: str) -> BatchFacts:
    """The batch system of a launcher that has one."""
    facts = LAUNCHERS[name].batch
    assert facts is not None
    return facts


def find_own_batch(variables: Mapping[str, str]) -> Scheduler | None:
    """The batch system whose job this process is in; None: it is in none."""
    return next((name for name in SCHEDULERS if variables.get(find_batch(name).job_variable)), None)


def find_scheduler(launcher: str, variables: Mapping[str, str]) -> Scheduler | None:
    """The batch system that a run must be submitted to; None: it runs here, or in the current allocation."""
    scheduler = next((name for name in SCHEDULERS if name == launcher), None)
    return None if scheduler is None or find_own_batch(variables) == scheduler else scheduler


def find_own_job(variables: Mapping[str, str]) -> str:
    """The batch job that this process is in, as `name_job` writes it; empty: it is in none."""
    scheduler = find_own_batch(variables)
    return "" if scheduler is None else name_job(scheduler, variables[find_batch(scheduler).job_variable])


def name_job(scheduler: str, number: str) -> str:
    """A job by its batch system and its number; the server's name, which PBS writes behind it, has several forms."""
    return f"{scheduler} {number.partition('.')[0]}"


def list_on_nodes() -> list[str]:
    """The launchers that place ranks on nodes."""
    return [name for name, record in LAUNCHERS.items() if not record.is_on_this_machine]


def load(target: str) -> Any:
    """What `module:name` says."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, kw_only=True)
class BatchNote:
    """What is known of the batch job that was to run one trial."""

    scheduler: str
    """slurm, pbs or lsf."""
    job: str = ""
    """Its number there; empty: the batch system took none."""
    may_come: bool = False
    """Whether the trial can still run: it never started, because its job was rejected or cancelled."""

    def __str__(self) -> str:
        return f"job {self.job} ({self.scheduler})" if self.job else f"a job of {self.scheduler}"


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What one job may use."""

    scheduler: Scheduler
    job_id: str
    num_nodes: int
    first_node: str
    tasks_per_node: int | None = None
    """Processes requested per node; None: unknown."""
    cores_per_node: int | None = None


def find_allocation(variables: Mapping[str, str]) -> Allocation | None:
    """The allocation that this process is in; None: it is in none."""
    scheduler = find_own_batch(variables)
    return None if scheduler is None else load(find_batch(scheduler).read_allocation)(variables)


def count_ranks_per_node(num_ranks: int, allocation: Allocation | None, given: int | None = None) -> int:
    """The maximum number of ranks per node: nodes are filled one after the other, up to their request."""
    if given is not None:
        return min(given, num_ranks)
    if allocation is None:
        return num_ranks
    evenly = -(-num_ranks // allocation.num_nodes)
    return min(num_ranks, max(evenly, allocation.tasks_per_node or 1))
