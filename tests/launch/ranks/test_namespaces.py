"""Emulated hosts: they reach each other at the link's rate, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalelab.errors import LaunchFailed
from scalelab.launch.ranks import namespaces
from scalelab.launch.ranks.namespaces import (
    EmulatedHost,
    emulate_hosts,
    find_host_obstacle,
    list_namespaces,
    list_pids,
    parse_link,
    remove_namespaces,
    remove_stale,
)
from tests.launch.ranks.emulation import needs_hosts

SLOW = parse_link("8mbit")
LISTEN = """
import socket
with socket.create_server(("0.0.0.0", 4000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    while connection.recv(65536):
        pass
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 4000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
LEAVE_BEHIND = """
import subprocess, sys
from scalelab.launch.ranks.namespaces import parse_link
from scalelab.launch.ranks.namespaces import emulate_hosts
with emulate_hosts(2, parse_link("unshaped")) as hosts:
    subprocess.Popen([*hosts[0].prefix(), "sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
    print(*(host.name for host in hosts), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own(request: pytest.FixtureRequest) -> Iterator[set[str]]:
    """Every test leaves as many namespaces as it found, whoever else has some."""
    before = set(list_namespaces())
    yield before
    mine = f"-{os.getpid()}-"
    assert not [name for name in list_namespaces() if mine in name and name not in before]


def send_between(sender: EmulatedHost, receiver: EmulatedHost, num_bytes: int) -> None:
    python = [sys.executable, "-c"]
    listener = subprocess.Popen([*receiver.prefix(), *python, LISTEN], stdout=subprocess.PIPE)
    assert listener.stdout is not None
    listener.stdout.readline()
    subprocess.run([*sender.prefix(), *python, SEND, receiver.address, str(num_bytes)], check=True, timeout=60)
    listener.wait(timeout=30)
    listener.stdout.close()


@needs_hosts
def test_what_one_host_sends_another_leaves_by_its_interface_and_by_no_other() -> None:
    with emulate_hosts(3, parse_link("unshaped")) as hosts:
        send_between(hosts[0], hosts[2], 1_000_000)
        sent = [host.count_sent_bytes() for host in hosts]
    assert 1_000_000 < sent[0] < 1_100_000
    assert sent[1] < 10_000
    assert sent[2] < 100_000


@needs_hosts
def test_a_rate_is_held_at_both_ends_of_every_cable() -> None:
    with emulate_hosts(2, SLOW) as hosts:
        shown = [
            subprocess.run(["tc", "-n", name, "qdisc", "show"], capture_output=True, text=True, check=True).stdout
            for name in [host.name for host in hosts] + [hosts[0].name.replace("h0", "hub")]
        ]
    assert [len(re.findall(r"qdisc tbf \S+ dev \S+ root .* rate 8Mbit burst", text)) for text in shown] == [1, 1, 2]


@needs_hosts
@pytest.mark.parametrize("rate", ["400gbit", "100tbit"])
def test_a_rate_beyond_what_tc_counts_in_32_bits_is_a_link_too(rate: str) -> None:
    with emulate_hosts(1, parse_link(rate)) as hosts:
        shown = subprocess.run(
            ["tc", "-n", hosts[0].name, "qdisc", "show"], capture_output=True, text=True, check=True
        ).stdout
    assert "qdisc tbf" in shown


@needs_hosts
def test_hosts_end_with_every_process_on_them() -> None:
    with emulate_hosts(2, parse_link("unshaped")) as hosts:
        sleeper = subprocess.Popen([*hosts[1].prefix(), "sleep", "600"], start_new_session=True)
        while sleeper.pid not in list_pids(hosts[1].name):
            assert sleeper.poll() is None
    assert sleeper.wait(timeout=10) == -signal.SIGKILL


@needs_hosts
def test_hosts_end_when_the_block_is_left_by_an_error() -> None:
    with pytest.raises(KeyboardInterrupt), emulate_hosts(2, parse_link("unshaped")) as hosts:
        raise KeyboardInterrupt
    assert not {host.name for host in hosts} & set(list_namespaces())


@needs_hosts
def test_two_sets_of_hosts_at_once_have_the_same_addresses_and_do_not_meet() -> None:
    with emulate_hosts(2, parse_link("unshaped")) as first, emulate_hosts(2, parse_link("unshaped")) as second:
        assert [host.address for host in first] == [host.address for host in second]
        send_between(first[0], first[1], 100_000)
        assert second[0].count_sent_bytes() < 10_000
        assert not {host.name for host in first} & {host.name for host in second}


@needs_hosts
def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not() -> None:
    command = [sys.executable, "-c", LEAVE_BEHIND]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    dead, alive = (subprocess.Popen(command, **pipes) for _ in range(2))  # type: ignore[call-overload]
    left, used = (process.stdout.readline().split() for process in (dead, alive))
    dead.kill()
    dead.wait()
    assert set(left) <= set(list_namespaces())
    removed = remove_stale()
    assert set(left) <= set(removed)
    assert not {name for name in list_namespaces() if f"-{dead.pid}-" in name}
    assert set(used) <= set(list_namespaces())
    alive.communicate(timeout=30)
    assert not set(used) & set(list_namespaces())
    dead.stdin.close()
    dead.stdout.close()


@needs_hosts
def test_names_of_another_process_space_or_of_nobody_are_left_alone(tmp_path: Path) -> None:
    space = namespaces._read_pid_space()
    names = [f"scalelab-{space + 1}-999999999-1-0hub", "scalelab-mine", "other"]
    for name in names:
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        assert not set(names) & set(remove_stale())
        assert all((namespaces.PLACE / name).exists() for name in names)
    finally:
        remove_namespaces(names)
    assert not any((namespaces.PLACE / name).exists() for name in names)


@needs_hosts
def test_removing_what_is_gone_is_no_error() -> None:
    remove_namespaces(["scalelab-1-1-1-0hub"])


@needs_hosts
def test_a_command_that_fails_is_told_in_its_own_words() -> None:
    with pytest.raises(
        LaunchFailed,
        match=r"could not emulate hosts: .ip netns add no/such. failed with .Invalid"
        r" netns name",
    ):
        namespaces._run("ip", "netns", "add", "no/such")


def test_more_hosts_than_addresses_are_refused() -> None:
    with pytest.raises(LaunchFailed, match="251 hosts are more than one subnet has addresses for: use 250"):
        emulate_hosts(251, SLOW).__enter__()


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(namespaces, "_has_capabilities", lambda: False)
    assert "(CAP_NET_ADMIN and CAP_SYS_ADMIN): run as root" in (find_host_obstacle() or "")


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    assert find_host_obstacle() == "emulated hosts need ip and tc, but tc cannot be found: install iproute2"


def test_other_systems_have_no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert "only Linux has" in (find_host_obstacle() or "")
