"""The trials of a run, one after the other: each result is on disk before the next trial starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scalelab.errors import DamagedRun
from scalelab.launch.agreement import copied_directory, copy_for_script, remove_stored
from scalelab.launch.launcher import Launcher
from scalelab.records.running import Neighbour
from scalelab.records.store import RunStore
from scalelab.records.tasks import Script
from scalelab.records.trial import Cause, Status, Trial, TrialResult, not_run


@dataclass(frozen=True, kw_only=True)
class TrialStarted:
    trial: Trial
    number: int
    num_trials: int
    neighbours: tuple[Neighbour, ...] = ()
    """Runs that others measure on the same cores, where they were not there before."""


@dataclass(frozen=True, kw_only=True)
class TrialEnded:
    result: TrialResult
    number: int
    num_trials: int
    is_from_disk: bool = False
    """An earlier execution of the run stored the result."""


Event = TrialStarted | TrialEnded
Listener = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """How earlier results change the plan: by default, not at all."""

    plan_more: Callable[[Sequence[TrialResult]], list[Trial]] = lambda _: []
    """Called when every planned trial has a result; adds the trials it returns."""
    refuse: Callable[[Trial, Sequence[TrialResult]], str | None] = lambda _, __: None
    """Why a trial need not run, given the results so far."""


def run_trials(
    store: RunStore, launcher: Launcher, listener: Listener, guidance: Guidance | None = None
) -> list[TrialResult]:
    """Run every trial without a result, in plan order, and give all results.

    A configuration that never completed and failed in a way that a repeat cannot change is not launched in later
    rounds: those trials become `not_run` with that reason.
    """
    guidance = guidance or Guidance()
    results: list[TrialResult] = []
    while True:
        trials = store.trials()
        for number, trial in enumerate(trials[len(results) :], start=len(results) + 1):
            known = _read_known(store, trial)
            if known is None:
                listener(TrialStarted(trial=trial, number=number, num_trials=len(trials)))
                known = _skip(trial, results, guidance) or _launch(launcher, trial, store)
                store.save_result(known)
                listener(TrialEnded(result=known, number=number, num_trials=len(trials)))
            else:
                listener(TrialEnded(result=known, number=number, num_trials=len(trials), is_from_disk=True))
            results.append(known)
        more = guidance.plan_more(results)
        if not more:
            return results
        store.add_trials(more)


def _launch(launcher: Launcher, trial: Trial, store: RunStore) -> TrialResult:
    """Launch a trial; its stored data set or copied directory is removed even if it is interrupted."""
    directory = store.trial_directory(trial.name)
    is_scratch = isinstance(trial.task, Script) and trial.task.is_scratch
    if isinstance(trial.task, Script) and is_scratch:
        copy_for_script(Path(trial.task.directory), directory)
    try:
        return launcher.launch(trial, directory)
    finally:
        if trial.dataset is not None:
            remove_stored(directory)
        if is_scratch:
            shutil.rmtree(copied_directory(directory), ignore_errors=True)


def _read_known(store: RunStore, trial: Trial) -> TrialResult | None:
    """The result on disk; a damaged one is set aside, and the trial runs again."""
    if not store.has_result(trial.name):
        return None
    try:
        return store.result(trial.name)
    except DamagedRun:
        store.set_aside(trial.name)
        return None


def _skip(trial: Trial, results: Sequence[TrialResult], guidance: Guidance) -> TrialResult | None:
    """The result of a trial that need not run, because earlier ones decide it."""
    reason = guidance.refuse(trial, results)
    if reason:
        return not_run(trial, reason, cause=Cause.ANSWERED)
    other = next((result for result in results if is_moot(trial, result)), None)
    if other is not None:
        reason = f"{other.trial.configuration} takes another batch than planned, so the study has no answer"
        return not_run(trial, reason, cause=Cause.OTHER_BATCH)
    earlier = [result for result in results if result.trial.configuration == trial.configuration]
    if any(result.status is Status.COMPLETED for result in earlier):
        return None
    first = next((result for result in earlier if result.status.is_final), None)
    if first is None:
        return None
    if first.status is Status.NOT_RUN:
        return not_run(trial, first.reason, first.batch, cause=first.cause)
    reason = f"round {first.trial.round} was {first.status.words}, and would be again"
    return not_run(trial, reason, cause=Cause.REPEATED)


def is_moot(trial: Trial, earlier: TrialResult) -> bool:
    """Whether a script did not take its batch as planned, so that this trial answers nothing either.

    With as many ranks, a trial with another batch may still do: a script may have a largest one.
    """
    if earlier.cause is not Cause.OTHER_BATCH:
        return False
    is_other_size = earlier.trial.num_ranks == trial.num_ranks and earlier.trial.global_batch != trial.global_batch
    return not is_other_size


def ignore_event(event: Event) -> None:
    """The listener of callers that need no progress."""
