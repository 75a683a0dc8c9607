"""Whether this machine can run a part of a recipe at all, asked before anything is launched.

A full-size part on a small machine would not fail, it would take the machine down: without a limit, the kernel ends
whatever it likes when memory runs out. So the least that the ranks must hold is held against what there is:

    parameters, gradients, and what moments the optimizer has; under DDP the gradients once more, in buckets;
    where FSDP shards, each rank's share

Activations come on top, so a part that passes may still run out of memory. On a CPU each rank therefore gets a limit,
its share of the machine: running out is then a result like any other.

The two sizes of every recipe: the published parameters, and the same shape for two CPU cores and a few minutes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from scalelab.errors import ScalelabError, UsageError
from scalelab.measure.launchers.steps import find_program
from scalelab.ranks.allocation import find_allocation
from scalelab.ranks.namespaces import find_host_obstacle
from scalelab.recipes.recipe import Size
from scalelab.recipes.submitted import SubmittedTraining, find_submission_obstacle
from scalelab.records.environment import find_gpus, read_allowed_memory
from scalelab.records.trial import Trial
from scalelab.strategies.catalogue import SHARDED
from scalelab.studies.memory.study import Memory
from scalelab.studies.optimizers import KEPT_TENSORS
from scalelab.studies.shared.sampling import Sampling
from scalelab.studies.shared.study import Study
from scalelab.units import format_bytes
from scalelab.workloads.catalogue import BUILT_IN, make_options

BYTES = {"float64": 8, "bfloat16": 2, "float16": 2}
"""Of a parameter that the model is cast to; others have 4."""
USABLE_SHARE = 0.8
"""Of a machine's memory, for all ranks together: the rest is the system's and torch's own."""


def find_obstacle(study: Study) -> str | None:
    """Why nothing of a study can be run on this machine; None: it can be tried."""
    if isinstance(study, SubmittedTraining):
        return None  # what becomes of its job is its result, also where there is nobody to take it
    try:
        trials = study.plan()
    except UsageError as error:
        return str(error)
    # A launcher that is not here is no obstacle: its trials are planned and then refused, so that the run says why.
    is_possible = any(
        find_trial_obstacle(study, trial) is None or find_launcher_obstacle(trial.launcher, trial.mpiexec)
        for trial in trials
    )
    return None if is_possible else find_lack_of_memory(trials) or find_trial_obstacle(study, trials[0])


def find_trial_obstacle(study: Study, trial: Trial) -> str | None:
    """Why one trial of a study cannot be run, though others may."""
    if isinstance(study, SubmittedTraining):
        return find_submission_obstacle()
    obstacle = find_host_obstacle() if trial.num_hosts > 1 else find_launcher_obstacle(trial.launcher, trial.mpiexec)
    if obstacle:
        return obstacle
    # A study of memory looks itself, by forecast, and has an answer also where nothing fits.
    return None if isinstance(study, Memory) else find_lack_of_memory([trial])


def find_launcher_obstacle(launcher: str, mpiexec: str | None = None) -> str | None:
    """Why a launcher cannot start ranks here; None: it can be tried."""
    try:
        if launcher == "mpi":
            find_program("mpiexec", "--mpiexec", mpiexec)
        allocation = find_allocation(os.environ) if launcher in ("slurm", "pbs", "lsf") else None
    except ScalelabError as error:
        return str(error)
    if launcher in ("slurm", "pbs", "lsf") and (allocation is None or allocation.scheduler != launcher):
        return "this was not started inside an allocation of it"
    return None


def limit_memory(study: Study) -> Study:
    """The study with a limit for every rank on a CPU, if it has none: the machine must outlive it.

    One that profiles its steps has none: the profiler takes as much as it records, and nothing is profiled in a limit.
    """
    is_profiled = study.sampling is not None and study.sampling.profile_steps > 0
    if study.job.found_device != "cpu" or study.job.memory_limit is not None or is_profiled:
        return study
    try:
        most = max(trial.num_processes for trial in study.plan())
    except UsageError:
        return study
    share = int(USABLE_SHARE * read_allowed_memory() / most)
    limited: Study = replace(study, job=replace(study.job, memory_limit=str(share)))
    return limited


def find_lack_of_memory(trials: Iterable[Trial]) -> str | None:
    """The trial that needs most, if even its states do not fit; ranks of one CPU share its memory."""
    worst: tuple[float, str] | None = None
    for trial in trials:
        per_rank = count_state_bytes(trial)
        if trial.device == "cuda":
            needed, there = per_rank, min((gpu.memory_bytes for gpu in find_gpus()), default=0)
        else:
            needed, there = per_rank * trial.num_processes, read_allowed_memory()
        if needed > there and (worst is None or needed > worst[0]):
            where = "its GPU has" if trial.device == "cuda" else "this machine has"
            words = (
                f"{trial.label or trial.configuration} holds at least {format_bytes(needed)} (parameters, gradients,"
                f" optimizer{' of all ranks' if trial.device == 'cpu' and trial.num_processes > 1 else ''}),"
                f" and {where} {format_bytes(there)}"
            )
            worst = (needed, words)
    return worst[1] if worst else None


def count_state_bytes(trial: Trial) -> int:
    """The least that one rank holds besides activations; 0 where nobody can say, or where nothing is allocated."""
    if trial.workload not in BUILT_IN or "memory_forecast" in trial.instruments:
        return 0
    num_parameters = make_options(trial.workload, trial.options).count_parameters()
    size = 4 if trial.shape.autocast else BYTES.get(trial.dtype, 4)
    copies = 2 + count_moments(trial) + (trial.strategy == "ddp")
    total = num_parameters * size * copies
    return total // trial.num_ranks if trial.strategy in SHARDED else total


def count_moments(trial: Trial) -> int:
    """Tensors as large as the parameters that the optimizer keeps; image models have SGD with momentum of their own."""
    chosen = trial.optimization.optimizer
    if chosen is None:
        return 1 if trial.workload in ("resnet18", "lenet") else 2
    return 1 if chosen == "sgd" and trial.optimization.momentum else KEPT_TENSORS[chosen]


T = TypeVar("T")


def choose(size: Size, *, small: T, full: T) -> T:
    return full if size == "full" else small


def choose_ranks(size: Size, full: int) -> int:
    """Two cores have room for two ranks."""
    return choose(size, small=min(2, full), full=full)


def make_sampling(
    size: Size,
    *,
    rounds: int = 4,
    steps: int = 12,
    comm_free: bool = False,
    phase_steps: int = 4,
    profile_steps: int = 0,
) -> Sampling:
    """Few launches of few steps in small, as told; the control is left to full size."""
    return Sampling(
        rounds=choose(size, small=rounds, full=6),
        steps=choose(size, small=steps, full=30),
        phase_steps=phase_steps if size == "small" else 2 * phase_steps,
        comm_free_steps=choose(size, small=4, full=8) if comm_free else 0,
        profile_steps=profile_steps,
        control=size == "full",
    )
