"""What of a file the kernel has in memory: asked for, read in, forgotten.

Forgetting is a request (`posix_fadvise` with `POSIX_FADV_DONTNEED`). The kernel refuses it for pages that are not yet
on the disk or that somebody has mapped, and some file systems ignore it. So the file is forced to the disk first, must
be closed by everybody, and is looked at afterwards with `mincore(2)`. Since Linux 5.2 that tells the truth only to who
owns the file or may write to it; everybody else is told that all of it is in memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from scalelab.environment import read_available_memory

BLOCK_BYTES = 1 << 20
FAILED = ctypes.c_void_p(-1).value
"""What mmap(2) gives where there is no map."""


def list_files(path: Path) -> list[Path]:
    """A file, or all files of a directory."""
    return [path] if path.is_file() else sorted(found for found in path.rglob("*") if found.is_file())


def can_forget() -> bool:
    """Whether this system has the call (Linux, some BSDs)."""
    return hasattr(os, "posix_fadvise")


def forget_files(files: Iterable[Path]) -> None:
    """Ask the kernel to drop what it has of these files from memory."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_in(files: Iterable[Path]) -> None:
    """Have the kernel hold these files in memory, as far as there is room."""
    room = read_available_memory()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while room > 0 and (block := opened.read(BLOCK_BYTES)):
                room -= len(block)


def measure_resident(files: Iterable[Path]) -> float | None:
    """The share of these files' pages that are in memory; None where the system cannot tell."""
    num_pages = num_resident = 0
    for file in files:
        found = _look_at(file)
        if found is None:
            return None
        num_pages += len(found)
        num_resident += int(np.count_nonzero(found & 1))
    return num_resident / num_pages if num_pages else 0.0


def _look_at(file: Path) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
    """One byte per page, whose lowest bit says that it is in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    descriptor = os.open(file, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        if not size:
            return pages
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == FAILED:
            return None
        try:
            return None if libc.mincore(address, size, pages.ctypes.data) else pages
        finally:
            libc.munmap(address, size)
    finally:
        os.close(descriptor)
