"""How long a study should take, before it runs: from runs like it, from a few steps, or from arithmetic.

An earlier run of the same configuration is the best guide. Without one, every configuration is launched for a few
steps, and then once as planned if that is short (a few milliseconds say nothing about a busy machine), as long as that
takes less than `MOST_TRYING_SECONDS`; those that are left follow from their batch. Where nothing
can be launched (no torch, another machine), the FLOPs of a built-in workload are divided by the speed of a matrix
product: that is right within a factor of about three, and of a workload of the user's own the time is unknown.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from msgspec import structs

from scalelab.errors import StoreError
from scalelab.launch.ranks.namespaces import parse_link
from scalelab.records.environment import count_cores
from scalelab.records.files import read_json, upgrade_result
from scalelab.records.launchers import LAUNCHERS
from scalelab.records.settings import TrainingRun
from scalelab.records.tasks import SCRIPT_MARK, Exchange, Forecast, Measure, Quantize, Read, Script, StepPlan, Train
from scalelab.records.trial import Status, Trial, TrialResult, to_builtins
from scalelab.units import format_bytes, format_count, format_duration
from scalelab.workloads.catalogue import BUILT_IN, MlpOptions, make_options

START_SECONDS = 4.0
"""Loading torch, once per study."""
ANSWER_SECONDS = 1.5
"""Starting the command, the statistics and the answer, once per study."""
LAUNCH_SECONDS = 0.2
"""Starting and ending the ranks of one trial."""
HOSTS_SECONDS = 6.0
"""The same on emulated hosts, where every rank and every torchrun loads torch."""
FEWEST_CALLS = 9
"""Of a message that alone is longer than its budget: one to check, two to plan by, three timings of two each."""
HOST_BYTES_PER_SECOND = 1e9
"""What a collective within a host should move."""
READ_BYTES_PER_SECOND = 1e9
WRITTEN_BYTES_PER_SECOND = 3e8
DEFLATED_BYTES_PER_SECOND = 2e7
"""What a stored set should be read and written with."""
ITEM_FACTOR, NAIVE_FACTOR = 4, 128
"""Times as long, sample by sample; and where every sample inflates a chunk that h5py has chosen."""
RUNS_LOOKED_AT = 20
MOST_PLANNED = 30
"""Configurations of a plan on one screen."""
MATRIX_SIZE = 512
TRIED_PLAN = StepPlan(lead_in_steps=1, clean_steps=3, phase_steps=0, comm_free_steps=0, cycles=1)
"""The steps of a try: the first is slower than the others."""
MOST_TRYING_SECONDS = 30.0
MOST_TRIED_PARAMETERS = 20_000_000
"""Of a larger network of equal layers, fewer and narrower ones are tried: its time grows with its parameters."""
SHORT_SECONDS = 3.0
"""A trial that should take less is tried as planned, with its instruments."""
Attempt = Callable[[Trial], TrialResult]
"""Launches a trial to see how it goes."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Seconds that a study should take, and where the guess comes from."""

    seconds: float | None
    source: str
    num_parameters: tuple[int, ...] = ()
    """Of the models that were tried."""
    was_run: str = "Nothing was run."


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What a few steps of a configuration took."""

    trial: Trial
    launch_seconds: float
    """Without the steps; of the first step, what it took longer than the others."""
    step_seconds: float
    num_parameters: int | None
    """Of the model as planned."""

    def expect(self, other: Trial) -> float:
        """The seconds of a trial like it, with all its steps: a step takes as long as its batch is large."""
        scale = other.batch_per_rank / self.trial.batch_per_rank
        return self.launch_seconds + (count_steps(other) or 0) * self.step_seconds * scale

    def correct(self, whole: TrialResult) -> Tried:
        """With the steps, plain and with instruments, of a trial that ran as planned."""
        launch = min(self.launch_seconds, whole.wall_seconds)
        step = (whole.wall_seconds - launch) / (count_steps(whole.trial) or 1)
        return replace(self, launch_seconds=launch, step_seconds=step)


def expect_seconds(trials: Sequence[Trial], runs: Sequence[Path], attempt: Attempt | None = None) -> Expectation:
    """From earlier runs if they cover every configuration, else by trying, else from arithmetic, else unknown."""
    known = find_earlier_seconds(trials, runs[-RUNS_LOOKED_AT:])
    if all(trial.configuration in known for trial in trials):
        total = START_SECONDS + ANSWER_SECONDS + sum(known[trial.configuration] for trial in trials)
        return Expectation(seconds=total, source="from earlier runs of the same trials")
    if all(isinstance(trial.task, Exchange) for trial in trials):
        total = START_SECONDS + sum(expect_launch(trial) + bound_exchange(trial) for trial in trials)
        return Expectation(seconds=total, source="if every size uses its whole --budget, or more for long messages")
    if all(isinstance(trial.task, Read) for trial in trials):
        total = START_SECONDS + sum(expect_launch(trial) + expect_reading(trial) for trial in trials)
        return Expectation(seconds=total, source="from typical disk and codec rates, within a factor of about three")
    if any(isinstance(trial.task, Forecast) for trial in trials):
        return Expectation(seconds=None, source="its results decide what runs next")
    if attempt is not None and all(can_try(trial) for trial in trials):
        return expect_by_trying(trials, known, attempt)
    return expect_by_arithmetic(trials)


def can_try(trial: Trial) -> bool:
    """Whether a few steps of it can be launched here."""
    is_here = LAUNCHERS[trial.launcher].is_on_this_machine and trial.num_hosts == 1
    return is_here and isinstance(trial.task, Measure | Script | Train) and count_steps(trial) is not None


def expect_by_trying(trials: Sequence[Trial], known: Mapping[str, float], attempt: Attempt) -> Expectation:
    """Launch what is not known for a few steps; a failure is the answer, and says why."""
    firsts: dict[str, Trial] = {}
    for trial in trials:
        firsts.setdefault(trial.configuration, trial)
    began = time.perf_counter()
    tried: dict[str, Tried] = {}
    start_seconds = START_SECONDS
    for name, trial in firsts.items():
        if name in known or (tried and time.perf_counter() - began > MOST_TRYING_SECONDS):
            continue
        short, thinned = shorten_trial(trial)
        twin = next((one for one in tried.values() if _fingerprint(one.trial) == _fingerprint(trial)), None)
        if twin is not None:  # the control is the plain loop under another name
            tried[name] = twin
            continue
        result = attempt(short)
        if not tried:
            start_seconds = max(0.0, time.perf_counter() - began - result.wall_seconds)
            began = time.perf_counter() - result.wall_seconds  # a try does not include loading torch
        if result.status is not Status.COMPLETED:
            what = f"a test launch of {name} was {result.status.words}: {result.reason}"
            return Expectation(seconds=None, source=what, was_run="Nothing else was run.")
        tried[name] = read_try(trial, result, thinned)
        is_short = tried[name].expect(trial) < SHORT_SECONDS and not isinstance(trial.task, Train)
        if is_short and (whole := attempt(trial)).status is Status.COMPLETED:
            tried[name] = tried[name].correct(whole)
    total = sum(
        known[trial.configuration] if trial.configuration in known else find_nearest(trial, tried).expect(trial)
        for trial in trials
    )
    return Expectation(
        seconds=start_seconds + ANSWER_SECONDS + total,
        source=f"from test launches of {format_count(len(set(map(id, tried.values()))), 'configuration')}",
        num_parameters=tuple(sorted({one.num_parameters for one in tried.values() if one.num_parameters})),
        was_run="Nothing else was run.",
    )


def shorten_trial(trial: Trial) -> tuple[Trial, float]:
    """The trial with a few clean steps and no instruments; and how many times larger the planned model is."""
    task = trial.task
    short = structs.replace(task, plan=TRIED_PLAN) if isinstance(task, Measure | Script) else Measure(plan=TRIED_PLAN)
    trial = replace(trial, task=short, instruments=())
    planned = make_options(trial.workload, trial.options) if trial.workload in BUILT_IN else None
    if not isinstance(planned, MlpOptions) or planned.count_parameters() <= MOST_TRIED_PARAMETERS:
        return trial, 1.0
    depth = max(1, planned.depth * MOST_TRIED_PARAMETERS // planned.count_parameters())
    tried = replace(planned, depth=depth, dim=min(planned.dim, math.isqrt(MOST_TRIED_PARAMETERS // depth)))
    smaller = replace(trial, options={**trial.options, "depth": tried.depth, "dim": tried.dim})
    return smaller, planned.count_parameters() / tried.count_parameters()


def read_try(trial: Trial, result: TrialResult, thinned: float = 1.0) -> Tried:
    """The launch and the typical step of a try, as its slowest rank saw them, for the model as planned."""
    by_step: dict[int, float] = {}
    for sample in result.samples:
        by_step[sample.step] = max(sample.step_seconds, by_step.get(sample.step, 0.0))
    first, *others = (by_step[number] for number in sorted(by_step))
    step = statistics.fmean(others or [first])
    launch = max(0.0, result.wall_seconds - first - sum(others)) + max(0.0, first - step)
    launch += (thinned - 1) * max(0.0, launch - LAUNCH_SECONDS)
    counts = [round(thinned * rank.num_parameters) for rank in result.ranks if rank.num_parameters]
    return Tried(
        trial=trial, launch_seconds=launch, step_seconds=thinned * step, num_parameters=max(counts, default=None)
    )


def find_nearest(trial: Trial, tried: Mapping[str, Tried]) -> Tried:
    """The try of the same configuration, or of the one most like it."""
    if trial.configuration in tried:
        return tried[trial.configuration]
    return max(
        tried.values(),
        key=lambda one: (one.trial.num_ranks == trial.num_ranks, one.trial.strategy == trial.strategy),
    )


def expect_by_arithmetic(trials: Sequence[Trial]) -> Expectation:
    """From the FLOPs of built-in workloads, and typical rates."""
    works = [0.0 if trial.trains_nothing else count_operations(trial) for trial in trials]
    if any(work is None for work in works) or any(
        trial.device != "cpu" for trial in trials if not trial.trains_nothing
    ):
        bound = sum(trial.timeout_seconds for trial in trials)
        return Expectation(
            seconds=None,
            source=f"no estimate before the first trial; at most {format_duration(bound)}, by --timeout",
        )
    speed = measure_matmul_speed()
    total = START_SECONDS
    for trial, work in zip(trials, works, strict=True):
        crowding = max(1.0, trial.num_ranks * trial.threads_per_rank / count_cores())
        total += expect_launch(trial)
        total += crowding * (work or 0.0) / (speed * trial.threads_per_rank) + bound_exchange(trial)
        total += expect_transfer(trial) + expect_reading(trial)
    return Expectation(seconds=total, source="from the workload's FLOPs, within a factor of about three")


def expect_transfer(trial: Trial) -> float:
    """What the link between hosts takes for the gradients of all steps; 0 where it has no rate, or there is none."""
    rate = parse_link(trial.link).bytes_per_second if trial.num_hosts > 1 else None
    if rate is None or trial.workload not in BUILT_IN:
        return 0.0
    return (count_steps(trial) or 0) * 4 * make_options(trial.workload, trial.options).count_parameters() / rate


def expect_launch(trial: Trial) -> float:
    return HOSTS_SECONDS if trial.num_hosts > 1 else LAUNCH_SECONDS


def bound_exchange(trial: Trial) -> float:
    """What an exchange may take: for every size its budget, or the calls that even the longest message has."""
    task = trial.task
    if not isinstance(task, Exchange):
        return 0.0
    rate = (parse_link(trial.link).bytes_per_second if trial.num_hosts > 1 else None) or HOST_BYTES_PER_SECOND
    num_calls = FEWEST_CALLS + task.warmup_calls
    return sum(max(task.budget_seconds, num_calls * size / rate) for size in task.sizes)


def expect_reading(trial: Trial) -> float:
    """What writing a stored set and going through it should take: passes by the budget where each sample is costly."""
    dataset = trial.dataset
    if dataset is None:
        return 0.0
    num_bytes = dataset.num_samples * dataset.sample_bytes
    is_slow = "gzip" in dataset.format or "compressed" in dataset.format
    total = num_bytes / (DEFLATED_BYTES_PER_SECOND if is_slow else WRITTEN_BYTES_PER_SECOND)
    task = trial.task
    if not isinstance(task, Read):
        return total
    for one in task.passes:
        slower = NAIVE_FACTOR if dataset.mode == "naive" and is_slow else ITEM_FACTOR if one.access == "item" else 1
        num_epochs = 1 if one.cache == "cold" else task.epochs
        total += num_epochs * min(slower * num_bytes / READ_BYTES_PER_SECOND, task.budget_seconds)
    return total


def count_steps(trial: Trial) -> int | None:
    """The steps of a trial; None if the length of an epoch decides."""
    match trial.task:
        case Measure(plan=plan) | Script(plan=plan):
            return plan.num_steps
        case Train(run=run) | Quantize(run=TrainingRun() as run):
            return run.num_steps
        case _:
            return 0


def count_operations(trial: Trial) -> float | None:
    """FLOPs of one rank in a whole trial; None if unknown before it runs."""
    if trial.workload not in BUILT_IN:
        return None
    num_steps = count_steps(trial)
    if num_steps is None:
        return None
    return make_options(trial.workload, trial.options).flops_per_sample() * trial.batch_per_rank * num_steps


def find_earlier_seconds(trials: Sequence[Trial], runs: Sequence[Path]) -> dict[str, float]:
    """The median duration of each configuration in earlier runs that differ in nothing but the round."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for file in run.glob("trials/*/result.json"):
            try:
                result = read_json(file)
            except StoreError:
                continue
            seconds = result.get("wall_seconds")
            if result.get("status") == Status.COMPLETED and isinstance(seconds, float):
                result = upgrade_result(result, result.get("schema_version", 1))
                found.setdefault(_fingerprint_stored(result.get("trial")), []).append(seconds)
    # The control is the plain loop under another name: both find what either took.
    keys = {trial.configuration: _fingerprint(trial) for trial in trials}
    return {name: statistics.median(found[key]) for name, key in keys.items() if key in found}


def measure_matmul_speed() -> float:
    """Floating-point operations per second of a matrix product on this machine, on one core."""
    left = np.ones((MATRIX_SIZE, MATRIX_SIZE), dtype=np.float32)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        left @ left
        best = min(best, time.perf_counter() - start)
    return 2.0 * MATRIX_SIZE**3 / best / count_cores()


def render_plan(trials: Sequence[Trial], expected: Expectation, *, is_full: bool = True) -> str:
    """The trials, one per line, and the time they should take; not full: one line per configuration, one screen."""
    rounds = Counter(trial.configuration for trial in trials)
    firsts: dict[str, Trial] = {}
    for trial in trials:
        firsts.setdefault(trial.configuration, trial)
    listed = list(trials if is_full else firsts.values())
    shown = listed if is_full else listed[:MOST_PLANNED]
    names = {trial.name: trial.name if is_full else trial.configuration for trial in shown}
    width = max(map(len, names.values()))
    lines = describe_models(trials, expected)
    for number, trial in enumerate(shown, start=1):
        crowded = ", oversubscribed" if trial.is_oversubscribed else ""
        times = "" if is_full or rounds[trial.configuration] == 1 else f", {rounds[trial.configuration]} rounds"
        lines.append(f"{number:4}  {names[trial.name]:<{width}}  {_describe_trial(trial)}{times}{crowded}")
    if len(shown) < len(listed):
        lines.append(f"      … and {len(listed) - len(shown)} more: --full lists every trial")
    time = "time unknown" if expected.seconds is None else f"about {format_duration(expected.seconds)}"
    lines += ["", f"{format_count(len(trials), 'trial')}, {time} ({expected.source}). {expected.was_run}"]
    return "\n".join(lines) + "\n"


def describe_models(trials: Sequence[Trial], expected: Expectation) -> list[str]:
    """What is trained, in one line: workload, parameters, data type and device; nothing for what trains nothing."""
    training = [trial for trial in trials if not trial.trains_nothing or trial.is_forecast]
    if not training:
        return []
    built_in = {(trial.workload, json.dumps(to_builtins(trial.options), sort_keys=True)): trial for trial in training}
    counts = sorted(
        {
            make_options(trial.workload, trial.options).count_parameters()
            for trial in built_in.values()
            if trial.workload in BUILT_IN
        }
        or expected.num_parameters
    )
    sizes = " to ".join(f"{count:,}" for count in dict.fromkeys((*counts[:1], *counts[-1:])))
    names = dict.fromkeys(Path(trial.workload).name.removesuffix(SCRIPT_MARK) for trial in training)
    words = [", ".join(names), f"{sizes} parameters" if sizes else "parameters unknown before it runs"]
    words += [", ".join(dict.fromkeys(trial.dtype for trial in training)), training[0].device]
    return [" · ".join(words), ""]


def _describe_trial(trial: Trial) -> str:
    ranks = format_count(trial.num_ranks, "rank")
    ranks += f" on {trial.num_hosts} hosts over {trial.link}" if trial.num_hosts > 1 else ""
    batch = f"batch {trial.batch_per_rank} per rank"
    match trial.task:
        case Exchange(sizes=sizes):
            return (
                f"{ranks}, {format_count(len(sizes), 'size')}, {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
            )
        case Read(dataset=dataset, passes=passes):
            workers = f", {format_count(dataset.workers, 'worker')}" if dataset.workers else ""
            return f"{ranks}{workers}, {batch}, {format_count(len(passes), 'pass')}"
        case Forecast():
            return f"{trial.strategy}, {ranks}, {batch}, memory forecast"
    return f"{trial.strategy}, {ranks}, {batch}, {_describe_length(trial)}"


def _describe_length(trial: Trial) -> str:
    """How far a trial goes: a training run may be given in epochs."""
    run = trial.training_run
    if run is not None and run.epochs is not None:
        return format_count(run.epochs, "epoch")
    return f"{count_steps(trial)} steps"


def _fingerprint(trial: Trial) -> str:
    return _fingerprint_stored(to_builtins(trial))


def _fingerprint_stored(trial: object) -> str:
    """What decides how long a trial takes: everything in it but its name, round, limits and instruments."""
    if not isinstance(trial, dict):
        return ""
    ignored = ("configuration", "label", "round", "timeout_seconds", "port", "seed", "instruments")
    return json.dumps({key: value for key, value in trial.items() if key not in ignored}, sort_keys=True)
