"""From what ranks leave behind to a result: who is missing, whose failure it was, and what a dead run still gives."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from scalelab.errors import UsageError
from scalelab.launch import meter_result
from scalelab.launch.agreement import outcome_file, samples_file
from scalelab.launch.fake import FakeLauncher
from scalelab.launch.meter_result import (
    MeterFailure,
    MeterOutcome,
    Stay,
    announce,
    assemble_result,
    leave_outcome,
    rescue_result,
    wait_for_outcomes,
)
from scalelab.records.files import write_json
from scalelab.records.observations import RankReport
from scalelab.records.samples import render_samples
from scalelab.records.store import RunStore
from scalelab.records.trial import Cause, Status, StepKind, StepSample
from scalelab.runs.experiment import execute_run, read_results
from scalelab.runs.scheduler import ignore_event
from scalelab.studies.catalogue import derive_document, read_study
from tests.records import make_record, make_store

STAY = Stay(started_at="2026-11-16T01:00:00+00:00", entered_seconds=10.0, load_before=0.5)


def make_metered(runs_dir: Path, num_ranks: int = 2) -> RunStore:
    trial = make_record(configuration="my-run", workload="train.py", strategy="metered", num_ranks=num_ranks)
    fields = {"label": "my-run", "job": {"workload": "train.py"}, "num_ranks": num_ranks, "global_batch": None}
    return make_store(runs_dir, [trial], study="metered", fields=fields)


def find_directory(store: RunStore) -> Path:
    return store.trial_directory("my-run-r1")


def make_outcome(rank: int, failure: MeterFailure | None = None) -> MeterOutcome:
    report = RankReport(rank=rank, peak_memory_bytes=1000 + rank)
    return MeterOutcome(report=report, stay=STAY, left_seconds=20.0, failure=failure)


def write_steps(directory: Path, rank: int, num_steps: int, tail: str = "") -> None:
    samples = [StepSample(rank, step, StepKind.CLEAN, 11.0 + step, 1.0, 0.1, loss=0.5) for step in range(num_steps)]
    samples_file(directory, rank).write_text(render_samples(samples) + tail)


def announce_dead(directory: Path, rank: int) -> None:
    """What a process leaves that was killed: its announcement."""
    identity = {"pid": os.getpid(), "host": meter_result.socket.gethostname(), "started": 1.0}
    stay = {"started_at": STAY.started_at, "entered_seconds": 10.0, "load_before": None}
    write_json(outcome_file(directory, rank), {**identity, "stay": stay})


def fail(reason: str, **fields: Any) -> MeterFailure:
    return MeterFailure(status=Status.CRASHED, reason=reason, **fields)


def test_ranks_that_all_left_an_outcome_make_a_completed_result(tmp_path: Path) -> None:
    store = make_metered(tmp_path)
    directory = find_directory(store)
    for rank in (0, 1):
        write_steps(directory, rank, 3)
        leave_outcome(directory, make_outcome(rank))
    result = assemble_result(store.trials()[0], directory)
    assert (result.status, result.reason, len(result.samples)) == (Status.COMPLETED, "", 6)
    assert [rank.peak_memory_bytes for rank in result.ranks] == [1000, 1001]
    assert (result.started_at, result.load_before) == (STAY.started_at, 0.5)
    assert (result.wall_seconds, result.first_step_seconds) == (10.0, 1.0)


def test_a_rank_without_a_meter_is_named(tmp_path: Path) -> None:
    store = make_metered(tmp_path, num_ranks=4)
    directory = find_directory(store)
    for rank in (0, 2):
        leave_outcome(directory, make_outcome(rank))
    announce_dead(directory, 3)
    result = assemble_result(store.trials()[0], directory)
    assert result.status is Status.CRASHED
    assert result.reason == (
        "rank 3 did not reach the end of the Meter: killed, or still running; rank 1 recorded nothing: no Meter was"
        " created there"
    )


@pytest.mark.parametrize(
    ("failures", "reason"),
    [
        ((fail("lost", cause=Cause.LOST_PEER), fail("shape")), "shape"),
        ((fail("lost", cause=Cause.LOST_PEER), None), "lost"),
        ((None, fail("shape")), "shape"),
        ((None, None), ""),
    ],
)
def test_an_error_of_a_rank_s_own_is_to_blame_before_a_lost_peer(
    tmp_path: Path, failures: tuple[MeterFailure | None, ...], reason: str
) -> None:
    store = make_metered(tmp_path)
    for rank, failure in enumerate(failures):
        leave_outcome(find_directory(store), make_outcome(rank, failure))
    assert assemble_result(store.trials()[0], find_directory(store)).reason == reason


def test_a_rank_that_died_is_to_blame_before_one_that_lost_it(tmp_path: Path) -> None:
    store = make_metered(tmp_path)
    leave_outcome(find_directory(store), make_outcome(0, fail("lost", cause=Cause.LOST_PEER)))
    announce_dead(find_directory(store), 1)
    assert assemble_result(store.trials()[0], find_directory(store)).reason.startswith("rank 1 did not reach")


def test_nobody_waits_for_the_dead_or_longer_than_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps: list[float] = []
    now = [0.0]
    monkeypatch.setattr(meter_result.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        now[0] += 1.0

    monkeypatch.setattr(meter_result.time, "sleep", sleep)
    leave_outcome(tmp_path, make_outcome(0))
    announce_dead(tmp_path, 1)
    wait_for_outcomes(tmp_path, 2, 10.0)
    assert sleeps == []
    announce(tmp_path, 1, STAY)
    wait_for_outcomes(tmp_path, 2, 10.0)
    assert len(sleeps) == 10
    wait_for_outcomes(tmp_path, 3, 5.0)
    assert len(sleeps) == 15


def test_a_rank_that_comes_too_late_leaves_nothing_lying_about(tmp_path: Path) -> None:
    announce(tmp_path, 1, STAY)
    write_steps(tmp_path, 1, 2)
    (tmp_path / "result.json").write_text("{}")
    leave_outcome(tmp_path, make_outcome(1))
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_a_killed_run_is_put_together_by_its_first_reader(tmp_path: Path) -> None:
    store = make_metered(tmp_path, num_ranks=1)
    directory = find_directory(store)
    announce_dead(directory, 0)
    write_steps(directory, 0, 12, tail="0,12,clean,23.0,1.")
    document = derive_document(store)
    assert "rank 0 did not reach the end of the Meter" in document.cautions[0].message
    result = store.result("my-run-r1")
    assert (result.status, len(result.samples)) == (Status.CRASHED, 12)
    assert (result.wall_seconds, result.started_at) == (13.0, STAY.started_at)
    assert not outcome_file(directory, 0).exists()
    assert derive_document(store) == document


def test_a_run_that_is_at_work_is_left_alone(tmp_path: Path) -> None:
    store = make_metered(tmp_path)
    with store.claim():
        assert rescue_result(store) is None
        assert "the script is still running" in derive_document(store).cautions[0].message
    announce(find_directory(store), 1, STAY)
    assert rescue_result(store) is None
    assert not store.has_result("my-run-r1")


def test_ranks_of_another_host_do_not_hold_a_run_that_nobody_claims(tmp_path: Path) -> None:
    store = make_metered(tmp_path)
    write_json(outcome_file(find_directory(store), 1), {"pid": 1, "host": "elsewhere", "started": 0.0})
    assert rescue_result(store) is not None


def test_a_run_that_cannot_be_written_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_metered(tmp_path, num_ranks=1)
    write_steps(find_directory(store), 0, 3)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("scalelab.records.store.write_atomically", refuse)
    (result,), damaged = read_results(store, read_study(store))
    assert (len(result.samples), damaged) == (3, [])
    assert not store.has_result("my-run-r1")


def test_a_metered_run_is_not_resumed(tmp_path: Path) -> None:
    store = make_metered(tmp_path)
    with pytest.raises(UsageError, match="was recorded by a Meter: run its script again"):
        execute_run(store, read_study(store), FakeLauncher(lambda trial: 1.0), ignore_event)


def test_an_announcement_is_of_this_process(tmp_path: Path) -> None:
    announce(tmp_path, 0, STAY)
    said = json.loads(outcome_file(tmp_path, 0).read_text())
    assert said["pid"] == os.getpid()
    assert said["started"] == psutil.Process().create_time()
