"""Real ranks on emulated hosts: the meeting, the link, failures, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from scalelab.errors import LaunchFailed
from scalelab.launch.hosts import HostsLauncher
from scalelab.launch.launcher import choose_launcher
from scalelab.launch.local import LocalLauncher
from scalelab.launch.ranks.namespaces import list_namespaces, list_pids
from scalelab.launch.utilization import OTHERS
from scalelab.records.files import write_trial
from scalelab.records.tasks import Exchange
from scalelab.records.trial import NO_STRATEGY, Status, StepPlan, Trial, TrialResult
from scalelab.studies.shared.job import Job
from tests.launch.ranks.emulation import needs_hosts
from tests.worker.trials import make_trial, write_step_workload

PLAN = StepPlan(lead_in_steps=2, clean_steps=4, phase_steps=0, comm_free_steps=2, cycles=1)


def make_spread(**fields: Any) -> Trial:
    return make_trial(**({"link": "unshaped", "plan": PLAN} | fields))


def launch(launcher: HostsLauncher, trial: Trial, directory: Path) -> TrialResult:
    directory.mkdir(parents=True, exist_ok=True)
    write_trial(directory, trial)
    return launcher.launch(trial, directory)


@pytest.fixture
def hosts() -> Iterator[HostsLauncher]:
    """A launcher that leaves no namespace of ours behind."""
    with HostsLauncher() as launcher:
        yield launcher
    assert not [name for name in list_namespaces() if f"-{os.getpid()}-" in name]


def test_trials_on_one_host_are_the_local_launchers() -> None:
    assert isinstance(choose_launcher(Job(), [make_trial(), make_trial(strategy="single", num_ranks=1)]), LocalLauncher)
    assert isinstance(choose_launcher(Job(), [make_trial(strategy="single", num_ranks=1, link="1gbit")]), LocalLauncher)
    assert isinstance(choose_launcher(Job(), [make_trial(), make_spread()]), HostsLauncher)


def test_hosts_are_as_many_as_ranks_need() -> None:
    assert make_spread().num_hosts == 2
    assert make_spread(num_ranks=4, ranks_per_host=2).num_hosts == 2
    assert make_spread(num_ranks=4, ranks_per_host=3).num_hosts == 2
    assert make_spread(ranks_per_host=2).num_hosts == 1
    assert make_trial(num_ranks=4).num_hosts == 1


def test_where_no_host_can_be_emulated_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("scalelab.launch.hosts.find_host_obstacle", lambda: "it needs root: become root")
    with pytest.raises(LaunchFailed, match="it needs root"):
        HostsLauncher().check()
    with pytest.raises(LaunchFailed, match="it needs root"):
        launch(HostsLauncher(), make_spread(), tmp_path)


@pytest.mark.ranks
@needs_hosts
def test_ranks_train_the_same_on_hosts_that_two_may_share_and_every_gradient_goes_over_the_link(
    hosts: HostsLauncher, launcher: LocalLauncher, tmp_path: Path
) -> None:
    fields = {"options": {"dim": 128, "depth": 4}, "plan": PLAN, "num_ranks": 3, "global_batch": 6}
    (tmp_path / "inside").mkdir()
    write_trial(tmp_path / "inside", make_trial(**fields))
    inside = launcher.launch(make_trial(**fields), tmp_path / "inside")
    watched = make_spread(**fields, link="1gbit", ranks_per_host=2, instruments=("utilization",))
    spread = launch(hosts, watched, tmp_path / "spread")
    assert spread.status is Status.COMPLETED, spread.reason
    assert spread.losses() == inside.losses()
    assert [rank.host for rank in spread.ranks] == ["host0", "host0", "host1"]
    assert [rank.cores for rank in spread.ranks] == [rank.cores for rank in inside.ranks]
    assert {load.device for load in spread.loads} == {"rank 0", "rank 1", "rank 2", OTHERS}
    gradients = 4 * (spread.ranks[0].num_parameters or 0)
    exchanged = gradients * (len(spread.losses()))  # comm-free steps, which exchange nothing, are no part of them
    assert all(sent > exchanged for sent in hosts.sent_bytes)
    assert sum(hosts.sent_bytes) < 4 * exchanged
    logs = {"rank0.log", "rank1.log", "rank2.log", "step.log"}
    assert {path.name for path in (tmp_path / "spread").iterdir()} == {"trial.json", *logs}


@pytest.mark.ranks
@needs_hosts
def test_no_message_crosses_a_link_faster_than_its_rate(hosts: HostsLauncher, tmp_path: Path) -> None:
    """A bound that no busy machine can break: what the buckets let through at once is a few percent of the message."""
    size, bytes_per_second = 4_000_000, 12.5e6
    exchange = Exchange(operation="all_reduce", sizes=(size,), repeats=3, warmup_calls=0)
    fields = {"workload": "", "options": {}, "strategy": NO_STRATEGY, "task": exchange}
    result = launch(hosts, make_spread(link="100mbit", **fields), tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    assert len(result.transfers) >= 6
    assert min(line.seconds / line.num_calls for line in result.transfers) > 0.9 * size / bytes_per_second


@pytest.mark.ranks
@pytest.mark.slow
@needs_hosts
def test_a_rank_that_hangs_times_out_with_its_stack_in_the_log(hosts: HostsLauncher, tmp_path: Path) -> None:
    spec = write_step_workload(tmp_path, "time.sleep(3600)", rank=1, step=2)
    result = launch(hosts, make_spread(workload=spec, timeout_seconds=30.0), tmp_path / "t")
    assert result.status is Status.TIMED_OUT
    assert "not finished after 30 s" in result.reason
    assert "in endless" in (tmp_path / "t/rank1.log").read_text()


@needs_hosts
def test_a_supervisor_that_cannot_start_is_not_run_with_its_last_words(
    hosts: HostsLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho there is no torch here\nexit 7\n")
    broken.chmod(0o755)
    monkeypatch.setattr("scalelab.launch.hosts.sys.executable", str(broken))
    result = launch(hosts, make_spread(), tmp_path / "t")
    assert result.status is Status.NOT_RUN
    assert "exited with code 7: there is no torch here; see" in result.reason


@needs_hosts
def test_a_supervisor_that_is_on_its_way_to_its_host_is_ended_too(
    hosts: HostsLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come before `ip netns exec` has entered the namespace: it is not found there."""
    started: list[subprocess.Popen[bytes]] = []

    def start_outside(*_: object) -> subprocess.Popen[bytes]:
        if started:
            raise KeyboardInterrupt
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return started[-1]

    monkeypatch.setattr("scalelab.launch.stepped.start_step", start_outside)
    with pytest.raises(KeyboardInterrupt):
        launch(hosts, make_spread(), tmp_path)
    assert [process.returncode for process in started] == [-signal.SIGTERM]


LAUNCH = """
import sys
from pathlib import Path
from scalelab.launch.hosts import HostsLauncher
from scalelab.records.files import read_trial
directory = Path(sys.argv[1])
HostsLauncher().launch(read_trial(directory), directory)
"""


@pytest.mark.ranks
@pytest.mark.slow
@needs_hosts
def test_a_launcher_that_is_killed_leaves_no_process_and_no_namespace_beyond_the_next_start(
    hosts: HostsLauncher, tmp_path: Path
) -> None:
    marker = tmp_path / "stuck"
    action = f"(open({str(marker)!r}, 'w').close(), time.sleep(3600))"
    spec = write_step_workload(tmp_path, action, rank=1, step=2)
    directory = tmp_path / "t"
    directory.mkdir()
    write_trial(directory, make_spread(workload=spec))
    command = subprocess.Popen([sys.executable, "-c", LAUNCH, str(directory)], stderr=subprocess.DEVNULL)
    while not marker.exists():
        assert command.poll() is None
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(0.05)
    names = [name for name in list_namespaces() if f"-{command.pid}-" in name]
    family = [psutil.Process(pid) for name in names for pid in list_pids(name)]
    assert len(names) == 3
    assert len(family) == 4
    command.kill()
    command.wait(timeout=30)
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert [name for name in list_namespaces() if name in names]
    hosts.check()
    assert not [name for name in list_namespaces() if name in names]
