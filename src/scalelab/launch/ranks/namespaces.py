"""Hosts that are emulated: network namespaces of this machine, joined by virtual cables whose rate can be held.

A host is a namespace with one interface, `eth0`. A cable (veth) leads from it to a hub, a namespace with a bridge, so
that any number of hosts see each other. A token bucket (tc tbf) at each end of a cable holds a direction to the link's
rate: what a host sends at its own end, what it receives at the hub's.

    rate     exact in the long run, headers included; the kernel counts those of every frame that it has not cut yet
    burst    what may pass at once after a pause. 2 ms worth, at least 32 kB: a smaller bucket runs over while the
             processor is busy, and what runs over is lost to the rate; a larger one lets short messages through at
             the speed of memory. The hub's is four times as large, since two buckets in a row lose twice
    frames   of 9000 bytes: with 1500 headers would take 4 % of the rate

Everything lies inside namespaces, so that nothing of it shows among the interfaces of the machine, addresses cannot
clash with others, and all that is in a namespace is removed with it. Names identify the owner: the process by its
number, its start and its number space. So two runs at once cannot take each other's, and what a killed one left behind
differs from what is in use: `remove_stale` is called before new hosts are made.

What joins ranks is a link, read from the text that a flag or a trial has:

    inside      all ranks on one host, joined by whatever that has: its loopback, or NVLink
    unshaped    a host for every rank, joined by virtual cables as fast as the kernel carries them
    1gbit …     the same, with every cable held to this rate in each direction (tc's units: bit, kbit, mbit, gbit, tbit)

The rate is that of the wire, headers included, as a vendor prints it: 1gbit is 0.125 GB/s, and of that a payload gets
99.3 % where frames have 9014 bytes, 66 of them headers. A delay cannot be given: it would need the kernel's netem.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scalelab.checks import parse_bit_rate
from scalelab.errors import LaunchFailed, UsageError

INSIDE = "inside"
UNSHAPED = "unshaped"


@dataclass(frozen=True, kw_only=True)
class Link:
    """One way to join ranks."""

    name: str
    """As it was given."""
    bits_per_second: float | None = None
    """The rate of each direction; None: as found."""

    @property
    def is_inside(self) -> bool:
        """Whether there is no link because all ranks are on one host."""
        return self.name == INSIDE

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.bits_per_second is None else self.bits_per_second / 8


def parse_link(text: str) -> Link:
    """Parse a link; raises `UsageError` if it is not valid."""
    name = text.strip().lower()
    name = INSIDE if name == "loopback" else name
    if name in (INSIDE, UNSHAPED):
        return Link(name=name)
    rate, comma, _ = name.partition(",")
    if comma:
        raise UsageError(
            f"{text!r} is more than a rate: delay and loss need the kernel's netem, which is not used;"
            f" give only the rate, {rate or '1gbit'}"
        )
    try:
        return Link(name=name.removesuffix("/s"), bits_per_second=parse_bit_rate(name))
    except UsageError:
        raise UsageError(
            f"{text!r} is not a valid link: use {INSIDE}, {UNSHAPED}, or a rate such as 1gbit or 100mbit"
        ) from None


PLACE = Path("/run/netns")
"""Where iproute2 keeps the names of namespaces."""
INTERFACE = "eth0"
MTU_BYTES = 9000
BURST_SECONDS = 0.002
LEAST_BURST_BYTES = 32_000
HUB_BURSTS = 4
QUEUE_SECONDS = 0.1
"""What a cable keeps rather than drops; senders that share memory with it wait long before."""
LEAST_QUEUE_BYTES = 4_000_000
MOST_BYTES = 2_000_000_000
"""Of a queue or a bucket: tc keeps both in 32 bits."""
MOST_HOSTS = 250
END_SECONDS = 5.0
"""How long killed processes may take to leave a namespace."""
CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21
"""From capability.h."""
ON_ONE_HOST = "keep ranks on one host (--launcher local, --links inside)"
_NUMBERS = itertools.count()
"""Of the sets of hosts that this process has made."""
NAME = re.compile(r"scalelab-(?P<space>\d+)-(?P<pid>\d+)-(?P<start>\d+)-(?P<what>\w+)")


@dataclass(frozen=True, kw_only=True)
class EmulatedHost:
    """A namespace that plays a host."""

    name: str
    """Of the namespace."""
    address: str
    """Of its interface, known to the other hosts only."""

    def prefix(self) -> list[str]:
        """What makes a command run on this host."""
        return ["ip", "netns", "exec", self.name]

    def count_sent_bytes(self) -> int:
        """What has left the host by its interface so far, headers included."""
        found = json.loads(_run("ip", "-n", self.name, "-json", "-statistics", "link", "show", INTERFACE))
        return int(found[0]["stats64"]["tx"]["bytes"])


def find_host_obstacle() -> str | None:
    """Why hosts cannot be emulated here, and what to do; None: they can."""
    if sys.platform != "linux":
        return f"emulated hosts need network namespaces, which only Linux has: {ON_ONE_HOST}"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"emulated hosts need ip and tc, but {' and '.join(missing)} cannot be found: install iproute2"
    if not _has_capabilities():
        return (
            "emulated hosts need root for network namespaces (CAP_NET_ADMIN and CAP_SYS_ADMIN): run as"
            f" root, or {ON_ONE_HOST}"
        )
    return None


@contextmanager
def emulate_hosts(num_hosts: int, link: Link) -> Iterator[list[EmulatedHost]]:
    """Hosts joined by a link; they end with the block, and every process on them does."""
    if num_hosts > MOST_HOSTS:
        raise LaunchFailed(f"{num_hosts} hosts are more than one subnet has addresses for: use {MOST_HOSTS} or fewer")
    number = next(_NUMBERS)
    hub = _make_name(f"{number}hub")
    hosts = [EmulatedHost(name=_make_name(f"{number}h{k}"), address=f"10.0.0.{k + 1}") for k in range(num_hosts)]
    try:
        _make_hub(hub)
        for k, host in enumerate(hosts):
            _make_host(host, hub, f"port{k}", link)
        yield hosts
    finally:
        remove_namespaces([hub, *(host.name for host in hosts)])


def remove_stale() -> list[str]:
    """Remove what ended processes left behind, and nothing else; returns the names."""
    left = [name for name in list_namespaces() if _is_abandoned(name)]
    remove_namespaces(left)
    return left


def list_namespaces() -> list[str]:
    """All that were ever made here, by this process or another."""
    return sorted(path.name for path in PLACE.glob("scalelab-*") if NAME.fullmatch(path.name))


def remove_namespaces(names: Sequence[str]) -> None:
    """End every process in them and remove those that exist; cables and bridges go with them."""
    existing = [name for name in names if (PLACE / name).exists()]
    give_up = time.monotonic() + END_SECONDS
    while (pids := [pid for name in existing for pid in list_pids(name)]) and time.monotonic() < give_up:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for name in existing:
        # Another process may be removing the same remains.
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def list_pids(name: str) -> list[int]:
    """The processes in a namespace; none where it is gone."""
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


def _make_hub(hub: str) -> None:
    _run("ip", "netns", "add", hub)
    _run("ip", "-n", hub, "link", "add", "bridge", "mtu", str(MTU_BYTES), "type", "bridge")
    _run("ip", "-n", hub, "link", "set", "bridge", "addrgenmode", "none", "up")


def _make_host(host: EmulatedHost, hub: str, port: str, link: Link) -> None:
    size = ("mtu", str(MTU_BYTES))
    _run("ip", "netns", "add", host.name)
    _run("ip", "-n", hub, "link", "add", port, *size, "type", "veth", "peer", INTERFACE, *size, "netns", host.name)
    _run("ip", "-n", hub, "link", "set", port, "addrgenmode", "none", "master", "bridge", "up")
    _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _run("ip", "-n", host.name, "link", "set", INTERFACE, "addrgenmode", "none", "up")
    _run("ip", "-n", host.name, "link", "set", "lo", "up")
    if link.bytes_per_second is not None:
        burst = max(LEAST_BURST_BYTES, BURST_SECONDS * link.bytes_per_second)
        _shape(host.name, INTERFACE, link.bytes_per_second, burst)
        _shape(hub, port, link.bytes_per_second, HUB_BURSTS * burst)


def _shape(namespace: str, interface: str, bytes_per_second: float, burst: float) -> None:
    """Hold what leaves an interface to a rate. In tc's words bps is bytes per second and b is bytes."""
    queue = max(LEAST_QUEUE_BYTES, QUEUE_SECONDS * bytes_per_second)
    burst, queue = (round(min(wanted, MOST_BYTES)) for wanted in (burst, queue))
    rate = ("rate", f"{round(8 * bytes_per_second)}bit", "burst", f"{burst}b", "limit", f"{queue}b")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *rate)


def _run(*command: str) -> str:
    """The output of a command; a failure raises an error with its message."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())
        raise LaunchFailed(
            f"could not emulate hosts: {' '.join(command)!r} failed with {words!r}: use a kernel with veth, bridge and"
            f" sch_tbf, or {ON_ONE_HOST}"
        )
    return done.stdout


def _make_name(what: str) -> str:
    pid = os.getpid()
    return f"scalelab-{_read_pid_space()}-{pid}-{_read_start(pid)}-{what}"


def _is_abandoned(name: str) -> bool:
    """Whether its owner has ended. Numbers of another space of processes say nothing here: that one is not ours."""
    parts = NAME.fullmatch(name)
    if parts is None or int(parts["space"]) != _read_pid_space():
        return False
    return _read_start(int(parts["pid"])) != parts["start"]


def _read_pid_space() -> int:
    """Process numbers are those of a pid namespace; containers have their own."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _read_start(pid: int) -> str | None:
    """When a process began, in ticks since the machine did; None: there is none (proc(5), stat, field 22)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]


def _has_capabilities() -> bool:
    try:
        text = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return False
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", text, re.MULTILINE)
    effective = int(found[1], 16) if found else 0
    return all(effective >> capability & 1 for capability in (CAP_NET_ADMIN, CAP_SYS_ADMIN))
