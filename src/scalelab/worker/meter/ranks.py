"""Who this process is, and one directory for all ranks, without a collective.

A collective would hang where only some ranks have a Meter, and would add traffic to the user's network. The
rendezvous store is enough: rank 0 puts the directory there, the others wait for it. Which store:

    the process group's          where there is one
    torchrun's agent's           before that, where torchrun serves it
    none                         one rank needs none

torch is imported only to reach torchrun's store; a process group exists only where torch is loaded already. That
store is there before any rank is, so one that does not answer is not waited for: torch would try again for minutes.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from scalelab.errors import StoreError, UsageError

CONNECT_SECONDS = 5.0
"""How long torchrun's store may take to answer."""
WAIT_SECONDS = 60.0
"""How long a rank waits for rank 0 to make the run."""
UNUSABLE = "-"
"""What rank 0 sends if it could not create the run; never a valid path."""


class RankPlace(NamedTuple):
    """Which of the ranks this process is."""

    rank: int
    num_ranks: int


def find_place() -> RankPlace:
    """From the process group, else from torchrun's variables, else the only rank."""
    distributed = find_process_group()
    if distributed is not None:
        return RankPlace(distributed.get_rank(), distributed.get_world_size())
    size = os.environ.get("WORLD_SIZE", "")
    if "RANK" not in os.environ and size.isdigit() and int(size) > 1:
        raise StoreError(f"WORLD_SIZE is {size}, but neither RANK nor a process group says which rank this is")
    try:
        place = RankPlace(int(os.environ["RANK"]), int(size))
    except (KeyError, ValueError):
        return RankPlace(0, 1)
    return place if 0 <= place.rank < place.num_ranks else RankPlace(0, 1)


def find_process_group() -> Any:
    """`torch.distributed` where it has a default process group, else None."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def open_rendezvous(place: RankPlace) -> Any:
    """The store that the ranks meet at; None for one rank."""
    if place.num_ranks == 1:
        return None
    distributed = find_process_group()
    if distributed is not None:
        return distributed.distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return reach_agent_store(os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
    raise UsageError(
        f"WORLD_SIZE is {place.num_ranks}, but there is no process group to agree on a run:"
        " create the Meter after torch.distributed.init_process_group"
    )


def reach_agent_store(host: str, port: str) -> Any:
    """torchrun's own store; raises `StoreError` where nothing answers."""
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        words = getattr(error, "strerror", None) or error
        raise StoreError(f"cannot reach torchrun's store at {host}:{port}: {words}") from None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))


def agree(place: RankPlace, rendezvous: Any, key: str, make: Callable[[], str]) -> str:
    """What rank 0 makes, on every rank; raises `StoreError` where rank 0 has made nothing."""
    if place.rank == 0:
        text = UNUSABLE
        try:
            text = make()
        finally:
            if rendezvous is not None:
                rendezvous.set(key, text)
        return text
    try:
        rendezvous.wait([key], timedelta(seconds=WAIT_SECONDS))
    except RuntimeError:
        raise StoreError(f"rank 0 created no Meter of this name within {WAIT_SECONDS:g} s") from None
    text = str(rendezvous.get(key), "utf-8")
    if text == UNUSABLE:
        raise NothingAgreed
    return text


class NothingAgreed(StoreError):
    """Rank 0 could not create the run, and has reported it."""
