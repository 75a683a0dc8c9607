"""A run that a batch system executes: what its flags ask for; then it is submitted, and waited for or detached from.

The submitting process only watches the run's directory for results and prints the answer at the end, so it makes no
difference whether it waits, is killed, or returns at once (`--detach`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalelab.cli.app import say
from scalelab.cli.measuring import (
    LineReporter,
    ProgressReporter,
    make_reporter,
    measure_and_report,
    refer_to,
    report_run,
)
from scalelab.cli.output import Output
from scalelab.cli.study_flags import Execution
from scalelab.errors import JobRejected, LaunchFailed, StoreError, Terminated, UsageError
from scalelab.launch.batch.handover import (
    JobLauncher,
    begin_each,
    describe_end,
    describe_log,
    is_out_of_time,
    list_requests,
    list_trial_directories,
    reject_missing,
    show_scripts,
    submit_each,
    submit_whole,
)
from scalelab.launch.batch.site import Site, Submission, combine_sites, load_site
from scalelab.launch.batch.system import (
    BatchJob,
    BatchRecord,
    BatchSystem,
    JobState,
    Phase,
    follow_job,
    read_record,
    size_job,
    wait_for_results,
)
from scalelab.launch.launcher import Submitter
from scalelab.records.launchers import LAUNCHERS, Scheduler, find_scheduler, load, name_job
from scalelab.records.store import RunStore
from scalelab.records.trial import Trial
from scalelab.report.document import Document, render_json
from scalelab.runs.experiment import check_something_measured, conclude_run, start_run
from scalelab.runs.scheduler import TrialEnded, TrialStarted
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Study

ROW_QUEUE_SECONDS = 600.0
"""Queue time limit of a recipe's row that is a job, without --queue-timeout."""
OF_WHOLE_RUNS = ("--detach", "--job-per-trial")


def make_record(submission: Submission, scheduler: Scheduler, earlier: BatchRecord | None = None) -> BatchRecord:
    """What a run requests: by flags, else as before, else by the site file."""
    if earlier is not None and submission.site_file is None:
        site = combine_sites(submission.asked, earlier.site)
    else:
        site = load_site(submission.asked, submission.site_file, scheduler)
    is_per_trial = submission.job_per_trial or bool(earlier and earlier.is_per_trial)
    return BatchRecord(scheduler=scheduler, site=site, is_per_trial=is_per_trial)


def check_unused_by_rows(submission: Submission, study: Study, trials: Sequence[Trial]) -> None:
    """Reject flags of a batch system that no row of a recipe would read: rows have launchers of their own."""
    jobs = [Job(launcher=trial.launcher) for trial in trials if study.find_site(trial) is not None]
    is_submitted = any(find_scheduler(job.launcher, os.environ) for job in jobs)
    unused = next((name for name in submission.list_given() if not is_submitted or name in OF_WHOLE_RUNS), None)
    if unused is not None:
        raise UsageError(
            f"{unused} has no effect: a recipe is not submitted as a whole. Omit it, or start the recipe inside a"
            " job of your own"
        )


def make_submitter(study: Study, submission: Submission) -> Submitter:
    """Submits a recipe's row that is a job and waits for it, up to a limit.

    Its request comes from flags, else as before, else from a site file, else from the row itself.
    """

    def submit(scheduler: Scheduler, trial: Trial, run: Path) -> JobLauncher:
        earlier = read_record(run)
        record = make_record(submission, scheduler, earlier)
        own = study.find_site(trial)
        if own is not None and record.site == submission.asked:
            record = dataclasses.replace(record, site=combine_sites(record.site, own))
        record = dataclasses.replace(record, is_per_trial=True, jobs=earlier.jobs if earlier else ())
        return JobLauncher(
            record,
            run,
            ranks_per_node=trial.ranks_per_node,
            queue_seconds=submission.queue_seconds or ROW_QUEUE_SECONDS,
            say=say,
        )

    return submit


def prepare(study: Study, submission: Submission, scheduler: Scheduler) -> tuple[Any, BatchRecord]:
    """The study with the site's settings, and the batch request."""
    record = make_record(submission, scheduler)
    return set_ranks_per_node(study, record.site), record


def show_jobs(
    study: Study, trials: Sequence[Trial], record: BatchRecord | None, execution: Execution, command: Sequence[str]
) -> str:
    """What --dry-run shows beside the plan: the scripts of a batch system, or the manifests that were written."""
    if record is not None:
        return show_scripts(trials, record, execution.runs_dir, study.job.ranks_per_node)
    write = LAUNCHERS[study.job.launcher].manifests
    return str(load(write)(trials, execution.submission.asked, execution.runs_dir, command)) if write else ""


def set_ranks_per_node(study: Study, site: Site) -> Study:
    """The study with the ranks per node of the site, unless a flag set them."""
    if study.job.ranks_per_node is not None:
        return study
    _, per_node = size_job([trial.num_processes for trial in study.plan()], site, None)
    changeable: Any = study
    if any(one.name == "job" for one in dataclasses.fields(changeable)):
        job = dataclasses.replace(study.job, ranks_per_node=per_node)
        return dataclasses.replace(changeable, job=job)  # type: ignore[no-any-return]
    return dataclasses.replace(changeable, ranks_per_node=per_node)  # type: ignore[no-any-return]


def start_and_submit(study: Study, record: BatchRecord, execution: Execution, command: Sequence[str]) -> int:
    """Create a run and submit it to a batch system; gives the exit code."""
    submission, output, runs_dir = execution.submission, execution.output, execution.runs_dir
    check_output(submission, output)
    BatchSystem(record.scheduler, runs_dir).check()
    for request in list_requests(study.plan(), record, runs_dir.resolve(), study.job.ranks_per_node):
        request.check()
    store = start_run(study, runs_dir, command, name=execution.name, note=execution.note)
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
            jobs = submit_each(store, record, launcher)
            if not jobs:
                conclude(store, study)
            return say_next(store, jobs)
        begin_each(store, record)
        return measure_and_report(store, study, launcher, output)
    try:
        job = submit_whole(store, record, study.job.ranks_per_node)
    except JobRejected as rejection:
        reject_missing(store, record, str(rejection))
        return report_run(store, study, conclude(store, study), output)
    if submission.detach:
        return say_next(store, [job])
    return wait_and_report(store, study, job, record, submission, output)


def say_next(store: RunStore, jobs: list[BatchJob]) -> int:
    """Print where the run is and how to follow it."""
    numbers = ", ".join(job.id for job in jobs)
    print(f"Submitted job{'s'[: len(jobs) > 1]} {numbers} for {store.path}  ·  scalelab list")  # noqa: T201
    return 0


def conclude(store: RunStore, study: Study) -> Document:
    """Conclude the run and store the document; raises `NothingMeasured` if every trial failed."""
    document = conclude_run(store, study)
    store.save_document(render_json(document))
    check_something_measured(store.results()[0], store, study)
    return document


def wait_and_report(
    store: RunStore,
    study: Study,
    job: BatchJob,
    record: BatchRecord,
    submission: Submission,
    output: Output,
) -> int:
    """Follow the job, then print and export the answer; Ctrl-C and SIGTERM cancel it."""
    system = BatchSystem(record.scheduler, store.path)
    try:
        with make_reporter(store, study) as progress:
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
        return interruption.exit_code if isinstance(interruption, Terminated) else 130
    return report_end(RunStore.open(store.path), study, record, job, state, output)


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
