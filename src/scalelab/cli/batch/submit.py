"""A run that a batch system executes: submitted, waited for, or left alone and come back to.

One job runs the whole study: it is `scalelab resume RUN`, which inside the allocation starts every trial as a step of
it. The process that submitted only watches the run's directory, where results appear one after the other, and prints
the answer at the end. So it makes no difference whether it waits, is killed, or leaves at once (`--detach`).
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
    Terminated,
    make_reporter,
    measure_and_report,
    raise_terminated,
    refer_to,
    report_run,
)
from scalelab.cli.output import Output
from scalelab.cli.progress import LineReporter, ProgressReporter
from scalelab.errors import JobRejected, LaunchFailed, RunBusy, StoreError, UsageError
from scalelab.measure.launchers.batch import (
    BatchJob,
    BatchRecord,
    BatchSystem,
    JobState,
    Phase,
    find_living,
    find_own_job,
    follow_job,
    hand_over,
    name_job,
    read_record,
    save_record,
    wait_for_results,
)
from scalelab.measure.launchers.trial_jobs import JobLauncher, describe_end, describe_log, is_out_of_time, request_run
from scalelab.records.observations import BatchNote
from scalelab.records.store import JOBS_FILE, RUNNING, RunStore, refuse_holder
from scalelab.records.trial import Cause, Trial, not_run
from scalelab.report.document import Document
from scalelab.report.renderers.exports import render_json
from scalelab.runs.experiment import check_something_measured, conclude_run, start_run
from scalelab.runs.scheduler import TrialEnded, TrialStarted
from scalelab.studies.shared.study import Study

SUBMITTING = "submitting.json"
"""The claim of who submits a job for a run: two at once would have two jobs write into it."""


def start_and_submit(
    study: Study,
    record: BatchRecord,
    runs_dir: Path,
    command: Sequence[str],
    submission: Submission,
    output: Output,
) -> int:
    """Make a run and have a batch system execute it; gives the exit code."""
    check_output(submission, output)
    BatchSystem(record.scheduler, runs_dir).check()
    for request in list_requests(study, study.plan(), record, runs_dir.resolve()):
        request.check()
    store = start_run(study, runs_dir, command)
    return submit_run(store, study, record, submission, output)


def check_output(submission: Submission, output: Output) -> None:
    """Refuse to write an answer that will not be there."""
    if submission.detach and output.wanted:
        flag = next(iter(output.wanted))
        raise UsageError(f"--detach leaves before there is an answer: leave {flag} out, and use it with scalelab show")


def submit_run(store: RunStore, study: Study, record: BatchRecord, submission: Submission, output: Output) -> int:
    """Have a batch system run the trials that have no result; gives the exit code."""
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
    """What a run has asked for before; raises `RunBusy` while one of its jobs waits or runs."""
    record = read_record(store.path)
    if record is None:
        return None
    refuse_living(store, record)
    release_ended(store, record)
    refuse_holder(store.path / RUNNING)
    return record


def check_trials_free(store: RunStore) -> None:
    """For who goes on with a run inside an allocation; raises `RunBusy` while trials of it have jobs of their own.

    Those do not claim the run, of which several are at work at once. A job for all trials does, and may be this one;
    one that was ended in the middle has left its claim behind, on another host. So has this one, where Slurm has
    started it again.
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
    """Whether this is a job that Slurm has put back into the queue and started again, as after a node that died."""
    return variables.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def refuse_living(store: RunStore, record: BatchRecord) -> None:
    for number, state in find_living(store.path, record).items():
        is_told = state.phase is not Phase.UNKNOWN
        advice = "" if is_told else f"; if you know that it has ended, remove {store.path / JOBS_FILE}"
        raise RunBusy(
            f"job {number} ({record.scheduler}) of run {store.name} is {state}: wait for it (scalelab list tells), or"
            f" cancel it first{advice}"
        )


def release_ended(store: RunStore, record: BatchRecord) -> None:
    """Take away the claim that a job of the run has left behind; all its jobs have ended."""
    for job in record.jobs:
        store.release(name_job(record.scheduler, job.id))


def list_missing(store: RunStore) -> list[Trial]:
    """The trials that have no result yet."""
    return [trial for trial in store.trials() if not store.has_result(trial.name)] or list(store.trials())


def detach_trials(store: RunStore, study: Study, launcher: JobLauncher, record: BatchRecord) -> int:
    """Submit a job for every trial that has no result, and leave; a trial that is refused is not run."""
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
    """Where it is, and how to come back to it."""
    numbers = ", ".join(job.id for job in jobs)
    print(f"Submitted job{'s'[: len(jobs) > 1]} {numbers} for {store.path}  ·  scalelab list")  # noqa: T201
    return 0


def report_rejection(store: RunStore, study: Study, record: BatchRecord, words: str, output: Output) -> int:
    """A job that is not taken makes its trials `not run`, with the batch system's words."""
    for trial in store.trials():
        if not store.has_result(trial.name):
            store.save_result(not_run(trial, words, note_refusal(record), cause=Cause.JOB))
    return report_run(store, study, conclude(store, study), output)


def note_refusal(record: BatchRecord) -> BatchNote:
    """What is kept of a job that was not taken: its trials can be submitted again."""
    return BatchNote(scheduler=record.scheduler, may_come=True)


def conclude(store: RunStore, study: Study) -> Document:
    """Answer from what is there, and keep the answer; raises `NothingMeasured` when every trial failed."""
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
        say(f"Interrupted; what was measured is kept  ·  scalelab resume {refer_to(store)}")
        return 143 if isinstance(interruption, Terminated) else 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return report_end(RunStore.open(store.path), study, record, job, state, output)


def list_trial_directories(run: Path) -> list[Path]:
    """Those of all trials that are planned by now: a search adds some."""
    store = RunStore.open(run)
    return [store.trial_directory(name) for name in store.record.trials]


class RunWatch:
    """Tells a listener of the results that appear in a run."""

    def __init__(self, store: RunStore, listener: ProgressReporter | LineReporter) -> None:
        self._path = store.path
        self._listener = listener
        self._told = {name for name in store.record.trials if store.has_result(name)}
        first = next((trial for trial in store.trials() if trial.name not in self._told), None)
        if first is not None:
            num_trials = len(store.record.trials)
            listener(TrialStarted(trial=first, number=len(self._told) + 1, num_trials=num_trials))

    def look(self) -> None:
        """Tell of what is new; a search may have added trials meanwhile.

        What a shared file system shows only in part is looked at again the next time.
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
    """What the job has measured; one that ended too early says so, and has an exit code for it."""
    if state.phase is Phase.ENDED:
        store.release(name_job(record.scheduler, job.id))
    missing = [name for name in store.record.trials if not store.has_result(name)]
    lost = f"job {job.id} {describe_end(state)} before {len(missing)} of {len(store.record.trials)} trials were run"
    again = f"{describe_log(job)}; scalelab resume {refer_to(store)} goes on"
    if len(missing) == len(store.record.trials):
        error = LaunchFailed(f"{lost}: {again}")
        error.exit_code = 124 if is_out_of_time(state) else 1
        raise error
    code = report_run(store, study, conclude(store, study), output)
    if missing:
        say(f"warning: {lost}: {again}")
        return 124 if is_out_of_time(state) else 3
    return code
