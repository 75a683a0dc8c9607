"""The CPU time of every replica of an emulated `dp`, readable from other processes.

Replicas are threads of one process that live for one pass, so that a look from outside, twenty times a second, would
miss most of them. The process itself therefore adds up what each of its replicas' threads used, in a small file that
it and the parent map into memory. It costs two clock readings for each replica and pass, and only a trial whose
utilization is looked at has it.

Threads that an operation starts in a replica are not in it: with more than one core per replica the parent looks at
cores instead.
"""

from __future__ import annotations

import mmap
from contextlib import ExitStack
from pathlib import Path

NUM_BYTES = 8
"""Of one replica's seconds, a double."""


def clock_file(directory: Path) -> Path:
    """Shared while the trial runs; the parent removes it."""
    return directory / "replicas.clock"


def make_replica_clock(directory: Path, num_replicas: int) -> memoryview[float]:
    """One double for each replica, which both sides see at once, at 0; stays mapped as long as the process lives."""
    path = clock_file(directory)
    path.write_bytes(bytes(NUM_BYTES * num_replicas))
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("d")


def open_replica_clock(directory: Path, num_replicas: int, stack: ExitStack) -> memoryview[float] | None:
    """What the rank has made; None: not yet. Unmapped with the stack."""
    path = clock_file(directory)
    if not path.is_file() or path.stat().st_size < NUM_BYTES * num_replicas:
        return None
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    bytes_view = memoryview(mapped)
    seconds = bytes_view.cast("d")
    stack.callback(mapped.close)
    stack.callback(bytes_view.release)
    stack.callback(seconds.release)
    return seconds
