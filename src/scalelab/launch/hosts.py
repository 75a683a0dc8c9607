"""`HostsLauncher`: ranks spread over hosts that are emulated on this machine, joined by a link whose rate is known.

Every host is a network namespace (`ranks/namespaces.py`) in which the supervisors of its ranks are started, as on the
nodes of a cluster: they meet over the link, and everything that ranks send each other goes over it. Cores are handed
out as for ranks on one host, so that a rank computes as fast here as there, and only the link differs.

A trial that is on one host is left to the `LocalLauncher`. Whatever ends a launch, no process and no namespace
outlives it, but for one case: a launcher that is killed. Then its processes end with it, and the next launcher removes
the namespaces.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from scalelab.errors import LaunchFailed
from scalelab.launch.launcher import Launched
from scalelab.launch.local import LocalLauncher
from scalelab.launch.ranks.namespaces import (
    INTERFACE,
    EmulatedHost,
    emulate_hosts,
    find_host_obstacle,
    parse_link,
    remove_stale,
)
from scalelab.launch.starters import StepCommand
from scalelab.launch.stepped import SUPERVISOR, run_step
from scalelab.records.trial import Trial, TrialResult


class HostsLauncher:
    """Runs trials on emulated hosts. Close it, or use it as a context manager, to end what it started."""

    def __init__(self) -> None:
        self._local = LocalLauncher()
        self._is_clean = False
        self.sent_bytes: tuple[int, ...] = ()
        """What each host of the last trial has sent over its link, headers included."""

    @classmethod
    def open(cls, _: Launched) -> HostsLauncher:
        return cls()

    def __enter__(self) -> HostsLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Fail early if hosts cannot be emulated, and clean up after a killed launcher."""
        self._local.check()
        obstacle = find_host_obstacle()
        if obstacle:
            raise LaunchFailed(obstacle)
        if not self._is_clean:
            remove_stale()
            self._is_clean = True

    def close(self) -> None:
        self._local.close()

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        """Run the trial on its own emulated hosts, which exist only during this call."""
        if trial.num_hosts == 1:
            return self._local.launch(trial, directory)
        self.check()
        launch = secrets.token_hex(4)
        with emulate_hosts(trial.num_hosts, parse_link(trial.link)) as hosts:
            commands = list_commands(trial, hosts, (SUPERVISOR, str(directory.resolve()), launch))
            result = run_step(trial, directory.resolve(), launch, commands)
            self.sent_bytes = tuple(host.count_sent_bytes() for host in hosts)
        return result


def list_commands(trial: Trial, hosts: Sequence[EmulatedHost], supervisor: Sequence[str]) -> list[StepCommand]:
    """The supervisor of every rank, on the rank's host; the last host may have fewer.

    It is given its rank instead of discovering it. It has no local rank: all hosts are this machine, whose cores and
    GPUs are handed out over all of them.
    """
    commands = []
    for rank in range(trial.num_processes):
        number = rank // trial.ranks_per_host
        host = hosts[number]
        fields = {"launcher": "", "rank": rank, "num_ranks": trial.num_processes, "num_nodes": len(hosts)}
        who = json.dumps({"host": f"host{number}", "member": {**fields, "node": number}})
        words = (*host.prefix(), sys.executable, "-P", "-m", *supervisor, who)
        commands.append(StepCommand(words=words, variables=describe_host(host)))
    return commands


def describe_host(host: EmulatedHost) -> dict[str, str]:
    """Library variables that force traffic over the link although the ranks share a machine."""
    return {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "NCCL_HOSTID": host.name,
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
    }
