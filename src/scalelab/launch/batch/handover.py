"""A run that is handed to a batch system: which trials, in how many jobs, and that no two submit the same.

One job runs the whole study: it is `scalelab resume RUN`, which starts every trial as a step of the allocation. With
`--job-per-trial` every trial is a job of its own (`JobLauncher`). What was submitted is in the run before this returns.

One job for a whole study waits in the queue once and changes the number of ranks inside its allocation. A job for every
trial asks for no more nodes than that trial needs, and waits for each: the choice where large allocations are rare. The
job runs the trial and stores its result; this launcher waits for it and reads that.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
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
    JobState,
    Phase,
    find_living,
    follow_job,
    hand_over,
    read_record,
    save_record,
    size_job,
    wait_for_results,
)
from scalelab.launch.ranks.placement import count_cores_per_process
from scalelab.records.launchers import SCHEDULERS, BatchNote, find_batch, find_own_job, name_job
from scalelab.records.running import RUNNING, refuse_holder
from scalelab.records.settings import find_kind
from scalelab.records.store import JOBS_FILE, RunStore
from scalelab.records.trial import Cause, Status, Trial, TrialResult, not_run

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


class JobLauncher:
    """Submits trials one after the other, and waits for each."""

    def __init__(
        self,
        record: BatchRecord,
        run: Path,
        *,
        ranks_per_node: int | None = None,
        queue_seconds: float | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._record = record
        self._run = run
        self._ranks_per_node = ranks_per_node
        self._queue_seconds = queue_seconds
        self._say = say
        self._system = BatchSystem(record.scheduler, run)

    def check(self) -> None:
        self._system.check()

    def close(self) -> None:
        """Nothing lives between two trials."""

    def submit(self, trial: Trial) -> BatchJob:
        """Hand the job of one trial over, and write it down; raises `JobRejected`."""
        request = request_trial(trial, self._run, self._record, self._ranks_per_node)
        return hand_over(self._system, request, self._record.site, self._write_down, trial.name)

    def _write_down(self, job: BatchJob) -> None:
        others = tuple(other for other in self._record.jobs if other.trial != job.trial)
        self._record = dataclasses.replace(self._record, jobs=(*others, job))
        save_record(self._run, self._record)

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        note = BatchNote(scheduler=self._record.scheduler, may_come=True)
        try:
            job = self.submit(trial)
            note = dataclasses.replace(note, job=job.id)
            state = follow_job(
                self._system,
                job,
                poll_seconds=self._record.site.poll_seconds,
                queue_seconds=self._queue_seconds,
                say=self._say,
            )
        except (JobRejected, TimeoutError) as refusal:
            return not_run(trial, str(refusal), note, cause=Cause.JOB)
        # What is taken for lost is written over the result that the job has left.
        wait_for_results(self._system, job, state, lambda: [directory])
        store = RunStore.open(self._run)
        if store.has_result(trial.name):
            return dataclasses.replace(store.result(trial.name), batch=dataclasses.replace(note, may_come=False))
        return describe_loss(trial, job, state, note)


def request_trial(trial: Trial, run: Path, record: BatchRecord, ranks_per_node: int | None) -> JobRequest:
    """The job that runs one trial of a run, on as many nodes as it needs."""
    site = dataclasses.replace(record.site, nodes=None)
    num_nodes, per_node = size_job([trial.num_processes], site, ranks_per_node)
    return JobRequest(
        name=f"scalelab-{trial.name}",
        num_nodes=num_nodes,
        ranks_per_node=per_node,
        cores_per_rank=count_cores_per_process(trial),
        has_gpus=find_kind(trial.device).is_accelerator,
        arguments=("-m", "scalelab", "resume", str(run.resolve()), "--only", trial.name, "--trust"),
        directory=Path.cwd(),
        batch_directory=run.resolve() / "batch",
    )


def request_run(trials: list[Trial], run: Path, record: BatchRecord, ranks_per_node: int | None) -> JobRequest:
    """The job that runs all trials of a run, as large as the largest of them needs it."""
    num_nodes, per_node = size_job([trial.num_processes for trial in trials], record.site, ranks_per_node)
    cores_per_node = max(min(per_node, trial.num_processes) * count_cores_per_process(trial) for trial in trials)
    return JobRequest(
        name="scalelab-run",
        num_nodes=num_nodes,
        ranks_per_node=per_node,
        cores_per_rank=-(-cores_per_node // per_node),
        has_gpus=any(find_kind(trial.device).is_accelerator for trial in trials),
        arguments=("-m", "scalelab", "resume", str(run.resolve()), "--trust"),
        directory=Path.cwd(),
        batch_directory=run.resolve() / "batch",
    )


def is_out_of_time(state: JobState) -> bool:
    """Whether the batch system ended a job because its wall time was over."""
    return any(find_batch(name).time_words in state.words for name in SCHEDULERS)


def describe_loss(trial: Trial, job: BatchJob, state: JobState, note: BatchNote) -> TrialResult:
    """The result of a trial whose job left none; without a log, the trial was not run."""
    if state.phase is Phase.ENDED and not Path(job.log).exists():
        hint = f"; {describe_log(job)}" if state.has_failed else ""
        return not_run(trial, f"job {job.id} {describe_end(state)} before it started{hint}", note, cause=Cause.JOB)
    is_over = dataclasses.replace(note, may_come=False)
    reason = f"job {job.id} {describe_end(state)} without a result; {describe_log(job)}"
    if is_out_of_time(state):
        reason += "; raise --wall-time"
        return TrialResult(trial=trial, status=Status.TIMED_OUT, cause=Cause.TIME_LIMIT, reason=reason, batch=is_over)
    return TrialResult(trial=trial, status=Status.CRASHED, cause=Cause.JOB, reason=reason, batch=is_over)


def describe_log(job: BatchJob) -> str:
    """Where the job's log is; a job without one may not have found its script."""
    log = Path(job.log)
    return f"see {log}" if log.exists() else f"it left no log; do the nodes share {log.parent}?"


def describe_end(state: JobState) -> str:
    """How a job ended, as far as the batch system reports."""
    if state.phase is Phase.UNKNOWN:
        return f"was given up, because the batch system does not report its state ({state.words}),"
    return f"ended ({state.words})" if state.words else "ended"
