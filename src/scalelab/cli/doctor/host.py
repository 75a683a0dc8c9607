"""Checks of one host: rank, cores, network and threads; its roofline and NCCL, by torch in a process of their own.

Ranks of one node measure the roofline at the same time. Each copies arrays that fit its share of the free memory; if
the share is too small to import torch, nothing is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape

from scalelab.checks import clean_lines, find_unguarded
from scalelab.errors import RankUnknown
from scalelab.launch.ranks.discovery import Membership, find_membership
from scalelab.launch.ranks.mpi import compare_memberships, find_by_mpi
from scalelab.launch.ranks.namespaces import remove_stale
from scalelab.launch.ranks.placement import (
    Placement,
    count_hyperthreads,
    find_mistakes,
    format_cores,
    read_numa_nodes,
    read_placement,
)
from scalelab.records.environment import (
    Environment,
    find_gpus,
    read_available_memory,
    read_memory_limit,
    usable_cores,
)
from scalelab.records.launchers import find_allocation
from scalelab.records.running import remove_leftovers
from scalelab.records.trial import to_builtins
from scalelab.units import format_bytes, format_count, format_quantity


class OutputConsole(Console):
    """rich's console on standard output; a reader that closed the pipe is left to `app.main`."""

    def __init__(self) -> None:
        super().__init__(file=find_unguarded(sys.stdout), highlight=False)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Grade(StrEnum):
    """Result of a check; the value is the sign on the terminal."""

    OK = "ok"
    WARNING = "!"
    FAILED = "✗"


@dataclass(frozen=True, kw_only=True)
class DoctorCheck:
    """One property of the machine."""

    name: str
    grade: Grade
    detail: str
    next_step: str = ""


def print_check(console: Console, check: DoctorCheck, *, is_json: bool = False) -> None:
    """One line, and a second one for the next step; or one JSON object."""
    if is_json:
        console.print(json.dumps(to_builtins(check)), soft_wrap=True, markup=False)
        return
    colour = {Grade.OK: "green", Grade.WARNING: "yellow", Grade.FAILED: "red"}[check.grade]
    console.print(f"[{colour}]{check.grade:<3}[/]{check.name:<11} {escape(clean_lines(check.detail))}", soft_wrap=True)
    if check.next_step:
        console.print(f"{'':15}→ {escape(clean_lines(check.next_step))}", soft_wrap=True)


def clean_up(console: Console) -> int:
    """Remove what killed commands of this user left; every start of ranks does it too."""
    removed = [*remove_leftovers(), *(f"emulated host {name}" for name in remove_abandoned())]
    for words in removed:
        console.print(f"removed {escape(clean_lines(words))}", soft_wrap=True)
    if not removed:
        console.print("Nothing was left", soft_wrap=True)
    return 0


def remove_abandoned() -> list[str]:
    """Network namespaces of killed commands, where there may be any."""
    return remove_stale() if shutil.which("ip") and os.geteuid() == 0 else []


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


TRY_SECONDS = 60.0
MOST_COPY_BYTES = 256 * 2**20
"""More than the caches of one core."""
LEAST_COPY_BYTES = 8 * 2**20
"""Smaller arrays fit in a cache."""
PROCESS_BYTES = 400_000_000
"""A process with torch imported, without the two arrays: rounded up from a measured 240 MB."""
USED_SHARE = 0.5
"""Share of the free memory that all ranks of a node may use together."""


def choose_copy_bytes(available_bytes: int, num_ranks: int) -> int | None:
    """Bytes of the array that each rank copies, a power of two; None: there is no room."""
    room = (USED_SHARE * available_bytes / num_ranks - PROCESS_BYTES) / 2
    if room < LEAST_COPY_BYTES:
        return None
    size = LEAST_COPY_BYTES
    while 2 * size <= min(room, MOST_COPY_BYTES):
        size *= 2
    return size


def measure_roofs(num_ranks: int = 1) -> dict[str, Any]:
    """Peak memory bandwidth and matmul rate with `num_ranks` ranks at once, or why they could not be measured."""
    available = read_available_memory()
    copy_bytes = choose_copy_bytes(available, num_ranks)
    if copy_bytes is None:
        where = f" for {num_ranks} ranks" if num_ranks > 1 else ""
        return {"unmeasured": f"{format_bytes(available)} of free memory{where} is too little to import torch"}
    found = run_module("scalelab.worker.doctor.roofline", str(copy_bytes))
    return found or {"unmeasured": "memory bandwidth and matmul rate could not be measured"}


def look_at_memory(environment: Environment) -> DoctorCheck:
    """Memory of the machine, and the limit of the control group."""
    there, limit = environment.memory_bytes, read_memory_limit()
    if limit is None or limit >= there:
        return DoctorCheck(name="memory", grade=Grade.OK, detail=format_bytes(there))
    return DoctorCheck(
        name="memory",
        grade=Grade.WARNING,
        detail=f"{format_bytes(there)}, limited to {format_bytes(limit)} by a control group",
        next_step="keep the sum over ranks below it with --memory-limit",
    )


def look_at_roofs() -> Iterator[DoctorCheck]:
    roofs = measure_roofs()
    if "unmeasured" in roofs:
        yield DoctorCheck(name="roofline", grade=Grade.WARNING, detail=roofs["unmeasured"])
        return
    yield DoctorCheck(name="roofline", grade=Grade.OK, detail=describe_roofs(roofs))
    if roofs["backends"]:
        yield DoctorCheck(name="backends", grade=Grade.OK, detail=f"torch is built with {', '.join(roofs['backends'])}")


def describe_roofs(roofs: Mapping[str, Any]) -> str:
    threads = "" if roofs["threads"] is None else f", {format_count(roofs['threads'], 'thread')}"
    flops = roofs["flops_per_second"] / 1e9
    copied = describe_copy(roofs["memory_bytes_per_second"], roofs["copy_bytes"])
    return f"{copied}, matmul {flops:.3g} GFLOP/s ({roofs['library']}{threads})"


def describe_copy(bytes_per_second: float, copy_bytes: int | None) -> str:
    what = "" if copy_bytes is None else f" (copying {format_bytes(copy_bytes)})"
    return f"memory {format_quantity('bytes', bytes_per_second)}/s{what}"


def look_at_nccl() -> DoctorCheck:
    """Whether an NCCL all-reduce works over all visible devices of this host, one process each."""
    num_devices = len(find_gpus())
    if not num_devices:
        return DoctorCheck(name="NCCL", grade=Grade.OK, detail="not tried: no CUDA device")
    return grade_nccl(num_devices, run_module("scalelab.worker.doctor.nccl_check", "nccl", str(num_devices)))


def grade_nccl(num_devices: int, found: Mapping[str, Any] | None) -> DoctorCheck:
    """The check from the answer of the processes; None: no answer in time."""
    devices = f"{num_devices} CUDA device{'s'[: num_devices > 1]}"
    if found is not None and found["works"]:
        return DoctorCheck(name="NCCL", grade=Grade.OK, detail=f"all-reduce over {devices} works")
    reason = found["reason"] if found is not None else f"no answer within {TRY_SECONDS:.0f} s"
    return DoctorCheck(
        name="NCCL",
        grade=Grade.FAILED,
        detail=f"all-reduce over {devices} failed: {reason}",
        next_step="NCCL_DEBUG=INFO scalelab doctor, or use --device cpu",
    )


def run_module(module: str, *words: str) -> dict[str, Any] | None:
    """The JSON that a module prints; None: nothing readable in time."""
    found: dict[str, Any] | None = try_module(module, *words)[0]
    return found


def try_module(module: str, *words: str) -> tuple[Any, str]:
    """The JSON that a module prints; where there is none, why: the last line of its error output."""
    command = [sys.executable, "-P", "-m", module, *words]
    try:
        done = subprocess.run(
            command, env=dict(os.environ), capture_output=True, text=True, timeout=TRY_SECONDS, check=False
        )
        if done.returncode == 0:
            return json.loads(done.stdout), ""
    except subprocess.TimeoutExpired:
        return None, f"no response within {TRY_SECONDS:.0f} s"
    except (OSError, ValueError) as error:
        return None, str(error)
    lines = done.stderr.strip().splitlines()
    return None, lines[-1] if lines else f"exit code {done.returncode}"
