"""Who a process is by MPI itself, where mpi4py is installed: no variable is read.

`MPI.COMM_WORLD` knows rank and size. Who shares a node is found by splitting it by shared memory: `Split_type(SHARED)`.
The lowest rank of a node stands for it, and nodes are numbered by these: that needs one exchange among all ranks, so
all must call. `guess_local_rank` is the short cut of many a homework, the rank modulo the devices of a node.
"""

from __future__ import annotations

import importlib
from typing import Any

from scalelab.errors import RankUnknown
from scalelab.ranks.discovery import Membership


def load_mpi() -> Any:
    """mpi4py's module MPI, which starts MPI as it is imported."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        raise RankUnknown(
            f"asking MPI who this rank is needs mpi4py, which cannot be imported ({error}): pip install mpi4py, or"
            " start with a launcher that sets variables"
        ) from None


def find_by_mpi(mpi: Any = None) -> Membership:
    """What MPI says. All ranks must call it together."""
    mpi = mpi or load_mpi()
    world = mpi.COMM_WORLD
    rank = world.Get_rank()
    local = world.Split_type(mpi.COMM_TYPE_SHARED, key=rank)
    leader = local.bcast(rank, root=0)
    leaders = sorted(set(world.allgather(leader)))
    found = Membership(
        launcher="mpi4py",
        rank=rank,
        num_ranks=world.Get_size(),
        local_rank=local.Get_rank(),
        num_local_ranks=local.Get_size(),
        node=leaders.index(leader),
        num_nodes=len(leaders),
        variables=("MPI.COMM_WORLD", "Split_type"),
    )
    local.Free()
    return found


def guess_local_rank(rank: int, num_devices: int) -> int:
    """The device by the rank alone: wrong where nodes hold different numbers of ranks, or ranks go round the nodes."""
    return rank % num_devices


def compare_memberships(found: Membership, by_mpi: Membership) -> str | None:
    """How two ways to the same rank differ; None: they agree as far as both know."""
    names = ("rank", "num_ranks", "local_rank", "num_local_ranks", "num_nodes")
    pairs = [(name, getattr(found, name), getattr(by_mpi, name)) for name in names]
    differing = [f"{name} {a} or {b}" for name, a, b in pairs if a is not None and b is not None and a != b]
    return f"{found.launcher} and {by_mpi.launcher} differ: {', '.join(differing)}" if differing else None
