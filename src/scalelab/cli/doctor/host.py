"""Checks of one host: rank, cores, network and threads."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

import psutil

from scalelab.cli.doctor.grades import DoctorCheck, Grade
from scalelab.errors import RankUnknown
from scalelab.launch.ranks.allocation import find_allocation
from scalelab.launch.ranks.discovery import Membership, find_membership
from scalelab.launch.ranks.mpi import compare_memberships, find_by_mpi
from scalelab.launch.ranks.placement import Placement, find_mistakes, read_placement
from scalelab.launch.ranks.topology import count_hyperthreads, format_cores, read_numa_nodes
from scalelab.records.environment import usable_cores

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")


def look_at_rank(variables: Mapping[str, str]) -> DoctorCheck:
    """Which launcher started this process, if any."""
    try:
        member = find_membership(variables)
    except RankUnknown as error:
        return DoctorCheck(name="rank", grade=Grade.FAILED, detail=str(error))
    if member is not None:
        return DoctorCheck(name="rank", grade=Grade.OK, detail=describe_member(member))
    try:
        allocation = find_allocation(variables)
    except RankUnknown as error:  # a container may hide the batch system's files, and can measure all the same
        return DoctorCheck(name="rank", grade=Grade.WARNING, detail=f"not a rank; {error}")
    if allocation is None:
        return DoctorCheck(name="rank", grade=Grade.OK, detail="not running under a distributed launcher")
    nodes = f"{allocation.num_nodes} node{'s'[: allocation.num_nodes > 1]}"
    return DoctorCheck(
        name="rank",
        grade=Grade.OK,
        detail=f"not a rank, inside {allocation.scheduler} job {allocation.job_id} with {nodes}",
    )


def describe_member(member: Membership) -> str:
    """Rank, local rank and node, with the launchers that say so."""
    unknown = "–"
    parts = [f"rank {member.rank} of {member.num_ranks}"]
    parts.append(f"local {member.local_rank if member.local_rank is not None else unknown}")
    parts[-1] += f" of {member.num_local_ranks or unknown}"
    parts.append(f"node {member.node if member.node is not None else unknown} of {member.num_nodes or unknown}")
    source = member.launcher
    if member.agreeing:
        source += f", as {' and '.join(member.agreeing)} say{'s'[: len(member.agreeing) == 1]}"
    if member.outer:
        source += f", inside {' and '.join(member.outer)}"
    return f"{', '.join(parts)} ({source})"


def ask_mpi(member: Membership | None) -> tuple[DoctorCheck, Membership | None]:
    """Rank and world size of mpi4py, compared with the variables. All ranks must ask."""
    try:
        by_mpi = find_by_mpi()
    except RankUnknown as error:
        return DoctorCheck(name="mpi4py", grade=Grade.FAILED, detail=str(error)), None
    difference = compare_memberships(member, by_mpi) if member else None
    if difference is None and member is None and by_mpi.num_ranks > 1:
        difference = f"mpi4py has {by_mpi.num_ranks} ranks, but no launcher variable is set"
    grade = Grade.FAILED if difference else Grade.OK
    return DoctorCheck(name="mpi4py", grade=grade, detail=difference or describe_member(by_mpi)), by_mpi


def look_at_cores() -> Iterator[DoctorCheck]:
    """CPU mask, NUMA nodes and nearest device of this process."""
    here = read_placement(0, socket.gethostname(), 0)
    numa_nodes = read_numa_nodes()
    threads = count_hyperthreads()
    smt = "" if threads in (None, 1) else f", {threads} threads per core"
    detail = f"mask {here.mask}, cores {format_cores(here.cores)}{smt}"
    detail += f", NUMA node {describe_nodes(here)} of {len(numa_nodes)}" if numa_nodes else ", NUMA nodes unknown"
    yield DoctorCheck(name="cores", grade=Grade.OK, detail=detail)
    if here.device is not None:
        yield DoctorCheck(name="device", grade=Grade.OK, detail=describe_device(here))
    for mistake in find_mistakes([here]):
        yield DoctorCheck(name="device", grade=Grade.WARNING, detail=mistake.message, next_step=mistake.next_step)


def describe_nodes(placement: Placement) -> str:
    return ", ".join(map(str, placement.numa_nodes)) or "–"


def describe_device(placement: Placement) -> str:
    device = placement.device
    if device is None:
        return "–"
    where = "unknown" if device.numa_node is None else f"node {device.numa_node}"
    far = "" if placement.distance is None else f", distance {placement.distance}"
    return f"{device.index} ({device.name}, {device.pci}, NUMA {where}{far})"


def look_at_network() -> DoctorCheck:
    """Interfaces that are up and have an address."""
    stats, found = psutil.net_if_stats(), []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        own = [one.address for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)]
        if name in stats and stats[name].isup and own:
            speed = f", {stats[name].speed} Mbit/s" if stats[name].speed else ""
            found.append(f"{name} {own[0].partition('%')[0]}{speed}")
    if not found:
        return DoctorCheck(
            name="network",
            grade=Grade.FAILED,
            detail="no interface is up, not even loopback, which ranks use for rendezvous",
            next_step="ip link set lo up",
        )
    return DoctorCheck(name="network", grade=Grade.OK, detail="; ".join(found))


def look_at_threads(variables: Mapping[str, str]) -> DoctorCheck:
    """Variables that set the number of threads; scalelab sets them for the ranks it launches."""
    told = [f"{name}={variables[name]}" for name in THREAD_VARIABLES if variables.get(name)]
    wanted = variables.get("OMP_NUM_THREADS", "").split(",")[0]
    num_cores = len(usable_cores())
    if wanted.isdigit() and int(wanted) > num_cores:
        return DoctorCheck(
            name="threads",
            grade=Grade.WARNING,
            detail=f"{', '.join(told)}, but this process has {num_cores} core{'s'[: num_cores > 1]}",
            next_step=f"export OMP_NUM_THREADS={num_cores}",
        )
    return DoctorCheck(name="threads", grade=Grade.OK, detail=", ".join(told) or "no variable set")
