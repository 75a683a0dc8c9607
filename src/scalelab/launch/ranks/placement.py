"""Which cores a rank owns, where it really is, and the cores, NUMA nodes and devices of this host.

A rank gets `threads_per_rank` cores of its own, the same number in every trial of a study, so that one rank against
two compares like with like: without pinning, one rank would use the whole machine and two would halve it. More ranks
than cores is allowed: then cores are handed out again from the first, and the trial is marked as oversubscribed.

That is the binding `cores`. With `numa` ranks are spread over the NUMA nodes, so that each has a memory controller of
its own as long as there are enough; with `none` every rank may use all cores that the launcher was given.

A launcher is asked for a binding and gives what it understands: masks are read back from the kernel. Three things spoil
a measurement without an error: ranks that share cores, ranks that all sit on one core, and a device at the far socket,
whose every transfer crosses the link between sockets.

The host is read from Linux's own files. What cannot be read is None or empty: other systems have no such files, and
containers hide some. A device is where its place on the PCI bus is: `numa_node` there is -1 where the firmware does not
say, which is unknown and not node 0.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from scalelab.launch.agreement import Assignment
from scalelab.records.environment import read_text, run_tool, usable_cores
from scalelab.records.settings import Bind, find_kind
from scalelab.records.trial import Trial

if TYPE_CHECKING:
    from scalelab.launch.ranks.discovery import Membership
    from scalelab.launch.rendezvous import Meeting, Neighbours

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
        cores = parse_cores(read_text(place / "cpulist"))
        if cores:
            found[int(place.name.removeprefix("node"))] = cores
    return found


def read_distances(system: Path = SYSTEM) -> dict[tuple[int, int], int]:
    """How far every NUMA node is from every other, as the firmware says: 10 is the node itself."""
    places = system / "devices/system/node"
    numbers = sorted(int(place.name.removeprefix("node")) for place in places.glob("node[0-9]*"))
    found: dict[tuple[int, int], int] = {}
    for node in numbers:
        row = read_text(places / f"node{node}" / "distance").split()
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
    listed = run_tool([program, "--query-gpu=index,name,pci.bus_id", "--format=csv,noheader"])
    found = []
    for line in (listed or "").splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) == 3 and fields[0].isdigit():
            found.append(locate_device(int(fields[0]), fields[1], fields[2], system))
    return tuple(found)


def locate_device(index: int, name: str, bus: str, system: Path = SYSTEM) -> LocalDevice:
    """The device with what the system knows of its place; drivers write eight digits for the bus's domain."""
    domain, _, rest = bus.lower().partition(":")
    pci = f"{domain[-4:]}:{rest}"
    place = system / "bus/pci/devices" / pci
    node = read_text(place / "numa_node").strip()
    return LocalDevice(
        index=index,
        name=name,
        pci=pci,
        numa_node=int(node) if node.isdigit() else None,
        near_cores=parse_cores(read_text(place / "local_cpulist")),
    )


def choose_device(local_rank: int | None, devices: tuple[LocalDevice, ...], visible: str | None) -> LocalDevice | None:
    """The device that a rank takes: of those that it sees, the one of its number among the ranks of its host.

    Where a launcher shows every rank a single device, that one. Devices that are named by UUID cannot be
    distinguished here.
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
    siblings = parse_cores(read_text(system / "devices/system/cpu/cpu0/topology/thread_siblings_list"))
    return len(siblings) or None


def read_visible_devices() -> str | None:
    """What restricts the devices of this process; None: nothing does."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def assign_cores(num_ranks: int, threads_per_rank: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The cores of each rank, in order; a rank that wants more than there are gets all of them."""
    width = min(threads_per_rank, len(cores))
    starts = range(0, num_ranks * width, width)
    return tuple(tuple(sorted(cores[(start + i) % len(cores)] for i in range(width))) for start in starts)


def bind_cores(
    bind: Bind,
    num_ranks: int,
    threads_per_rank: int,
    cores: Sequence[int],
    numa_nodes: Mapping[int, Sequence[int]],
    wanted: Sequence[int | None] = (),
) -> tuple[tuple[int, ...], ...]:
    """The cores of each rank of one host, out of the available ones.

    `wanted` has the NUMA nodes that ranks' devices are on; where one is not known ranks are spread evenly.
    """
    if bind == "none":
        return num_ranks * (tuple(sorted(cores)),)
    near = {node: tuple(core for core in own if core in cores) for node, own in sorted(numa_nodes.items())}
    near = {node: own for node, own in near.items() if own}
    if bind == "cores" or not near:
        return assign_cores(num_ranks, threads_per_rank, cores)
    known = [node for node in wanted[:num_ranks] if node is not None and node in near]
    nodes = list(near)
    places = known if len(known) == num_ranks else [nodes[rank * len(nodes) // num_ranks] for rank in range(num_ranks)]
    return assign_cores_by_node(threads_per_rank, near, places)


def assign_cores_by_node(
    threads_per_rank: int, numa_nodes: Mapping[int, Sequence[int]], places: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The cores of each rank on the NUMA node of its place. None reaches beyond its node: a rank that wants more cores
    than that has gets all of them."""
    shared = {node: assign_cores(places.count(node), threads_per_rank, numa_nodes[node]) for node in set(places)}
    return tuple(shared[node][places[:rank].count(node)] for rank, node in enumerate(places))


def default_threads_per_rank(most_ranks: int, num_cores: int) -> int:
    """As many cores as the largest trial of a study can give to each of its ranks, at least one."""
    return max(1, num_cores // most_ranks)


def is_oversubscribed(num_ranks: int, threads_per_rank: int, num_cores: int) -> bool:
    """Whether some core must serve more than one thread."""
    return num_ranks * threads_per_rank > num_cores


NEAR = 10
"""The distance of a NUMA node to itself (ACPI's SLIT)."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one rank is."""

    rank: int
    host: str
    cores: tuple[int, ...]
    """Those that the kernel lets it run on."""
    num_host_cores: int | None = None
    """Number of cores of its host, usable or not; None: unknown."""
    numa_nodes: tuple[int, ...] = ()
    """Of its cores; empty: unknown."""
    device: LocalDevice | None = None
    """None: it has none, or it is unknown."""
    distance: int | None = None
    """From its nearest core to its device, as the firmware says; 10 is the same NUMA node. None: unknown."""

    @property
    def mask(self) -> str:
        return format_mask(self.cores)


def read_placement(rank: int, host: str, local_rank: int | None, cores: Sequence[int] | None = None) -> Placement:
    """Where this process is now, as a rank of a job."""
    own = tuple(sorted(usable_cores() if cores is None else cores))
    numa_nodes = find_numa_nodes(own, read_numa_nodes())
    device = choose_device(local_rank, list_devices(), read_visible_devices())
    distance = None if device is None else find_distance(numa_nodes, device, read_distances())
    return Placement(
        rank=rank,
        host=host,
        cores=own,
        num_host_cores=os.cpu_count(),
        numa_nodes=numa_nodes,
        device=device,
        distance=distance,
    )


def count_cores_per_process(trial: Trial) -> int:
    """The cores that each process of a trial is to have; replicas of dp are threads of one."""
    return trial.num_ranks // trial.num_processes * (trial.threads_per_rank + trial.spare_cores_per_rank)


def bind_ranks(trial: Trial, num_ranks: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The cores of those ranks of a trial that share a host, by its binding."""
    width = count_cores_per_process(trial)
    if trial.bind != "numa":
        return bind_cores(trial.bind, num_ranks, width, cores, {})
    devices = list_devices() if find_kind(trial.device).is_listed else ()
    near = [choose_device(local_rank, devices, read_visible_devices()) for local_rank in range(num_ranks)]
    wanted = [None if device is None else device.numa_node for device in near]
    return bind_cores(trial.bind, num_ranks, width, cores, read_numa_nodes(), wanted)


def read_mask() -> tuple[int, ...]:
    """The cores that the launcher lets this process use."""
    return tuple(sorted(usable_cores()))


def choose_cores(trial: Trial, mask: tuple[int, ...], neighbours: Neighbours) -> tuple[int, ...]:
    """This rank's cores: from its own mask if the launcher set one, else its share of the node's.

    As many as the local launcher gives, so that trials of every launcher compare like with like.
    """
    return bind_ranks(trial, neighbours.num_alike, mask)[neighbours.position_alike]


def choose_device_number(local_rank: int, num_local_ranks: int, visible: str | None) -> int:
    """The GPU of a rank: the only visible one, or the one with its local rank."""
    if visible is not None and num_local_ranks > 1 and len(visible.split(",")) == 1:
        return 0
    return local_rank


def make_assignment(member: Membership, meeting: Meeting, directory: Path, cores: tuple[int, ...]) -> Assignment:
    """What a rank is to do, and where."""
    neighbours = meeting.neighbours
    local_rank = neighbours.position if member.local_rank is None else member.local_rank
    visible = read_visible_devices()
    return Assignment(
        directory=str(directory),
        rank=member.rank,
        local_rank=choose_device_number(local_rank, neighbours.num_local_ranks, visible),
        num_local_ranks=neighbours.num_local_ranks,
        cores=cores,
        address=meeting.address,
        port=meeting.port,
        listen_fd=meeting.listen_fd,
        launcher=member.launcher,
        agreeing=member.agreeing,
        host_rank=member.local_rank,
    )


def find_distance(
    numa_nodes: Sequence[int], device: LocalDevice, distances: Mapping[tuple[int, int], int]
) -> int | None:
    """Distance from the nearest NUMA node to the device's; None: unknown."""
    if device.numa_node is None:
        return None
    pairs = [(node, device.numa_node) for node in numa_nodes]
    return min((distances[pair] for pair in pairs if pair in distances), default=None)


class Mistake(NamedTuple):
    """What is wrong with where ranks are."""

    message: str
    next_step: str


def find_mistakes(placements: Sequence[Placement]) -> Iterator[Mistake]:
    """Everything that would spoil a measurement of these ranks, host by host."""
    for host in dict.fromkeys(placement.host for placement in placements):
        own = [placement for placement in placements if placement.host == host]
        yield from _find_sharing(host, own)
        yield from _find_far_devices(host, own)


def _find_sharing(host: str, placements: Sequence[Placement]) -> Iterator[Mistake]:
    shared = [(a, b) for a, b in combinations(placements, 2) if set(a.cores) & set(b.cores)]
    if not shared:
        return
    cores = {core for placement in placements for core in placement.cores}
    num_host_cores = placements[0].num_host_cores
    if num_host_cores is not None and len(placements) > num_host_cores:
        yield Mistake(
            f"{len(placements)} ranks share the {num_host_cores} core{'s'[: num_host_cores > 1]} of {host}",
            f"start at most {num_host_cores} there: no binding can give more ranks their own cores",
        )
        return
    if len(cores) == 1:
        yield Mistake(
            f"all {len(placements)} ranks of {host} are on core {min(cores)}",
            "let the launcher give every rank its own cores (srun --cpus-per-task, mpiexec --bind-to core)",
        )
        return
    first, second = shared[0]
    both = format_cores(set(first.cores) & set(second.cores))
    is_bound = any(placement.cores != first.cores for placement in placements)
    how = f"{len(shared)} pairs of masks overlap" if is_bound else "they are not bound"
    yield Mistake(
        f"ranks {first.rank} and {second.rank} of {host} share cores {both}: {how}",
        "let the launcher bind each rank to its own cores, or use --bind cores",
    )


def _find_far_devices(host: str, placements: Sequence[Placement]) -> Iterator[Mistake]:
    for placement in placements:
        device, distance = placement.device, placement.distance
        if device is not None and distance is not None and distance > NEAR:
            nodes = ", ".join(map(str, placement.numa_nodes))
            yield Mistake(
                f"rank {placement.rank} of {host} is on NUMA node {nodes}, but its device {device.index} is on"
                f" {device.numa_node}, at distance {distance} instead of {NEAR}",
                f"bind it to cores {format_cores(device.near_cores) or 'next to the device'}, or use --bind numa",
            )
