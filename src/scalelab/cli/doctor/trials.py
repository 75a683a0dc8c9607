"""What the doctor tries out in processes of their own, which have torch: the roofs of a host, and NCCL.

Ranks of one node try at the same time. So that they never take more memory than is left, each copies arrays of its
share of it, and what was copied is said; where a share is too small for torch itself nothing is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from scalelab.cli.doctor.checks import Check, Grade
from scalelab.records.environment import find_gpus, read_available_memory
from scalelab.units import format_bytes, format_quantity

TRY_SECONDS = 60.0
MOST_COPY_BYTES = 256 * 2**20
"""More than the caches of a core's share."""
LEAST_COPY_BYTES = 8 * 2**20
"""Less than that any cache holds."""
PROCESS_BYTES = 400_000_000
"""Of a process that has torch loaded, besides the two arrays: rounded up from a measured 240 MB."""
USED_SHARE = 0.5
"""What of the memory that is left all ranks of a node may take together."""


def choose_copy_bytes(available_bytes: int, num_ranks: int) -> int | None:
    """The array that each of so many ranks on a host copies, a power of two; None: there is no room for it."""
    room = (USED_SHARE * available_bytes / num_ranks - PROCESS_BYTES) / 2
    if room < LEAST_COPY_BYTES:
        return None
    size = LEAST_COPY_BYTES
    while 2 * size <= min(room, MOST_COPY_BYTES):
        size *= 2
    return size


def measure_roofs(num_ranks: int = 1) -> dict[str, Any]:
    """Memory and matrix products at their best here, with so many ranks at the same time; where they could not be
    measured, why."""
    available = read_available_memory()
    copy_bytes = choose_copy_bytes(available, num_ranks)
    if copy_bytes is None:
        who = f"{num_ranks} ranks share" if num_ranks > 1 else "there are"
        return {"unmeasured": f"{who} {format_bytes(available)} of memory, too little to load torch and copy arrays"}
    found = _run("scalelab.measure.roofs", str(copy_bytes))
    return found or {"unmeasured": "memory and matrix products could not be measured"}


def look_at_roofs() -> Iterator[Check]:
    roofs = measure_roofs()
    if "unmeasured" in roofs:
        yield Check(name="roofs", grade=Grade.WARNING, detail=roofs["unmeasured"])
        return
    yield Check(name="roofs", grade=Grade.OK, detail=describe_roofs(roofs))
    if roofs["backends"]:
        yield Check(name="backends", grade=Grade.OK, detail=f"built into torch: {', '.join(roofs['backends'])}")


def describe_roofs(roofs: Mapping[str, Any]) -> str:
    threads = "" if roofs["threads"] is None else f", {roofs['threads']} thread{'s'[: roofs['threads'] > 1]}"
    flops = roofs["flops_per_second"] / 1e9
    copied = describe_copy(roofs["memory_bytes_per_second"], roofs["copy_bytes"])
    return f"{copied}, float32 products {flops:.3g} GFLOP/s ({roofs['library']}{threads})"


def describe_copy(bytes_per_second: float, copy_bytes: int | None) -> str:
    what = "" if copy_bytes is None else f" (copying {format_bytes(copy_bytes)})"
    return f"memory {format_quantity('bytes', bytes_per_second)}/s{what}"


def look_at_nccl() -> Check:
    """Whether NCCL adds numbers of all devices of this host that this process may use, one process for each."""
    num_devices = len(find_gpus())
    if not num_devices:
        return Check(name="NCCL", grade=Grade.OK, detail="not tried: no CUDA device")
    return grade_nccl(num_devices, _run("scalelab.measure.nccl_check", "nccl", str(num_devices)))


def grade_nccl(num_devices: int, found: Mapping[str, Any] | None) -> Check:
    """The check from what the processes said; None: they said nothing in time."""
    devices = f"{num_devices} CUDA device{'s'[: num_devices > 1]}"
    if found is not None and found["works"]:
        return Check(name="NCCL", grade=Grade.OK, detail=f"works: an all-reduce over {devices}")
    reason = found["reason"] if found is not None else f"no answer within {TRY_SECONDS:.0f} s"
    return Check(
        name="NCCL",
        grade=Grade.FAILED,
        detail=f"does not work: an all-reduce over {devices} gave {reason}",
        next_step="NCCL_DEBUG=INFO scalelab doctor, or train with --device cpu",
    )


def _run(module: str, *words: str) -> dict[str, Any] | None:
    """What a module prints that has torch, as JSON; None: nothing that can be read, or not in time."""
    command = [sys.executable, "-P", "-m", module, *words]
    try:
        done = subprocess.run(
            command, env=dict(os.environ), capture_output=True, text=True, timeout=TRY_SECONDS, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return found
