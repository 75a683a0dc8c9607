"""Where ranks meet: everybody comes, or who did not is named."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from scalelab.errors import LaunchFailed
from scalelab.launch.rendezvous import (
    Meeting,
    choose_address,
    find_interface,
    join_meeting,
    open_meeting,
    rendezvous_file,
)
from scalelab.records.files import write_json


def open_here(directory: Path, num_ranks: int, seconds: float = 10.0, address: str = "127.0.0.1") -> Meeting:
    return open_meeting(directory, "l", num_ranks, address=address, port=0, deadline=time.monotonic() + seconds)


def test_all_ranks_come_and_the_socket_can_be_handed_on(tmp_path: Path) -> None:
    joined: dict[int, Meeting] = {}

    def join(rank: int) -> None:
        joined[rank] = join_meeting(tmp_path, "l", rank, time.monotonic() + 10)

    guests = [threading.Thread(target=join, args=(rank,)) for rank in (1, 2)]
    for guest in guests:
        guest.start()
    meeting = open_here(tmp_path, 3)
    for guest in guests:
        guest.join()
    assert {one.port for one in joined.values()} == {meeting.port}
    assert joined[1].interface == meeting.interface == find_interface("127.0.0.1")
    assert meeting.listen_fd is not None
    assert os.get_inheritable(meeting.listen_fd)
    with socket.socket(fileno=meeting.listen_fd) as listener:
        assert listener.getsockname() == ("127.0.0.1", meeting.port)


def test_a_stranger_is_not_taken_for_a_rank(tmp_path: Path) -> None:
    def knock() -> None:
        while not rendezvous_file(tmp_path, "l").exists():
            time.sleep(0.01)
        port = int(rendezvous_file(tmp_path, "l").read_text().split('"port": ')[1].split(",")[0])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\n")
            stranger.recv(1)

    stranger = threading.Thread(target=knock)
    stranger.start()
    with pytest.raises(LaunchFailed, match=r"rank 1 did not connect to 127\.0\.0\.1:"):
        open_here(tmp_path, 2, seconds=1.0)
    stranger.join()


def test_an_address_of_another_machine_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match=r"rank 0 on \S+ cannot listen on 192\.0\.2\.1 \(Cannot assign"):
        open_here(tmp_path, 2, address="192.0.2.1")


@pytest.mark.parametrize("address", ["192.0.2.1", "127.0.0.1"])
def test_a_master_that_cannot_be_reached_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr("scalelab.launch.rendezvous.CONNECT_SECONDS", 0.2)
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        where = {"address": address, "port": taken.getsockname()[1], "node": "a1"}
        write_json(rendezvous_file(tmp_path, "l"), where)
        with pytest.raises(LaunchFailed, match=rf"rank 3 on \S+ cannot reach rank 0 on a1 at {address}:\d+ \(.+\)"):
            join_meeting(tmp_path, "l", 3, time.monotonic() + 10)


def test_a_directory_that_nodes_do_not_share_is_suspected(tmp_path: Path) -> None:
    write_json(rendezvous_file(tmp_path, "earlier"), {"address": "127.0.0.1", "port": 1, "node": "a1"})
    with pytest.raises(LaunchFailed, match="shared by all nodes"):
        join_meeting(tmp_path, "l", 1, time.monotonic() + 0.2)


def test_the_address_is_the_given_one_or_loopback_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_address({"MASTER_ADDR": "a1"}, is_one_node=False) == "a1"
    assert choose_address({}, is_one_node=True) == "127.0.0.1"
    own = {"eth0": ["10.0.0.7"], "ib0": ["10.1.0.7"]}
    monkeypatch.setattr("scalelab.launch.rendezvous.list_addresses", lambda: own)
    assert choose_address({"GLOO_SOCKET_IFNAME": "ib0"}, is_one_node=False) == "10.1.0.7"
    monkeypatch.setattr("scalelab.launch.rendezvous._resolve", lambda _: "10.0.0.7")
    assert choose_address({}, is_one_node=False) == "10.0.0.7"
    monkeypatch.setattr("scalelab.launch.rendezvous._resolve", lambda _: "127.0.1.1")
    assert not choose_address({}, is_one_node=False).startswith("127.0.1")


def test_a_rank_that_came_and_left_is_named(tmp_path: Path) -> None:
    def come_and_leave() -> None:
        while not rendezvous_file(tmp_path, "l").exists():
            time.sleep(0.01)
        port = int(rendezvous_file(tmp_path, "l").read_text().split('"port": ')[1].split(",")[0])
        with socket.create_connection(("127.0.0.1", port)) as leaver:
            leaver.sendall(b'{"launch": "l", "rank": 1}\n')
            leaver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            time.sleep(0.1)
        join_meeting(tmp_path, "l", 2, time.monotonic() + 10)

    guest = threading.Thread(target=come_and_leave)
    guest.start()
    with pytest.raises(LaunchFailed, match=r"rank 1 did not connect to 127\.0\.0\.1:.* or disconnected"):
        open_here(tmp_path, 3)
    guest.join()
