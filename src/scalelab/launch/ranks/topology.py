"""The cores, NUMA nodes and devices of this host, from Linux's own files.

What cannot be read is None or empty: other systems have no such files, and containers hide some. A device is where its
place on the PCI bus is: `numa_node` there is -1 where the firmware does not say, which is unknown and not node 0.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys")


@dataclass(frozen=True, kw_only=True)
class LocalDevice:
    """A GPU, and where it is."""

    index: int
    """As the driver counts."""
    name: str
    pci: str
    """Its place on the bus, such as 0000:07:00.0."""
    numa_node: int | None = None
    """The nearest; None: unknown."""
    near_cores: tuple[int, ...] = ()
    """The cores next to it; empty: unknown."""


def format_mask(cores: Iterable[int]) -> str:
    """One bit per core, as taskset and PALS print it: cores 0 and 1 are 0x3."""
    return hex(sum(1 << core for core in set(cores)))


def format_cores(cores: Iterable[int]) -> str:
    """The cores in Linux's form: 0-3,8."""
    parts: list[list[int]] = []
    for core in sorted(set(cores)):
        if parts and parts[-1][1] == core - 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def parse_cores(text: str) -> tuple[int, ...]:
    """Parse a Linux core list; anything else gives no cores."""
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match:
            found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


def read_numa_nodes(system: Path = SYSTEM) -> dict[int, tuple[int, ...]]:
    """The cores of every NUMA node that has some; empty: unknown."""
    found = {}
    for place in sorted((system / "devices/system/node").glob("node[0-9]*")):
        cores = parse_cores(_read_text(place / "cpulist"))
        if cores:
            found[int(place.name.removeprefix("node"))] = cores
    return found


def read_distances(system: Path = SYSTEM) -> dict[tuple[int, int], int]:
    """How far every NUMA node is from every other, as the firmware says: 10 is the node itself."""
    places = system / "devices/system/node"
    numbers = sorted(int(place.name.removeprefix("node")) for place in places.glob("node[0-9]*"))
    found: dict[tuple[int, int], int] = {}
    for node in numbers:
        row = _read_text(places / f"node{node}" / "distance").split()
        found |= {(node, other): int(text) for other, text in zip(numbers, row, strict=False) if text.isdigit()}
    return found


def find_numa_nodes(cores: Iterable[int], numa_nodes: Mapping[int, Iterable[int]]) -> tuple[int, ...]:
    """The NUMA nodes that some of the cores belong to."""
    wanted = set(cores)
    return tuple(sorted(node for node, own in numa_nodes.items() if wanted & set(own)))


def list_devices(system: Path = SYSTEM) -> tuple[LocalDevice, ...]:
    """The NVIDIA GPUs that the driver lists, with their places; empty: none, or no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=index,name,pci.bus_id", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) == 3 and fields[0].isdigit():
            found.append(locate_device(int(fields[0]), fields[1], fields[2], system))
    return tuple(found)


def locate_device(index: int, name: str, bus: str, system: Path = SYSTEM) -> LocalDevice:
    """The device with what the system knows of its place; drivers write eight digits for the bus's domain."""
    domain, _, rest = bus.lower().partition(":")
    pci = f"{domain[-4:]}:{rest}"
    place = system / "bus/pci/devices" / pci
    node = _read_text(place / "numa_node")
    return LocalDevice(
        index=index,
        name=name,
        pci=pci,
        numa_node=int(node) if node.isdigit() else None,
        near_cores=parse_cores(_read_text(place / "local_cpulist")),
    )


def choose_device(local_rank: int | None, devices: tuple[LocalDevice, ...], visible: str | None) -> LocalDevice | None:
    """The device that a rank takes: of those that it sees, the one of its number among the ranks of its host.

    Where a launcher shows every rank a single device, that one. Named by UUID they cannot be told apart here.
    """
    if visible is not None:
        wanted = [part.strip() for part in visible.split(",") if part.strip()]
        known = {str(device.index): device for device in devices}
        devices = tuple(known[part] for part in wanted if part in known)
    if len(devices) == 1:
        return devices[0]
    if local_rank is None or local_rank >= len(devices):
        return None
    return devices[local_rank]


def count_hyperthreads(system: Path = SYSTEM) -> int | None:
    """How many logical cores one physical core has; None: unknown."""
    siblings = parse_cores(_read_text(system / "devices/system/cpu/cpu0/topology/thread_siblings_list"))
    return len(siblings) or None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def read_visible_devices() -> str | None:
    """What restricts the devices of this process; None: nothing does."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
