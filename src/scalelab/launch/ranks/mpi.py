"""Who a process is by MPI itself, where mpi4py is installed: no variable is read.

`MPI.COMM_WORLD` knows rank and size. Who shares a node is found by splitting it by shared memory: `Split_type(SHARED)`.
The lowest rank of a node stands for it, and nodes are numbered by these: that needs one exchange among all ranks, so
all must call. `guess_local_rank` is the short cut of many a homework, the rank modulo the devices of a node.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from scalelab.errors import RankUnknown
from scalelab.launch.ranks.discovery import PROXIES, Membership
from scalelab.records.observations import RankSource

BY_MPI = "Split_type(SHARED)"
"""The source's name beside those that are variables."""
LIBRARY = "MPI4PY_LIBMPI"
"""The variable with the path of the MPI library for mpi4py's wheels."""
ANSWER_SECONDS = 60.0
"""How long all ranks together may take to start MPI and to answer."""


def load_mpi() -> Any:
    """mpi4py's module MPI, which starts MPI as it is imported."""
    if LIBRARY not in os.environ and (library := find_library()):
        os.environ[LIBRARY] = library
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        words = str(error).partition("\n")[0]
        raise RankUnknown(
            f"reading the rank from MPI needs mpi4py, which cannot be imported ({words}): pip install mpi4py and put"
            " the MPI library on LD_LIBRARY_PATH, or start with a launcher that sets variables"
        ) from None


def find_library() -> str | None:
    """Where the MPI library lies that belongs to the launcher of this rank; another one would not know its ranks."""
    try:
        starters = [process.exe() for process in psutil.Process().parents() if process.name().startswith(PROXIES)]
    except psutil.Error:  # it has gone, or is hidden from us
        return None
    places = [Path(program).parents[1] / "lib" for program in starters if len(Path(program).parents) > 1]
    return next((str(place) for place in places if any(place.glob("libmpi.so*"))), None)


def ask_mpi_aside() -> RankSource:
    """What MPI reports to a helper process, so this one stays without MPI. All ranks must call it together."""
    command = [sys.executable, "-P", "-m", "scalelab.launch.ranks.mpi"]
    try:
        # Descriptors stay open: by one of them a library finds its launcher.
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False, close_fds=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        said = json.loads(done.stdout.strip().rpartition("\n")[2] or "{}")
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return RankSource(source=BY_MPI, reason=f"mpi4py did not respond: {error}")
    if "rank" not in said:
        words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return RankSource(source=BY_MPI, reason=said.get("error") or (words or ["mpi4py printed nothing"])[-1])
    fields = {name: said[name] for name in ("rank", "num_ranks", "local_rank")}
    return RankSource(source=BY_MPI, **fields)


def main() -> int:
    """Print what MPI says as one JSON object."""
    try:
        said: dict[str, Any] = dataclasses.asdict(find_by_mpi())
    except RankUnknown as error:
        said = {"error": str(error)}
    sys.stdout.write(json.dumps(said) + "\n")
    return 0


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
        launch=world.bcast(f"mpi.{secrets.token_hex(8)}", root=0),
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


if __name__ == "__main__":
    sys.exit(main())
