"""`HostsLauncher`: ranks spread over hosts that are emulated on this machine, joined by a link whose rate is known.

Every host is a network namespace (`ranks/namespaces.py`) with a torchrun of its own, as on a cluster: they find each
other by a rendezvous over the link, and everything that ranks send each other goes over it. Cores are handed out as
for ranks on one host, so that a rank computes as fast here as there, and only the link differs.

A trial that is on one host is left to the `LocalLauncher`. Whatever ends a launch, no process and no namespace
outlives it, but for one case: a launcher that is killed. Then the kernel ends its processes, and the next launcher
removes the namespaces.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from scalelab.errors import DamagedRun, LaunchFailed, StorageFull
from scalelab.launch.agreement import EXIT_STORAGE, host_file, host_log, log_file, outcome_file, place_file
from scalelab.launch.launcher import read_conditions
from scalelab.launch.local import (
    GRACE_SECONDS,
    LocalLauncher,
    clear_previous,
    dump_stacks,
)
from scalelab.launch.outcome import RankEnd, conclude_trial, read_last_words
from scalelab.launch.ranks.links import parse_link
from scalelab.launch.ranks.namespaces import (
    INTERFACE,
    EmulatedHost,
    emulate_hosts,
    find_host_obstacle,
    list_pids,
    remove_stale,
)
from scalelab.launch.ranks.placement import bind_ranks
from scalelab.launch.utilization import watch_devices
from scalelab.records.environment import usable_cores
from scalelab.records.files import read_json
from scalelab.records.trial import Trial, TrialResult

PORT = 29500
"""Of the rendezvous; nothing else listens on an emulated host."""


class HostsLauncher:
    """Runs trials on emulated hosts. Close it, or use it as a context manager, to end what it started."""

    def __init__(self) -> None:
        self._local = LocalLauncher()
        self._is_clean = False
        self.sent_bytes: tuple[int, ...] = ()
        """What each host of the last trial has sent over its link, headers included."""

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
        clear_previous(trial, directory)
        conditions = read_conditions()
        cores = bind_ranks(trial, trial.num_processes, usable_cores())
        with watch_devices(trial, directory, partial(find_pids, trial, directory), cores) as loads:
            ends = self._run(trial, directory.resolve(), conditions.launched + trial.timeout_seconds)
        measured = conditions.compare()
        if any(end.code == EXIT_STORAGE for end in ends):
            raise StorageFull(f"a rank could not write to {directory}: free some space, then run 'scalelab resume'")
        return conclude_trial(
            trial,
            directory,
            ends,
            loads=tuple(loads),
            **measured,
        )

    def _run(self, trial: Trial, directory: Path, deadline: float) -> list[RankEnd]:
        """How every rank ended; its host is gone by then."""
        agents: list[subprocess.Popen[bytes]] = []
        # torchrun makes a directory for logs wherever it is told to, and never removes it.
        with tempfile.TemporaryDirectory(prefix="scalelab-") as scratch:
            try:
                with emulate_hosts(trial.num_hosts, parse_link(trial.link)) as hosts:
                    for number in range(len(hosts)):  # one by one: those before one that fails must be ended
                        agents.append(start_agent(trial, directory, hosts, number, scratch))  # noqa: PERF401
                    is_timed_out = _wait(trial, directory, hosts, agents, deadline)
                    codes = [agent.poll() for agent in agents]
                    self.sent_bytes = tuple(host.count_sent_bytes() for host in hosts)
            finally:  # what was on the hosts has been killed, but for one that was on its way there
                for agent in agents:
                    agent.kill()
                    agent.wait()
        hosts_ends = [HostEnd(number, code, is_timed_out) for number, code in enumerate(codes)]
        _check_started(trial, directory, hosts_ends)
        return [end for host_end in hosts_ends for end in _read_ends(trial, directory, host_end)]


def find_pids(trial: Trial, directory: Path) -> list[int] | None:
    """The process ids of all ranks; None: not all have started."""
    try:
        return [int(read_json(place_file(directory, rank))["pid"]) for rank in range(trial.num_processes)]
    except DamagedRun:
        return None


class HostEnd(NamedTuple):
    """How the torchrun of a host ended."""

    number: int
    code: int | None
    """None: it had to be ended by us."""
    is_timed_out: bool


def start_agent(
    trial: Trial, directory: Path, hosts: Sequence[EmulatedHost], number: int, scratch: str
) -> subprocess.Popen[bytes]:
    """Start the torchrun of one host in its own session, so Ctrl-C reaches only the parent."""
    cores = bind_ranks(trial, trial.num_processes, usable_cores())
    ranks = _list_ranks(trial, number)
    torchrun = [
        f"--nnodes={len(hosts)}",
        f"--node-rank={number}",
        f"--nproc-per-node={len(ranks)}",
        f"--master-addr={hosts[0].address}",
        f"--master-port={trial.port or PORT}",
        f"--log-dir={scratch}",
        *("-m", "scalelab.worker.entry.host_rank", str(directory), f"host{number}", json.dumps(cores)),
    ]
    agent = [
        sys.executable,
        "-m",
        "scalelab.worker.entry.host_agent",
        str(os.getpid()),
        str(directory),
        str(number),
    ]
    with host_log(directory, number).open("wb") as log:
        return subprocess.Popen(
            [*hosts[number].prefix(), *agent, *torchrun],
            env=os.environ | describe_host(hosts[number]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def describe_host(host: EmulatedHost) -> dict[str, str]:
    """Library variables that force traffic over the link although the ranks share a machine."""
    return {
        "PYTHONSAFEPATH": "1",  # a file in the working directory must not take the place of a module
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "NCCL_HOSTID": host.name,
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
    }


def _wait(
    trial: Trial,
    directory: Path,
    hosts: Sequence[EmulatedHost],
    agents: Sequence[subprocess.Popen[bytes]],
    deadline: float,
) -> bool:
    """Wait until every torchrun has ended, or shortly after one has failed; gives whether time was up before."""
    poll = select.poll()
    handles = {os.pidfd_open(agent.pid): agent for agent in agents}
    try:
        for handle in handles:
            poll.register(handle, select.POLLIN)
        waiting, has_failed = set(handles), False
        while waiting:
            ended = poll.poll(1e3 * max(0.0, deadline - time.perf_counter()))
            if not ended and not has_failed:
                pids = [pid for host in hosts for pid in list_pids(host.name) if pid not in {a.pid for a in agents}]
                dump_stacks(pids, [log_file(directory, rank) for rank in range(trial.num_processes)])
                return True
            if not ended:
                return False
            for handle, _ in ended:
                poll.unregister(handle)
                waiting.discard(handle)
                if handles[handle].wait() and not has_failed:
                    has_failed, deadline = True, min(deadline, time.perf_counter() + GRACE_SECONDS)
        return False
    finally:
        for handle in handles:
            os.close(handle)


def _check_started(trial: Trial, directory: Path, ends: Sequence[HostEnd]) -> None:
    """A torchrun that failed before any of its ranks started is not a result of the trial."""
    outcomes = [outcome_file(directory, rank) for rank in range(trial.num_processes)]
    failed = [end for end in ends if end.code and end.code > 0]
    files = [*outcomes, *(host_file(directory, end.number) for end in ends)]
    if failed and not any(file.is_file() for file in files):
        log = host_log(directory, failed[0].number)
        words = read_last_words(log)
        number, code = failed[0].number, failed[0].code
        raise LaunchFailed(f"torchrun on host {number} exited with code {code}: {words}; see {log}")


def _read_ends(trial: Trial, directory: Path, end: HostEnd) -> list[RankEnd]:
    """How the ranks of one host ended, as far as its torchrun reports."""
    ranks = _list_ranks(trial, end.number)
    if end.code == 0:
        return [RankEnd(code=0, was_killed=False) for _ in ranks]
    if end.code is None:
        return [RankEnd(code=None, was_killed=True, is_timed_out=end.is_timed_out) for _ in ranks]
    if end.code < 0:
        return [RankEnd(code=None, was_killed=False) for _ in ranks]
    try:
        codes = read_json(host_file(directory, end.number))["exit_codes"]
    except DamagedRun:
        codes = {}
    # A rank without a code was ended by its torchrun, because of another one.
    return [RankEnd(code=codes.get(str(rank)), was_killed=str(rank) not in codes) for rank in ranks]


def _list_ranks(trial: Trial, number: int) -> range:
    """The ranks of one host; the last host may have fewer."""
    first = number * trial.ranks_per_host
    return range(first, min(first + trial.ranks_per_host, trial.num_processes))
