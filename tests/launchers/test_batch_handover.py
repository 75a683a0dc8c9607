"""Between the batch system and the run: no job that nobody knows, no two for one run, no result taken for lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from scalelab.cli.submission import Submission, check_unused
from scalelab.cli.submit import SUBMITTING, check_no_job, check_trials_free
from scalelab.errors import RunBusy, UsageError
from scalelab.measure.launchers import batch
from scalelab.measure.launchers.batch import (
    BatchJob,
    BatchRecord,
    BatchSystem,
    JobState,
    Phase,
    hand_over,
    hold_interrupts,
    save_record,
    wait_for_results,
)
from scalelab.measure.launchers.jobscripts import make_job, render_launch
from scalelab.measure.launchers.site import Site
from scalelab.studies.study import Job
from tests.launchers.test_batch_jobs import make_request, play_program
from tests.records import make_store

JOB = BatchJob(id="7.host", submitted_at="", log="x.log")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    return place


def play_error(programs: Path, name: str, words: str, code: int) -> None:
    play_program(programs, name, "")
    (programs / name).write_text(f"#!/bin/sh\necho '{words}' >&2\nexit {code}\n")


def note_exit_code(run: Path, code: str) -> None:
    (run / "batch" / "pbs").mkdir(parents=True, exist_ok=True)
    (run / "batch" / "pbs" / "7.host.ec").write_text(f"{code}\n")


def test_a_job_that_pbs_has_forgotten_has_ended(programs: Path, tmp_path: Path) -> None:
    play_error(programs, "qstat", "qstat: Unknown Job Id 7.host", 153)
    assert BatchSystem("pbs", tmp_path).ask(["7.host"]) == {"7.host": JobState(phase=Phase.ENDED)}
    play_error(programs, "qstat", "qstat: cannot connect to server 7.host", 111)
    assert BatchSystem("pbs", tmp_path).ask(["7.host"]) == {"7.host": JobState(phase=Phase.UNKNOWN)}


def test_a_job_that_lsf_killed_has_ended_with_its_reason(programs: Path, tmp_path: Path) -> None:
    record = '{"JOBID": "7", "STAT": "EXIT", "EXIT_REASON": "TERM_RUNLIMIT", "KILL_REASON": "", "SUSPEND_REASON": ""}'
    play_program(programs, "bjobs", f'{{"RECORDS": [{record}]}}')
    state = BatchSystem("lsf", tmp_path).ask(["7"])["7"]
    assert state == JobState(phase=Phase.ENDED, words="failed, TERM_RUNLIMIT")


def test_a_cancellation_that_nobody_confirms_is_no_success(programs: Path, tmp_path: Path) -> None:
    assert not BatchSystem("pbs", tmp_path).cancel(["7.host"])
    play_program(programs, "qdel", "")
    play_error(programs, "qstat", "qstat: Unknown Job Id 7.host", 153)
    assert BatchSystem("pbs", tmp_path).cancel(["7.host"])


def test_ctrl_c_while_a_job_is_handed_over_cancels_it_after_it_was_written_down(programs: Path, tmp_path: Path) -> None:
    play_program(programs, "qsub", "7.host\n")
    play_error(programs, "qstat", "qstat: Unknown Job Id 7.host", 153)
    (programs / "qdel").write_text(f'#!/bin/sh\necho "$1" >{tmp_path}/cancelled\n')
    (programs / "qdel").chmod(0o755)
    written: list[BatchJob] = []

    def write_down(job: BatchJob) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        written.append(job)

    with pytest.raises(KeyboardInterrupt):
        hand_over(BatchSystem("pbs", tmp_path), make_request(tmp_path, "pass"), Site(), write_down)
    assert [job.id for job in written] == ["7.host"]
    assert (tmp_path / "cancelled").read_text() == "7.host\n"


def test_interrupts_that_were_held_come_afterwards_and_handlers_are_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    reached: list[str] = []

    def interrupt() -> None:
        with hold_interrupts():
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert reached
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_result_that_a_shared_file_system_shows_late_is_waited_for(tmp_path: Path) -> None:
    note_exit_code(tmp_path, "0")
    late = threading.Timer(0.3, (tmp_path / "result.json").touch)
    late.start()
    ended = JobState(phase=Phase.ENDED)
    wait_for_results(BatchSystem("pbs", tmp_path), JOB, ended, lambda: [tmp_path])
    assert (tmp_path / "result.json").exists()
    late.join()


@pytest.mark.parametrize(("code", "words"), [("1", ""), (None, "canceled")])
def test_nothing_is_waited_for_after_a_job_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str | None, words: str
) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waited"))
    monkeypatch.setattr(batch, "time", clock)
    if code:
        note_exit_code(tmp_path, code)
    state = JobState(phase=Phase.ENDED, words=words)
    wait_for_results(BatchSystem("pbs", tmp_path), JOB, state, lambda: [tmp_path])


def test_a_run_that_is_executed_on_this_host_is_not_submitted(tmp_path: Path, programs: Path) -> None:
    store = make_store(tmp_path / "runs")
    play_error(programs, "qstat", "qstat: Unknown Job Id 7.host", 153)
    save_record(store.path, BatchRecord(scheduler="pbs", site=Site(), jobs=(JOB,)))
    with store.claim(), pytest.raises(RunBusy, match="is being executed on this host"):
        check_no_job(store)
    with store.claim(SUBMITTING), pytest.raises(RunBusy), store.claim(SUBMITTING):
        pytest.fail("two submit at once")
    assert check_no_job(store) is not None


def test_a_run_whose_trials_have_living_jobs_is_not_resumed_inside_an_allocation(
    tmp_path: Path, programs: Path
) -> None:
    store = make_store(tmp_path / "runs")
    check_trials_free(store)
    play_program(programs, "qstat", '{"Jobs": {"7.host": {"job_state": "R"}}}')
    save_record(store.path, BatchRecord(scheduler="pbs", site=Site(), jobs=(JOB,)))
    check_trials_free(store)
    save_record(store.path, BatchRecord(scheduler="pbs", site=Site(), jobs=(JOB,), is_per_trial=True))
    with pytest.raises(RunBusy, match=r"job 7\.host \(pbs\) of run .* is running: wait for it"):
        check_trials_free(store)


def test_flags_of_a_submission_are_refused_inside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(workload="mlp", launcher="slurm")
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(name, raising=False)
    check_unused(Submission(detach=True), job)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    check_unused(Submission(), job)
    with pytest.raises(UsageError, match="--detach is for a job that is submitted, and this is inside one of slurm"):
        check_unused(Submission(detach=True), job)
    with pytest.raises(UsageError, match="--container is for a job that is submitted"):
        check_unused(Submission(asked=Site(container="apptainer exec x.sif")), job)


def test_the_sites_python_may_hold_variables(tmp_path: Path) -> None:
    text = render_launch(make_request(tmp_path, "pass"), Site(python="$HOME/venv/bin/python"))
    assert 'exec "$HOME/venv/bin/python" -c pass' in text


@pytest.mark.parametrize(("scheduler", "seconds"), [("slurm", 1), ("pbs", 1), ("lsf", 60)])
def test_a_wall_time_is_never_rounded_to_nothing(tmp_path: Path, scheduler: str, seconds: int) -> None:
    job = make_job(make_request(tmp_path, "pass"), Site(wall_time="0.2s"), scheduler)  # type: ignore[arg-type]
    assert job.spec is not None
    assert job.spec.attributes.duration.total_seconds() == seconds
