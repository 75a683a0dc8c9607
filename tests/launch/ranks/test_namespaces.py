"""Emulated hosts: they reach each other at the link's rate, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("capabilities", "is_enough"),
    [((12, 21), True), ((12,), False), ((21,), False), ((12, 20, 22), False), ((11, 13, 21), False), ((), False)],
)
def test_emulating_needs_the_capabilities_12_and_21(
    capabilities: tuple[int, ...], is_enough: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As capability.h numbers CAP_NET_ADMIN and CAP_SYS_ADMIN."""
    status = tmp_path / "status"
    bits = sum(1 << capability for capability in capabilities)
    status.write_text(f"CapPrm:\t{2**40 - 1:016x}\nCapEff:\t{bits:016x}\n")
    monkeypatch.setattr(namespaces, "Path", lambda _: status)
    assert namespaces._has_capabilities() is is_enough


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    assert find_host_obstacle() == "emulated hosts need ip and tc, but tc cannot be found: install iproute2"


def test_other_systems_have_no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert "only Linux has" in (find_host_obstacle() or "")


@pytest.mark.parametrize(
    ("rate", "host", "hub"),
    [
        ("1gbit", (10**9, 250_000, 12_500_000), (10**9, 1_000_000, 12_500_000)),
        ("100mbit", (10**8, 32_000, 4_000_000), (10**8, 128_000, 4_000_000)),
        ("4000gbit", (4 * 10**12, 10**9, 2 * 10**9), (4 * 10**12, 2 * 10**9, 2 * 10**9)),
    ],
)
def test_a_cable_holds_2_ms_at_once_and_keeps_100_ms_of_its_rate(
    monkeypatch: pytest.MonkeyPatch, rate: str, host: tuple[int, ...], hub: tuple[int, ...]
) -> None:
    """Bursts of at least 32 kB, four times as much at the hub; queues of at least 4 MB; neither beyond 2 GB."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(namespaces, "_run", lambda *words: commands.append(words))
    namespaces._make_host(EmulatedHost(name="h", address="10.0.0.1"), "hub", "port0", parse_link(rate))
    shaped = {words[2]: words[-6:] for words in commands if words[0] == "tc"}
    assert shaped == {
        name: ("rate", f"{bits}bit", "burst", f"{burst}b", "limit", f"{queue}b")
        for name, (bits, burst, queue) in (("h", host), ("hub", hub))
    }
    mtus = [words[place + 1] for words in commands for place, word in enumerate(words) if word == "mtu"]
    assert mtus == ["9000", "9000"]


def test_processes_that_stay_in_a_namespace_are_killed_for_five_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stays").touch()
    killed: list[int] = []
    clock = iter(range(100))  # a second for every look
    slept: set[float] = set()
    monkeypatch.setattr(namespaces, "PLACE", tmp_path)
    monkeypatch.setattr(namespaces, "list_pids", lambda _: [123])
    monkeypatch.setattr(namespaces, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=slept.add))
    monkeypatch.setattr(namespaces.os, "kill", lambda pid, _: killed.append(pid))
    monkeypatch.setattr(namespaces, "subprocess", SimpleNamespace(run=lambda *_, **__: None))
    remove_namespaces(["stays", "gone"])
    assert killed == [123] * 4  # at 1, 2, 3 and 4 s
    assert slept == {0.02}
