"""The roofline of this process: `python -m scalelab.worker.doctor.roofline [BYTES]` prints it as one JSON object.

Two roofs bound every step on a processor: how many bytes memory moves per second, and how many operations a matrix
product does. Memory is measured by copying an array that no cache should hold, and a copy moves every byte twice; a
product of n × n matrices is 2·n³ operations. Both are the best of several goes, for only interference makes them
slower. torch does it where it is installed, with as many threads as it takes by itself, because that is what trains;
otherwise numpy. Which of torch's backends for communication were built in stands beside it.

BYTES is the size of that array, of which two are held. Ranks of one node measure at the same time, so who starts them
gives each its share of the memory that is left (`cli/doctor_trials.py`).

It runs in its own process because the command line has no torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

COPY_BYTES = 256 * 2**20
"""More than the caches of a core's share; a server's last level may hold it, and says so by its rate."""
PRODUCT_SIZE = 1024
BACKENDS = ("gloo", "nccl", "mpi", "ucc")
MOST_SECONDS = 0.3
"""For each of the two, after a first go that is not counted."""


def measure_roofs(copy_bytes: int = COPY_BYTES) -> dict[str, Any]:
    """Bytes per second of memory, operations per second of float32 products, threads and backends; and what was copied
    for that."""
    try:
        import torch
    except ImportError:
        return {"library": f"numpy {np.__version__}", "threads": None, "backends": [], **measure_by_numpy(copy_bytes)}
    import torch.distributed as dist

    source, target = torch.ones(copy_bytes // 4), torch.ones(copy_bytes // 4)
    a, b = torch.rand(PRODUCT_SIZE, PRODUCT_SIZE), torch.rand(PRODUCT_SIZE, PRODUCT_SIZE)
    product = torch.empty_like(a)
    return {
        "library": f"torch {torch.__version__}",
        "threads": torch.get_num_threads(),
        "backends": list_backends(dist),
        **express(copy_bytes, take_best(lambda: target.copy_(source)), take_best(lambda: torch.mm(a, b, out=product))),
    }


def list_backends(dist: Any) -> list[str]:
    """Built-in backends; a torch without any lacks even the functions to query them."""
    if not dist.is_available():
        return []
    asked = {name: getattr(dist, f"is_{name}_available", None) for name in BACKENDS}
    return [name for name, is_available in asked.items() if is_available is not None and is_available()]


def measure_by_numpy(copy_bytes: int) -> dict[str, float]:
    source, target = np.ones(copy_bytes // 4, dtype=np.float32), np.ones(copy_bytes // 4, dtype=np.float32)
    draw = np.random.default_rng(0)
    a, b = (draw.random((PRODUCT_SIZE, PRODUCT_SIZE), dtype=np.float32) for _ in range(2))
    product = np.empty_like(a)
    copy, multiply = (lambda: np.copyto(target, source)), (lambda: np.matmul(a, b, out=product))
    return express(copy_bytes, take_best(copy), take_best(multiply))


def express(copy_bytes: int, copy_seconds: float, product_seconds: float) -> dict[str, float]:
    return {
        "copy_bytes": copy_bytes,
        "memory_bytes_per_second": 2 * copy_bytes / copy_seconds,
        "flops_per_second": 2 * PRODUCT_SIZE**3 / product_seconds,
    }


def take_best(work: Callable[[], object]) -> float:
    """The shortest of several goes, in seconds."""
    work()
    best, give_up = float("inf"), time.perf_counter() + MOST_SECONDS
    while time.perf_counter() < give_up:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure_roofs(*map(int, sys.argv[1:]))))
    sys.stdout.flush()
    os._exit(0)
