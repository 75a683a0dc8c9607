"""Whether this machine can run a part of a recipe, asked before anything is launched; and the two sizes of recipes.

A full-size part on a small machine does not fail, it takes the machine down: without a limit, the kernel kills any
process when memory runs out. So the least that the ranks must hold is compared with the memory there is:

    parameters, gradients, and the moments of the optimizer; under DDP the gradients once more, in buckets;
    where FSDP shards, each rank's share

Activations come on top, so a part that passes may still run out of memory. On a CPU each rank therefore gets a limit,
its share of the machine: running out of memory is then a result like any other.

A part may be a batch job of its own: whether the batch system takes it is what the row asks. Inside an allocation it
is a step of that; outside, it is submitted and waited for, and a rejection is the row's result, in the batch system's
words. Without a batch system the row says so and does not run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from scalelab.answers.train import TrainStudy
from scalelab.errors import RankUnknown, ScalelabError, UsageError
from scalelab.launch.batch.jobscripts import NO_PSIJ
from scalelab.launch.batch.site import Site
from scalelab.launch.ranks.namespaces import find_host_obstacle
from scalelab.launch.starters import find_program
from scalelab.recipes.recipe import Size
from scalelab.records.environment import find_gpus, installed_version, read_allowed_memory
from scalelab.records.launchers import (
    LAUNCHERS,
    SCHEDULERS,
    STARTERS,
    Scheduler,
    find_allocation,
    find_batch,
    find_own_batch,
)
from scalelab.records.strategies import ALL_PARTS, find_strategy
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Document
from scalelab.studies.optimizers import KEPT_TENSORS
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling, Study
from scalelab.units import format_bytes
from scalelab.workloads.catalogue import BUILT_IN, make_options

BYTES = {"float64": 8, "bfloat16": 2, "float16": 2}
"""Of a parameter that the model is cast to; others have 4."""
USABLE_SHARE = 0.8
"""Of a machine's memory, for all ranks together: the rest is the system's and torch's own."""
PROGRAMS: dict[Scheduler, str] = {name: find_batch(name).submit for name in SCHEDULERS}
NO_BATCH_SYSTEM = f"there is no batch system here: none of {', '.join(PROGRAMS.values())} is on PATH"


@dataclass(frozen=True, kw_only=True)
class SubmittedTraining(TrainStudy):
    """A training run that is submitted to a batch system as a job of its own."""

    site: Site = field(default_factory=Site)
    """What the job asks for where neither flags nor a site file set it."""

    def find_site(self, trial: Trial) -> Site | None:  # noqa: ARG002
        return self.site

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        """The answer of the training run; nothing if it did not run, which the row says itself."""
        document = super().conclude(results)
        is_run = any(result.status is not Status.NOT_RUN for result in results)
        return document if is_run else replace(document, sections=(), cautions=())


def find_batch_system() -> Scheduler | None:
    """The batch system that this process runs in, or else one that takes jobs from here."""
    try:
        allocation = find_allocation(os.environ)
    except RankUnknown:
        allocation = None
    if allocation is not None:
        return allocation.scheduler
    return next((name for name, program in PROGRAMS.items() if shutil.which(program)), None)


def find_submission_obstacle() -> str | None:
    """Why no job can be submitted from here; None: it can be tried."""
    if find_batch_system() is None:
        return NO_BATCH_SYSTEM
    return NO_PSIJ if installed_version("psij-python") is None else None


def find_obstacle(study: Study) -> str | None:
    """Why nothing of a study can run on this machine; None: it can be tried."""
    try:
        trials = study.plan()
    except UsageError as error:
        return str(error)
    # Trials of a launcher or batch system that is not here are planned and then refused, so that the run says why.
    is_possible = any(
        study.find_site(trial)
        or find_trial_obstacle(study, trial) is None
        or find_launcher_obstacle(trial.launcher, trial.mpiexec)
        for trial in trials
    )
    return None if is_possible else find_lack_of_memory(trials) or find_trial_obstacle(study, trials[0])


def find_trial_obstacle(study: Study, trial: Trial) -> str | None:
    """Why one trial of a study cannot run, though others may."""
    if study.find_site(trial) is not None:
        return find_submission_obstacle()
    obstacle = find_host_obstacle() if trial.num_hosts > 1 else find_launcher_obstacle(trial.launcher, trial.mpiexec)
    if obstacle:
        return obstacle
    return None if study.forecasts_memory else find_lack_of_memory([trial])


def find_launcher_obstacle(launcher: str, mpiexec: str | None = None) -> str | None:
    """Why a launcher cannot start ranks here; None: it can be tried."""
    record = LAUNCHERS[launcher]
    if record.batch is not None and find_own_batch(os.environ) != launcher:
        return f"not running inside a {launcher} allocation"
    try:
        if record.starters:
            find_program(STARTERS[record.starters[0]].program, "--mpiexec" if record.takes_mpiexec else "", mpiexec)
    except ScalelabError as error:
        return str(error)
    return None


def limit_memory(study: Study) -> Study:
    """The study with a memory limit per rank on a CPU, unless it has one or profiles steps: traces need memory."""
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
    """The least that one rank holds besides activations; 0 where that is unknown, or nothing is allocated."""
    if trial.workload not in BUILT_IN or trial.is_forecast:
        return 0
    num_parameters = make_options(trial.workload, trial.options).count_parameters()
    size = 4 if trial.shape.autocast else BYTES.get(trial.dtype, 4)
    strategy = find_strategy(trial.strategy)
    has_buckets = strategy.memory is not None and strategy.memory.has_buckets
    one = num_parameters * size
    pieces = {part: one // strategy.count_shards(part, trial.num_ranks) for part in ALL_PARTS}
    return pieces["parameters"] + pieces["gradients"] + count_moments(trial) * pieces["optimizer"] + has_buckets * one


def count_moments(trial: Trial) -> int:
    """Parameter-sized tensors that the optimizer keeps; image models bring SGD with momentum."""
    chosen = trial.optimization.optimizer
    if chosen is None:
        return 1 if trial.workload in ("resnet18", "lenet") else 2
    return 1 if chosen == "sgd" and trial.optimization.momentum else KEPT_TENSORS[chosen]


T = TypeVar("T")


def choose(size: Size, *, small: T, full: T) -> T:
    return full if size == "full" else small


def choose_ranks(size: Size, full: int) -> int:
    """Two cores run two ranks."""
    return choose(size, small=min(2, full), full=full)


def make_sized_job(size: Size, **fields: Any) -> Job:
    """Small: one thread per rank and minutes; full: all cores and up to an hour."""
    limits = {"threads_per_rank": 1, "timeout": "5min"} if size == "small" else {"timeout": "1h"}
    return Job(**(limits | fields))


def make_sampling(
    size: Size,
    *,
    rounds: int = 4,
    steps: int = 12,
    comm_free: bool = False,
    phase_steps: int = 4,
    profile_steps: int = 0,
) -> Sampling:
    """Few launches of few steps in small; the control runs in full size only."""
    return Sampling(
        rounds=choose(size, small=rounds, full=6),
        steps=choose(size, small=steps, full=30),
        phase_steps=phase_steps if size == "small" else 2 * phase_steps,
        comm_free_steps=choose(size, small=4, full=8) if comm_free else 0,
        profile_steps=profile_steps,
        control=size == "full",
    )
