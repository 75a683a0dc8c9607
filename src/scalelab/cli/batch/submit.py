"""A run that a batch system executes: submitted, then waited for or detached from.

One job runs the whole study: it is `scalelab resume RUN`, which starts every trial as a step of the allocation. The
submitting process only watches the run's directory for results and prints the answer at the end, so it makes no
difference whether it waits, is killed, or returns at once (`--detach`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from scalelab.cli.batch.submission import Submission, list_requests, say
from scalelab.cli.measuring import (
    make_reporter,
    measure_and_report,
    raise_terminated,
    refer_to,
    report_run,
)
from scalelab.cli.output import Output
from scalelab.cli.progress import LineReporter, ProgressReporter
from scalelab.errors import JobRejected, LaunchFailed, RunBusy, StoreError, Terminated, UsageError
from scalelab.launch.batch.system import (
    BatchJob,
    BatchRecord,
    BatchSystem,
    JobState,
    Phase,
    find_living,
    follow_job,
    hand_over,
    read_record,
    save_record,
    wait_for_results,
)
from scalelab.launch.batch.trial_jobs import JobLauncher, describe_end, describe_log, is_out_of_time, request_run
from scalelab.launch.ranks.allocation import find_own_job, name_job
from scalelab.records.observations import BatchNote
from scalelab.records.store import JOBS_FILE, RUNNING, RunStore, refuse_holder
from scalelab.records.trial import Cause, Trial, not_run
from scalelab.report.document import Document
from scalelab.report.renderers.exports import render_json
from scalelab.runs.experiment import TrialEnded, TrialStarted, check_something_measured, conclude_run, start_run
from scalelab.studies.shared.study import Study

SUBMITTING = "submitting.json"
"""Claim of the submitting process: two at once would submit two jobs that write into one run."""


def start_and_submit(
    study: Study,
    record: BatchRecord,
    runs_dir: Path,
    command: Sequence[str],
    submission: Submission,
    output: Output,
) -> int:
    """Create a run and submit it to a batch system; gives the exit code."""
    check_output(submission, output)
    BatchSystem(record.scheduler, runs_dir).check()
    for request in list_requests(study, study.plan(), record, runs_dir.resolve()):
        request.check()
    store = start_run(study, runs_dir, command)
    return submit_run(store, study, record, submission, output)


def check_output(submission: Submission, output: Output) -> None:
    """Refuse output flags with --detach: the answer does not exist yet."""
    if submission.detach and output.wanted:
        flag = next(iter(output.wanted))
        raise UsageError(f"--detach returns before there is an answer: use {flag} with scalelab show")


def submit_run(store: RunStore, study: Study, record: BatchRecord, submission: Submission, output: Output) -> int:
    """Submit the trials that have no result; gives the exit code."""
    if record.is_per_trial:
        launcher = JobLauncher(
            record,
            store.path,
            ranks_per_node=study.job.ranks_per_node,
            queue_seconds=submission.queue_seconds,
            say=say,
        )
        if submission.detach:
            return detach_trials(store, study, launcher, record)
        with store.claim(SUBMITTING):
            check_no_job(store)
            save_record(store.path, record)
        return measure_and_report(store, study, launcher, output)
    system = BatchSystem(record.scheduler, store.path)
    request = request_run(list_missing(store), store.path, record, study.job.ranks_per_node)
    try:
        with store.claim(SUBMITTING):
            check_no_job(store)
            save_record(store.path, record)
            job = hand_over(system, request, record.site, lambda job: save_jobs(store, record, job))
    except JobRejected as rejection:
        return report_rejection(store, study, record, str(rejection), output)
    if submission.detach:
        return say_next(store, [job])
    return wait_and_report(store, study, system, job, record, submission, output)


def save_jobs(store: RunStore, record: BatchRecord, *jobs: BatchJob) -> None:
    save_record(store.path, dataclasses.replace(record, jobs=jobs))


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
    """Whether Slurm requeued and restarted this job, as after a node failure."""
    return variables.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


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


def detach_trials(store: RunStore, study: Study, launcher: JobLauncher, record: BatchRecord) -> int:
    """Submit a job for every trial without a result and return; a rejected trial is `not run`."""
    jobs = []
    with store.claim(SUBMITTING):
        check_no_job(store)
        save_record(store.path, record)
        for trial in list_missing(store):
            try:
                jobs.append(launcher.submit(trial))
            except JobRejected as rejection:
                store.save_result(not_run(trial, str(rejection), note_refusal(record), cause=Cause.JOB))
    if not jobs:
        conclude(store, study)
    return say_next(store, jobs)


def say_next(store: RunStore, jobs: list[BatchJob]) -> int:
    """Print where the run is and how to follow it."""
    numbers = ", ".join(job.id for job in jobs)
    print(f"Submitted job{'s'[: len(jobs) > 1]} {numbers} for {store.path}  ·  scalelab list")  # noqa: T201
    return 0


def report_rejection(store: RunStore, study: Study, record: BatchRecord, words: str, output: Output) -> int:
    """The trials of a rejected job are `not run`, with the batch system's message."""
    for trial in store.trials():
        if not store.has_result(trial.name):
            store.save_result(not_run(trial, words, note_refusal(record), cause=Cause.JOB))
    return report_run(store, study, conclude(store, study), output)


def note_refusal(record: BatchRecord) -> BatchNote:
    """The note of a rejected job: its trials can be submitted again."""
    return BatchNote(scheduler=record.scheduler, may_come=True)


def conclude(store: RunStore, study: Study) -> Document:
    """Conclude the run and store the document; raises `NothingMeasured` if every trial failed."""
    document = conclude_run(store, study)
    store.save_document(render_json(document))
    check_something_measured(store.results()[0], store, study)
    return document


def wait_and_report(
    store: RunStore,
    study: Study,
    system: BatchSystem,
    job: BatchJob,
    record: BatchRecord,
    submission: Submission,
    output: Output,
) -> int:
    """Follow the job, then print and export the answer; Ctrl-C and SIGTERM cancel it."""
    previous = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        with make_reporter(store) as progress:
            watch = RunWatch(store, progress)
            state = follow_job(
                system,
                job,
                poll_seconds=record.site.poll_seconds,
                queue_seconds=submission.queue_seconds,
                say=progress.say,
                look=watch.look,
            )
            wait_for_results(system, job, state, lambda: list_trial_directories(store.path))
            watch.look()
    except TimeoutError as late:
        error = LaunchFailed(f"{late}: scalelab resume {refer_to(store)} submits it again")
        error.exit_code = 124
        raise error from None
    except KeyboardInterrupt as interruption:
        say(f"Interrupted; results so far are kept  ·  scalelab resume {refer_to(store)}")
        return 143 if isinstance(interruption, Terminated) else 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return report_end(RunStore.open(store.path), study, record, job, state, output)


def list_trial_directories(run: Path) -> list[Path]:
    """The directories of all trials planned so far: a search adds trials."""
    store = RunStore.open(run)
    return [store.trial_directory(name) for name in store.record.trials]


class RunWatch:
    """Reports results that appear in a run to a listener."""

    def __init__(self, store: RunStore, listener: ProgressReporter | LineReporter) -> None:
        self._path = store.path
        self._listener = listener
        self._told = {name for name in store.record.trials if store.has_result(name)}
        first = next((trial for trial in store.trials() if trial.name not in self._told), None)
        if first is not None:
            num_trials = len(store.record.trials)
            listener(TrialStarted(trial=first, number=len(self._told) + 1, num_trials=num_trials))

    def look(self) -> None:
        """Report new results; a search may have added trials.

        Files that a shared file system shows only in part are read again next time.
        """
        with contextlib.suppress(StoreError, OSError):
            store = RunStore.open(self._path)
            for name in store.record.trials:
                if name not in self._told and store.has_result(name):
                    result = store.result(name)
                    self._told.add(name)
                    num_trials = len(store.record.trials)
                    self._listener(TrialEnded(result=result, number=len(self._told), num_trials=num_trials))


def report_end(
    store: RunStore, study: Study, record: BatchRecord, job: BatchJob, state: JobState, output: Output
) -> int:
    """Report what the job measured; a job that ended too early has its own exit code."""
    if state.phase is Phase.ENDED:
        store.release(name_job(record.scheduler, job.id))
    missing = [name for name in store.record.trials if not store.has_result(name)]
    lost = f"job {job.id} {describe_end(state)} before {len(missing)} of {len(store.record.trials)} trials ran"
    again = f"{describe_log(job)}; scalelab resume {refer_to(store)} continues it"
    if len(missing) == len(store.record.trials):
        error = LaunchFailed(f"{lost}: {again}")
        error.exit_code = 124 if is_out_of_time(state) else 1
        raise error
    code = report_run(store, study, conclude(store, study), output)
    if missing:
        say(f"warning: {lost}: {again}")
        return 124 if is_out_of_time(state) else 3
    return code
