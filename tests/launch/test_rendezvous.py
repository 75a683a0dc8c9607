"""Where ranks meet: everybody comes, or who did not is named."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import LaunchFailed
from scalelab.launch.rendezvous import (
    Guest,
    Meeting,
    MeetingPlace,
    Neighbours,
    choose_address,
    find_interface,
    join_meeting,
    open_meeting,
    seat_guests,
)
from scalelab.records.files import read_json, write_json


def make_place(directory: Path | None, seconds: float = 10.0, **fields: Any) -> MeetingPlace:
    return MeetingPlace(launch="l", directory=directory, deadline=time.monotonic() + seconds, **fields)


def make_guest(rank: int) -> Guest:
    return Guest(rank=rank, node=f"n{rank // 2}", mask=(0, 1))


def open_here(directory: Path, num_ranks: int, seconds: float = 10.0, address: str = "127.0.0.1") -> Meeting:
    return open_meeting(make_place(directory, seconds, address=address), make_guest(0), num_ranks, "go")


def join_here(directory: Path, rank: int, seconds: float = 10.0) -> Meeting:
    return join_meeting(make_place(directory, seconds), make_guest(rank))


def wait_for_port(directory: Path) -> int:
    file = make_place(directory).file
    assert file is not None
    while not file.exists():
        time.sleep(0.01)
    return int(read_json(file)["port"])


def test_all_ranks_come_and_the_socket_can_be_handed_on(tmp_path: Path) -> None:
    joined: dict[int, Meeting] = {}

    def join(rank: int) -> None:
        joined[rank] = join_here(tmp_path, rank)

    guests = [threading.Thread(target=join, args=(rank,)) for rank in (1, 2)]
    for guest in guests:
        guest.start()
    meeting = open_here(tmp_path, 3)
    for guest in guests:
        guest.join()
    assert {one.port for one in joined.values()} == {meeting.port}
    assert joined[1].interface == meeting.interface == find_interface("127.0.0.1")
    assert {one.word for one in joined.values()} == {"go"}
    assert joined[1].neighbours == Neighbours(num_local_ranks=2, position=1, num_alike=2, position_alike=1)
    assert joined[2].neighbours == Neighbours(), "alone on its node"
    assert meeting.listen_fd is not None
    assert os.get_inheritable(meeting.listen_fd)
    with socket.socket(fileno=meeting.listen_fd) as listener:
        assert listener.getsockname() == ("127.0.0.1", meeting.port)


def test_a_stranger_is_not_taken_for_a_rank(tmp_path: Path) -> None:
    def knock() -> None:
        with socket.create_connection(("127.0.0.1", wait_for_port(tmp_path))) as stranger:
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
        write_json(tmp_path / "rendezvous-l.json", where)
        with pytest.raises(LaunchFailed, match=rf"rank 3 on \S+ cannot reach rank 0 on a1 at {address}:\d+ \(.+\)"):
            join_here(tmp_path, 3)


def test_a_directory_that_nodes_do_not_share_is_suspected(tmp_path: Path) -> None:
    write_json(tmp_path / "rendezvous-earlier.json", {"address": "127.0.0.1", "port": 1, "node": "a1"})
    with pytest.raises(LaunchFailed, match="shared by all nodes"):
        join_here(tmp_path, 1, seconds=0.2)


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
        with socket.create_connection(("127.0.0.1", wait_for_port(tmp_path))) as leaver:
            leaver.sendall(b'{"launch": "l", "rank": 1, "node": "n0", "mask": [0]}\n')
            leaver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            time.sleep(0.1)

    guest = threading.Thread(target=come_and_leave)
    guest.start()
    with pytest.raises(LaunchFailed, match=r"rank 1 did not connect to 127\.0\.0\.1:.* or disconnected"):
        open_here(tmp_path, 3)
    guest.join()


def test_ranks_of_a_training_run_that_may_take_years_meet_too(tmp_path: Path) -> None:
    years = 10 * 365 * 86400.0
    guest = threading.Thread(target=join_here, args=(tmp_path, 1, years))
    guest.start()
    assert open_here(tmp_path, 2, seconds=years).port > 0
    guest.join()


def test_one_that_says_nothing_keeps_nobody_waiting(tmp_path: Path) -> None:
    def come_after_a_mute() -> None:
        port = wait_for_port(tmp_path)
        with socket.create_connection(("127.0.0.1", port)):
            join_here(tmp_path, 1)

    guest = threading.Thread(target=come_after_a_mute)
    guest.start()
    assert open_here(tmp_path, 2).port > 0
    guest.join()


def test_ranks_that_know_the_address_need_no_file_and_may_come_before_rank_0(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = make_place(None, port=port, is_patient=True)
    joined: list[Meeting] = []
    guest = threading.Thread(target=lambda: joined.append(join_meeting(place, make_guest(1))))
    guest.start()
    time.sleep(0.1)
    opened = open_meeting(place, make_guest(0), 2, "here")
    guest.join()
    assert (joined[0].port, joined[0].word) == (opened.port, "here") == (port, "here")
    assert not list(tmp_path.iterdir())


def test_ranks_are_seated_by_node_and_by_the_cores_that_they_share() -> None:
    everywhere, half = (0, 1, 2, 3), (0, 1)
    masks = [everywhere, half, everywhere, half]
    guests = [Guest(rank=rank, node="n", mask=mask) for rank, mask in enumerate(masks)]
    seats = seat_guests([*reversed(guests), Guest(rank=4, node="other", mask=half)])
    assert [seats[rank].position for rank in range(5)] == [0, 1, 2, 3, 0]
    assert [seats[rank].position_alike for rank in range(5)] == [0, 0, 1, 1, 0]
    assert [seats[rank].num_alike for rank in range(5)] == [2, 2, 2, 2, 1]
