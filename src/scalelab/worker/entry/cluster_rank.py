"""One rank of a trial under any launcher: `python -m scalelab.worker.entry.cluster_rank DIRECTORY LAUNCH`.

srun, mpiexec, jsrun or torchrun starts one of these for every rank. It has no torch. It finds out which rank it is,
meets the others, takes its share of the node's cores and then starts the rank itself beside it, with a log of its own
in the trial's directory. Two processes, because only one that outlives the rank can tell how it ended, on any node and
under any launcher: that goes into a file, together with the node's name. It is also who has the stacks written and ends
the rank when time is up, since no launcher hands signals on reliably.

It ends with 0 whatever became of the rank: the trial's launcher reads the files, gives the other ranks a moment to
say what they saw, and then ends the step. LAUNCH tells the files of this launch from those of an earlier one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalelab.errors import LaunchFailed, PeerLeft, RankUnknown, ScalelabError
from scalelab.launch.agreement import (
    end_file,
    kill_group,
    loads_file,
    log_file,
    outcome_file,
    place_file,
    read_words,
)
from scalelab.launch.local import dump_stacks
from scalelab.launch.ranks.discovery import Membership, find_membership, list_claims
from scalelab.launch.ranks.mpi import ask_mpi_aside
from scalelab.launch.ranks.placement import bind_ranks
from scalelab.launch.rendezvous import Meeting, choose_address, find_interface, join_meeting, open_meeting, reach
from scalelab.launch.utilization import watch_rank
from scalelab.records.environment import count_oom_kills, usable_cores
from scalelab.records.files import write_json
from scalelab.records.observations import RankReport, RankSource
from scalelab.records.schema import read_trial
from scalelab.records.trial import SINGLE_PROCESS, Cause, Status, Trial, to_builtins

NEIGHBOUR_SECONDS = 30.0
"""How long the ranks of one node may take to appear, one after the other."""
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

    @property
    def rank(self) -> int:
        return self.member.rank

    def leave_word(self, path: Path, **words: Any) -> None:
        write_json(path, {"launch": self.launch, "node": socket.gethostname(), **words})


def main(directory: str, launch: str) -> int:
    """Run this rank; returns 0 once its end is recorded, however the rank ended."""
    started = time.monotonic()
    for number in STOPPING:
        signal.signal(number, _stop)
    place = Path(directory)
    try:
        trial = read_trial(place)
        seat = Seat(
            directory=place,
            launch=launch,
            trial=trial,
            member=find_member(trial),
            deadline=started + trial.timeout_seconds,
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
    rank, mask, oom_kills = seat.rank, tuple(sorted(usable_cores())), count_oom_kills()
    end: dict[str, Any] = {"code": None, "signal": None, "is_timed_out": False}
    try:
        seat.leave_word(place_file(seat.directory, rank), rank=rank, local_rank=seat.member.local_rank, mask=mask)
        sources = list_sources(seat.trial)
        meeting = meet(seat)
        assignment = make_assignment(seat, meeting) | {"sources": to_builtins(sources)}
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


def meet(seat: Seat) -> Meeting | None:
    """Where the ranks meet; None: this one is alone, or the launcher has arranged it."""
    trial, member = seat.trial, seat.member
    if trial.strategy in SINGLE_PROCESS or trial.is_forecast:
        return None
    if member.launcher == "torchrun":
        return meet_by_torchrun(seat)
    if member.rank > 0:
        return join_meeting(seat.directory, seat.launch, member.rank, seat.deadline)
    return open_meeting(
        seat.directory,
        seat.launch,
        member.num_ranks,
        address=choose_address(os.environ, is_one_node=member.num_nodes == 1),
        port=int(os.environ.get("MASTER_PORT") or 0) if os.environ.get("MASTER_ADDR") else trial.port,
        deadline=seat.deadline,
    )


def meet_by_torchrun(seat: Seat) -> Meeting:
    """torchrun's own meeting place, which must answer; where its agent does not keep it, rank 0 opens it later."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return Meeting(address=address, port=port, interface=None)
    with reach(address, port, rank=seat.rank, master_node=address) as connection:
        return Meeting(address=address, port=port, interface=find_interface(connection.getsockname()[0]))


def make_assignment(seat: Seat, meeting: Meeting | None) -> dict[str, Any]:
    """The rank's `worker.Assignment` as JSON."""
    places = wait_for_neighbours(seat)
    position = [place["rank"] for place in places].index(seat.rank)
    local_rank = position if seat.member.local_rank is None else seat.member.local_rank
    return {
        "directory": str(seat.directory),
        "rank": seat.rank,
        "local_rank": choose_device_number(local_rank, len(places), os.environ.get("CUDA_VISIBLE_DEVICES")),
        "cores": choose_cores(seat.trial, [tuple(place["mask"]) for place in places], position),
        "address": meeting.address if meeting else "",
        "port": meeting.port if meeting else 0,
        "listen_fd": meeting.listen_fd if meeting else None,
        "is_joined": seat.member.launcher == "torchrun",
        "launcher": seat.member.launcher,
        "agreeing": seat.member.agreeing,
        "host_rank": seat.member.local_rank,
    }


def wait_for_neighbours(seat: Seat) -> list[dict[str, Any]]:
    """The words of all ranks on this node, in the order of ranks."""
    node, give_up = socket.gethostname(), min(seat.deadline, time.monotonic() + NEIGHBOUR_SECONDS)
    while True:
        words = [read_words(place_file(seat.directory, rank), seat.launch) for rank in range(seat.trial.num_processes)]
        found = [place for place in words if place is not None and place["node"] == node]
        if len(found) >= (seat.member.num_local_ranks or 1) or time.monotonic() > give_up:
            return found
        time.sleep(0.02)


def choose_cores(trial: Trial, masks: list[tuple[int, ...]], position: int) -> tuple[int, ...]:
    """This rank's cores: from its own mask if the launcher set one, else its share of the node's.

    As many as the local launcher gives, so that trials of every launcher compare like with like.
    """
    mask = masks[position]
    alike = [number for number, other in enumerate(masks) if other == mask]
    return bind_ranks(trial, len(alike), mask)[alike.index(position)]


def choose_device_number(local_rank: int, num_local_ranks: int, visible: str | None) -> int:
    """The GPU of a rank: the only visible one, or the one with its local rank."""
    if visible is not None and num_local_ranks > 1 and len(visible.split(",")) == 1:
        return 0
    return local_rank


def describe_network(seat: Seat, meeting: Meeting | None) -> dict[str, str]:
    """Library variables that are not set yet: the interface that reached the other ranks."""
    told = {"RANK": str(seat.rank), "WORLD_SIZE": str(seat.member.num_ranks)}
    if seat.member.num_nodes == 1:
        told |= {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE}
    elif meeting is not None and meeting.interface:
        told["GLOO_SOCKET_IFNAME"] = meeting.interface
    return {name: value for name, value in told.items() if name not in os.environ or name in ("RANK", "WORLD_SIZE")}


def run_child(seat: Seat, assignment: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """The rank itself, in its own session."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "scalelab.worker.entry.assigned",
        str(os.getpid()),
        json.dumps(assignment),
    ]
    variables = variables | {"LOCAL_RANK": str(assignment["local_rank"])}
    with log_file(seat.directory, seat.rank).open("ab") as log:
        # Descriptors stay open: the listener of rank 0, and the one by which an MPI library finds its launcher.
        child = subprocess.Popen(
            command, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, close_fds=False,
            start_new_session=True,
        )  # fmt: skip
    told = {"cores": assignment["cores"], "rank": seat.rank, "gpu": assignment["local_rank"]}
    try:
        with watch_rank(seat.trial, seat.directory, pid=child.pid, **told) as loads:
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
    report = RankReport(rank=seat.rank, host=socket.gethostname())
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
