"""How often a study measures each of its configurations, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import tyro

from scalelab.checks import check_at_least, check_divisible
from scalelab.errors import UsageError
from scalelab.launch.ranks.placement import default_threads_per_rank, is_oversubscribed
from scalelab.records.devices import find_kind
from scalelab.records.observations import Instrument
from scalelab.records.refusals import check_strategy
from scalelab.records.strategies import SCRIPT, find_strategy
from scalelab.records.tasks import Exchange, Forecast, Measure, Script
from scalelab.records.trial import NO_STRATEGY, StepPlan, Trial
from scalelab.studies.shared.job import Job, check_devices, describe_place, describe_trial_fields
from scalelab.units import format_count

FEW_STEPS = 3
"""Profiled steps of one launch, where a study records some unasked: the first is often slow, the median is not it."""
LINK = "link"
"""The configuration of an all-reduce on two ranks that predictions take the link from."""
LINK_SIZES = tuple(4**power * 1024 for power in range(1, 7))
LINK_ROUNDS = 3
QUICK_ROUNDS, QUICK_STEPS = 5, 10
"""What is left with --quick."""
QUICK_FIELDS = ("rounds", "steps", "phase_steps", "comm_free_steps", "profile_steps")
"""What it sets."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How often it is measured."""

    rounds: int = 12
    """Launches of every configuration, interleaved."""
    steps: int = 30
    """Clean steps per launch, warm-up included."""
    warmup: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """First steps to drop. None: found from the step times."""
    phase_steps: int = 4
    """Extra steps per launch with input, forward, backward and optimizer timed."""
    comm_free_steps: int = 8
    """Extra steps per launch without the gradient all-reduce: they show what communication costs."""
    profile_steps: int = 0
    """Last steps per launch, under torch's profiler; traces are kept. No step is profiled under --memory-limit."""
    free_steps: int = 8
    """Extra steps per launch that are not synchronized at their edges, on GPUs: they show host-bound time."""
    control: bool = True
    """Measure the reference twice, as two configurations: if they differ, so does the machine."""

    def __post_init__(self) -> None:
        check_at_least("rounds", self.rounds, 1)
        check_at_least("steps", self.steps, 2)
        for name in ("phase_steps", "comm_free_steps", "profile_steps", "free_steps"):
            check_at_least(name, getattr(self, name), 0)
        if self.warmup is not None:
            check_at_least("warmup", self.warmup, 0)
            if self.warmup >= self.steps:
                raise UsageError(
                    f"--warmup {self.warmup} leaves nothing of --steps {self.steps}: use fewer warm-up steps,"
                    f" or --steps {self.warmup + 20}"
                )

    def hasten(self) -> Sampling:
        """Fewer of everything: what is left takes a minute, and its intervals are wider."""
        return replace(
            self,
            rounds=min(self.rounds, QUICK_ROUNDS),
            steps=min(self.steps, QUICK_STEPS),
            warmup=None if self.warmup is None else min(self.warmup, QUICK_STEPS // 2),
            phase_steps=min(self.phase_steps, 2),
            comm_free_steps=min(self.comm_free_steps, 4),
            profile_steps=0,
        )

    @property
    def launches(self) -> str:
        """Launches per configuration, in words."""
        return format_count(self.rounds, "launch")

    @property
    def plan(self) -> StepPlan:
        """The steps of one launch: a third of the clean ones lead in, the rest is interleaved with the other kinds."""
        lead_in = min(self.steps - 1, max(self.warmup or 0, self.steps // 3))
        return StepPlan(
            lead_in_steps=lead_in,
            clean_steps=self.steps - lead_in,
            phase_steps=self.phase_steps,
            comm_free_steps=self.comm_free_steps,
            profiled_steps=self.profile_steps,
            free_steps=self.free_steps,
        )


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One row of a study: what is measured in every round."""

    name: str
    strategy: str
    num_ranks: int
    global_batch: int
    job: Job | None = None
    """What is trained, where it differs from the study's job."""
    label: str = ""
    """What tables call it; empty: its strategy and number of ranks."""
    instruments: tuple[Instrument, ...] = ()
    """What is recorded besides time, in its first round."""


def plan_forecast(job: Job, row: Configuration, task: Forecast, prefix: str = "") -> Trial:
    """A row as one process on fake tensors; its ranks are not started."""
    return Trial(
        configuration=f"{prefix}{row.name}",
        strategy=row.strategy,
        num_ranks=row.num_ranks,
        global_batch=row.global_batch,
        label=row.label,
        task=task,
        **describe_trial_fields(row.job or job, row.strategy),
    )


def plan_rounds(job: Job, sampling: Sampling, configurations: Sequence[Configuration]) -> list[Trial]:
    """Every configuration once per round, the rounds one after the other, so that slow drift falls on all alike.

    Every other round runs backwards: what comes first in a round is not always the same.
    """
    if job.script is not None:
        configurations = [replace(one, strategy=SCRIPT.name) for one in configurations]
    most_ranks = max(configuration.num_ranks for configuration in configurations)
    check_devices(job, job.count_on_node(most_ranks))
    alike = {c.name: describe_trial_fields(c.job or job, c.strategy) for c in configurations}
    cores = {num_ranks: share_cores(job, num_ranks, most_ranks) for num_ranks in {c.num_ranks for c in configurations}}
    trials = [
        Trial(
            configuration=configuration.name,
            strategy=configuration.strategy,
            num_ranks=configuration.num_ranks,
            global_batch=configuration.global_batch,
            round=number,
            **cores[configuration.num_ranks],
            task=plan_task(configuration.job or job, sampling, configuration),
            label=configuration.label,
            instruments=configuration.instruments if number == 1 else (),
            **alike[configuration.name],
        )
        for number in range(1, sampling.rounds + 1)
        for configuration in (configurations if number % 2 else reversed(configurations))
    ]
    if job.script is None:
        for trial in trials:
            check_strategy(trial)
    return trials


def plan_task(job: Job, sampling: Sampling, configuration: Configuration) -> Measure | Script:
    """What the ranks of a configuration do: train the workload, or run the script."""
    plan = plan_steps(sampling, configuration.strategy, job.memory_limit_bytes, configuration.num_ranks)
    if job.script is not None or not find_kind(job.found_device).is_accelerator:
        plan = replace(plan, free_steps=0)  # a CPU has nothing queued, and a script waits where it likes
    if job.script is None:
        return Measure(plan=plan)
    num_ranks = configuration.num_ranks
    check_divisible(configuration.global_batch, num_ranks)
    return job.make_script_task(plan, configuration.global_batch // num_ranks, num_ranks)


def share_cores(job: Job, num_ranks: int, most_ranks: int) -> dict[str, Any]:
    """The cores of each rank, the same in every trial, and whether these ranks have to share them.

    Of nodes that are not known yet the latter cannot be said: ranks report where they are, and a caution names sharing.
    """
    num_cores = job.count_node_cores()
    threads = job.threads_per_rank or default_threads_per_rank(job.count_on_node(most_ranks), num_cores)
    is_shared = not job.has_unknown_nodes and is_oversubscribed(job.count_on_node(num_ranks), threads, num_cores)
    return {"threads_per_rank": threads, "is_oversubscribed": is_shared}


def describe_bare_trial(job: Job, num_ranks: int, most_ranks: int) -> dict[str, Any]:
    """What a job says about a trial that trains nothing."""
    place = describe_place(job) | share_cores(job, num_ranks, most_ranks)
    return {"workload": "", "strategy": NO_STRATEGY, "num_ranks": num_ranks, **place}


def plan_link(job: Job, sampling: Sampling, num_ranks: int) -> list[Trial]:
    """An all-reduce on two ranks by size."""
    trial = Trial(
        configuration=LINK,
        label="all-reduce × 2",
        global_batch=2,
        **describe_bare_trial(job, 2, num_ranks),
        task=Exchange(operation="all_reduce", sizes=LINK_SIZES, repeats=20, budget_seconds=0.1),
    )
    return [replace(trial, round=number) for number in range(1, min(LINK_ROUNDS, sampling.rounds) + 1)]


def plan_steps(
    sampling: Sampling, strategy: str, limit_bytes: int | None = None, num_ranks: int | None = None
) -> StepPlan:
    """Communication is skipped only where all of it can be: `no_sync` does not cover FSDP's all-gathers.

    Under a memory limit nothing is profiled: the profiler's own memory could make a trial run out of it. A pipeline of
    one stage is a plain loop, whose phases can be timed.
    """
    plan = sampling.plan if limit_bytes is None else replace(sampling.plan, profiled_steps=0)
    record = find_strategy(strategy)
    plan = plan if record.has_phases or num_ranks == 1 else replace(plan, phase_steps=0)
    return plan if record.can_skip_communication else replace(plan, comm_free_steps=0)


def check_ranks(ranks: Sequence[int], global_batch: int | None = None) -> None:
    """Reject numbers of ranks that no trial could have, naming the flag."""
    if not ranks:
        raise UsageError("--ranks needs at least one number, for example --ranks 1 2")
    for num_ranks in ranks:
        check_at_least("ranks", num_ranks, 1)
        if global_batch is not None:
            check_divisible(global_batch, num_ranks)
    if len(set(ranks)) < len(ranks):
        raise UsageError(f"--ranks {' '.join(map(str, ranks))} lists a number twice: give each once")
