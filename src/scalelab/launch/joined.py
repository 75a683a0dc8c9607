"""`JoinedLauncher`: this process is one rank of a job that torchrun, mpiexec or srun has launched already.

The command runs once per rank. On rank 0 this launcher does what the others do for all: it runs the trial, waits for
what every rank leaves behind, and gives one result. The other ranks only run their share (`run_member`).

Rank 0 writes its address into the directory of runs, which all ranks were given alike, or listens where MASTER_ADDR and
MASTER_PORT say (`rendezvous.py`). When all have met, it names the trial to the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from scalelab.errors import DamagedRun, RankUnknown
from scalelab.launch.agreement import (
    DUMP_SIGNAL,
    EXIT_STORAGE,
    kill_group,
    name_rank_process,
    outcome_file,
    report_storage,
)
from scalelab.launch.launcher import check_torch
from scalelab.launch.outcome import RankEnd, conclude_trial
from scalelab.launch.ranks.discovery import Membership, find_membership
from scalelab.launch.ranks.placement import choose_cores, make_assignment, read_mask
from scalelab.launch.rendezvous import (
    Guest,
    Meeting,
    MeetingPlace,
    Neighbours,
    choose_address,
    join_meeting,
    open_meeting,
)
from scalelab.records.environment import read_load_average
from scalelab.records.files import read_json, read_trial, storage_errors
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
    is_alone = member is not None and member.num_ranks == 1 and not member.is_elastic
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
            raise report_storage(directory)
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
        """This rank's end. If torchrun ends it because another rank has failed, the words of that one count."""
        try:
            code = run_member(self._member, self._meeting_place, directory, trial.timeout_seconds)
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
    member: Membership, meeting_place: Path, directory: Path | None = None, timeout_seconds: float | None = None
) -> int:
    """Run this rank's share in a process that has torch; it does not outlive this call.

    Only rank 0 knows the directory of the trial, and sends it to the others. When the time limit passes, the rank's
    stacks go where its errors go, and `TimeoutExpired` is raised.
    """
    meeting = meet(member, meeting_place, os.environ, str(directory.resolve()) if directory else "")
    trial = read_trial(Path(meeting.word))
    member = member if member.local_rank is not None else replace(member, local_rank=meeting.neighbours.position)
    assignment = make_assignment(member, meeting, Path(meeting.word), choose_own_cores(trial, meeting.neighbours))
    listen_fd = meeting.listen_fd
    process = subprocess.Popen(
        name_rank_process(assignment, os.getpid()),
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


def meet(member: Membership, directory: Path, variables: Mapping[str, str], word: str = "") -> Meeting:
    """Meet the other ranks: where MASTER_ADDR and MASTER_PORT say, or by a file in the directory of runs."""
    me = Guest(rank=member.rank, node=socket.gethostname(), mask=read_mask())
    place = find_meeting_place(member, directory, variables)
    if member.rank > 0:
        return join_meeting(place, me)
    try:
        return open_meeting(place, me, member.num_ranks, word)
    finally:
        if place.file is not None:
            place.file.unlink(missing_ok=True)


def find_meeting_place(member: Membership, directory: Path, variables: Mapping[str, str]) -> MeetingPlace:
    """How these ranks find each other; the address of a torchrun is its agents', which listen there."""
    deadline = time.monotonic() + MEETING_SECONDS
    given = {key: value for key, value in variables.items() if not (member.is_elastic and key.startswith("MASTER_"))}
    if member.num_ranks == 1:
        return MeetingPlace(launch="", deadline=deadline)
    if given.get("MASTER_ADDR") and given.get("MASTER_PORT"):
        address, port = given["MASTER_ADDR"], int(given["MASTER_PORT"])
        name = f"{address}:{port}"
        return MeetingPlace(launch=name, address=address, port=port, deadline=deadline, is_patient=True)
    if member.launch is None:
        raise RankUnknown(
            f"rank {member.rank} of {member.num_ranks} ({member.launcher}) cannot find the others: set MASTER_ADDR to"
            " rank 0's node and MASTER_PORT to a free port there, the same on all ranks"
        )
    with storage_errors(directory, "--runs-dir"):
        directory.mkdir(parents=True, exist_ok=True)
    address = choose_address(given, is_one_node=member.num_nodes == 1) if member.rank == 0 else ""
    # A torchrun that was killed may have left a file of the same name; rank 0 writes its own over it.
    return MeetingPlace(
        launch=member.launch, directory=directory, address=address, deadline=deadline, is_patient=member.is_elastic
    )


def choose_own_cores(trial: Trial, neighbours: Neighbours) -> tuple[int, ...]:
    """This rank's share of its host's cores; none where it is alone, or the launcher has bound it by itself.

    Ranks that were bound together, to a socket say, share out what that has.
    """
    is_bound = neighbours.num_alike == 1 and neighbours.num_local_ranks > 1
    return () if is_bound or trial.num_processes == 1 else choose_cores(trial, read_mask(), neighbours)


def describe_member(member: Membership, meeting: Meeting) -> dict[str, str]:
    """Who the rank is, in the names that torch reads."""
    told = {"RANK": str(member.rank), "WORLD_SIZE": str(member.num_ranks), "LOCAL_RANK": str(member.local_rank)}
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
