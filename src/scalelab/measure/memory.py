"""The instrument `memory`: every byte that torch's allocator gives out in a step, by category, with its peak.

On a CPU torch's profiler records each allocation and release of the allocator: the equal of what CUDA calls allocated.
It does not know what was there before it began, so that is counted from the storages themselves: parameters, optimizer,
buffers, the batch; and DDP's buckets from what DDP says of them. Two steps are run: the first fills the memory as every
later step finds it, the second is accounted (`analysis.memory` has the rules).

On CUDA the caching allocator's own history is read instead, the peak is the allocator's, and a snapshot for the public
viewer (pytorch.org/memory_viz) is kept. What the categories do not explain there is the rest.

The data set lies in the host's memory and is not counted, on a CPU either: only the batch of the step is.
"""

from __future__ import annotations

import csv
import io
import math
import pickle
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType, _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from scalelab.analysis.memory import Change, MemoryAccount, MemoryEvent, account_step, find_alive
from scalelab.files import write_atomically
from scalelab.measure.memory_marks import StorageMap, count_bucket_bytes, place_marks, take_marked_steps
from scalelab.measure.profiles import let_threads_finish
from scalelab.measure.training import Training
from scalelab.observations import MemoryReport, RankReport
from scalelab.trial import Trial

EXCHANGE_PREFIXES = ("FullyShardedDataParallel._", "FSDP::", "c10d::", "gloo:", "nccl:")
"""What sharded strategies and process groups call their own work in a profile."""
SCRATCH_NAMES = re.compile(r"c10d::|FSDP::all_gather( |$)")
"""Of them, those whose memory a process group's thread may release."""
EXCHANGE_PATHS = ("torch/distributed/fsdp", "torch/distributed/distributed_c10d")
"""Where that work is in a stack."""
MARK = "scalelab.mark."
MOST_ENTRIES = 1_000_000
"""Of CUDA's history: far more than two steps make."""
COLUMNS = ("seconds", "alive_bytes", "num_bytes", "category", "phase")

Recorded = list[tuple[float, str, Mapping[int, str]]]


def look_at_memory(trial: Trial, training: Training, directory: Path, report: RankReport) -> RankReport:
    """The report with the memory of a further step; a timeline, and on CUDA a snapshot, beside it."""
    is_cuda = trial.device == "cuda"
    device = next(training.model.parameters()).device
    storages = StorageMap(training, device, lambda storage: storage.data_ptr())
    events, recorded = (record_cuda if is_cuda else record_cpu)(training, storages, _name_file(directory, report.rank))
    marks = place_marks(recorded, [event.seconds for event in events])
    standing = storages.standing(find_alive(events))
    standing["buckets"] += count_bucket_bytes(training)
    account = account_step(events, marks, standing)
    file = f"memory/rank{report.rank}.csv"
    write_timeline(directory / file, account.timeline)
    memory = make_report(account, file)
    return replace(report, memory=add_cuda_figures(memory, device, directory, report.rank) if is_cuda else memory)


def make_report(account: MemoryAccount, file: str = "") -> MemoryReport:
    """An account as it travels with a rank's report."""
    return MemoryReport(
        peak_bytes=account.peak_bytes,
        peak_phase=account.peak_phase,
        current_bytes=account.current_bytes,
        by_category=account.by_category,
        phase_peaks=account.phase_peaks,
        file=file,
    )


def record_cpu(training: Training, storages: StorageMap, _: Path) -> tuple[list[MemoryEvent], Recorded]:
    """Two steps under the profiler: the allocator's calls and the marks, on one clock."""
    named: list[Mapping[int, str]] = []

    def record(phase: str, addresses: Mapping[int, str]) -> None:
        named.append(addresses)
        with record_function(MARK + phase):
            pass

    every_thread = _ExperimentalConfig(profile_all_threads=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, experimental_config=every_thread) as profiler:
        take_marked_steps(training, storages, record)
        let_threads_finish()
    results = profiler.profiler.kineto_results
    events, marks = read_event_tree(results.experimental_event_tree())
    recorded = [(seconds, phase, names) for (seconds, phase), names in zip(marks, named, strict=True)]
    return events, recorded


def read_event_tree(roots: Sequence[Any]) -> tuple[list[MemoryEvent], list[tuple[float, str]]]:
    """The allocator's calls and our marks in the order of time, from what the profiler calls its event tree."""
    events: list[MemoryEvent] = []
    marks: list[tuple[float, str]] = []
    scratch: dict[MemoryEvent, float] = {}
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
        if exchange_end is None and node.name.startswith(EXCHANGE_PREFIXES):
            exchange_end = node.end_time_ns / 1e9
        is_scratch = is_scratch or SCRATCH_NAMES.match(node.name) is not None
        waiting += [(child, exchange_end, is_scratch) for child in node.children]
    events.sort(key=lambda event: event.seconds)
    return end_scratch(events, scratch), sorted(marks)


def end_scratch(events: Sequence[MemoryEvent], scratch: Mapping[MemoryEvent, float]) -> list[MemoryEvent]:
    """The events with a release of what a collective took for itself, where nobody saw one.

    A process group's own thread may be the last to let go of it, and the profiler does not watch that thread. The call
    that asked for the collective has waited for it, so that it is released by the end of this call.
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


def record_cuda(training: Training, storages: StorageMap, snapshot_file: Path) -> tuple[list[MemoryEvent], Recorded]:
    """Two steps with the caching allocator's history switched on; its snapshot is kept for the public viewer."""
    recorded: Recorded = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MOST_ENTRIES)
    try:
        take_marked_steps(training, storages, lambda phase, names: recorded.append((time.time(), phase, names)))
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    snapshot_file.parent.mkdir(parents=True, exist_ok=True)
    snapshot_file.write_bytes(pickle.dumps(snapshot))
    return list(read_snapshot(snapshot, torch.cuda.current_device())), recorded


def read_snapshot(snapshot: Mapping[str, Any], device: int) -> Iterator[MemoryEvent]:
    """The calls of one device's caching allocator; memory counts as released when that is asked for."""
    for entry in snapshot["device_traces"][device]:
        sign = {"alloc": 1, "free_requested": -1}.get(entry["action"])
        if sign is not None:
            paths = (frame["filename"] for frame in entry.get("frames", ()))
            is_exchange = any(part in path for path in paths for part in EXCHANGE_PATHS)
            yield MemoryEvent(entry["time_us"] / 1e6, sign * entry["size"], entry["addr"], is_exchange)


def add_cuda_figures(memory: MemoryReport, device: torch.device, directory: Path, rank: int) -> MemoryReport:
    """The allocator's own peak instead of ours; what the categories leave over is the rest."""
    peak = int(torch.cuda.max_memory_allocated(device))
    rest = peak - memory.peak_bytes + memory.by_category.get("rest", 0)
    return replace(
        memory,
        peak_bytes=peak,
        current_bytes=int(torch.cuda.memory_allocated(device)),
        reserved_bytes=int(torch.cuda.max_memory_reserved(device)),
        by_category={**memory.by_category, "rest": rest},
        snapshot=str(_name_file(directory, rank).relative_to(directory)),
    )


def _name_file(directory: Path, rank: int) -> Path:
    """What the public viewer reads."""
    return directory / "memory" / f"rank{rank}.pickle"


def write_timeline(path: Path, timeline: Sequence[Change]) -> None:
    """Every call of the allocator in the step: when, what was alive after it, its size, category and phase."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    begin = timeline[0].seconds if timeline else 0.0
    writer.writerows((f"{change.seconds - begin:.9f}", *change[1:]) for change in timeline)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue())
