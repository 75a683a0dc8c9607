"""Jobs on a real Slurm: submitted, refused, asked for, cancelled; and what is made of answers that nobody expects."""

from __future__ import annotations

import signal
import stat
import threading
from pathlib import Path

import psutil
import pytest

from scalelab.errors import DamagedRun, JobRejected, LaunchFailed
from scalelab.launch.batch.executors import PollingOff
from scalelab.launch.batch.handover import JobLauncher, describe_loss
from scalelab.launch.batch.jobscripts import JobRequest
from scalelab.launch.batch.site import Site
from scalelab.launch.batch.system import (
    BatchJob,
    BatchRecord,
    BatchSystem,
    JobState,
    Phase,
    find_living,
    follow_job,
    read_record,
    save_record,
)
from scalelab.records.launchers import BatchNote
from scalelab.records.trial import Status
from tests.cli.commands import wait_until
from tests.slurm import Cluster
from tests.worker.trials import make_trial

LONG = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', '{mark}'])"
"""A job with a child of its own, both of which carry a mark."""
NOTE = BatchNote(scheduler="slurm", job="7", may_come=True)


def make_request(run: Path, code: str, num_nodes: int = 1, ranks_per_node: int = 1) -> JobRequest:
    return JobRequest(
        name="scalelab-test",
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        cores_per_rank=1,
        has_gpus=False,
        arguments=("-c", code),
        directory=run,
        batch_directory=run / "batch",
    )


@pytest.fixture
def system(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatchSystem:
    slurm.join(monkeypatch)
    return BatchSystem("slurm", tmp_path)


def follow(system: BatchSystem, job: BatchJob, queue_seconds: float | None = None) -> tuple[JobState, list[str]]:
    said: list[str] = []
    state = follow_job(system, job, poll_seconds=0.1, queue_seconds=queue_seconds, say=said.append)
    return state, said


def find_marked(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]


def test_a_job_runs_where_and_as_it_was_asked_to(system: BatchSystem, tmp_path: Path) -> None:
    system.check()
    code = "import os; print(os.environ['SLURM_JOB_ID'], os.environ['SLURM_NTASKS'], os.environ['MARK'], os.getcwd())"
    job = system.submit(make_request(tmp_path, code, ranks_per_node=2), Site(setup=("export MARK=set-up",)))
    state, said = follow(system, job)
    assert state == JobState(phase=Phase.ENDED)
    assert said[-1] == f"job {job.id} (slurm) is ended"
    assert Path(job.log).read_text().split() == [job.id, "2", "set-up", str(tmp_path)]


def test_a_job_that_slurm_refuses_is_refused_in_its_words(system: BatchSystem, tmp_path: Path) -> None:
    with pytest.raises(JobRejected, match=r"^sbatch: error: Batch job submission failed: "):
        system.submit(make_request(tmp_path, "pass", num_nodes=99), Site())


def test_ctrl_c_while_waiting_cancels_the_job_and_leaves_no_process(system: BatchSystem, tmp_path: Path) -> None:
    mark = f"mark-{tmp_path.name}"
    job = system.submit(make_request(tmp_path, LONG.format(mark=mark)), Site())
    look = threading.Event()

    def interrupt() -> None:
        if find_marked(mark):
            look.set()
            signal.raise_signal(signal.SIGINT)

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        follow_job(system, job, poll_seconds=0.1, queue_seconds=None, say=said.append, look=interrupt)
    assert look.is_set()
    assert said[-1] == f"job {job.id} (slurm) was cancelled"
    wait_until(lambda: not find_marked(mark), seconds=20)
    assert system.ask([job.id])[job.id].phase is Phase.ENDED


def test_a_job_that_waits_too_long_in_the_queue_is_cancelled(system: BatchSystem, tmp_path: Path) -> None:
    job = system.submit(make_request(tmp_path, "pass"), Site(directives=("begin=now+1hour",)))
    with pytest.raises(TimeoutError, match=rf"job {job.id} was still queued .* after 0.1 s and was cancelled"):
        follow(system, job, queue_seconds=0.1)
    assert system.ask([job.id])[job.id].phase is Phase.ENDED


def test_several_jobs_are_told_apart_and_listed_until_they_end(system: BatchSystem, tmp_path: Path) -> None:
    waiting = system.submit(make_request(tmp_path, "pass"), Site(directives=("begin=now+1hour",)))
    over = system.submit(make_request(tmp_path, "pass"), Site())
    follow(system, over)
    record = BatchRecord(scheduler="slurm", site=Site(), jobs=(waiting, over))
    save_record(tmp_path, record)
    assert read_record(tmp_path) == record
    living = find_living(tmp_path, record)
    assert list(living) == [waiting.id]
    assert living[waiting.id].phase is Phase.QUEUED
    system.cancel([waiting.id])
    assert find_living(tmp_path, record) == {}


def test_a_trial_whose_job_is_refused_is_not_run_in_slurms_words(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.join(monkeypatch)
    record = BatchRecord(scheduler="slurm", site=Site(queue="nowhere"), is_per_trial=True)
    launcher = JobLauncher(record, tmp_path)
    result = launcher.launch(make_trial(), tmp_path)
    assert result.status is Status.NOT_RUN
    assert "invalid partition" in result.reason
    assert result.batch == BatchNote(scheduler="slurm", may_come=True)


def play_program(directory: Path, name: str, text: str, code: int = 0) -> None:
    """A program of a batch system that is not here."""
    file = directory / name
    (directory / f"{name}.txt").write_text(text)
    file.write_text(f"#!/bin/sh\ncat {directory / name}.txt\nexit {code}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    return place


def test_a_batch_system_that_is_not_here_is_missed_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for scheduler, program in (("slurm", "sbatch"), ("pbs", "qsub"), ("lsf", "bsub")):
        with pytest.raises(LaunchFailed, match=f"{program} is not on PATH: .* --dry-run"):
            BatchSystem(scheduler, tmp_path).check()  # type: ignore[arg-type]
    assert not (tmp_path / "batch").exists()


def test_reasons_with_blanks_and_unknown_states_are_taken_as_they_are(programs: Path, tmp_path: Path) -> None:
    lines = [
        "JOBID ST REASON",
        "1 PD (Nodes required are DOWN, or reserved)",
        "2 XX None",
        "3 F RaisedSignal:9",
    ]
    play_program(programs, "squeue", "\n".join(lines))
    found = BatchSystem("slurm", tmp_path).ask(["1", "2", "3", "4"])
    assert found["1"] == JobState(phase=Phase.QUEUED, words="(Nodes required are DOWN, or reserved)")
    assert found["2"] == JobState(phase=Phase.RUNNING)
    assert found["3"] == JobState(phase=Phase.ENDED, words="failed, RaisedSignal:9", has_failed=True)
    assert found["4"] == JobState(phase=Phase.ENDED)


@pytest.mark.parametrize(
    ("text", "code", "is_readable"),
    [("", 1, True), ("no JSON", 0, False), ('{"Jobs": {"7.host": {}}}', 0, False)],
)
def test_a_batch_system_that_does_not_answer_leaves_the_job_unknown(
    programs: Path, tmp_path: Path, text: str, code: int, is_readable: bool
) -> None:
    play_program(programs, "qstat", text, code)
    system = BatchSystem("pbs", tmp_path)
    state = system.ask(["7.host"])["7.host"]
    assert (state.phase, state.is_readable) == (Phase.UNKNOWN, is_readable)
    (tmp_path / "batch" / "pbs").mkdir(parents=True)
    (tmp_path / "batch" / "pbs" / "7.host.ec").write_text("0")
    assert system.ask(["7.host"]) == {"7.host": JobState(phase=Phase.ENDED)}


def test_a_job_of_pbs_is_submitted_and_asked_for_by_its_whole_name(programs: Path, tmp_path: Path) -> None:
    play_program(programs, "qsub", "7.host\n")
    play_program(programs, "qstat", '{"Jobs": {"7.host": {"job_state": "Q", "comment": "Not enough nodes"}}}')
    system = BatchSystem("pbs", tmp_path)
    job = system.submit(make_request(tmp_path, "pass"), Site())
    assert job.id == "7.host"
    assert system.ask([job.id])[job.id] == JobState(phase=Phase.QUEUED, words="Not enough nodes")


def test_a_rejection_by_pbs_is_in_its_words(programs: Path, tmp_path: Path) -> None:
    play_program(programs, "qsub", "qsub: Job violates queue and/or server resource limits\n", 1)
    with pytest.raises(JobRejected, match=r"^qsub: Job violates queue and/or server resource limits$"):
        BatchSystem("pbs", tmp_path).submit(make_request(tmp_path, "pass"), Site())


def test_a_trial_whose_job_leaves_no_result_has_crashed_or_run_out_of_time(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.touch()
    job = BatchJob(id="7", submitted_at="", log=str(log))
    late = describe_loss(make_trial(), job, JobState(phase=Phase.ENDED, words="failed, TimeLimit"), NOTE)
    assert late.status is Status.TIMED_OUT
    assert "raise --wall-time" in late.reason
    lost = describe_loss(make_trial(), job, JobState(phase=Phase.ENDED, words="failed, NodeFail"), NOTE)
    assert lost.status is Status.CRASHED
    assert lost.reason == f"job 7 ended (failed, NodeFail) without a result; see {log}"
    assert lost.batch == BatchNote(scheduler="slurm", job="7")
    unknown = describe_loss(make_trial(), job, JobState(phase=Phase.UNKNOWN, is_readable=False), NOTE)
    assert unknown.status is Status.CRASHED
    assert "job 7 was given up" in unknown.reason


def test_a_trial_whose_job_has_not_begun_was_not_run_and_may_come(tmp_path: Path) -> None:
    job = BatchJob(id="7", submitted_at="", log=str(tmp_path / "x.log"))
    result = describe_loss(make_trial(), job, JobState(phase=Phase.ENDED, words="canceled"), NOTE)
    assert (result.status, result.batch) == (Status.NOT_RUN, NOTE)
    assert result.reason == "job 7 ended (canceled) before it started"


def test_the_log_of_an_earlier_job_does_not_say_that_a_later_one_has_begun(programs: Path, tmp_path: Path) -> None:
    play_program(programs, "qsub", "7.host\n")
    system = BatchSystem("pbs", tmp_path)
    for words in ("the first", "the second"):
        job = system.submit(make_request(tmp_path, "pass"), Site())
        assert not Path(job.log).exists()
        Path(job.log).write_text(words)
    job = system.submit(make_request(tmp_path, "pass"), Site())
    cancelled = describe_loss(make_trial(), job, JobState(phase=Phase.ENDED, words="canceled"), NOTE)
    assert cancelled.status is Status.NOT_RUN
    kept = [(tmp_path / "batch" / f"scalelab-test.{number}.log").read_text() for number in (1, 2)]
    assert kept == ["the first", "the second"]


def test_a_job_that_failed_and_left_no_log_may_not_have_found_its_directory(tmp_path: Path) -> None:
    job = BatchJob(id="7", submitted_at="", log=str(tmp_path / "x.log"))
    state = JobState(phase=Phase.ENDED, words="failed, NonZeroExitCode", has_failed=True)
    lost = describe_loss(make_trial(), job, state, NOTE)
    assert lost.status is Status.NOT_RUN
    assert lost.reason.endswith(f"before it started; it left no log; do the nodes share {tmp_path}?")


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    (tmp_path / "job.json").write_text('{"scheduler": "sge"}')
    with pytest.raises(DamagedRun, match=r"job\.json is damaged"):
        read_record(tmp_path)


def test_psijs_own_thread_never_asks(tmp_path: Path) -> None:
    config = PollingOff(tmp_path)
    assert config.initial_queue_polling_delay > 1e7
    assert config.keep_files
