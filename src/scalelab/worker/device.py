"""The seam between scalelab and a device: everything that depends on one goes through here.

Streams, events, waiting, memory statistics, peaks, the cache, random states, names and profiler activities are asked of
a `DeviceDriver`. It goes by `torch.accelerator`, which is the same for all kinds, and by torch's module of the kind
(`torch.cuda`, which ROCm shares, `torch.xpu`, `torch.mps`) for what that lacks in the oldest torch that we take. Kinds
differ by their records (`records/settings.py`). No other module of this package calls `torch.cuda`, and a test looks.

A CPU has no driver: its work is done when a call returns, and its memory is the process's. Where code asks
`find_driver(device)`, None is the CPU.

Tests put a driver of their own into `DRIVERS`: a pretend accelerator whose work is queued and done later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from scalelab.errors import UsageError
from scalelab.records.settings import DEVICES, DeviceKind

MOST_ENTRIES = 1_000_000
"""Of an allocator's history: far more than two steps make."""


@dataclass(frozen=True)
class DeviceMemory:
    """What the caching allocator of a device says; None: it does not say."""

    allocated_bytes: int
    peak_bytes: int | None
    reserved_bytes: int | None
    peak_reserved_bytes: int | None


class DeviceDriver:
    """One kind of accelerator, by torch."""

    def __init__(self, kind: DeviceKind) -> None:
        self.kind = kind

    @property
    def module(self) -> Any:
        """torch's module of the kind."""
        return getattr(torch, self.kind.name)

    def is_in_use(self) -> bool:
        """Whether this process has begun to use it; asking does not begin. MPS does not say: it has memory then."""
        module = getattr(torch, self.kind.name, None)
        if module is None or not module.is_available():
            return False
        is_begun = getattr(module, "is_initialized", None)
        return bool(is_begun() if is_begun else self.read_memory(0).allocated_bytes)

    def count(self) -> int:
        return int(self.module.device_count()) if self.module.is_available() else 0

    def select(self, index: int) -> torch.device:
        """Make a device the current one of this process."""
        device = torch.device(self.kind.name, index)
        torch.accelerator.set_device_index(index)
        return device

    def find_current(self) -> int:
        return int(torch.accelerator.current_device_index())

    def name(self, index: int) -> str:
        found = getattr(self.module, "get_device_name", None)
        return str(found(index)) if found else self.kind.title

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait until everything that was queued on the device is done; None: on the current one."""
        torch.accelerator.synchronize(device)

    def make_event(self) -> Any:
        """A mark that can be recorded in the current stream, waited for, and timed against another."""
        return self.module.Event(enable_timing=True)

    def read_memory(self, device: torch.device | int) -> DeviceMemory:
        module = self.module
        if not self.kind.has_peaks:
            driver = getattr(module, "driver_allocated_memory", None)
            return DeviceMemory(int(module.current_allocated_memory()), None, int(driver()) if driver else None, None)
        return DeviceMemory(
            int(module.memory_allocated(device)),
            int(module.max_memory_allocated(device)),
            int(module.memory_reserved(device)),
            int(module.max_memory_reserved(device)),
        )

    def reset_peaks(self, device: torch.device | int) -> None:
        if self.kind.has_peaks:
            self.module.reset_peak_memory_stats(device)

    def empty_cache(self) -> None:
        self.module.empty_cache()

    def count_free_bytes(self, device: torch.device) -> int | None:
        """What this process could still have: free on the device, or in its own cache."""
        if not hasattr(self.module, "mem_get_info"):
            return None
        return int(self.module.mem_get_info(device)[0]) + (self.read_memory(device).reserved_bytes or 0)

    def count_total_bytes(self, device: torch.device) -> int | None:
        return int(self.module.mem_get_info(device)[1]) if hasattr(self.module, "mem_get_info") else None

    def limit(self, device: torch.device, num_bytes: int) -> None:
        """Let this process allocate so much and no more."""
        if not hasattr(self.module, "set_per_process_memory_fraction"):
            raise UsageError(f"--memory-limit: torch cannot limit the memory of a {self.kind.title}: drop it")
        total = self.module.get_device_properties(device).total_memory
        self.module.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)

    def has_float8(self, device: torch.device) -> bool:
        """Whether the device multiplies in 8 bits: from compute capability 8.9 on, and CDNA 3 (which says 9.4)."""
        return self.kind.may_have_float8 and tuple(self.module.get_device_capability(device)) >= (8, 9)

    def read_random_state(self) -> torch.Tensor:
        state: torch.Tensor = self.module.get_rng_state()
        return state

    def restore_random_state(self, state: torch.Tensor) -> None:
        self.module.set_rng_state(state)

    def start_history(self) -> None:
        """Have the allocator write down every call, with its stack."""
        if not self.kind.has_history:
            raise UsageError(
                f"memory by category needs an allocator that keeps a history, and torch has none for {self.kind.name}:"
                " use --device cpu or cuda"
            )
        self.module.memory._record_memory_history(context="alloc", stacks="python", max_entries=MOST_ENTRIES)

    def read_history(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.module.memory._snapshot()
        return found

    def stop_history(self) -> None:
        self.module.memory._record_memory_history(enabled=None)


DRIVERS: dict[str, DeviceDriver] = {kind.name: DeviceDriver(kind) for kind in DEVICES.values() if kind.is_accelerator}


def find_driver(device: torch.device | str) -> DeviceDriver | None:
    """The driver of a device; None: a CPU, which needs none."""
    return DRIVERS.get(device if isinstance(device, str) else device.type)


def find_driver_of(tensors: Iterable[torch.Tensor]) -> DeviceDriver | None:
    """The driver of the accelerator that tensors are on; None: all are on CPUs."""
    return next(filter(None, map(find_driver, {tensor.device.type for tensor in tensors})), None)


def find_used_driver() -> DeviceDriver | None:
    """The driver of the accelerator that this process has begun to use; None: it uses none."""
    return next((driver for driver in DRIVERS.values() if driver.is_in_use()), None)


def has_accelerator() -> bool:
    """Whether this host has an accelerator that torch can use."""
    return torch.accelerator.is_available()


def choose_device(name: str, rank: int, local_rank: int) -> torch.device:
    """The device of a rank, made the current one: its local rank counts the devices of its host."""
    driver = find_driver(name)
    if driver is None:
        return torch.device(name)
    num_devices = driver.count()
    if local_rank >= num_devices:
        raise UsageError(
            f"rank {rank} needs {driver.kind.title} {local_rank}, but torch {torch.__version__} sees {num_devices}:"
            f" use --device cpu, fewer --ranks, or a build of torch for {name}"
        )
    return driver.select(local_rank)


def choose_fake_device(name: str) -> torch.device:
    """Where fake tensors say that they are: the CPU where torch has no such device, for its engine would abort."""
    driver = find_driver(name)
    return torch.device(name if driver is not None and driver.count() else "cpu")


def choose_synchronize(device: torch.device) -> Callable[[], None]:
    """Waits for the device; a CPU has finished its work when a call returns."""
    driver = find_driver(device)
    return _nothing_to_wait_for if driver is None else partial(driver.synchronize, device)


def _nothing_to_wait_for() -> None:
    pass


def list_activities() -> list[torch.profiler.ProfilerActivity]:
    """What the profiler records here: the CPU, and the kernels of the accelerator in use."""
    driver = find_used_driver()
    names = ["CPU", driver.kind.activity] if driver and driver.kind.activity else ["CPU"]
    return [getattr(torch.profiler.ProfilerActivity, name) for name in names]
