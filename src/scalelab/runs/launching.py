"""Which launcher runs the trials of a job: the only place that knows all of them.

    local              this machine, from a forkserver
    hosts              emulated hosts, if a trial has several
    torchrun           torchrun on this machine, or on every node of an allocation
    mpi                any mpiexec
    slurm, pbs, lsf    inside an allocation, its own command: srun, mpiexec, jsrun

Outside an allocation, slurm, pbs and lsf submit a job (`cli/batch`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from scalelab.errors import LaunchFailed, RankUnknown
from scalelab.launch.batch.site import find_scheduler
from scalelab.launch.batch.trial_jobs import JobLauncher
from scalelab.launch.hosts import HostsLauncher
from scalelab.launch.local import LocalLauncher
from scalelab.launch.ranks.allocation import Allocation, Scheduler, find_allocation
from scalelab.launch.stepped import Step, StepLauncher
from scalelab.launch.steps import find_program, is_this_host, tell_kind
from scalelab.records.settings import LauncherName
from scalelab.records.trial import Cause, Trial, TrialResult, not_run

ON_THIS_MACHINE = ("local", "hosts")


class Launched(Protocol):
    """What a job and a trial say about how ranks are started."""

    @property
    def launcher(self) -> LauncherName: ...
    @property
    def mpiexec(self) -> str | None: ...
    @property
    def ranks_per_node(self) -> int | None: ...


class MixedLauncher:
    """Runs every trial with its own launcher: the rows of a recipe may differ."""

    def __init__(self, own: LocalLauncher | HostsLauncher, submit: Submitter | None = None) -> None:
        self._own = own
        self._submit = submit

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        if trial.launcher in ON_THIS_MACHINE:
            return self._own.launch(trial, directory)
        try:
            launcher = self._choose(trial, directory)
        except (LaunchFailed, RankUnknown) as error:
            return not_run(trial, str(error), cause=Cause.LAUNCHER)  # trials of other launchers can still run
        try:
            return launcher.launch(trial, directory)
        finally:
            launcher.close()

    def _choose(self, trial: Trial, directory: Path) -> StepLauncher | JobLauncher:
        scheduler = find_scheduler(trial.launcher, os.environ)
        if scheduler is None or self._submit is None:
            return StepLauncher(find_step(trial, os.environ))
        launcher = self._submit(scheduler, trial, directory.parents[1])
        launcher.check()
        return launcher

    def check(self) -> None:
        self._own.check()

    def close(self) -> None:
        self._own.close()


Submitter = Callable[[Scheduler, Trial, Path], JobLauncher]
"""Submits a trial of a run to a batch system."""
CheckedLauncher = LocalLauncher | HostsLauncher | StepLauncher | MixedLauncher


def choose_launcher(job: Launched, trials: Sequence[Trial], submit: Submitter | None = None) -> CheckedLauncher:
    """The launcher of a job; raises `LaunchFailed` if something it needs is missing.

    `submit` handles a recipe's trial that is a batch job; without it such a trial does not run.
    """
    if job.launcher not in ON_THIS_MACHINE:
        return StepLauncher(find_step(job, os.environ))
    own = HostsLauncher() if any(trial.num_hosts > 1 for trial in trials) else LocalLauncher()
    is_mixed = any(trial.launcher not in ON_THIS_MACHINE for trial in trials)
    return MixedLauncher(own, submit) if is_mixed else own


def find_step(job: Launched, variables: Mapping[str, str]) -> Step:
    """The command that starts the ranks of a job here."""
    allocation = find_allocation(variables)
    if job.launcher == "torchrun":
        # A job's shell may run on a login node, and its script on a service node.
        is_here = allocation is not None and (not allocation.first_node or is_this_host(allocation.first_node))
        if allocation is None or (allocation.num_nodes == 1 and is_here):
            return Step(kind="", is_torchrun=True, ranks_per_node=job.ranks_per_node)
        return make_step(allocation, job, is_torchrun=True)
    if job.launcher == "mpi":
        return make_mpi_step(allocation, job)
    if allocation is None or allocation.scheduler != job.launcher:
        raise LaunchFailed(
            f"--launcher {job.launcher} starts ranks only inside a {job.launcher} job, and this is not one"
        )
    return make_step(allocation, job)


def make_step(allocation: Allocation, job: Launched, *, is_torchrun: bool = False) -> Step:
    """The launch command of the allocation's batch system."""
    if allocation.scheduler == "pbs":
        return make_mpi_step(allocation, job, is_torchrun=is_torchrun)
    kind = {"slurm": "srun", "lsf": "jsrun"}[allocation.scheduler]
    return Step(
        kind=kind,
        program=find_program(kind),
        allocation=allocation,
        ranks_per_node=job.ranks_per_node,
        is_torchrun=is_torchrun,
    )


def make_mpi_step(allocation: Allocation | None, job: Launched, *, is_torchrun: bool = False) -> Step:
    """mpiexec, which finds the nodes of an allocation itself."""
    program = find_program("mpiexec", "--mpiexec", job.mpiexec)
    return Step(
        kind=tell_kind(program),
        program=program,
        allocation=allocation,
        ranks_per_node=job.ranks_per_node,
        is_torchrun=is_torchrun,
    )
