"""Looking at devices from outside: real ranks on cores, GPUs played by a stand-in for the driver's library."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from scalelab.launch.agreement import Assignment, make_replica_clock, open_replica_clock
from scalelab.launch.local import LocalLauncher
from scalelab.launch.utilization import (
    OTHERS,
    RankReader,
    ReplicaReader,
    find_process_clock,
    make_load,
    read_clock,
    watch_rank,
)
from scalelab.records.environment import usable_cores
from scalelab.records.observations import DeviceLoad
from scalelab.records.trial import Status, StepKind, StepPlan
from tests.worker.trials import launch, make_trial

PLAN = StepPlan(lead_in_steps=10, clean_steps=400, phase_steps=0, comm_free_steps=0, cycles=1)


def test_a_share_outside_its_bounds_is_cut() -> None:
    assert make_load(1.0, 0.1, "rank 0", 1.2).busy == 1.0
    assert make_load(1.0, 0.1, "rank 0", -0.1).busy == 0.0


def test_the_clock_of_a_process_is_its_processor_time() -> None:
    clock = find_process_clock(os.getpid())
    assert clock is not None
    before, own = read_clock(clock), time.process_time()
    assert before == pytest.approx(own, abs=0.05)


def test_a_process_that_has_ended_has_no_clock() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert read_clock(find_process_clock(process.pid)) is None


def test_a_reader_of_a_process_that_has_ended_says_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    reader = RankReader([usable_cores()[:1]], [process.pid])
    reader.read()
    assert reader.read() == []


def test_a_trial_that_does_not_ask_is_not_looked_at(tmp_path: Path) -> None:
    with watch_rank(
        make_trial(), Assignment(directory=str(tmp_path), rank=0, local_rank=0, cores=(0,)), os.getpid()
    ) as loads:
        pass
    assert loads == []


@pytest.mark.parametrize(("bind", "others"), [("cores", {OTHERS}), ("none", set())])
def test_one_rank_of_several_is_looked_at_under_its_own_number(bind: str, others: set[str], tmp_path: Path) -> None:
    trial = make_trial(instruments=("utilization",), bind=bind)
    assignment = Assignment(directory=str(tmp_path), rank=5, local_rank=1, cores=usable_cores()[:1])
    with watch_rank(trial, assignment, os.getpid()) as loads:
        while len(loads) < 4:
            pass
    assert {load.device for load in loads} == {"rank 5", *others}


@pytest.mark.ranks
def test_every_rank_is_looked_at_while_it_runs(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = make_trial(instruments=("utilization",), plan=PLAN, options={"dim": 64, "depth": 2}, global_batch=64)
    result = launch(launcher, trial, tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    assert {load.device for load in result.loads} == {"rank 0", "rank 1", OTHERS}
    clean = [sample for sample in result.samples if sample.kind is StepKind.CLEAN]
    within = [load for load in result.loads if clean[0].start_seconds < load.seconds < clean[-1].start_seconds]
    assert any(load.busy > 0 for load in within if load.device == "rank 0")
    assert all(0 <= load.busy <= 1 and load.interval_seconds > 0 for load in result.loads)


@pytest.mark.ranks
@pytest.mark.parametrize("threads", [1, 2])
def test_every_replica_of_dp_is_looked_at(launcher: LocalLauncher, tmp_path: Path, threads: int) -> None:
    trial = make_trial(
        strategy="dp",
        instruments=("utilization",),
        plan=PLAN,
        options={"dim": 64, "depth": 2},
        threads_per_rank=threads,
    )
    result = launch(launcher, trial, tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    assert {load.device for load in result.loads} == {"replica 0", "replica 1", "all replicas", OTHERS}
    assert not list(tmp_path.glob("*.clock"))


def test_what_a_process_used_beside_its_other_replicas_is_replica_0s(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = memoryview(bytearray(16)).cast("d")
    cores = usable_cores()
    reader = ReplicaReader([cores[:1], cores[-1:]], [os.getpid()], lambda: seconds)
    assert reader.read() == []
    begun = time.process_time()
    while time.process_time() - begun < 0.02:
        pass
    seconds[1] = 0.005
    loads = {load.device: load for load in reader.read()}
    used = {name: loads[name].busy * loads[name].interval_seconds for name in ("replica 0", "replica 1")}
    assert used["replica 1"] == pytest.approx(0.005)
    assert used["replica 0"] > 0.01


def test_a_pass_longer_than_the_period_counts_in_all_the_time_that_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both replicas are busy all the time, in passes of six periods, which are added up when they end."""
    clock = SimpleNamespace(now=0.0, last=0.0)

    def read_process() -> list[DeviceLoad]:
        seconds, clock.last = clock.now - clock.last, clock.now
        return [make_load(clock.now, seconds, "rank 0", 1.0)]

    seconds = memoryview(bytearray(16)).cast("d")
    cores = usable_cores()
    reader = ReplicaReader([cores[:1], cores[-1:]], [os.getpid()], lambda: seconds)
    monkeypatch.setattr(reader, "_num_cores", 2)
    monkeypatch.setattr(reader._process, "read", read_process)
    loads = []
    for number in range(1, 62):
        clock.now = 0.05 * number
        seconds[0] = seconds[1] = 0.3 * (number // 6)
        loads += reader.read()
    for device in ("replica 0", "replica 1"):
        found = [load for load in loads if load.device == device]
        used = sum(load.busy * load.interval_seconds for load in found)
        assert used / sum(load.interval_seconds for load in found) == pytest.approx(1.0, abs=0.02)


def test_a_clock_that_replicas_share_is_seen_on_both_sides_once_it_is_there(tmp_path: Path) -> None:
    with ExitStack() as stack:
        assert open_replica_clock(tmp_path, 2, stack) is None
        ours = make_replica_clock(tmp_path, 2)
        theirs = open_replica_clock(tmp_path, 2, stack)
        ours[1] = 2.5
        assert theirs is not None
        assert list(theirs) == [0.0, 2.5]
