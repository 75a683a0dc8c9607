"""Checks that run torch in a process of their own: the roofline of a host, and NCCL.

Ranks of one node measure at the same time. Each copies arrays that fit its share of the free memory; if the share is
too small to import torch, nothing is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from scalelab.cli.doctor.grades import DoctorCheck, Grade
from scalelab.records.environment import find_gpus, read_available_memory
from scalelab.units import format_bytes, format_count, format_quantity

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
    found = _run("scalelab.worker.roofline", str(copy_bytes))
    return found or {"unmeasured": "memory bandwidth and matmul rate could not be measured"}


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
    return grade_nccl(num_devices, _run("scalelab.worker.nccl_check", "nccl", str(num_devices)))


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


def _run(module: str, *words: str) -> dict[str, Any] | None:
    """The JSON that a module prints; None: nothing readable in time."""
    command = [sys.executable, "-P", "-m", module, *words]
    try:
        done = subprocess.run(
            command, env=dict(os.environ), capture_output=True, text=True, timeout=TRY_SECONDS, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return found
