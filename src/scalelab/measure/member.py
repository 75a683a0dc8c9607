"""One rank of a training that somebody else has launched.

    python -m scalelab.measure.member PARENT DIRECTORY DEVICE MEETING

torchrun, mpiexec or srun starts `scalelab train` on every rank, and each of them starts one of these beside itself,
because the command itself has no torch. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say who it is and where the
others are. MEETING is empty where the launcher has arranged that; where the ranks have met already it is the socket
that rank 0 listens on, and `joined` for the others. Only rank 0 knows the directory of the run (the others are given
`-`); it tells them through the process group.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from scalelab.environment import usable_cores
from scalelab.files import read_json
from scalelab.measure.agreement import die_with_parent
from scalelab.measure.worker import Assignment, run_rank
from scalelab.ranks.discovery import find_membership
from scalelab.ranks.placement import bind_ranks
from scalelab.trial import Trial, from_builtins


def main(parent: str, directory: str, device: str, meeting: str) -> int:
    """Join the others, learn where the run is, and train."""
    die_with_parent(int(parent))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    if int(os.environ["WORLD_SIZE"]) > 1:
        if device == "cuda":
            torch.cuda.set_device(local_rank)
        join_group(rank, "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", meeting)
        told = [directory]
        dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
        directory = told[0]
    member = find_membership(os.environ)
    assignment = Assignment(
        directory=directory,
        rank=rank,
        local_rank=local_rank,
        cores=choose_cores(directory, rank) if dist.is_initialized() else (),
        launcher=member.launcher if member else "",
        agreeing=member.agreeing if member else (),
        host_rank=member.local_rank if member else None,
    )
    return run_rank(assignment)


def choose_cores(directory: str, rank: int) -> tuple[int, ...]:
    """This rank's share of its host's cores by the trial's binding; none where the launcher has bound ranks itself."""
    mine = (socket.gethostname(), usable_cores())
    everybody: list[tuple[str, tuple[int, ...]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    here = [number for number, (host, _) in enumerate(everybody) if host == mine[0]]
    if any(everybody[number][1] != mine[1] for number in here):
        return ()
    trial = from_builtins(read_json(Path(directory) / "trial.json"), Trial)
    return bind_ranks(trial, len(here), mine[1])[here.index(rank)]


def join_group(rank: int, backend: str, meeting: str) -> None:
    """Meet the others where the variables say; on rank 0, at the socket that they have come to already."""
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
