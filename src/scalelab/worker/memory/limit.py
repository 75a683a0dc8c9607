"""The bound on a rank's memory, and how close to it the rank came.

On a CPU the bound is `RLIMIT_DATA`, which counts private writable memory (`VmData`), from what the rank has once torch
is loaded. Resident memory would be the wrong thing to compare with it: pages that were never touched count against the
limit, and pages of mapped files, which are resident, do not. The kernel keeps no peak of `VmData`, but it keeps one of
all mapped memory (`VmPeak`), and what is mapped besides private writable memory, libraries above all, only grows:

    peak of VmData = max(VmData, VmPeak − (VmSize − VmData))

How much that is for the same step differs from launch to launch, unless the allocator gives every tensor
pages of its own (`--allocator pages`): then it is what is alive, to a few pages. On an accelerator the bound is a share
of the device, and what counts is what torch's caching allocator has reserved.
"""

from __future__ import annotations

import ctypes
import resource
from dataclasses import replace
from pathlib import Path

import torch

from scalelab.errors import UsageError
from scalelab.records.observations import RankReport
from scalelab.records.trial import Trial
from scalelab.worker.device import find_driver

M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -2, -3, -8
"""Parameters of glibc's `mallopt`, from malloc.h."""
PAGE_BYTES = 4096
REACHED = 0.9
"""The share of a limit above which it counts as nearly reached."""


def limit_memory(trial: Trial, device: torch.device) -> None:
    """Limit what this rank may allocate from here on, so running out is an error and not a dead machine."""
    if trial.memory_limit_bytes is None:
        return
    driver = find_driver(device)
    if driver is not None:
        driver.limit(device, trial.memory_limit_bytes)
    else:
        limit = read_data_bytes() + trial.memory_limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def give_pages() -> None:
    """Make glibc give every block of a page or more pages of its own, and take them back when it is freed.

    Otherwise blocks are cut from what was freed before, and how well they fit differs from launch to launch: the same
    step then needs a few percent more or less memory, and no batch is the largest. Threads share one heap, for one of
    their own is mapped with room for more (mallopt(3)).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    settings = ((M_MMAP_THRESHOLD, PAGE_BYTES), (M_TOP_PAD, 0), (M_ARENA_MAX, 1))
    if mallopt is None or not all(mallopt(parameter, value) for parameter, value in settings):
        raise UsageError("--allocator pages needs glibc, which this machine does not have: use --allocator system")


class LimitWatch:
    """What a rank takes from its limit, counted from here on."""

    def __init__(self, trial: Trial, device: torch.device) -> None:
        self._device = device
        self._driver = find_driver(device)
        self._limit = trial.memory_limit_bytes
        if self._driver is not None:
            free = self._driver.count_free_bytes(device)
            self._limit = min(filter(None, (free, trial.memory_limit_bytes)), default=None)
            self._base = 0
        else:
            self._base = read_data_bytes()

    def complete(self, report: RankReport) -> RankReport:
        """The report with the highest that was taken."""
        taken: int | None
        if self._driver is not None:
            taken = self._driver.read_memory(self._device).peak_reserved_bytes
        else:
            taken = read_peak_data_bytes() - self._base
        return replace(report, limited_bytes=taken, limit_bytes=self._limit)


def has_reached_limit() -> bool:
    """Whether this process has come so close to its limit that a request in vain may be the reason of an error."""
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return limit != resource.RLIM_INFINITY and read_peak_data_bytes() > REACHED * limit


def has_room_for(num_bytes: int) -> bool:
    """Whether this process may take so much more than ever before.

    What it merely has free now does not count: blocks that are given back in another order than they were taken leave
    the heap in pieces, and the next step may find none large enough.
    """
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return limit == resource.RLIM_INFINITY or read_peak_data_bytes() + num_bytes <= limit


def read_data_bytes() -> int:
    """The private writable memory of this process, which `RLIMIT_DATA` bounds (Linux 4.7 and later)."""
    return read_status().get("VmData", 0)


def read_peak_data_bytes() -> int:
    """The most that it has been; what is mapped besides is taken to have been as much then as it is now."""
    status = read_status()
    data = status.get("VmData", 0)
    return max(data, status.get("VmPeak", 0) - (status.get("VmSize", 0) - data))


def read_status() -> dict[str, int]:
    """The sizes that the kernel keeps for this process, in bytes; none where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split() for line in lines if line.startswith("Vm")]
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in parts}
