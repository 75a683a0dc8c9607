"""Between the batch system and the run: no job that nobody knows, no two for one run, no result taken for lost."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from scalelab.cli import resume
from scalelab.errors import NothingMeasured, RunBusy
from scalelab.launch.batch import system as batch
from scalelab.launch.batch.handover import SUBMITTING, check_no_job, check_trials_free
from scalelab.launch.batch.jobscripts import make_job, render_launch
from scalelab.launch.batch.site import Site
from scalelab.launch.batch.system import (
    MOST_UNREADABLE,
    BatchJob,
    BatchRecord,
    BatchSystem,
    JobState,
    Phase,
    follow_job,
    hand_over,
    hold_interrupts,
    save_record,
    wait_for_results,
)
from scalelab.launch.fake import FakeLauncher
from scalelab.records.launchers import SCHEDULERS, find_batch, find_own_job, name_job
from scalelab.records.running import RUNNING
from scalelab.records.store import RunStore
from scalelab.records.trial import Status
from scalelab.runs.experiment import start_run
from scalelab.serve.listing import describe_run
from scalelab.studies.scaling.study import StrongScaling
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from tests.launch.batch.test_batch_jobs import make_request, play_program
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
    assert state == JobState(phase=Phase.ENDED, words="failed, TERM_RUNLIMIT", has_failed=True)


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


def test_a_run_that_is_being_executed_is_not_submitted(tmp_path: Path, programs: Path) -> None:
    store = make_store(tmp_path / "runs")
    play_error(programs, "qstat", "qstat: Unknown Job Id 7.host", 153)
    save_record(store.path, BatchRecord(scheduler="pbs", site=Site(), jobs=(JOB,)))
    with store.claim(), pytest.raises(RunBusy, match=r"process \d+ on .* is executing run"):
        check_no_job(store)
    with store.claim(SUBMITTING), pytest.raises(RunBusy), store.claim(SUBMITTING):
        pytest.fail("two submit at once")
    assert check_no_job(store) is not None


def put_claim(store: RunStore, job: str) -> Path:
    """A claim of a process on another host."""
    claim = {"pid": 1, "host": "elsewhere", "started": 0.0, "job": job}
    marker = store.path / RUNNING
    marker.write_text(json.dumps(claim))
    return marker


def test_only_the_claim_of_the_job_that_has_ended_is_taken_away(tmp_path: Path, programs: Path) -> None:
    store = make_store(tmp_path / "runs")
    play_error(programs, "qstat", "qstat: Unknown Job Id 7.host", 153)
    save_record(store.path, BatchRecord(scheduler="pbs", site=Site(), jobs=(JOB,)))
    marker = put_claim(store, "pbs 8")
    with pytest.raises(RunBusy, match="process 1 on elsewhere in job pbs 8 is executing run"):
        check_no_job(store)
    check_trials_free(store)
    assert marker.exists()
    put_claim(store, "pbs 7")
    check_trials_free(store)
    assert not marker.exists()
    put_claim(store, "pbs 7")
    assert check_no_job(store) is not None
    assert not marker.exists()


def test_a_job_that_is_alive_keeps_its_claim(tmp_path: Path, programs: Path) -> None:
    store = make_store(tmp_path / "runs")
    play_program(programs, "qstat", '{"Jobs": {"7.host": {"job_state": "R"}}}')
    save_record(store.path, BatchRecord(scheduler="pbs", site=Site(), jobs=(JOB,)))
    marker = put_claim(store, "pbs 7")
    check_trials_free(store)
    assert marker.exists()


def test_a_job_that_slurm_has_started_again_takes_its_own_claim_away(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "runs")
    play_program(programs, "squeue", "JOBID ST REASON\n7 R None\n")
    job = BatchJob(id="7", submitted_at="", log="x.log")
    save_record(store.path, BatchRecord(scheduler="slurm", site=Site(), jobs=(job,)))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    marker = put_claim(store, "slurm 7")
    check_trials_free(store)
    assert marker.exists()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    check_trials_free(store)
    assert not marker.exists()
    marker = put_claim(store, "slurm 8")
    check_trials_free(store)
    assert marker.exists()


def test_a_run_that_goes_on_without_its_job_is_listed_as_running(tmp_path: Path, programs: Path) -> None:
    store = make_store(tmp_path / "runs")
    play_error(programs, "qstat", "qstat: Unknown Job Id 7.host", 153)
    save_record(store.path, BatchRecord(scheduler="pbs", site=Site(), jobs=(JOB,)))
    put_claim(store, "pbs 7")
    assert describe_run(store.path).state == "interrupted, pbs job 7.host ended"
    put_claim(store, "pbs 8")
    assert describe_run(store.path).state == "running"


def test_a_claim_names_the_job_that_it_was_made_in(tmp_path: Path) -> None:
    store = make_store(tmp_path / "runs")
    with store.claim(job=find_own_job({"PBS_JOBID": "7.host.domain"})):
        assert json.loads((store.path / RUNNING).read_text())["job"] == "pbs 7" == name_job("pbs", "7.host")
    with store.claim(job=find_own_job({})):
        assert "job" not in json.loads((store.path / RUNNING).read_text())


PLAIN_ANSWER = """Job Id: 7.host
    Job_Name = scalelab-run
    job_state = F
    Exit_status = 271
    Variable_List = PBS_O_HOME=/home/me,QUOTE="quoted",
\tBROKEN={"job_state": "R"}
    comment = Job run at noon and failed

"""


def play_broken_json(programs: Path, plain: str) -> None:
    """A qstat whose JSON holds an environment as it is, and which answers in plain text too."""
    play_program(programs, "qstat", '{"Jobs": {"7.host": {"job_state": "R", "Variable_List": {"X": "a "quoted" b"}}}}')
    (programs / "plain.txt").write_text(plain)
    text = f'#!/bin/sh\ncase "$*" in *json*) cat {programs}/qstat.txt;; *) cat {programs}/plain.txt;; esac\n'
    (programs / "qstat").write_text(text)


def test_pbs_whose_json_is_broken_is_read_in_plain_text(programs: Path, tmp_path: Path) -> None:
    play_broken_json(programs, PLAIN_ANSWER)
    system = BatchSystem("pbs", tmp_path)
    words = "failed, Job run at noon and failed"
    assert system.ask(["7.host"]) == {"7.host": JobState(phase=Phase.ENDED, words=words, has_failed=True)}
    play_broken_json(programs, PLAIN_ANSWER.replace("= F", "= R"))
    assert system.ask(["7.host"])["7.host"].phase is Phase.RUNNING
    play_broken_json(programs, PLAIN_ANSWER.replace("= 271", "= 265"))
    assert system.ask(["7.host"])["7.host"].words.startswith("canceled")


def test_answers_that_nobody_can_read_are_given_up_after_several(programs: Path, tmp_path: Path) -> None:
    play_broken_json(programs, "nothing that helps")
    said: list[str] = []
    asked: list[int] = []
    state = follow_job(
        BatchSystem("pbs", tmp_path),
        JOB,
        poll_seconds=0.0,
        queue_seconds=None,
        say=said.append,
        look=lambda: asked.append(1),
    )
    assert (state.phase, state.is_readable) == (Phase.UNKNOWN, False)
    assert len(asked) == MOST_UNREADABLE
    assert said == ["job 7.host (pbs) is unknown (its output cannot be read)"]


def test_a_run_whose_job_nobody_can_tell_of_says_how_to_go_on(tmp_path: Path, programs: Path) -> None:
    store = make_store(tmp_path / "runs")
    play_broken_json(programs, "nothing that helps")
    save_record(store.path, BatchRecord(scheduler="pbs", site=Site(), jobs=(JOB,)))
    with pytest.raises(RunBusy, match=r"is unknown .*; if it has ended, remove .*job\.json"):
        check_no_job(store)


def test_a_cancellation_that_is_not_confirmed_is_not_said_to_be_one(programs: Path, tmp_path: Path) -> None:
    play_program(programs, "qdel", "", 1)
    play_program(programs, "qstat", '{"Jobs": {"7.host": {"job_state": "Q"}}}')
    system = BatchSystem("pbs", tmp_path)
    ask, answers = system.ask, iter([JobState(phase=Phase.QUEUED)])
    system.ask = lambda ids: {"7.host": next(answers, JobState(phase=Phase.UNKNOWN))}  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match=r"was cancelled, not yet confirmed by pbs \(check with `scalelab list`\)$"):
        follow_job(system, JOB, poll_seconds=0.0, queue_seconds=-1.0, say=lambda _: None)
    assert ask(["7.host"])["7.host"].phase is Phase.QUEUED


def test_a_job_whose_trials_have_all_failed_says_that_all_have_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exit code is what those wait by to whom a shared file system shows results late."""
    study = StrongScaling(job=Job(workload="mlp", launcher="slurm"), ranks=(1,), sampling=Sampling(rounds=1))
    store = start_run(study, tmp_path / "runs", ["scalelab"])
    fake = FakeLauncher(lambda _: 0.01, failures={trial.configuration: Status.CRASHED for trial in store.trials()})
    monkeypatch.setattr(resume, "choose_launcher", lambda *_: fake)
    for name in SCHEDULERS:
        monkeypatch.delenv(find_batch(name).job_variable, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    job = BatchJob(id="17", submitted_at="", log="x.log")
    save_record(store.path, BatchRecord(scheduler="slurm", site=Site(), jobs=(job,)))
    with pytest.raises(NothingMeasured) as failed:
        resume.main([str(store.path)])
    assert str(failed.value.exit_code) in batch.DONE_CODES
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    with pytest.raises(NothingMeasured) as elsewhere:
        resume.main([str(store.path)])
    assert elsewhere.value.exit_code == 1


def test_a_run_whose_trials_have_living_jobs_is_not_resumed_inside_an_allocation(
    tmp_path: Path, programs: Path
) -> None:
    store = make_store(tmp_path / "runs")
    check_trials_free(store)
    play_program(programs, "qstat", '{"Jobs": {"7.host": {"job_state": "R"}}}')
    save_record(store.path, BatchRecord(scheduler="pbs", site=Site(), jobs=(JOB,)))
    check_trials_free(store)
    save_record(store.path, BatchRecord(scheduler="pbs", site=Site(), jobs=(JOB,), is_per_trial=True))
    with pytest.raises(RunBusy, match=r"pbs job 7\.host of run .* is running: wait for it"):
        check_trials_free(store)


def test_the_sites_python_may_hold_variables(tmp_path: Path) -> None:
    text = render_launch(make_request(tmp_path, "pass"), Site(python="$HOME/venv/bin/python"))
    assert 'exec "$HOME/venv/bin/python" -c pass' in text


@pytest.mark.parametrize(("scheduler", "seconds"), [("slurm", 1), ("pbs", 1), ("lsf", 60)])
def test_a_wall_time_is_never_rounded_to_nothing(tmp_path: Path, scheduler: str, seconds: int) -> None:
    job = make_job(make_request(tmp_path, "pass"), Site(wall_time="0.2s"), scheduler)  # type: ignore[arg-type]
    assert job.spec is not None
    assert job.spec.attributes.duration.total_seconds() == seconds
