"""The instrument `memory`: every byte that torch's allocator gives out in a step, by category, with its peak.

On a CPU torch's profiler records each allocation and release of the allocator: the equal of what CUDA calls allocated.
It does not know what was there before it began, so that is counted from the storages themselves: parameters, optimizer,
buffers, the batch; and DDP's buckets from what DDP says of them. Two steps are run: the first fills the memory as every
later step finds it, the second is accounted (`analysis.memory` has the rules).

On CUDA the caching allocator's own history is read instead, the peak is the allocator's, and a snapshot for the public
viewer (pytorch.org/memory_viz) is kept. What the categories do not explain there is the rest.
The data set lies in the host's memory and is not counted, on a CPU either: only the batch of the step is.

What lies where in a step's memory: the storages of a training step by category, and the marks between its phases. Both
the measurement and the forecast ask the same questions of the same training; only what an address is differs. A
real tensor has a pointer, a fake one the identity of its storage.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from scalelab.analysis.memory import BEGIN, MemoryAccount, MemoryPoint, PhaseMark, account_step, find_alive
from scalelab.records.files import write_atomically
from scalelab.records.observations import MemoryReport, RankReport
from scalelab.records.trial import Trial
from scalelab.worker.device import DeviceMemory, find_driver
from scalelab.worker.memory.allocator import AllocatorRecording, name_snapshot, open_recording
from scalelab.worker.step import take_step
from scalelab.worker.strategies.ddp import find_hook_state
from scalelab.worker.training import Training


class HoldsMemory(Protocol):
    """What a step's memory is found from: a training run, or what was seen of a script."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizers(self) -> Any: ...
    @property
    def batches(self) -> Any: ...


Storages = dict[int, int]
"""Bytes by address."""
AddressOf = Callable[[torch.UntypedStorage], int]
RecordPhase = Callable[[str, Mapping[int, str]], None]
"""Called with the phase that ends, and the categories of known addresses."""


class StorageMap:
    """Finds the storages of a training run on its device."""

    def __init__(self, training: HoldsMemory, device: torch.device, address_of: AddressOf) -> None:
        self._training = training
        self._device = device
        self._address_of = address_of

    def find(self, values: Iterable[Any]) -> Storages:
        """The storages of tensors, each once; non-tensors and other devices are left out."""
        found: Storages = {}
        for value in values:
            tensor = localise(value)
            if tensor is not None and tensor.device.type == self._device.type and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                found[self._address_of(storage)] = storage.nbytes()
        return found

    def parameters(self) -> Storages:
        return self.find(self._training.model.parameters())

    def gradients(self) -> Storages:
        return self.find(parameter.grad for parameter in self._training.model.parameters())

    def buffers(self) -> Storages:
        return self.find(self._training.model.buffers())

    def optimizer(self) -> Storages:
        return self.find(tree_leaves([list(one.state.values()) for one in self._training.optimizers]))

    def batch(self) -> Storages:
        return self.find(tree_leaves(getattr(self._training.batches, "last", None)))

    def remembered(self) -> Storages:
        """What a hook of DDP that compresses gradients, or a pipeline for its messages, keeps from step to step."""
        model: Any = self._training.model
        state = next(filter(None, map(find_hook_state, list_replicas(model))), None)
        kept = () if state is None else (state.p_memory_dict, state.q_memory_dict, state.error_dict)
        return self.find([*getattr(model, "receive_buffers", ()), *(one for each in kept for one in each.values())])

    def outputs(self, output: Any) -> Storages:
        return self.find(tree_leaves(output))

    def standing(self, alive: Collection[int]) -> dict[str, int]:
        """What existed before; `alive` holds the addresses that events made, which are not counted twice."""
        found = {
            "parameters": self.parameters(),
            "optimizer": self.optimizer(),
            "buffers": self.buffers(),
            "batch": self.batch(),
            "buckets": self.remembered(),
        }
        return {name: sum(size for at, size in sizes.items() if at not in alive) for name, sizes in found.items()}


def localise(value: Any) -> torch.Tensor | None:
    """A tensor; of a sharded one, this rank's piece."""
    if not isinstance(value, torch.Tensor):
        return None
    local = getattr(value, "_local_tensor", value)
    return local if isinstance(local, torch.Tensor) else value


def take_marked_steps(training: Training, storages: StorageMap, record: RecordPhase) -> None:
    """One step that fills the memory as every later one finds it, then the step that is accounted."""

    def mark(phase: str) -> None:
        record(phase, name_kept(phase, storages))

    with _watch_output(training, storages, record):
        take_step(training, mark)
        record(BEGIN, {})
        take_step(training, mark)


def name_kept(phase: str, storages: StorageMap) -> dict[int, str]:
    """The categories of what is known by its owner when a phase ends."""
    if phase == "input":
        return dict.fromkeys(storages.batch(), "batch")
    if phase == "backward":
        return dict.fromkeys(storages.remembered(), "buckets") | dict.fromkeys(storages.gradients(), "gradients")
    if phase == "optimizer":
        return dict.fromkeys(storages.optimizer(), "optimizer")
    return {}


@contextmanager
def _watch_output(training: Training, storages: StorageMap, record: RecordPhase) -> Iterator[None]:
    """Mark the end of the model's forward and the start of the loss."""

    def see(_: object, __: object, output: Any) -> None:
        if torch.is_grad_enabled():
            record("model", dict.fromkeys(storages.outputs(output), "output"))

    hooks = [part.register_forward_hook(see) for part in training.parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def place_marks(recorded: Iterable[tuple[float, str, Mapping[int, str]]], times: list[float]) -> list[PhaseMark]:
    """Marks by the time they were made at, among events by their times, ascending."""
    ordered = torch.tensor(times, dtype=torch.float64)
    return [
        PhaseMark(phase=phase, position=int(torch.searchsorted(ordered, seconds)), named=named)
        for seconds, phase, named in recorded
    ]


def count_bucket_bytes(training: HoldsMemory) -> int:
    """DDP's buckets, as DDP reports them; they were allocated before recording started."""
    told = [model._get_ddp_logging_data() for model in list_replicas(training.model)]
    sizes = [str(one.get("rebuilt_bucket_sizes") or one.get("bucket_sizes") or "") for one in told]
    return sum(int(size) for text in sizes for size in text.split(",") if size.strip())


def list_replicas(model: nn.Module) -> list[DistributedDataParallel]:
    """Every DDP in a model: around the whole, or around the parts that take turns. Looks through torch.compile."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


COLUMNS = ("seconds", "alive_bytes", "num_bytes", "category", "phase")


def look_at_memory(trial: Trial, training: Training, directory: Path, report: RankReport) -> RankReport:
    """The report with the memory of a further step; a timeline, and on CUDA a snapshot, beside it."""
    storages = map_storages(training)
    recording = open_recording(trial, directory, report.rank)
    recording.start()
    try:
        take_marked_steps(training, storages, recording.record)
    finally:
        recording.stop()
    return account_memory(training, storages, recording, directory, report)


def map_storages(training: HoldsMemory) -> StorageMap:
    """The storages of real tensors."""
    return StorageMap(training, next(training.model.parameters()).device, lambda storage: storage.data_ptr())


def account_memory(
    training: HoldsMemory, storages: StorageMap, recording: AllocatorRecording, directory: Path, report: RankReport
) -> RankReport:
    """The report with what was recorded of two steps; a timeline, and on CUDA a snapshot, beside it."""
    events, recorded = recording.read()
    marks = place_marks(recorded, [event.seconds for event in events])
    standing = storages.standing(find_alive(events))
    standing["buckets"] += count_bucket_bytes(training)
    account = account_step(events, marks, standing)
    file = f"memory/rank{report.rank}.csv"
    write_timeline(directory / file, account.timeline)
    memory = make_report(account, file)
    device = next(training.model.parameters()).device
    if driver := find_driver(device):
        memory = add_device_figures(memory, driver.read_memory(device), directory, report.rank)
    return replace(report, memory=memory)


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


def add_device_figures(memory: MemoryReport, found: DeviceMemory, directory: Path, rank: int) -> MemoryReport:
    """The allocator's own peak instead of ours; what the categories leave over is the rest."""
    peak = memory.peak_bytes if found.peak_bytes is None else found.peak_bytes
    rest = peak - memory.peak_bytes + memory.by_category.get("rest", 0)
    return replace(
        memory,
        peak_bytes=peak,
        current_bytes=found.allocated_bytes,
        reserved_bytes=found.peak_reserved_bytes,
        by_category={**memory.by_category, "rest": rest},
        snapshot=str(name_snapshot(directory, rank).relative_to(directory)),
    )


def write_timeline(path: Path, timeline: Sequence[MemoryPoint]) -> None:
    """Every call of the allocator in the step: when, what was alive after it, its size, category and phase."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    begin = timeline[0].seconds if timeline else 0.0
    writer.writerows((f"{change.seconds - begin:.9f}", *change[1:]) for change in timeline)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue())
