"""Records the allocator's calls: on a CPU by torch's profiler, on CUDA from the caching allocator's own history.

Both give the same events: when, how many bytes, at which address, and whether a collective took them. A process group's
thread may release memory where no profiler looks; `end_scratch` says when that counts as released.

What kernels of a processor take while they run, beyond their results, a forecast measures here too. On a processor with
bfloat16 kernels torch hands matrix products of that type to oneDNN, which takes a scratchpad from torch's allocator
while it runs. Its size follows from oneDNN's blocking: the processor, the caches, the threads and the layout of the
matrices. There is no formula to copy and torch does not expose the query, so every distinct product is run once, for
real, on matrices of at most 2048 rows and columns (8 MB in bfloat16); blocks hardly grow beyond that. Convolutions of
every type take memory too: oneDNN reorders images, gradients and weights into its own layouts, or torch unfolds the
images. That grows with the batch, a + b · batch, so a convolution is run with its batch, or with two small ones where
it has more than 16 MB.
"""

from __future__ import annotations

import bisect
import itertools
import math
import pickle
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import _disable_current_modes

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

PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
}
"""The operators that torch may hand to oneDNN's matrix product."""
CONVOLUTIONS = {torch.ops.aten.convolution.default: (0,), torch.ops.aten.convolution_backward.default: (0, 1)}
"""With the arguments whose first dimension is the batch."""
MOST_CONVOLVED = 2**24
"""Bytes of such arguments up to which a convolution is run as it is."""
MOST_MEASURED = (64, 2048, 2048)
"""Batch, rows and columns up to which a product is run to see its scratchpad."""

Recorded = list[tuple[float, str, Mapping[int, str]]]
Operand = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and type of a matrix."""


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


def has_kernels(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of this type on this processor: the question that torch's dispatch asks."""
    if not (torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def shorten_operand(tensor: torch.Tensor) -> Operand:
    """Its layout, or that of a smaller one with its dimensions in the same order."""
    short = tensor[tuple(slice(most) for most in MOST_MEASURED[3 - tensor.dim() :])]
    strides = tensor.stride() if short.shape == tensor.shape else torch.empty_like(short).stride()
    return tuple(short.shape), strides, tensor.dtype


def describe_call(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What decides how much a call takes while it runs; None: it takes nothing."""
    if func in PRODUCTS and has_kernels(args[0].dtype):
        return func, *(shorten_operand(operand) for operand in args)
    return (func, *(_describe(arg) for arg in args)) if func in CONVOLUTIONS else None


def measure_call(func: Any, args: tuple[Any, ...], num_threads: int) -> int:
    """What a matrix product or a convolution takes beyond its results while it runs."""
    if func in PRODUCTS:
        return measure_scratchpad(func, [shorten_operand(operand) for operand in args], num_threads)
    batched = CONVOLUTIONS[func]
    batch = int(args[0].shape[0])
    sample_bytes = sum(args[index].nbytes for index in batched) // max(batch, 1)
    small = max(MOST_CONVOLVED // (2 * max(sample_bytes, 1)), 1)
    if batch <= 2 * small:
        return _measure_batch(func, args, batch, num_threads)
    first, second = (_measure_batch(func, args, size, num_threads) for size in (small, 2 * small))
    return int(first + (second - first) / small * (batch - small) + 0.5)


def _measure_batch(func: Any, args: tuple[Any, ...], batch: int, num_threads: int) -> int:
    """The same of a convolution of so many samples."""
    places = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    short = [args[index][:batch] if index in CONVOLUTIONS[func] else args[index] for index in places]

    def call(*real: torch.Tensor) -> Any:
        given = dict(zip(places, real, strict=True))
        return func(*(given.get(index, arg) for index, arg in enumerate(args)))

    return measure_scratchpad(call, [_describe(tensor) for tensor in short], num_threads)


def _describe(arg: Any) -> Any:
    return (tuple(arg.shape), arg.stride(), arg.dtype) if isinstance(arg, torch.Tensor) else str(arg)


def measure_scratchpad(func: Any, operands: Iterable[Operand], num_threads: int) -> int:
    """What an operator takes beyond its result while it runs, on real operands and as many threads as a rank has."""
    before = torch.get_num_threads()
    with _disable_current_modes():
        real = [torch.empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in operands]
        torch.set_num_threads(num_threads)
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                kept = func(*real)  # not released before the profile ends
        finally:
            torch.set_num_threads(before)
    del kept
    events, _ = read_event_tree(profiler.profiler.kineto_results.experimental_event_tree())
    alive = list(itertools.accumulate((event.num_bytes for event in events), initial=0))
    return max(alive) - alive[-1]
