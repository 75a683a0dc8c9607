"""Where ranks meet, and what they send each other there, before torch is loaded.

Rank 0 listens and writes its address into a directory that all nodes share, or listens where MASTER_ADDR and
MASTER_PORT say. Every other rank reads that one file, connects and says who it is: its rank, its node and its cores.
When all have come, rank 0 sends each its place among the ranks of its node and lets it go. So n ranks open n files and
n connections, and a node that cannot reach another is named with address, port and reason within seconds, not by a
time-out inside a library. The socket that rank 0 listens on is then handed to its process group: no port is chosen
twice.

The address is one of rank 0's node that others can reach: MASTER_ADDR if it is set, that of the interface
GLOO_SOCKET_IFNAME, what the node's own name stands for, or the one by which packets leave it. On one node it is
loopback, and nothing listens anywhere else. gloo sends over the same interface, unless another one is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from scalelab.errors import DamagedRun, LaunchFailed, PeerLeft
from scalelab.launch.agreement import write_words
from scalelab.records.files import read_json

LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 8.0
"""How long a node may take to answer. A route that drops packets does not answer at all."""
ANSWER_SECONDS = 5.0
"""How long rank 0 tries to answer one rank that has come."""
LOOK_SECONDS = 0.05
MOST_PAUSE_SECONDS = 0.4
"""How long a rank waits between two looks for the file of rank 0, in the end."""
MOST_WAIT_SECONDS = 3600.0
"""Of one wait for ranks: the time limit of a training run is longer than the kernel can wait at once."""
MOST_HELLO_BYTES = 65536
SPARE_FILES = 64
"""Descriptors that rank 0 needs besides one for every rank."""
FAR_AWAY = ("192.0.2.1", 9)
"""An unassigned address (RFC 5737): nothing is sent, only its route is looked up."""


@dataclass(frozen=True, kw_only=True)
class Guest:
    """What a rank says when it comes."""

    rank: int
    node: str
    """The name of its machine."""
    mask: tuple[int, ...]
    """The cores that it may use there."""


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """A rank's place among those of its machine; the defaults are those of a rank that is alone there."""

    num_local_ranks: int = 1
    position: int = 0
    num_alike: int = 1
    """Ranks of the machine that may use the same cores."""
    position_alike: int = 0


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks of a trial have met."""

    address: str
    port: int
    interface: str | None
    """Of this node, over which the others are reached; None: unknown."""
    neighbours: Neighbours
    word: str = ""
    """What rank 0 sent to all the others."""
    listen_fd: int | None = None
    """Rank 0's, to be handed on."""


@dataclass(frozen=True, kw_only=True)
class MeetingPlace:
    """How the ranks of one launch find rank 0."""

    launch: str
    """A name that no other launch has."""
    directory: Path | None = None
    """Where rank 0 publishes its address; None: all ranks know it."""
    address: str = LOOPBACK
    """What rank 0 listens on, and what the others connect to without a directory."""
    port: int = 0
    deadline: float
    """By `time.monotonic`."""
    is_patient: bool = False
    """Whether a refused connection is tried again until the deadline: rank 0 may not have come yet."""

    @property
    def file(self) -> Path | None:
        """The file with rank 0's address, named after the launch so that an earlier one is not read."""
        return self.directory and self.directory / f"rendezvous-{self.launch}.json"

    def seconds_left(self) -> float:
        return max(LOOK_SECONDS, self.deadline - time.monotonic())


def open_meeting(place: MeetingPlace, me: Guest, num_ranks: int, word: str = "") -> Meeting:
    """Rank 0's side: listen, publish the address, wait for every other rank and send each its place."""
    allow_connections(num_ranks)
    address = place.address
    with _listen(address, place.port, num_ranks) as listener:
        port = listener.getsockname()[1]
        if place.file is not None:
            write_words(place.file, {"address": address, "port": port, "node": me.node})
        with ExitStack() as stack:
            came, missing = _gather(listener, place, num_ranks, stack)
            if not missing:
                neighbours = seat_guests([me, *(guest for guest, _ in came.values())])
                told = {rank: {"neighbours": asdict(neighbours[rank]), "word": word} for rank in came}
                missing = [rank for rank, (_, connection) in came.items() if not _tell(connection, told[rank])]
        if missing:
            raise LaunchFailed(
                f"rank {missing[0]} did not connect to {address}:{port} on {me.node}, or disconnected: see its log"
                " and step.log"
            )
        listener.setblocking(True)
        os.set_inheritable(listener.fileno(), True)
        return Meeting(
            address=address,
            port=port,
            interface=find_interface(address),
            neighbours=neighbours[me.rank],
            word=word,
            listen_fd=listener.detach(),
        )


def join_meeting(place: MeetingPlace, me: Guest) -> Meeting:
    """Any other rank's side: find rank 0, reach it, say who this is, and wait until all have."""
    while True:
        try:
            with visit(place, me) as visiting:
                return visiting.wait_for_answer(place)
        except LaunchFailed:
            if not place.is_patient or time.monotonic() > place.deadline:
                raise
            time.sleep(LOOK_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A rank that has come to rank 0, and waits until all have."""

    connection: socket.socket
    address: str
    port: int
    node: str

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def wait_for_answer(self, place: MeetingPlace) -> Meeting:
        """What rank 0 says when all have come; raises `PeerLeft` if it has gone."""
        self.connection.settimeout(place.seconds_left())
        try:
            with self.connection.makefile("rb") as stream:
                told = json.loads(stream.readline())
            neighbours, word = Neighbours(**told["neighbours"]), str(told["word"])
        except (OSError, ValueError, TypeError, KeyError):
            raise PeerLeft(f"rank 0 on {self.node} exited before all ranks had connected; see its log") from None
        interface = find_interface(self.connection.getsockname()[0])
        return Meeting(address=self.address, port=self.port, interface=interface, neighbours=neighbours, word=word)


def visit(place: MeetingPlace, me: Guest) -> Visit:
    """Find rank 0, reach it, and say who this is."""
    where = _find_first(place)
    address, port, node = str(where["address"]), int(str(where["port"])), str(where["node"])
    connection = reach(address, port, rank=me.rank, master_node=node)
    with contextlib.suppress(OSError):  # one that has gone does not answer either
        connection.sendall(json.dumps({"launch": place.launch, **asdict(me)}).encode() + b"\n")
    return Visit(connection=connection, address=address, port=port, node=node)


def seat_guests(guests: Sequence[Guest]) -> dict[int, Neighbours]:
    """Every rank's place among those of its machine, in the order of ranks."""
    in_order = sorted(guests, key=lambda guest: guest.rank)
    on_node = Counter(guest.node for guest in in_order)
    alike = Counter((guest.node, guest.mask) for guest in in_order)
    seen_node: Counter[str] = Counter()
    seen_alike: Counter[tuple[str, tuple[int, ...]]] = Counter()
    found = {}
    for guest in in_order:
        group = (guest.node, guest.mask)
        found[guest.rank] = Neighbours(
            num_local_ranks=on_node[guest.node],
            position=seen_node[guest.node],
            num_alike=alike[group],
            position_alike=seen_alike[group],
        )
        seen_node[guest.node] += 1
        seen_alike[group] += 1
    return found


def allow_connections(num_ranks: int) -> None:
    """Raise the limit of open files, often 1024, to what rank 0 needs; its process group inherits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_ranks + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


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


def _listen(address: str, port: int, num_ranks: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family, backlog=max(1024, num_ranks))
    except OSError as error:
        raise LaunchFailed(
            f"rank 0 on {socket.gethostname()} cannot listen on {address}{f':{port}' if port else ''} ({_say(error)}):"
            " unset MASTER_ADDR and MASTER_PORT, or set them to an address and a free port of that node"
        ) from None


Arrivals = dict[int, tuple[Guest, socket.socket]]


def _gather(
    listener: socket.socket, place: MeetingPlace, num_ranks: int, stack: ExitStack
) -> tuple[Arrivals, list[int]]:
    """Wait for every other rank; gives those that came, and those that did not or have gone again.

    One that says nothing keeps none of the others waiting. Connections are closed with the stack.
    """
    came: Arrivals = {}
    heard: dict[socket.socket, bytes] = {}
    ranks: dict[socket.socket, int] = {}
    listener.setblocking(False)
    selector = stack.enter_context(selectors.DefaultSelector())
    selector.register(listener, selectors.EVENT_READ)
    while len(came) < num_ranks - 1:
        ready = [key.fileobj for key, _ in selector.select(min(MOST_WAIT_SECONDS, place.seconds_left()))]
        if not ready and time.monotonic() >= place.deadline:
            return came, sorted(set(range(1, num_ranks)) - came.keys())
        for speaker in ready:
            assert isinstance(speaker, socket.socket)
            if speaker is listener:
                connection = stack.enter_context(listener.accept()[0])
                connection.setblocking(False)
                heard[connection] = b""
                selector.register(connection, selectors.EVENT_READ)
                continue
            if speaker in ranks:  # a rank that has come says nothing more until it is answered: it has left
                return came, [ranks[speaker]]
            heard[speaker] += _receive(speaker)
            guest = _understand(heard[speaker], place.launch)
            if guest is not None and 0 < guest.rank < num_ranks:
                came[guest.rank], ranks[speaker] = (guest, speaker), guest.rank
            elif _is_stranger(heard[speaker]):
                selector.unregister(speaker)
                speaker.close()
    return came, []


def _is_stranger(heard: bytes) -> bool:
    """Whether a connection that is not a rank's will not become one."""
    return not heard or heard.endswith(b"\n") or len(heard) > MOST_HELLO_BYTES


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(MOST_HELLO_BYTES)
    except OSError:
        return b""


def _understand(hello: bytes, launch: str) -> Guest | None:
    """Who says this; None: not a rank of this launch, or not all of it has come."""
    if not hello.endswith(b"\n"):
        return None
    try:
        said = json.loads(hello)
        guest = Guest(rank=int(said["rank"]), node=str(said["node"]), mask=tuple(said["mask"]))
        return guest if said["launch"] == launch else None
    except (ValueError, KeyError, TypeError):
        return None


def _tell(connection: socket.socket, told: Mapping[str, Any]) -> bool:
    """Send a rank its place, now that all have come; False: it has disconnected."""
    connection.settimeout(ANSWER_SECONDS)
    try:
        connection.sendall(json.dumps(told).encode() + b"\n")
    except OSError:
        return False
    return True


def _find_first(place: MeetingPlace) -> dict[str, object]:
    """Where rank 0 is."""
    if place.file is None:
        return {"address": place.address, "port": place.port, "node": place.address}
    pause = LOOK_SECONDS
    while True:
        with contextlib.suppress(DamagedRun):
            if place.file.is_file():
                return read_json(place.file)
        if time.monotonic() > place.deadline:
            break
        time.sleep(pause)
        pause = min(MOST_PAUSE_SECONDS, 1.5 * pause)
    raise LaunchFailed(
        f"rank 0 did not publish its address: {place.file.name} is missing; is {place.file.parent} shared by all nodes?"
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
