"""Run the trials of a run one after the other; each result is on disk before the next trial starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scalelab.errors import DamagedRun
from scalelab.measure.launchers.launcher import Launcher
from scalelab.store import RunStore
from scalelab.trial import Status, Trial, TrialResult, not_run


@dataclass(frozen=True, kw_only=True)
class TrialStarted:
    trial: Trial
    number: int
    num_trials: int


@dataclass(frozen=True, kw_only=True)
class TrialEnded:
    result: TrialResult
    number: int
    num_trials: int
    is_from_disk: bool = False
    """The result was there already: an earlier execution of the run had it."""


Event = TrialStarted | TrialEnded
Listener = Callable[[Event], None]


def run_trials(store: RunStore, launcher: Launcher, listener: Listener) -> list[TrialResult]:
    """Run every trial that has no result yet, in the order of the plan, and give all results.

    A configuration that never completed and failed in a way that repeating cannot change is not launched again in
    later rounds: those trials become `not_run` with that reason.
    """
    trials = store.trials()
    results: list[TrialResult] = []
    failed: dict[str, TrialResult] = {}
    completed: set[str] = set()
    for number, trial in enumerate(trials, start=1):
        known = _read_known(store, trial)
        if known is None:
            listener(TrialStarted(trial=trial, number=number, num_trials=len(trials)))
            cause = failed.get(trial.configuration)
            known = _skip(trial, cause) if cause else launcher.launch(trial, store.trial_directory(trial.name))
            store.save_result(known)
            listener(TrialEnded(result=known, number=number, num_trials=len(trials)))
        else:
            listener(TrialEnded(result=known, number=number, num_trials=len(trials), is_from_disk=True))
        if known.status is Status.COMPLETED:
            completed.add(trial.configuration)
        elif known.status.is_final and trial.configuration not in completed:
            failed.setdefault(trial.configuration, known)
        results.append(known)
    return results


def _read_known(store: RunStore, trial: Trial) -> TrialResult | None:
    """The result on disk; a damaged one is set aside and the trial runs again."""
    if not store.has_result(trial.name):
        return None
    try:
        return store.result(trial.name)
    except DamagedRun:
        store.set_aside(trial.name)
        return None


def _skip(trial: Trial, cause: TrialResult) -> TrialResult:
    if cause.status is Status.NOT_RUN:
        return not_run(trial, cause.reason)
    return not_run(trial, f"round {cause.trial.round} of it was {cause.status}, and would be again")
