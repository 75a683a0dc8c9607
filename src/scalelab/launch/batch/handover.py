"""A run that is handed to a batch system: which trials, in how many jobs, and that no two submit the same.

One job runs the whole study: it is `scalelab resume RUN`, which starts every trial as a step of the allocation. With
`--job-per-trial` every trial is a job of its own. What was submitted is in the run before this returns.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from scalelab.errors import JobRejected, RunBusy
from scalelab.launch.batch.jobscripts import (
    JobRequest,
    check_psij,
    make_executor,
    make_job,
    render_launch,
    render_script,
)
from scalelab.launch.batch.system import (
    BatchJob,
    BatchRecord,
    BatchSystem,
    Phase,
    find_living,
    hand_over,
    read_record,
    save_record,
)
from scalelab.launch.batch.trial_jobs import JobLauncher, request_run, request_trial
from scalelab.launch.ranks.allocation import find_own_job, name_job
from scalelab.records.launchers import SCHEDULERS, find_batch
from scalelab.records.observations import BatchNote
from scalelab.records.running import RUNNING, refuse_holder
from scalelab.records.store import JOBS_FILE, RunStore
from scalelab.records.trial import Cause, Trial, TrialResult, not_run

SUBMITTING = "submitting.json"
"""Claim of the submitting process: two at once would submit two jobs that write into one run."""


def submit_whole(store: RunStore, record: BatchRecord, ranks_per_node: int | None) -> BatchJob:
    """One job for all trials that have no result; raises `JobRejected`."""
    system = BatchSystem(record.scheduler, store.path)
    request = request_run(list_missing(store), store.path, record, ranks_per_node)
    with store.claim(SUBMITTING):
        check_no_job(store)
        save_record(store.path, record)
        return hand_over(
            system, request, record.site, lambda job: save_record(store.path, dataclasses.replace(record, jobs=(job,)))
        )


def submit_each(store: RunStore, record: BatchRecord, launcher: JobLauncher) -> list[BatchJob]:
    """A job for every trial that has no result; one that is rejected is `not run`."""
    jobs = []
    with store.claim(SUBMITTING):
        check_no_job(store)
        save_record(store.path, record)
        for trial in list_missing(store):
            try:
                jobs.append(launcher.submit(trial))
            except JobRejected as rejection:
                store.save_result(reject(trial, record, str(rejection)))
    return jobs


def begin_each(store: RunStore, record: BatchRecord) -> None:
    """Write down that every trial will be a job of its own, submitted one after the other."""
    with store.claim(SUBMITTING):
        check_no_job(store)
        save_record(store.path, record)


def reject_missing(store: RunStore, record: BatchRecord, words: str) -> None:
    """The trials of a rejected job are `not run`, with the batch system's message."""
    for trial in store.trials():
        if not store.has_result(trial.name):
            store.save_result(reject(trial, record, words))


def reject(trial: Trial, record: BatchRecord, words: str) -> TrialResult:
    """The result of a rejected trial, which can be submitted again."""
    return not_run(trial, words, BatchNote(scheduler=record.scheduler, may_come=True), cause=Cause.JOB)


def check_no_job(store: RunStore) -> BatchRecord | None:
    """The earlier batch record of a run; raises `RunBusy` while one of its jobs waits or runs."""
    record = read_record(store.path)
    if record is None:
        return None
    refuse_living(store, record)
    release_ended(store, record)
    refuse_holder(store.path / RUNNING)
    return record


def check_trials_free(store: RunStore) -> None:
    """Before resuming inside an allocation: raises `RunBusy` while trials of the run have jobs of their own.

    Those run side by side and do not claim the run. A job for all trials does, and may be this one; a job that was
    killed leaves its claim behind, on another host, and so does this one if Slurm restarted it.
    """
    record = read_record(store.path)
    if record is None:
        return
    if record.is_per_trial:
        refuse_living(store, record)
    elif is_restarted(os.environ):
        store.release(find_own_job(os.environ))
    elif store.is_running() and not find_living(store.path, record):
        release_ended(store, record)


def is_restarted(variables: Mapping[str, str]) -> bool:
    """Whether the batch system requeued and restarted this job, as after a node failure."""
    counts = (variables.get(find_batch(name).restart_variable, "0") for name in SCHEDULERS)
    return any(count not in ("", "0") for count in counts)


def refuse_living(store: RunStore, record: BatchRecord) -> None:
    for number, state in find_living(store.path, record).items():
        is_told = state.phase is not Phase.UNKNOWN
        advice = "" if is_told else f"; if it has ended, remove {store.path / JOBS_FILE}"
        raise RunBusy(
            f"{record.scheduler} job {number} of run {store.name} is {state}: wait for it (see scalelab list) or"
            f" cancel it first{advice}"
        )


def release_ended(store: RunStore, record: BatchRecord) -> None:
    """Remove the claim that an ended job of the run left behind."""
    for job in record.jobs:
        store.release(name_job(record.scheduler, job.id))


def list_missing(store: RunStore) -> list[Trial]:
    """The trials that have no result yet."""
    return [trial for trial in store.trials() if not store.has_result(trial.name)] or list(store.trials())


def list_trial_directories(run: Path) -> list[Path]:
    """The directories of all trials planned so far: a search adds trials."""
    store = RunStore.open(run)
    return [store.trial_directory(name) for name in store.record.trials]


def show_scripts(trials: Sequence[Trial], record: BatchRecord, runs_dir: Path, ranks_per_node: int | None) -> str:
    """The scripts of the jobs that would be submitted: one for all trials, or one per configuration."""
    check_psij()
    texts: list[str] = []
    place = runs_dir.resolve() / "RUN"
    with tempfile.TemporaryDirectory(prefix="scalelab-") as scratch:
        run = Path(scratch)
        for request in list_requests(trials, record, run, ranks_per_node):
            executor = make_executor(record.scheduler, request.batch_directory)
            script = render_script(executor, make_job(request, record.site, record.scheduler))
            lines = [line for line in script.splitlines() if line.strip()]
            texts += [
                f"\nJob script for {record.scheduler} (not submitted):\n",
                *lines,
                f"\nIt runs {request.launch_file}:\n",
                render_launch(request, record.site),
            ]
        return "\n".join(texts).replace(str(run.resolve()), str(place))


def list_requests(
    trials: Sequence[Trial], record: BatchRecord, run: Path, ranks_per_node: int | None
) -> list[JobRequest]:
    """One job for all, or one per configuration: its rounds differ only in name."""
    if not record.is_per_trial:
        return [request_run(list(trials), run, record, ranks_per_node)]
    return [request_trial(trial, run, record, ranks_per_node) for trial in trials if trial.round == 1]
