"""Beside every rank that the forkserver does not fork: `python -m scalelab.launch.supervisor DIRECTORY LAUNCH [WHO]`.

srun, mpiexec, jsrun, torchrun or the launcher of emulated hosts starts one of these for every rank. It has no torch. It
finds out which rank it is, meets the others, takes its share of the node's cores and then starts the rank itself beside
it, with a log of its own in the trial's directory. Two processes, because only one that outlives the rank can say how
it ended, on any node and under any launcher: that goes into a file, together with the node's name. It is also who has
the stacks written and ends the rank when time is up, since no launcher hands signals on reliably.

It ends with 0 whatever became of the rank: the trial's launcher reads the files, gives the other ranks a moment to
say what they saw, and then ends the step. LAUNCH marks the files of this launch. WHO is
the rank's `Membership` as JSON, from a launcher that sets no variables, and the name of its host.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalelab.errors import LaunchFailed, PeerLeft, RankUnknown, ScalelabError
from scalelab.launch.agreement import (
    Assignment,
    end_file,
    kill_group,
    loads_file,
    log_file,
    name_rank_process,
    outcome_file,
    place_file,
    write_words,
)
from scalelab.launch.local import dump_stacks
from scalelab.launch.ranks.discovery import Membership, find_membership, list_claims
from scalelab.launch.ranks.mpi import ask_mpi_aside
from scalelab.launch.ranks.placement import choose_cores, make_assignment, read_mask
from scalelab.launch.rendezvous import (
    Guest,
    Meeting,
    MeetingPlace,
    choose_address,
    join_meeting,
    open_meeting,
)
from scalelab.launch.utilization import watch_rank
from scalelab.records.environment import count_oom_kills
from scalelab.records.files import read_trial, write_json
from scalelab.records.observations import RankReport, RankSource
from scalelab.records.trial import Cause, Status, Trial, to_builtins

LOOPBACK_INTERFACE = "lo"
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What launchers and batch systems end a rank by."""


class Stopped(BaseException):
    """A signal that ends this rank: its launcher's, the batch system's, or Ctrl-C's."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Who and where this rank is."""

    directory: Path
    launch: str
    trial: Trial
    member: Membership
    deadline: float
    """By this node's own clock."""
    host: str = ""
    """The name of an emulated host; empty: the machine's own."""

    @property
    def rank(self) -> int:
        return self.member.rank

    def leave_word(self, path: Path, **words: Any) -> None:
        write_words(path, {"launch": self.launch, "node": self.host or socket.gethostname(), **words})


def main(directory: str, launch: str, who: str = "") -> int:
    """Run this rank; returns 0 once its end is recorded, however the rank ended."""
    started = time.monotonic()
    for number in STOPPING:
        signal.signal(number, _stop)
    place = Path(directory)
    try:
        trial = read_trial(place)
        told = json.loads(who) if who else {}
        seat = Seat(
            directory=place,
            launch=launch,
            trial=trial,
            member=Membership(**told["member"]) if told else find_member(trial),
            deadline=started + trial.timeout_seconds,
            host=told.get("host", ""),
        )
    except ScalelabError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the only place where it can be read
        return error.exit_code
    take_part(seat)
    return 0


def find_member(trial: Trial) -> Membership:
    """The rank of this process; raises `RankUnknown` if it does not belong to the trial."""
    try:
        member = find_membership(os.environ)
    except RankUnknown:  # some launchers say no number of ranks, which is known here
        member = find_membership(os.environ | {"WORLD_SIZE": str(trial.num_processes)})
    if member is None:
        raise RankUnknown(
            "no variable names this process's rank: check that mpiexec is the MPI that its --version reports"
        )
    if member.num_ranks != trial.num_processes:
        raise RankUnknown(
            f"{member.launcher} reports rank {member.rank} of {member.num_ranks} ({', '.join(member.variables)}), but"
            f" the trial has {trial.num_processes}: unset the variables left over from an earlier launch"
        )
    return member


def take_part(seat: Seat) -> None:
    """Meet the others, run the rank, and leave word how it ended."""
    rank, oom_kills = seat.rank, count_oom_kills()
    end: dict[str, Any] = {"code": None, "signal": None, "is_timed_out": False}
    try:
        meeting = meet(seat)
        cores = choose_cores(seat.trial, read_mask(), meeting.neighbours)
        assignment = make_assignment(seat.member, meeting, seat.directory, cores)
        assignment = replace(assignment, host=seat.host, sources=list_sources(seat.trial))
        end |= run_child(seat, assignment, describe_network(seat, meeting))
    except Stopped as stop:
        end["signal"] = stop.args[0]
    except LaunchFailed as error:
        cause = Cause.LOST_PEER if isinstance(error, PeerLeft) else Cause.LAUNCHER
        report_failure(seat, str(error), cause)
        end["code"] = 1
    ignore_signals()
    has_oom_kill = oom_kills is not None and (count_oom_kills() or 0) > oom_kills
    seat.leave_word(end_file(seat.directory, rank), rank=rank, has_oom_kill=has_oom_kill, **end)


def meet(seat: Seat) -> Meeting:
    """Say where this rank is, and meet the others."""
    place, me = arrive(seat)
    return open_meeting(place, me, seat.member.num_ranks) if seat.rank == 0 else join_meeting(place, me)


def arrive(seat: Seat) -> tuple[MeetingPlace, Guest]:
    """Leave word that this rank has begun; gives where it meets the others, and what it says there."""
    seat.leave_word(place_file(seat.directory, seat.rank), rank=seat.rank)
    address, port = choose_listener(seat) if seat.rank == 0 else ("", 0)
    place = MeetingPlace(
        launch=seat.launch, directory=seat.directory, address=address, port=port, deadline=seat.deadline
    )
    return place, Guest(rank=seat.rank, node=socket.gethostname(), mask=read_mask())


def choose_listener(seat: Seat) -> tuple[str, int]:
    """The address and port that rank 0 listens on. Those of a torchrun are its agents', which listen there."""
    is_one_node = seat.member.num_nodes == 1
    if seat.member.is_elastic:
        given = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
        return choose_address(given, is_one_node=is_one_node), 0
    port = int(os.environ.get("MASTER_PORT") or 0) if os.environ.get("MASTER_ADDR") else seat.trial.port
    return choose_address(os.environ, is_one_node=is_one_node), port


def list_sources(trial: Trial) -> tuple[RankSource, ...]:
    """What every source reports of this rank; MPI itself is queried only if the trial requests it."""
    by_variables = tuple(
        RankSource(
            source=claim.source,
            rank=claim.rank,
            num_ranks=claim.num_ranks,
            local_rank=claim.local_rank,
            variables=tuple(dict.fromkeys(claim.variables)),
        )
        for claim in list_claims(os.environ)
    )
    return (*by_variables, ask_mpi_aside()) if "mpi" in trial.instruments else by_variables


def describe_network(seat: Seat, meeting: Meeting) -> dict[str, str]:
    """Library variables that are not set yet: the interface that reached the other ranks."""
    told = {"RANK": str(seat.rank), "WORLD_SIZE": str(seat.member.num_ranks)}
    if seat.member.num_nodes == 1:
        told |= {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE}
    elif meeting.interface:
        told["GLOO_SOCKET_IFNAME"] = meeting.interface
    return {name: value for name, value in told.items() if name not in os.environ or name in ("RANK", "WORLD_SIZE")}


def run_child(seat: Seat, assignment: Assignment, variables: dict[str, str]) -> dict[str, Any]:
    """The rank itself, in its own session."""
    variables = os.environ | variables | {"LOCAL_RANK": str(assignment.local_rank)}
    with log_file(seat.directory, seat.rank).open("ab") as log:
        # Descriptors stay open: the listener of rank 0, and the one by which an MPI library finds its launcher.
        child = subprocess.Popen(
            name_rank_process(assignment, os.getpid()), env=variables, stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, close_fds=False, start_new_session=True,
        )  # fmt: skip
    try:
        with watch_rank(seat.trial, assignment, child.pid) as loads:
            code = child.wait(max(0.0, seat.deadline - time.monotonic()))
        if loads:
            seat.leave_word(loads_file(seat.directory, seat.rank), loads=to_builtins(loads))
        return {"code": code}
    except subprocess.TimeoutExpired:
        dump_stacks([child.pid], [log_file(seat.directory, seat.rank)])
        return {"is_timed_out": True}
    finally:
        if not kill_group(child.pid):
            child.kill()
        child.wait()


def report_failure(seat: Seat, reason: str, cause: Cause) -> None:
    """What a rank writes that failed; torch was never loaded."""
    with log_file(seat.directory, seat.rank).open("a", encoding="utf-8") as log:
        log.write(f"error: {reason}\n")
    failure = {"status": Status.CRASHED, "cause": cause, "reason": reason, "traceback": ""}
    report = RankReport(rank=seat.rank, host=seat.host or socket.gethostname())
    write_json(outcome_file(seat.directory, seat.rank), {"report": to_builtins(report), "failure": failure})


def _stop(number: int, _: object) -> None:
    ignore_signals()  # some launchers send several
    raise Stopped(number)


def ignore_signals() -> None:
    """From now on nothing interrupts the last word."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
