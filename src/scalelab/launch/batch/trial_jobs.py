"""`JobLauncher`: every trial is a separate job (`--job-per-trial`).

One job for a whole study waits in the queue once and changes the number of ranks inside its allocation. A job for every
trial asks for no more nodes than that trial needs, and waits for each: the choice where large allocations are rare. The
job runs the trial and stores its result; this launcher waits for it and reads that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from scalelab.errors import JobRejected
from scalelab.launch.batch.jobscripts import JobRequest
from scalelab.launch.batch.system import (
    BatchJob,
    BatchRecord,
    BatchSystem,
    JobState,
    Phase,
    follow_job,
    hand_over,
    save_record,
    size_job,
    wait_for_results,
)
from scalelab.launch.stepped import count_cores_per_process
from scalelab.records.launchers import SCHEDULERS, find_batch
from scalelab.records.observations import BatchNote
from scalelab.records.store import RunStore
from scalelab.records.trial import Cause, Status, Trial, TrialResult, not_run


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
        has_gpus=trial.device == "cuda",
        arguments=("-m", "scalelab", "resume", str(run.resolve()), "--only", trial.name),
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
        has_gpus=any(trial.device == "cuda" for trial in trials),
        arguments=("-m", "scalelab", "resume", str(run.resolve())),
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
