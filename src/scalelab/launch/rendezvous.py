"""Where ranks on several nodes meet: agreed on through the trial's directory, and checked before anything is trained.

Rank 0 listens and writes its address into the directory, which all nodes share. Every other rank reads it, connects
and says who it is; when all have, rank 0 lets them go. So a node that cannot reach another is told by name, address,
port and reason within seconds, before torch is loaded, and not by a time-out inside a library. The socket that rank 0
listens on is then handed to its process group: no port is chosen twice.

The address is one of rank 0's node that others can reach: MASTER_ADDR where somebody has set it, that of the interface
GLOO_SOCKET_IFNAME, what the node's own name stands for, or the one by which packets leave it. On one node it is
loopback, and nothing listens anywhere else. gloo sends over the same interface, unless it has been told another.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from scalelab.errors import DamagedRun, LaunchFailed, PeerLeft
from scalelab.launch.ranks.discovery import LOOPBACK
from scalelab.records.files import read_json, write_json

CONNECT_SECONDS = 8.0
"""How long a node may take to answer. A route that drops packets does not answer at all."""
HELLO_SECONDS = 5.0
"""How long a new connection may take to identify itself."""
LOOK_SECONDS = 0.05
FAR_AWAY = ("192.0.2.1", 9)
"""An unassigned address (RFC 5737): nothing is sent, only its route is looked up."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks of a trial meet."""

    address: str
    port: int
    interface: str | None
    """Of this node, over which the others are reached; None: unknown."""
    listen_fd: int | None = None
    """Rank 0's, to be handed on."""


def rendezvous_file(directory: Path, launch: str) -> Path:
    """The file with rank 0's address, named after the launch so that an earlier one is not read."""
    return directory / f"rendezvous-{launch}.json"


def open_meeting(directory: Path, launch: str, num_ranks: int, *, address: str, port: int, deadline: float) -> Meeting:
    """Rank 0's side: listen, publish the address, and wait for every other rank."""
    node = socket.gethostname()
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        raise LaunchFailed(
            f"rank 0 on {node} cannot listen on {address}{f':{port}' if port else ''} ({_say(error)}): unset"
            " MASTER_ADDR and MASTER_PORT, or set them to an address and a free port of that node"
        ) from None
    port = listener.getsockname()[1]
    with listener:
        write_json(rendezvous_file(directory, launch), {"address": address, "port": port, "node": node})
        missing = _gather(listener, launch, num_ranks, deadline)
        if missing:
            raise LaunchFailed(
                f"rank {missing[0]} did not connect to {address}:{port} on {node}, or disconnected: see its log"
                " and step.log"
            )
        listener.setblocking(True)
        os.set_inheritable(listener.fileno(), True)
        return Meeting(address=address, port=port, interface=find_interface(address), listen_fd=listener.detach())


def join_meeting(directory: Path, launch: str, rank: int, deadline: float) -> Meeting:
    """Any other rank's side: read where rank 0 is, reach it, and wait until all have."""
    told = _wait_for_word(rendezvous_file(directory, launch), deadline)
    where = (str(told["address"]), int(str(told["port"])))
    with reach(*where, rank=rank, master_node=str(told["node"])) as connection:
        connection.sendall(json.dumps({"launch": launch, "rank": rank}).encode() + b"\n")
        connection.settimeout(max(LOOK_SECONDS, deadline - time.monotonic()))
        try:
            word = connection.recv(16)
        except OSError:
            word = b""
        if not word:
            raise PeerLeft(f"rank 0 on {told['node']} exited before all ranks had connected; see its log")
        return Meeting(address=where[0], port=where[1], interface=find_interface(connection.getsockname()[0]))


def reach(address: str, port: int, *, rank: int, master_node: str) -> socket.socket:
    """A connection to rank 0; raises `LaunchFailed` with the node, the address and the reason where there is none."""
    try:
        return socket.create_connection((address, port), timeout=CONNECT_SECONDS)
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else _say(error)
        raise LaunchFailed(
            f"rank {rank} on {socket.gethostname()} cannot reach rank 0 on {master_node} at {address}:{port}"
            f" ({reason}): set GLOO_SOCKET_IFNAME to an interface that connects the nodes, or MASTER_ADDR to rank 0's"
            " address"
        ) from None


def choose_address(variables: Mapping[str, str], *, is_one_node: bool) -> str:
    """Rank 0's address for the others."""
    if variables.get("MASTER_ADDR"):
        return variables["MASTER_ADDR"]
    if is_one_node:
        return LOOPBACK
    own = {name: addresses[0] for name, addresses in list_addresses().items() if addresses}
    wanted = variables.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if wanted in own:
        return own[wanted]
    by_name = _resolve(socket.gethostname())
    if by_name in own.values():
        return str(by_name)
    return _find_way_out() or next(iter(own.values()), LOOPBACK)


def list_addresses() -> dict[str, list[str]]:
    """The IPv4 addresses of every interface that is up and leads away from this node."""
    is_up = {name: stats.isup for name, stats in psutil.net_if_stats().items()}
    return {
        name: [a.address for a in found if a.family == socket.AF_INET and not a.address.startswith("127.")]
        for name, found in psutil.net_if_addrs().items()
        if is_up.get(name)
    }


def find_interface(address: str) -> str | None:
    """The interface of this node that has an address; None: none has."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.address == address for one in found):
            return name
    return None


def _gather(listener: socket.socket, launch: str, num_ranks: int, deadline: float) -> list[int]:
    """Let every other rank come, and let them go when all have; gives those that are not there."""
    came: dict[int, socket.socket] = {}
    with ExitStack() as stack:
        while len(came) < num_ranks - 1:
            listener.settimeout(max(LOOK_SECONDS, deadline - time.monotonic()))
            try:
                guest = stack.enter_context(listener.accept()[0])
            except TimeoutError:
                return sorted(set(range(1, num_ranks)) - came.keys())
            rank = _greet(guest, launch)
            if rank is None:
                guest.close()
            else:
                came[rank] = guest
        return [rank for rank, guest in sorted(came.items()) if not _let_go(guest)]


def _let_go(guest: socket.socket) -> bool:
    """Notify a rank that all have connected; False: it has disconnected."""
    try:
        guest.sendall(b"go\n")
    except OSError:
        return False
    return True


def _greet(guest: socket.socket, launch: str) -> int | None:
    """The rank of a new connection; None: not a rank."""
    guest.settimeout(HELLO_SECONDS)
    try:
        with guest.makefile("rb") as stream:
            hello = json.loads(stream.readline(200))
        return int(hello["rank"]) if hello["launch"] == launch else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _wait_for_word(path: Path, deadline: float) -> dict[str, object]:
    while time.monotonic() < deadline:
        try:
            return read_json(path)
        except DamagedRun:
            time.sleep(LOOK_SECONDS)
    raise LaunchFailed(
        f"rank 0 did not publish its address: {path.name} is missing; is {path.parent} shared by all nodes?"
    )


def _say(error: OSError) -> str:
    """The system's own words, without those that Python adds."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


def _resolve(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _find_way_out() -> str | None:
    """The address by which packets leave this node."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(FAR_AWAY)
        except OSError:
            return None
        return str(probe.getsockname()[0])
