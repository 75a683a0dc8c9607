"""How long a rank wanted to run and the kernel had given its core to others.

On a machine that other programs use too, a phase that takes longer on one rank may only have been interrupted there.
Linux counts for every thread the time that it stood in the queue of a core (`/proc/thread-self/schedstat`, the second
number, in nanoseconds; Documentation/scheduler/sched-stats.rst). Taking it off leaves what the phase took of itself:
computing, sleeping, waiting. A reading costs less than a microsecond.

Only the thread that trains is seen. Where torch computes with several threads, a stall of another one counts as
computing; so does time that a hypervisor gives to other machines. On a GPU a stall of the host says little, and
nothing is read.
"""

from __future__ import annotations

import os

SCHEDSTAT = "/proc/thread-self/schedstat"


class StallClock:
    """Reads the stalls of the thread that it was made in. Use as a context manager: it holds a file open."""

    def __init__(self, *, is_wanted: bool = True) -> None:
        self._file: int | None = None
        if is_wanted:
            try:
                self._file = os.open(SCHEDSTAT, os.O_RDONLY)
            except OSError:  # not Linux, or a kernel that does not count
                self._file = None

    def __enter__(self) -> StallClock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def read(self) -> float | None:
        """Seconds since the thread began; None: nobody counts them here."""
        if self._file is None:
            return None
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
