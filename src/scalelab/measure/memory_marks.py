"""What lies where in a step's memory: the storages of a training by category, and the marks between its phases.

Both the measurement and the forecast ask the same questions of the same training; only what an address is differs. A
real tensor has a pointer, a fake one the identity of its storage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from scalelab.analysis.memory import BEGIN, PhaseMark
from scalelab.measure.step import take_step
from scalelab.measure.training import Training
from scalelab.strategies.ddp import find_hook_state

Storages = dict[int, int]
"""Bytes by address."""
AddressOf = Callable[[torch.UntypedStorage], int]
Record = Callable[[str, Mapping[int, str]], None]
"""Told the phase that ends, and the categories of known addresses."""


class StorageMap:
    """Finds a training's storages on its device."""

    def __init__(self, training: Training, device: torch.device, address_of: AddressOf) -> None:
        self._training = training
        self._device = device
        self._address_of = address_of

    def find(self, values: Iterable[Any]) -> Storages:
        """The storages of tensors, each once; what is no tensor, or elsewhere, is left out."""
        found: Storages = {}
        for value in values:
            tensor = _localise(value)
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
        return self.find(tree_leaves(list(self._training.optimizer.state.values())))

    def batch(self) -> Storages:
        return self.find(tree_leaves(getattr(self._training.batches, "last", None)))

    def remembered(self) -> Storages:
        """What a hook of DDP that compresses gradients keeps from step to step."""
        model = getattr(self._training.model, "_orig_mod", self._training.model)
        state = find_hook_state(model) if isinstance(model, DistributedDataParallel) else None
        kept = () if state is None else (state.p_memory_dict, state.q_memory_dict, state.error_dict)
        return self.find(tensor for tensors in kept for tensor in tensors.values())

    def outputs(self, output: Any) -> Storages:
        return self.find(tree_leaves(output))

    def standing(self, alive: Collection[int]) -> dict[str, int]:
        """What was there before; of what events made, the addresses that are alive are told, and not counted twice."""
        found = {
            "parameters": self.parameters(),
            "optimizer": self.optimizer(),
            "buffers": self.buffers(),
            "batch": self.batch(),
            "buckets": self.remembered(),
        }
        return {name: sum(size for at, size in sizes.items() if at not in alive) for name, sizes in found.items()}


def _localise(value: Any) -> torch.Tensor | None:
    """A tensor; of a sharded one, this rank's piece."""
    if not isinstance(value, torch.Tensor):
        return None
    local = getattr(value, "_local_tensor", value)
    return local if isinstance(local, torch.Tensor) else value


def take_marked_steps(training: Training, storages: StorageMap, record: Record) -> None:
    """One step that fills the memory as every later one finds it, then the step that is accounted."""

    def mark(phase: str) -> None:
        record(phase, _name_kept(phase, storages))

    with _watch_output(training, storages, record):
        take_step(training, mark)
        record(BEGIN, {})
        take_step(training, mark)


def _name_kept(phase: str, storages: StorageMap) -> dict[int, str]:
    """The categories of what is known by its owner when a phase ends."""
    if phase == "input":
        return dict.fromkeys(storages.batch(), "batch")
    if phase == "backward":
        return dict.fromkeys(storages.remembered(), "buckets") | dict.fromkeys(storages.gradients(), "gradients")
    if phase == "optimizer":
        return dict.fromkeys(storages.optimizer(), "optimizer")
    return {}


@contextmanager
def _watch_output(training: Training, storages: StorageMap, record: Record) -> Iterator[None]:
    """Mark where the model ends and its loss begins."""

    def see(_: object, __: object, output: Any) -> None:
        if torch.is_grad_enabled():
            record("model", dict.fromkeys(storages.outputs(output), "output"))

    hook = training.model.register_forward_hook(see)
    try:
        yield
    finally:
        hook.remove()


def place_marks(recorded: Iterable[tuple[float, str, Mapping[int, str]]], times: list[float]) -> list[PhaseMark]:
    """Marks by the time they were made at, among events by their times, ascending."""
    ordered = torch.tensor(times, dtype=torch.float64)
    return [
        PhaseMark(phase=phase, position=int(torch.searchsorted(ordered, seconds)), named=named)
        for seconds, phase, named in recorded
    ]


def count_bucket_bytes(training: Training) -> int:
    """DDP's buckets, as DDP itself says; they were made before anybody watched."""
    model = getattr(training.model, "_orig_mod", training.model)
    if not isinstance(model, DistributedDataParallel):
        return 0
    told = model._get_ddp_logging_data()
    sizes = str(told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or "")
    return sum(int(size) for size in sizes.split(",") if size.strip())
