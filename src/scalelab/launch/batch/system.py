"""Jobs of a batch system: submit, query, cancel, and record them in the run.

What a job is for is on disk before it runs, and what it measured is on disk before it ends: so no process needs to wait
for it. `job.json` in the run holds the numbers that the batch system gave to its jobs and what they asked for; by it
`scalelab list` and `scalelab resume` find them again.

A batch system that does not answer does not end a job: it is asked again. A job that it no longer knows has ended, and
so has one that has left its exit code. PBS is known to answer with broken JSON, for a job's environment stands in it:
then it is asked again in plain text. What cannot be read either way, several times in a row, is given up with words.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from scalelab.errors import DamagedRun, JobRejected, LaunchFailed, UsageError
from scalelab.launch.batch.jobscripts import JobRequest, make_executor, make_job, render_launch
from scalelab.launch.batch.site import Site
from scalelab.records.files import read_json, storage_errors, write_atomically, write_json
from scalelab.records.launchers import Scheduler, find_batch
from scalelab.records.store import JOBS_FILE
from scalelab.records.trial import from_builtins, to_builtins

BATCH_DIRECTORY = "batch"
"""In the run: job scripts, their logs, and PSI/J's own files."""
ASK_SECONDS = 60.0
"""How long a batch system may take to answer one question."""
UNKNOWN_JOB = re.compile(r"unknown job ?id|job has finished", re.IGNORECASE)
"""What PBS says of a job it no longer knows; its exit code is then an error."""
DONE_CODES = ("0", "3")
"""What scalelab ends with when every trial has a result."""
SHOW_SECONDS = 60.0
"""How long a shared file system may take to show what a job wrote that has ended."""
CANCEL_SECONDS = 60.0
"""How long we wait for a cancelled job to be gone."""
MOST_UNREADABLE = 10
"""Unreadable answers in a row after which waiting ends."""


class Phase(StrEnum):
    """How far a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """The batch system could not be asked, or did not answer."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """A job's state in the batch system."""

    phase: Phase
    words: str = ""
    """Why it waits or has failed, in the batch system's words."""
    has_failed: bool = False
    """Whether it ended without completing."""
    is_readable: bool = True
    """Whether the batch system's answer could be read."""

    def __str__(self) -> str:
        return f"{self.phase} ({self.words})" if self.words else self.phase.value


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """One job that was submitted."""

    id: str
    """As the batch system calls it."""
    submitted_at: str
    log: str
    """What scalelab said in it."""
    trial: str | None = None
    """The only trial that it runs; None: all that have no result."""


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """The contents of `job.json`."""

    scheduler: Scheduler
    site: Site
    is_per_trial: bool = False
    """Whether every trial is a separate job."""
    jobs: tuple[BatchJob, ...] = field(default=())
    """The last ones that were submitted."""


class BatchSystem:
    """One batch system, for the jobs of one run."""

    def __init__(self, scheduler: Scheduler, directory: Path) -> None:
        self.scheduler = scheduler
        self.directory = directory.resolve() / BATCH_DIRECTORY
        self._executor = make_executor(scheduler, self.directory)

    def check(self) -> None:
        """Reject at once where nothing can be submitted."""
        (program, *_) = self._executor.get_cancel_command("0")
        for name in (find_batch(self.scheduler).submit, program):
            if shutil.which(name) is None:
                raise LaunchFailed(
                    f"{name} is not on PATH: submit from a login node of the cluster, or print the job script with"
                    " --dry-run"
                )

    def submit(self, request: JobRequest, site: Site, trial: str | None = None) -> BatchJob:
        """Hand a job over; raises `JobRejected` with the batch system's words."""
        from psij import InvalidJobException, SubmitException

        job = make_job(request, site, self.scheduler)
        with storage_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            put_aside(request.log_file)
            write_atomically(request.launch_file, render_launch(request, site))
        try:
            self._executor.submit(job)
        except (SubmitException, InvalidJobException) as error:
            raise JobRejected(" ".join(error.message.split())) from None
        except FileNotFoundError as error:
            raise LaunchFailed(f"cannot run {error.filename}: submit from a login node of the cluster") from None
        now = datetime.now(UTC).isoformat()
        return BatchJob(id=str(job.native_id), submitted_at=now, log=str(request.log_file), trial=trial)

    def ask(self, ids: Collection[str]) -> dict[str, JobState]:
        """How far each job is."""
        try:
            done = run_question(self._executor.get_status_command(ids))
        except (OSError, subprocess.TimeoutExpired):
            return self._guess(ids)
        if done.returncode and all(word in done.stderr for word in ids) and UNKNOWN_JOB.search(done.stderr):
            return dict.fromkeys(ids, JobState(phase=Phase.ENDED))
        if done.returncode:
            return self._guess(ids)
        try:
            found: dict[str, Any] = dict(self._executor.parse_status_output(done.returncode, done.stdout))
        except Exception:  # noqa: BLE001 - whatever PSI/J makes of an answer that it does not expect
            return self._ask_plainly(ids)
        return {number: self._read_state(number, found.get(number)) for number in ids}

    def _ask_plainly(self, ids: Collection[str]) -> dict[str, JobState]:
        """The same in plain text, where the batch system has such a form."""
        from scalelab.launch.batch.executors import Pbs

        states = self._guess(ids, is_readable=False)
        if not isinstance(self._executor, Pbs):
            return states
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = run_question(self._executor.get_plain_status_command(ids))
            found = self._executor.parse_plain_status_output(done.stdout)
            told = {number.partition(".")[0]: status for number, status in found.items()}
            known = [number for number in ids if number.partition(".")[0] in told]
            states |= {number: self._read_state(number, told[number.partition(".")[0]]) for number in known}
        return states

    def _guess(self, ids: Collection[str], *, is_readable: bool = True) -> dict[str, JobState]:
        """The state known without the batch system: whether the job's script reached its last line."""
        words = "" if is_readable else "its output cannot be read"
        unknown = JobState(phase=Phase.UNKNOWN, words=words, is_readable=is_readable)
        ended = JobState(phase=Phase.ENDED)
        return {number: ended if self.has_ended(number) else unknown for number in ids}

    def _read_state(self, number: str, status: Any) -> JobState:
        if status is None or self.has_ended(number):
            return JobState(phase=Phase.ENDED)
        name, words = status.state.name, status.message or ""
        if not status.state.final:
            return JobState(phase=Phase.RUNNING if name == "ACTIVE" else Phase.QUEUED, words=words)
        how = "" if name == "COMPLETED" else name.lower()
        words = ", ".join(filter(None, (how, words)))
        return JobState(phase=Phase.ENDED, words=words, has_failed=name == "FAILED")

    def has_ended(self, number: str) -> bool:
        """Whether the job's script reached its last line."""
        return (self.directory / self.scheduler / f"{number}.ec").is_file()

    def read_exit_code(self, number: str) -> str | None:
        """What scalelab ended with in a job; None: the job's script has not come to its last line."""
        place = self.directory / self.scheduler
        try:
            list(place.iterdir())  # has NFS ask its server what there is
            return (place / f"{number}.ec").read_text(encoding="utf-8").strip()
        except OSError:
            return None

    def cancel(self, ids: Collection[str]) -> bool:
        """End jobs, and wait until they are gone; False: the batch system has not confirmed that they are."""
        for number in ids:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    self._executor.get_cancel_command(number), capture_output=True, timeout=ASK_SECONDS, check=False
                )
        give_up = time.monotonic() + CANCEL_SECONDS
        phases = {Phase.RUNNING}
        while phases - {Phase.ENDED, Phase.UNKNOWN} and time.monotonic() < give_up:
            phases = {state.phase for state in self.ask(ids).values()}
            time.sleep(0.2)
        return phases <= {Phase.ENDED}


def follow_job(
    system: BatchSystem,
    job: BatchJob,
    *,
    poll_seconds: float,
    queue_seconds: float | None,
    say: Callable[[str], None],
    look: Callable[[], None] = lambda: None,
) -> JobState:
    """Wait until the job has ended, saying how far it is whenever that changes.

    `look` is called between the questions. A job that waits in the queue for more than `queue_seconds` is cancelled
    and `TimeoutError` is raised; Ctrl-C cancels it too. Any other end of the waiting leaves the job to itself. Of a job
    whose state cannot be read for long, what is given is that it is unknown.
    """
    said, began, num_unreadable = None, time.monotonic(), 0
    try:
        while True:
            state = system.ask([job.id])[job.id]
            if str(state) != said:
                said = str(state)
                say(f"job {job.id} ({system.scheduler}) is {said}")
            look()
            num_unreadable = 0 if state.is_readable else num_unreadable + 1
            if state.phase is Phase.ENDED or num_unreadable >= MOST_UNREADABLE:
                return state
            if state.phase is Phase.QUEUED and queue_seconds is not None and time.monotonic() - began > queue_seconds:
                break
            time.sleep(poll_seconds)
    except KeyboardInterrupt:
        say(f"job {job.id} ({system.scheduler}) {cancel_job(system, job)}")
        raise
    raise TimeoutError(f"job {job.id} was still {said} after {queue_seconds:g} s and {cancel_job(system, job)}")


def cancel_job(system: BatchSystem, job: BatchJob) -> str:
    """Cancel a job; returns what is known of its end."""
    if system.cancel([job.id]):
        return "was cancelled"
    return f"was cancelled, not yet confirmed by {system.scheduler} (check with `scalelab list`)"


def shows_result(directory: Path) -> bool:
    """Whether a trial's directory lists a result; listing has NFS ask its server what there is."""
    return any(file.name == "result.json" for file in directory.iterdir())


def wait_for_results(
    system: BatchSystem, job: BatchJob, state: JobState, directories: Callable[[], Sequence[Path]]
) -> None:
    """Give a shared file system time to show what a job has written that ended well, as far as is known.

    `directories` are those of the trials that it was to run.
    """
    give_up = time.monotonic() + SHOW_SECONDS
    while time.monotonic() < give_up:
        code = system.read_exit_code(job.id)
        may_come = code in DONE_CODES or (code is None and not state.words)
        if not may_come or all(map(shows_result, directories())):
            return
        time.sleep(0.2)


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait: a job that was handed over must be written down, or it could not be cancelled.

    They are kept from the batch system's own command too, which gets the mask of this thread.
    """
    numbers, came = (signal.SIGINT, signal.SIGTERM), []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in previous.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def hand_over(
    system: BatchSystem,
    request: JobRequest,
    site: Site,
    write_down: Callable[[BatchJob], None],
    trial: str | None = None,
) -> BatchJob:
    """Submit a job and write it down, both or neither; Ctrl-C meanwhile cancels it."""
    job: BatchJob | None = None
    try:
        with hold_interrupts():
            job = system.submit(request, site, trial)
            write_down(job)
    except KeyboardInterrupt:
        if job is not None:
            system.cancel([job.id])
        raise
    return job


def put_aside(log: Path) -> None:
    """Rename the log of an earlier job: the presence of a log means that the job has started."""
    if log.exists():
        names = (log.with_name(f"{log.stem}.{number}{log.suffix}") for number in itertools.count(1))
        log.rename(next(name for name in names if not name.exists()))


def run_question(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Output of a batch system; undecodable bytes are replaced."""
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ASK_SECONDS, check=False)


def save_record(run: Path, record: BatchRecord) -> None:
    with storage_errors(run):
        write_json(run / JOBS_FILE, to_builtins(record))


def read_record(run: Path) -> BatchRecord | None:
    """The jobs of a run; None: it has had none."""
    file = run / JOBS_FILE
    if not file.is_file():
        return None
    try:
        return from_builtins(read_json(file), BatchRecord)
    except (ValueError, UsageError) as error:
        raise DamagedRun(f"{file} is damaged: {error}") from error


def find_living(run: Path, record: BatchRecord) -> dict[str, JobState]:
    """The jobs that have not ended, as far as the batch system reports."""
    if not record.jobs:
        return {}
    states = BatchSystem(record.scheduler, run).ask([job.id for job in record.jobs])
    return {number: state for number, state in states.items() if state.phase is not Phase.ENDED}


def size_job(num_ranks: Sequence[int], site: Site, ranks_per_node: int | None) -> tuple[int, int]:
    """Nodes and ranks on each that the largest of some trials needs."""
    most = max(num_ranks)
    per_node = ranks_per_node or site.ranks_per_node or -(-most // (site.nodes or 1))
    needed = -(-most // per_node)
    if site.nodes is not None and site.nodes < needed:
        raise UsageError(
            f"--nodes {site.nodes} with {per_node} ranks per node is too small for {most} ranks: use --nodes {needed}"
        )
    return site.nodes or needed, min(per_node, most)
