"""Records the allocator's calls: on a CPU by torch's profiler, on CUDA from the caching allocator's own history.

Both give the same events: when, how many bytes, at which address, and whether a collective took them. A process group's
thread may release memory where no profiler looks; `end_scratch` says when that counts as released.
"""

from __future__ import annotations

import bisect
import math
import pickle
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from scalelab.analysis.memory import MemoryEvent
from scalelab.records.trial import Trial
from scalelab.worker.device import DeviceDriver, find_driver
from scalelab.worker.instruments.profiles import let_threads_finish

EXCHANGE_PREFIXES = ("FullyShardedDataParallel._", "FSDP::", "c10d::", "gloo:", "nccl:")
"""What sharded strategies and process groups call their own work in a profile."""
SCRATCH_NAMES = re.compile(r"c10d::|FSDP::all_gather( |$)")
"""Of them, those whose memory a process group's thread may release."""
WAIT_NAME = "_c10d_functional::wait_tensor"
"""Where a step waits for a functional collective."""
EXCHANGE_PATHS = ("torch/distributed/fsdp", "torch/distributed/distributed_c10d")
"""Where that work is in a stack."""
MARK = "scalelab.mark."

Recorded = list[tuple[float, str, Mapping[int, str]]]


class AllocatorRecording(Protocol):
    """The allocator's calls over a few steps, and marks between their phases."""

    def start(self) -> None: ...
    def record(self, phase: str, addresses: Mapping[int, str]) -> None: ...
    def stop(self) -> None: ...
    def read(self) -> tuple[list[MemoryEvent], Recorded]: ...


def open_recording(trial: Trial, directory: Path, rank: int) -> AllocatorRecording:
    driver = find_driver(trial.device)
    return HistoryRecording(name_snapshot(directory, rank), driver) if driver is not None else CpuRecording()


class CpuRecording:
    """By torch's profiler: the allocator's calls and the marks, on one clock."""

    def __init__(self) -> None:
        self._named: list[Mapping[int, str]] = []
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        self._profile.start()

    def record(self, phase: str, addresses: Mapping[int, str]) -> None:
        self._named.append(addresses)
        with record_function(MARK + phase):
            pass

    def stop(self) -> None:
        let_threads_finish()
        self._profile.stop()

    def read(self) -> tuple[list[MemoryEvent], Recorded]:
        assert self._profile.profiler is not None
        results = self._profile.profiler.kineto_results
        owned = {address for named in self._named for address in named}
        events, marks = read_event_tree(results.experimental_event_tree(), owned)  # type: ignore[union-attr]
        return events, [(seconds, phase, names) for (seconds, phase), names in zip(marks, self._named, strict=True)]


def read_event_tree(
    roots: Sequence[Any], owned: Collection[int] = ()
) -> tuple[list[MemoryEvent], list[tuple[float, str]]]:
    """The allocator's calls and our marks in the order of time, from what the profiler calls its event tree.

    `owned` are the addresses of what outlives a phase, such as gradients.
    """
    events: list[MemoryEvent] = []
    marks: list[tuple[float, str]] = []
    scratch: dict[MemoryEvent, float] = {}
    waits: list[float] = []
    waiting: list[tuple[Any, float | None, bool]] = [(root, None, False) for root in roots]
    while waiting:
        node, exchange_end, is_scratch = waiting.pop()
        kind, extra = node.typed
        seconds = node.start_time_ns / 1e9
        if kind == _EventType.Allocation:
            events.append(MemoryEvent(seconds, extra.alloc_size, extra.ptr, exchange_end is not None))
            if is_scratch and exchange_end is not None and extra.alloc_size > 0:
                scratch[events[-1]] = exchange_end
        elif node.name.startswith(MARK):
            marks.append((seconds, node.name.removeprefix(MARK)))
        elif node.name == WAIT_NAME:
            waits.append(node.end_time_ns / 1e9)
        if exchange_end is None and node.name.startswith(EXCHANGE_PREFIXES):
            exchange_end = node.end_time_ns / 1e9
        is_scratch = is_scratch or SCRATCH_NAMES.match(node.name) is not None
        waiting += [(child, exchange_end, is_scratch) for child in node.children]
    events.sort(key=lambda event: event.seconds)
    waits.sort()
    for event in events:
        following = bisect.bisect_left(waits, event.seconds)
        if event.num_bytes > 0 and event.address not in owned and following < len(waits):
            scratch.setdefault(event, waits[following])
    return end_scratch(events, scratch), sorted(marks)


def end_scratch(events: Sequence[MemoryEvent], scratch: Mapping[MemoryEvent, float]) -> list[MemoryEvent]:
    """The events with a release of what a collective took for itself, where none was seen.

    A process group's own thread may be the last to let go of it, and the profiler does not watch that thread. The call
    that asked for the collective has waited for it, so that it is released by the end of this call. A functional
    collective (DTensor's) is waited for later, and its thread may also be the last to hold what was sent: whatever has
    an owner in the step is released by the step, where it is seen, and the thread lets go when the collective ends.
    """
    following: dict[int, MemoryEvent] = {}
    unseen: list[MemoryEvent] = []
    for event in reversed(events):
        after = following.get(event.address)
        if event in scratch and (after is None or after.num_bytes > 0):
            end = min(scratch[event], math.inf if after is None else after.seconds)
            unseen.append(MemoryEvent(end, -event.num_bytes, event.address, True))
        following[event.address] = event
    return sorted([*events, *unseen], key=lambda event: event.seconds)


class HistoryRecording:
    """By the caching allocator's history; its snapshot is kept for the public viewer."""

    def __init__(self, snapshot_file: Path, driver: DeviceDriver) -> None:
        self._file = snapshot_file
        self._driver = driver
        self._recorded: Recorded = []
        self._snapshot: Mapping[str, Any] = {}

    def start(self) -> None:
        self._driver.synchronize()
        self._driver.reset_peaks(self._driver.find_current())
        self._driver.start_history()

    def record(self, phase: str, addresses: Mapping[int, str]) -> None:
        self._recorded.append((time.time(), phase, addresses))

    def stop(self) -> None:
        try:
            self._driver.synchronize()
            self._snapshot = self._driver.read_history()
        finally:
            self._driver.stop_history()

    def read(self) -> tuple[list[MemoryEvent], Recorded]:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_bytes(pickle.dumps(self._snapshot))
        return list(read_snapshot(self._snapshot, self._driver.find_current())), self._recorded


def read_snapshot(snapshot: Mapping[str, Any], device: int) -> Iterator[MemoryEvent]:
    """The calls of one device's caching allocator; memory counts as released when that is asked for."""
    for entry in snapshot["device_traces"][device]:
        sign = {"alloc": 1, "free_requested": -1}.get(entry["action"])
        if sign is not None:
            paths = (frame["filename"] for frame in entry.get("frames", ()))
            is_exchange = any(part in path for path in paths for part in EXCHANGE_PATHS)
            yield MemoryEvent(entry["time_us"] / 1e6, sign * entry["size"], entry["addr"], is_exchange)


def name_snapshot(directory: Path, rank: int) -> Path:
    """What the public viewer reads."""
    return directory / "memory" / f"rank{rank}.pickle"
