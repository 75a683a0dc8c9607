"""One rank of an externally launched training run.

    python -m scalelab.worker.entry.member PARENT DIRECTORY DEVICE MEETING WHO

torchrun, mpiexec or srun starts `scalelab train` on every rank, and each of them starts one of these beside itself,
because the command itself has no torch. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say who it is and where the
others are. MEETING is empty where the launcher has arranged that; where the ranks have met already it is the socket
that rank 0 listens on, and `joined` for the others. Only rank 0 knows the directory of the run (the others are given
`-`); it tells them through the process group. WHO is what the command has found out of the rank, before it set RANK
and others itself: who started it, who agrees, and its number on the host. Where nobody says that, it is the place among
the ranks with the same host name.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from scalelab.launch.agreement import die_with_parent
from scalelab.launch.ranks.placement import bind_ranks
from scalelab.records.environment import usable_cores
from scalelab.records.schema import read_trial
from scalelab.worker.entry.cluster_rank import choose_device_number
from scalelab.worker.worker import Assignment, run_rank

Place = tuple[str, tuple[int, ...]]
"""The host of a rank, and the cores that it may use there."""


def main(parent: str, directory: str, device: str, meeting: str, who: str) -> int:
    """Join the others, learn where the run is, and train."""
    die_with_parent(int(parent))
    rank, known = int(os.environ["RANK"]), json.loads(who)
    places: list[Place] = [(socket.gethostname(), usable_cores())]
    if int(os.environ["WORLD_SIZE"]) > 1:
        join_group(rank, "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", meeting)
        told = [directory]
        dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
        directory, places = told[0], gather_places(places[0])
    here = list_neighbours(places, rank)
    host_rank = here.index(rank) if known["local_rank"] is None else known["local_rank"]
    local_rank = choose_device_number(host_rank, len(here), os.environ.get("CUDA_VISIBLE_DEVICES"))
    os.environ.setdefault("LOCAL_RANK", str(host_rank))
    if device == "cuda" and local_rank < torch.cuda.device_count():  # otherwise the rank says what it lacks
        torch.cuda.set_device(local_rank)
    assignment = Assignment(
        directory=directory,
        rank=rank,
        local_rank=local_rank,
        cores=choose_cores(directory, places, rank) if len(places) > 1 else (),
        launcher=known["launcher"],
        agreeing=tuple(known["agreeing"]),
        host_rank=host_rank,
    )
    return run_rank(assignment)


def gather_places(mine: Place) -> list[Place]:
    """Where every rank is, in order."""
    everybody = [mine] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def list_neighbours(places: Sequence[Place], rank: int) -> list[int]:
    """The ranks on the host of this one, itself among them."""
    return [number for number, (host, _) in enumerate(places) if host == places[rank][0]]


def choose_cores(directory: str, places: Sequence[Place], rank: int) -> tuple[int, ...]:
    """This rank's share of its host's cores by the trial's binding; none where the launcher has bound it by itself.

    Ranks that were bound together, to a socket say, share out what that has."""
    here, mask = list_neighbours(places, rank), places[rank][1]
    alike = [number for number in here if places[number][1] == mask]
    if len(alike) == 1 and len(here) > 1:
        return ()
    trial = read_trial(Path(directory))
    return bind_ranks(trial, len(alike), mask)[alike.index(rank)]


def join_group(rank: int, backend: str, meeting: str) -> None:
    """Connect at the address in the environment; on rank 0, at the socket already in use."""
    if not meeting:
        dist.init_process_group(backend)
        return
    size, address, port = int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, size, rank == 0, master_listen_fd=int(meeting) if rank == 0 else None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is destroyed, as in every rank: see `leave_together`
