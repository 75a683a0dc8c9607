"""How busy cores and GPUs are while a trial runs, seen from outside its ranks.

A thread of the parent looks twenty times a second. What it looks at depends on who owns the device:

    rank 0 …          the processor time of the rank's process, all threads together, over that of its cores. The
                      kernel keeps it to the nanosecond, and what other programs do is not in it
    replica 0 …       each replica of an emulated `dp`. Replicas are threads of one process, which adds up what each
                      used (`replica_clock.py`); what the process used besides belongs to replica 0. With several
                      cores per replica those are looked at instead: the kernel counts a core's time in ticks of
                      10 ms, and for all programs
    all replicas      the same process as a whole
    other programs    what the cores of all ranks did beyond the ranks' own processes
    gpu 0 …           the driver's utilization: the share of time in which at least one kernel ran; memory, clock,
                      power, temperature and reasons to slow down (`gpus.py`)

Cores are looked at only where a trial asks; GPUs always, but less often, for their clocks move with heat and power.
Where no tool of the driver is found, the result is empty. Processes that a rank starts, such as loader workers, count
as other programs.

The supervisor beside a rank looks at that rank alone (`watch_rank`).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from scalelab.launch.agreement import Assignment, clock_file, open_replica_clock
from scalelab.launch.gpus import PERIOD_SECONDS, SLOW_PERIOD_SECONDS, LoadReader, open_gpus
from scalelab.launch.launcher import has_watched_gpus, is_watched
from scalelab.launch.ranks.placement import assign_cores
from scalelab.records.observations import DeviceLoad
from scalelab.records.settings import find_kind
from scalelab.records.trial import Trial

OTHERS = "other programs"
PROCESS = "all replicas"


@contextmanager
def watch_devices(
    trial: Trial,
    directory: Path,
    pids: Sequence[int],
    cores: Sequence[Sequence[int]],
    num_gpus: int | None = None,
) -> Iterator[list[DeviceLoad]]:
    """Fills the list that it gives for as long as the block lasts, for a trial that is watched (`is_watched`).

    `num_gpus` says how many of this host's GPUs are looked at; None: one for every rank.
    """
    loads: list[DeviceLoad] = []
    with ExitStack() as stack:
        if has_watched_gpus(trial):
            reader = open_gpus(num_gpus or trial.num_ranks, stack)
        else:
            reader = make_reader(trial, directory, pids, cores, stack)
        if reader is None:
            yield loads
            return
        is_over = threading.Event()
        period = reader.period_seconds if "utilization" in trial.instruments else SLOW_PERIOD_SECONDS
        thread = threading.Thread(target=_look, args=(reader, is_over, loads, period), name="utilization", daemon=True)
        thread.start()
        try:
            yield loads
        finally:
            is_over.set()
            thread.join()


@contextmanager
def watch_rank(trial: Trial, assignment: Assignment, pid: int) -> Iterator[list[DeviceLoad]]:
    """One rank of several, by its supervisor.

    What others do on its cores is only known where no other rank may use them.
    """
    if not is_watched(trial):
        yield []
        return
    directory, cores = Path(assignment.directory), [assignment.cores]
    if trial.num_processes == 1:
        with watch_devices(trial, directory, [pid], cores) as loads:
            yield loads
        return
    rank, gpu = assignment.rank, assignment.local_rank
    with watch_devices(trial, directory, [pid], cores, num_gpus=gpu + 1) as loads:
        yield loads
    names = {f"gpu {gpu}": f"gpu {rank}"} if find_kind(trial.device).is_listed else {"rank 0": f"rank {rank}"}
    if trial.bind != "none" and not trial.is_oversubscribed:
        names[OTHERS] = OTHERS
    loads[:] = [replace(load, device=names[load.device]) for load in loads if load.device in names]


def make_reader(
    trial: Trial, directory: Path, pids: Sequence[int], cores: Sequence[Sequence[int]], stack: ExitStack
) -> LoadReader:
    """The samplers of a trial's processes."""
    if not trial.is_emulated:
        return RankReader(cores, pids)
    stack.callback(clock_file(directory).unlink, missing_ok=True)
    threads = trial.threads_per_rank + trial.spare_cores_per_rank
    groups = assign_cores(trial.num_ranks, threads, cores[0])
    if threads > 1:
        return ReplicaCoreReader(groups, pids)
    return ReplicaReader(groups, pids, lambda: open_replica_clock(directory, trial.num_ranks, stack))


def _look(reader: LoadReader, is_over: threading.Event, loads: list[DeviceLoad], period_seconds: float) -> None:
    reader.read()
    while not is_over.wait(period_seconds):
        loads += reader.read()


class RankReader:
    """The processor time of processes, and of all other processes on their cores."""

    period_seconds = PERIOD_SECONDS

    def __init__(self, cores: Sequence[Sequence[int]], pids: Sequence[int]) -> None:
        self._cores = cores
        self._clocks = [find_process_clock(pid) for pid in pids]
        self._last = time.perf_counter()
        self._own: list[float | None] = [None] * len(pids)
        self._of_cores = CoreTimes(join_cores(cores))

    def read(self) -> list[DeviceLoad]:
        now, before = time.perf_counter(), self._last
        own = [read_clock(clock) for clock in self._clocks]
        shares = self._of_cores.read()
        spent = [None if a is None or b is None else b - a for a, b in zip(self._own, own, strict=True)]
        self._last, self._own = now, own
        seconds = now - before
        loads = [
            make_load(now, seconds, f"rank {rank}", used / seconds / len(group))
            for rank, (used, group) in enumerate(zip(spent, self._cores, strict=True))
            if used is not None
        ]
        if loads and len(loads) == len(spent):
            used_by_ranks = sum(used for used in spent if used is not None) / seconds / len(shares)
            loads.append(make_load(now, seconds, OTHERS, sum(shares.values()) / len(shares) - used_by_ranks))
        return loads


class ReplicaReader:
    """Replicas that have one core each: by the time that their process adds up for them.

    It adds up a pass when the pass has ended, so an interval lasts until every other replica has ended one: the time
    of a pass that is longer than the period would otherwise count in the interval of its end alone, and be cut there.
    """

    period_seconds = PERIOD_SECONDS

    def __init__(
        self, cores: Sequence[Sequence[int]], pids: Sequence[int], open_clock: Callable[[], memoryview[float] | None]
    ) -> None:
        self._num_cores = len({core for group in cores for core in group})
        self._process = RankReader([join_cores(cores)], pids)
        self._open_clock = open_clock
        self._clock: memoryview[float] | None = None
        self._last: list[float] | None = None

    def read(self) -> list[DeviceLoad]:
        self._clock = self._clock or self._open_clock()
        now = None if self._clock is None else list(self._clock)
        if now and self._last and any(a == b for a, b in zip(self._last[1:], now[1:], strict=True)):
            return []
        before, self._last = self._last, now
        process = self._process.read()
        if before is None or self._last is None or not process:
            return []
        whole = process[0]
        seconds = whole.interval_seconds
        spent = [now - then for then, now in zip(before, self._last, strict=True)]
        spent[0] = whole.busy * seconds * self._num_cores - sum(spent[1:])
        replicas = [
            make_load(whole.seconds, seconds, f"replica {number}", used / seconds) for number, used in enumerate(spent)
        ]
        return [*replicas, *name_process(process)]


class ReplicaCoreReader:
    """Replicas that have several cores each: by those cores."""

    period_seconds = PERIOD_SECONDS

    def __init__(self, cores: Sequence[Sequence[int]], pids: Sequence[int]) -> None:
        self._cores = cores
        self._process = RankReader([join_cores(cores)], pids)
        self._of_cores = CoreTimes(join_cores(cores))

    def read(self) -> list[DeviceLoad]:
        shares = self._of_cores.read()
        process = self._process.read()
        if not process:
            return []
        now, seconds = process[0].seconds, process[0].interval_seconds
        replicas = [
            make_load(now, seconds, f"replica {number}", sum(shares[core] for core in group) / len(group))
            for number, group in enumerate(self._cores)
        ]
        return [*replicas, *name_process(process)]


def join_cores(cores: Sequence[Sequence[int]]) -> list[int]:
    return sorted({core for group in cores for core in group})


def name_process(loads: Sequence[DeviceLoad]) -> list[DeviceLoad]:
    """The one process of an emulated dp is not one rank but all replicas."""
    return [load if load.device == OTHERS else replace(load, device=PROCESS) for load in loads]


class CoreTimes:
    """The busy share of cores since the last reading."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = cores
        self._last = psutil.cpu_times(percpu=True)

    def read(self) -> dict[int, float]:
        now, before = psutil.cpu_times(percpu=True), self._last
        self._last = now
        return {core: _share_busy(before[core], now[core]) for core in self._cores}


def _share_busy(before: Any, now: Any) -> float:
    """All of a core's time that was not idle and not given to another machine; 0 where the clock has not ticked."""
    passed = {name: getattr(now, name) - getattr(before, name) for name in now._fields if not name.startswith("guest")}
    total = sum(passed.values())
    unused = sum(passed.get(name, 0.0) for name in ("idle", "iowait", "steal"))
    return max(0.0, 1 - unused / total) if total > 0 else 0.0


def make_load(now: float, seconds: float, device: str, busy: float) -> DeviceLoad:
    """A share outside [0, 1], as two clocks that do not tick together can give, is cut."""
    return DeviceLoad(seconds=now, device=device, busy=min(1.0, max(0.0, busy)), interval_seconds=seconds)


def find_process_clock(pid: int) -> int | None:
    """The kernel's clock of a process's processor time (clock_getcpuclockid(3)); None if there is none."""
    find = getattr(ctypes.CDLL(None), "clock_getcpuclockid", None)
    clock = ctypes.c_int()
    if find is None or find(ctypes.c_int(pid), ctypes.byref(clock)) != 0:
        return None
    return clock.value


def read_clock(clock: int | None) -> float | None:
    """Seconds; None once the process has ended."""
    try:
        return None if clock is None else time.clock_gettime(clock)
    except OSError:
        return None
