"""Trials as steps: what becomes of them when nodes, ranks and commands fail. mpiexec is played, the ranks are real."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalelab.launch.local import LocalLauncher
from scalelab.launch.ranks.namespaces import EmulatedHost, emulate_hosts, parse_link
from scalelab.launch.stepped import LaunchStep, StepLauncher
from scalelab.records.launchers import Allocation
from scalelab.records.trial import Status, StepPlan, Trial, TrialResult
from tests.launch.played import write_mpiexec
from tests.launch.ranks.emulation import needs_hosts
from tests.worker.trials import launch, make_trial, write_step_workload

pytestmark = pytest.mark.ranks
PLAN = StepPlan(lead_in_steps=2, clean_steps=4, phase_steps=0, comm_free_steps=2, cycles=1)
NODE = socket.gethostname()


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a trial by an mpiexec that behaves as told."""

    def run(trial: Trial, step: dict[str, Any] | None = None, **how: Any) -> TrialResult:
        monkeypatch.setenv("PLAY", json.dumps(how))
        chosen = LaunchStep(kind="mpich", program=write_mpiexec(tmp_path), **(step or {}))
        return launch(StepLauncher(chosen), trial, tmp_path / "t")  # type: ignore[arg-type]

    return run


def make_short(**fields: Any) -> Trial:
    return make_trial(**({"plan": PLAN, "timeout_seconds": 60.0} | fields))


def test_a_command_that_starts_nothing_is_not_run_in_its_own_words(play: Any) -> None:
    result = play(make_short(), says="error: no such partition", code=3)
    assert result.status is Status.NOT_RUN
    assert result.reason.startswith("mpiexec exited with code 3: error: no such partition; see ")


def test_a_command_that_waits_for_ever_is_not_run_and_no_stacks_are_promised(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalelab.launch.stepped.LATE_SECONDS", 3.0)  # enough for the shell to say it
    result = play(make_short(timeout_seconds=3.0), says="srun: Requested nodes are busy")
    assert result.status is Status.NOT_RUN
    assert result.reason.startswith(
        "no rank had started after 3 s: mpiexec exited with code -15: srun: Requested nodes are busy"
    )


def test_more_ranks_than_an_allocation_has_nodes_for_are_not_run(play: Any) -> None:
    allocation = Allocation(scheduler="pbs", job_id="7", num_nodes=1, first_node="a1")
    result = play(make_short(), step={"allocation": allocation, "ranks_per_node": 1})
    assert result.status is Status.NOT_RUN
    assert "need 2 nodes, job 7 has 1" in result.reason


def test_ranks_that_nobody_numbers_are_not_run(play: Any) -> None:
    result = play(make_short(), is_mute=True)
    assert result.status is Status.NOT_RUN
    assert "no variable names this process's rank" in result.reason


def test_a_rank_of_another_launch_is_not_run(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}.items():
        monkeypatch.setenv(name, value)
    result = play(make_short(), is_mute=True)
    assert result.status is Status.NOT_RUN
    assert "MPICH reports rank 0 of 3" in result.reason
    assert "the trial has 2" in result.reason


def test_a_node_that_dies_is_a_crash_with_its_name(play: Any) -> None:
    result = play(make_short(), dies=1)
    assert result.status is Status.CRASHED
    assert f"rank 1 on {NODE} exited without a message, as when a node dies" in result.reason
    assert "mpiexec exited with code 9: lost the node of rank 1" in result.reason


def test_a_rank_that_is_told_to_end_from_outside_is_a_crash(play: Any) -> None:
    result = play(make_short(), stops=1)
    assert result.status is Status.CRASHED
    assert result.reason.startswith(f"rank 1 on {NODE} was killed by SIGTERM")


def test_a_master_elsewhere_is_refused_soon_and_clearly(
    play: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    result = play(make_short())
    assert result.status is Status.CRASHED
    assert result.reason.startswith(f"rank 0 on {NODE} cannot listen on 192.0.2.1 (")
    assert "cannot listen" in (tmp_path / "t/rank0.log").read_text()


def test_a_time_limit_shorter_than_loading_torch_is_a_result(play: Any) -> None:
    assert play(make_short(timeout_seconds=0.5)).status is Status.TIMED_OUT


def test_an_error_of_a_rank_is_told_in_its_own_words(play: Any, tmp_path: Path) -> None:
    spec = write_step_workload(tmp_path, "raise RuntimeError('the cable is cut')", rank=1, step=3)
    result = play(make_short(workload=spec))
    assert result.status is Status.CRASHED
    assert "the cable is cut" in result.reason
    assert {path.name for path in (tmp_path / "t").iterdir()} == {"trial.json", "rank0.log", "rank1.log", "step.log"}


@pytest.fixture
def nodes() -> Iterator[list[EmulatedHost]]:
    with emulate_hosts(2, parse_link("unshaped")) as hosts:
        yield hosts


def name_nodes(hosts: list[EmulatedHost], directory: Path) -> dict[str, Any]:
    """Each host with a name that the others know, as nodes have, on which the played mpiexec starts ranks."""
    names = directory / "hosts"
    names.write_text("".join(f"{host.address} node{number}\n" for number, host in enumerate(hosts)))
    become = f'hostname "$0" && mount --bind {names} /etc/hosts && exec "$@"'
    rename = ["unshare", "--uts", "--mount", "sh", "-c", become]
    return {"prefixes": [[*host.prefix(), *rename, f"node{number}"] for number, host in enumerate(hosts)]}


ALLOCATION = Allocation(scheduler="pbs", job_id="7", num_nodes=2, first_node="node0", tasks_per_node=1)
TWO_NODES = {"allocation": ALLOCATION}


@needs_hosts
def test_two_nodes_train_as_one_does(
    play: Any, nodes: list[EmulatedHost], launcher: LocalLauncher, tmp_path: Path
) -> None:
    watched = make_short(instruments=("utilization",))
    result = play(watched, step=TWO_NODES, **name_nodes(nodes, tmp_path))
    assert result.status is Status.COMPLETED, result.reason
    assert [rank.host for rank in result.ranks] == ["node0", "node1"]
    assert {load.device for load in result.loads} == {"rank 0", "rank 1"}, "each by its own node"
    assert result.losses() == launch(launcher, make_short(), tmp_path / "local").losses()
    assert all(host.count_sent_bytes() > 4 * (result.ranks[0].num_parameters or 0) for host in nodes)


@needs_hosts
def test_a_torchrun_on_each_of_two_nodes_trains_as_one_does(
    play: Any, nodes: list[EmulatedHost], launcher: LocalLauncher, tmp_path: Path
) -> None:
    result = play(make_short(), step={**TWO_NODES, "is_torchrun": True}, **name_nodes(nodes, tmp_path))
    assert result.status is Status.COMPLETED, result.reason
    assert [rank.host for rank in result.ranks] == ["node0", "node1"]
    assert result.losses() == launch(launcher, make_short(), tmp_path / "local").losses()


@needs_hosts
def test_a_node_without_a_way_to_the_master_is_named(play: Any, nodes: list[EmulatedHost], tmp_path: Path) -> None:
    subprocess.run(["ip", "-n", nodes[1].name, "link", "set", "eth0", "down"], check=True)
    result = play(make_short(), step=TWO_NODES, **name_nodes(nodes, tmp_path))
    assert result.status is Status.CRASHED
    assert "rank 1 on node1 cannot reach rank 0 on node0 at 10.0.0.1:" in result.reason
