"""`JoinedLauncher`: this process is one rank of a job that torchrun, mpiexec or srun has launched already.

The command runs once per rank. On rank 0 this launcher does what the others do for all: it runs the trial, waits for
what every rank leaves behind, and gives one result. The other ranks only run their share (`run_member`).

torchrun says where ranks meet, and so does whoever sets MASTER_ADDR and MASTER_PORT. Other launchers do not: then rank
0 writes its address into the directory of runs, which all ranks were given alike (`rendezvous.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from scalelab.errors import DamagedRun, RankUnknown, StorageFull
from scalelab.launch.agreement import DUMP_SIGNAL, EXIT_STORAGE, kill_group, outcome_file
from scalelab.launch.launcher import check_torch
from scalelab.launch.outcome import RankEnd, conclude_trial
from scalelab.launch.ranks.discovery import Membership, find_membership
from scalelab.launch.rendezvous import Meeting, choose_address, join_meeting, open_meeting, rendezvous_file
from scalelab.records.environment import read_load_average
from scalelab.records.files import read_json, storage_errors
from scalelab.records.trial import Trial, TrialResult

WAIT_SECONDS = 15.0
"""How long rank 0 waits for the others' last words once it has ended."""
MEETING_SECONDS = 300.0
"""How long ranks may take to connect: nodes load programs from one file system."""
DUMP_SECONDS = 2.0
"""How long a rank may take to write its stacks after the time limit."""


def find_member(variables: Mapping[str, str]) -> Membership | None:
    """This process's rank in an externally launched job; None: not under a launcher, or the only rank."""
    member = find_membership(variables)
    is_alone = member is not None and member.num_ranks == 1 and member.launcher != "torchrun"
    return None if is_alone else member


class JoinedLauncher:
    """Rank 0's launcher in an externally launched job."""

    def __init__(self, member: Membership, meeting_place: Path) -> None:
        self._member, self._meeting_place = member, meeting_place

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        started_at, launched = datetime.now(UTC).isoformat(), time.perf_counter()
        load = read_load_average()
        for file in directory.glob("rank*.json"):
            file.unlink()
        mine = self._run(trial, directory)
        # torchrun ends the whole job as soon as one rank has failed; what is known of it is written first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if mine.code == EXIT_STORAGE:
            raise StorageFull(f"a rank could not write to {directory}: free some space, then run 'scalelab resume'")
        return conclude_trial(
            trial,
            directory,
            [mine, *_wait_for_others(trial, directory, 0.0 if mine.was_killed else WAIT_SECONDS)],
            started_at=started_at,
            launched=launched,
            wall_seconds=time.perf_counter() - launched,
            load_before=load,
            has_oom_kill=False,
        )

    def _run(self, trial: Trial, directory: Path) -> RankEnd:
        """This rank's end. Told to end by torchrun, because another rank has failed: then that one's words count."""
        try:
            code = run_member(
                self._member, self._meeting_place, trial.device, str(directory.resolve()), trial.timeout_seconds
            )
        except subprocess.TimeoutExpired:
            return RankEnd(code=None, was_killed=True, is_timed_out=True)
        except KeyboardInterrupt:
            others = range(1, trial.num_processes)
            if not any(_has_failed(outcome_file(directory, rank)) for rank in others):
                raise
            return RankEnd(code=None, was_killed=True)
        return RankEnd(code=code, was_killed=False)

    def check(self) -> None:
        check_torch()

    def close(self) -> None:
        """The other ranks are not ours to end."""


def run_member(
    member: Membership, meeting_place: Path, device: str, directory: str = "-", timeout_seconds: float | None = None
) -> int:
    """Run this rank's share in a process that has torch; it does not outlive this call.

    When the time limit passes, its stacks go where its errors go, and `TimeoutExpired` is raised.
    """
    meeting = meet(member, meeting_place, os.environ)
    listen_fd = None if meeting is None else meeting.listen_fd
    told = "" if meeting is None else str(listen_fd) if listen_fd is not None else "joined"
    who = json.dumps({"launcher": member.launcher, "agreeing": member.agreeing, "local_rank": member.local_rank})
    command = [
        sys.executable,
        "-P",
        "-m",
        "scalelab.worker.entry.member",
        str(os.getpid()),
        directory,
        device,
        told,
        who,
    ]
    process = subprocess.Popen(
        command,
        env=os.environ | describe_member(member, meeting),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        pass_fds=() if listen_fd is None else (listen_fd,),
    )
    if listen_fd is not None:
        os.close(listen_fd)
    try:
        return process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(DUMP_SIGNAL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DUMP_SECONDS)
        raise
    finally:
        if process.poll() is None and not kill_group(process.pid):
            process.send_signal(signal.SIGKILL)
        process.wait()


def meet(member: Membership, place: Path, variables: Mapping[str, str]) -> Meeting | None:
    """The rendezvous address; None: already set in the environment."""
    if member.num_ranks == 1 or (variables.get("MASTER_ADDR") and variables.get("MASTER_PORT")):
        return None
    if member.launch is None:
        raise RankUnknown(
            f"rank {member.rank} of {member.num_ranks} ({member.launcher}) cannot find the others: set MASTER_ADDR to"
            " rank 0's node and MASTER_PORT to a free port there, the same on all ranks"
        )
    deadline = time.monotonic() + MEETING_SECONDS
    with storage_errors(place, "--runs-dir"):
        place.mkdir(parents=True, exist_ok=True)
    if member.rank > 0:
        return join_meeting(place, member.launch, member.rank, deadline)
    try:
        address = choose_address(variables, is_one_node=member.num_nodes == 1)
        return open_meeting(place, member.launch, member.num_ranks, address=address, port=0, deadline=deadline)
    finally:
        rendezvous_file(place, member.launch).unlink(missing_ok=True)


def describe_member(member: Membership, meeting: Meeting | None) -> dict[str, str]:
    """Who the rank is, in the names that torch reads."""
    told = {"RANK": str(member.rank), "WORLD_SIZE": str(member.num_ranks)}
    if member.local_rank is not None:
        told["LOCAL_RANK"] = str(member.local_rank)
    if meeting is not None:
        told |= {"MASTER_ADDR": meeting.address, "MASTER_PORT": str(meeting.port)}
        if meeting.interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            told["GLOO_SOCKET_IFNAME"] = meeting.interface
    return told


def _has_failed(outcome: Path) -> bool:
    try:
        return bool(read_json(outcome).get("failure"))
    except DamagedRun:
        return False


def _wait_for_others(trial: Trial, directory: Path, seconds: float) -> list[RankEnd]:
    """How the other ranks ended, as far as their files show."""
    others = range(1, trial.num_processes)
    give_up = time.perf_counter() + seconds
    while time.perf_counter() < give_up and not all(outcome_file(directory, rank).is_file() for rank in others):
        time.sleep(0.05)
        list(directory.iterdir())  # has NFS ask its server what there is
    is_impatient = seconds == 0
    return [
        RankEnd(code=0 if outcome_file(directory, rank).is_file() else None, was_killed=is_impatient) for rank in others
    ]
