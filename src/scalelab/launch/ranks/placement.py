"""Where a rank really is: its cores, their NUMA nodes, its device, and what is wrong with that.

A launcher is asked for a binding and gives what it understands: masks are read back from the kernel. Three things spoil
a measurement without an error: ranks that share cores, ranks that all sit on one core, and a device at the far socket,
whose every transfer crosses the link between sockets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from scalelab.launch.ranks.affinity import bind_cores
from scalelab.launch.ranks.topology import (
    LocalDevice,
    choose_device,
    find_numa_nodes,
    format_cores,
    format_mask,
    list_devices,
    read_distances,
    read_numa_nodes,
    read_visible_devices,
)
from scalelab.records.environment import usable_cores
from scalelab.records.trial import Trial

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


def bind_ranks(trial: Trial, num_ranks: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The cores of those ranks of a trial that share a host, by its binding."""
    width = trial.num_ranks // trial.num_processes * (trial.threads_per_rank + trial.spare_cores_per_rank)
    if trial.bind != "numa":
        return bind_cores(trial.bind, num_ranks, width, cores, {})
    devices = list_devices() if trial.device == "cuda" else ()
    near = [choose_device(local_rank, devices, read_visible_devices()) for local_rank in range(num_ranks)]
    wanted = [None if device is None else device.numa_node for device in near]
    return bind_cores(trial.bind, num_ranks, width, cores, read_numa_nodes(), wanted)


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
    how = f"{len(shared)} pairs of masks overlap" if is_bound else "none of them is bound"
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
