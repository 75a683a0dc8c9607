"""A pretend accelerator: `torch.device("pretend", 0)` and `("pretend", 1)`, driven through the seam as a real one is.

Its tensors are torch's (the PrivateUse1 device with a Python backend), autograd and optimizers work on them, and what
they hold is computed on the CPU. Time is pretended, so that tests are exact and never wait:

    clock       the host's. Starting an operator takes LAUNCH_SECONDS of it, whatever the operator
    streams     each device has two. An operator is done when everything before it in its stream is, plus its own time
    synchronise moves the host's clock to where the device is. Without it a clock reads launches
    events      are where their stream was when they were recorded. Their time cannot be read before they have passed
    copies      to the host with `non_blocking` arrive when the stream gets there. Until then the numbers are NaN
    memory      is counted in blocks of 512 bytes by device and by stream, with a peak, a limit and other tenants

Registering a device with torch cannot be undone: only separate processes may call `install`.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from scalelab.records.settings import DEVICES, DeviceKind
from scalelab.worker.device import DRIVERS, DeviceDriver, DeviceMemory

NAME = "pretend"
KIND = DeviceKind(name=NAME, title="pretend accelerator", block_bytes=512, has_history=True)
LAUNCH_SECONDS = 2e-6
KERNEL_SECONDS = 30e-6
"""Of every operator, whatever its size."""
COLD_SECONDS = 1e-3
"""What the first operator of its kind takes more: it is compiled, or tuned."""
COPY_BYTES_PER_SECOND = 10e9
VIEWS = (
    "view",
    "t.default",
    "transpose",
    "detach",
    "expand",
    "slice",
    "select",
    "unsqueeze",
    "alias",
    "permute",
    "split",
)
"""Operators that start nothing on a device."""


@dataclass
class PretendDevice:
    """One device: its streams, its memory, and what may be wrong with it."""

    total_bytes: int = 1 << 30
    speed: float = 1.0
    """Of its clock, over the nominal one."""
    link_speed: float = 1.0
    other_bytes: int = 0
    """What another process has allocated."""
    name: str = "Pretend 1"
    limit_bytes: int | None = None
    stream: int = 0
    ends: dict[int, float] = field(default_factory=lambda: {0: 0.0, 1: 0.0})
    """When each stream will have done what is queued."""
    busy_seconds: float = 0.0
    """Of all kernels so far: what a right measurement adds up to."""
    allocated: Counter[int] = field(default_factory=Counter)
    """Bytes by stream."""
    peak_bytes: int = 0
    arriving: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    """Copies to the host that are not there yet."""

    @property
    def allocated_bytes(self) -> int:
        return sum(self.allocated.values())

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.other_bytes - self.allocated_bytes


@dataclass
class Machine:
    """The host's clock and its two devices."""

    now: float = 100.0
    current: int = 0
    devices: list[PretendDevice] = field(default_factory=lambda: [PretendDevice(), PretendDevice()])
    seen: set[tuple[int, str]] = field(default_factory=set)
    history: list[dict[str, Any]] | None = None
    is_forgetful: bool = False
    """Whether a synchronise returns at once, as where it waits for another device or stream."""
    launches: int = 0

    def read(self) -> float:
        """Instead of `perf_counter`."""
        self.now += 1e-7
        return self.now

    def queue(self, index: int, name: str, copying: float = 0.0) -> float:
        device = self.devices[index]
        self.now += LAUNCH_SECONDS
        self.launches += 1
        seconds = KERNEL_SECONDS + (0.0 if (index, name) in self.seen else COLD_SECONDS)
        self.seen.add((index, name))
        seconds = seconds / device.speed + copying
        device.busy_seconds += seconds
        end = device.ends[device.stream] = max(device.ends[device.stream], self.now) + seconds
        return end

    def wait(self, index: int, until: float | None = None) -> None:
        device = self.devices[index]
        self.now = max(self.now, max(device.ends.values()) if until is None else until)
        due = [arrive for at, arrive in device.arriving if at <= self.now]
        device.arriving = [one for one in device.arriving if one[0] > self.now]
        for arrive in due:
            arrive()

    def allocate(self, storage: torch.UntypedStorage, index: int) -> None:
        device = self.devices[index]
        size = math.ceil(storage.nbytes() / KIND.block_bytes) * KIND.block_bytes
        limit = device.total_bytes if device.limit_bytes is None else device.limit_bytes
        if size > min(limit - device.allocated_bytes, device.free_bytes):
            raise torch.OutOfMemoryError(f"pretend out of memory. Tried to allocate {size} bytes")
        stream, address = device.stream, storage.data_ptr()
        device.allocated[stream] += size
        device.peak_bytes = max(device.peak_bytes, device.allocated_bytes)
        self.note("alloc", size, address)
        weakref.finalize(storage, self.release, index, stream, size, address)

    def release(self, index: int, stream: int, size: int, address: int) -> None:
        self.devices[index].allocated[stream] -= size
        self.note("free_requested", size, address)

    def note(self, action: str, size: int, address: int) -> None:
        if self.history is not None:
            self.history.append({"action": action, "size": size, "addr": address, "time_us": self.now * 1e6})


MACHINE = Machine()


class PretendTensor(torch.Tensor):
    """On a pretend device; `inner` is what it holds."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> PretendTensor:
        made: PretendTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
        )
        made.inner = inner
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PretendTensor({self.inner}, device='{self.device}')"

    def untyped_storage(self) -> torch.UntypedStorage:  # what an allocator would know it by
        return self.inner.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operator(func, args, kwargs or {})


class PretendMode(TorchDispatchMode):
    """Sees what no pretend tensor goes into: factories, and copies from the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operator(func, args, kwargs or {})


def run_operator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PretendTensor)]
    source = find_source(func, given)
    plain_args, plain_kwargs = tree_map_only(PretendTensor, lambda tensor: tensor.inner, (args, kwargs))
    wanted = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if wanted is not None:
        plain_kwargs["device"] = torch.device("cpu")
    before = {storage_of(leaf) for leaf in tree_leaves((plain_args, plain_kwargs)) if isinstance(leaf, torch.Tensor)}
    name = str(func)
    target = wanted or source
    if source is not None and (name.startswith(("aten._local_scalar_dense", "aten.equal")) or target.type == "cpu"):
        is_late = bool(kwargs.get("non_blocking"))
        result = func(*plain_args, **plain_kwargs)
        return copy_to_host(source, result, is_late)
    if name.startswith("aten.copy_") and given and not isinstance(args[0], PretendTensor):
        return copy_to_host(given[0].device, func(*plain_args, **plain_kwargs), bool((*args, False)[2]))
    result = func(*plain_args, **plain_kwargs)
    if target is None or target.type != NAME:
        return result
    index = MACHINE.current if target.index is None else target.index
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    for leaf in {storage_of(leaf): leaf for leaf in leaves if storage_of(leaf) not in before}.values():
        MACHINE.allocate(leaf.untyped_storage(), index)
    if not any(part in name for part in VIEWS):
        sent = sum(leaf.nbytes for leaf in leaves) if source is None else 0
        copying = sent / (COPY_BYTES_PER_SECOND * MACHINE.devices[index].link_speed)
        MACHINE.queue(index, name, copying)
    known = {id(tensor.inner): tensor for tensor in given}
    place = torch.device(NAME, index)

    def wrap(one: torch.Tensor) -> torch.Tensor:
        return known[id(one)] if id(one) in known else PretendTensor(one, place)

    return tree_map_only(torch.Tensor, wrap, result)


def find_source(func: Any, given: list[PretendTensor]) -> torch.device | None:
    places = {tensor.device for tensor in given}
    if len(places) > 1:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, got {sorted(map(str, places))}")
    return next(iter(places), None)


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def copy_to_host(source: torch.device, result: Any, is_late: bool) -> Any:
    """Wait for the numbers, unless they may arrive later: until then they are not there."""
    index = source.index or 0
    size = result.nbytes if isinstance(result, torch.Tensor) else 4
    speed = COPY_BYTES_PER_SECOND * MACHINE.devices[index].link_speed
    end = MACHINE.queue(index, "copy to host", size / speed)
    if not is_late:
        MACHINE.wait(index, end)
        return result
    numbers, hidden = result.clone(), result
    hidden.fill_(math.nan if hidden.is_floating_point() else -1)
    MACHINE.devices[index].arriving.append((end, lambda: hidden.copy_(numbers)))  # type: ignore[arg-type, return-value]
    return hidden


class PretendEvent:
    """Where its stream was when it was recorded."""

    def __init__(self) -> None:
        self.at = math.inf
        self.index = 0

    def record(self) -> None:
        device = MACHINE.devices[MACHINE.current]
        self.index, self.at = MACHINE.current, max(device.ends[device.stream], MACHINE.now)

    def query(self) -> bool:
        return self.at <= MACHINE.now

    def synchronize(self) -> None:
        MACHINE.wait(self.index, self.at)

    def elapsed_time(self, other: PretendEvent) -> float:
        if not (self.query() and other.query()):
            raise RuntimeError("an event was read before the device had passed it")
        return 1e3 * (other.at - self.at)


class PretendDriver(DeviceDriver):
    """The seam's view of the machine."""

    def is_in_use(self) -> bool:
        return MACHINE.launches > 0

    def count(self) -> int:
        return len(MACHINE.devices)

    def select(self, index: int) -> torch.device:
        MACHINE.current = index
        return torch.device(NAME, index)

    def find_current(self) -> int:
        return MACHINE.current

    def name(self, index: int) -> str:
        return MACHINE.devices[index].name

    def synchronize(self, device: torch.device | None = None) -> None:
        if not MACHINE.is_forgetful:
            MACHINE.wait(self._index(device))

    def make_event(self) -> PretendEvent:
        return PretendEvent()

    def read_memory(self, device: torch.device | int) -> DeviceMemory:
        found = MACHINE.devices[self._index(device)]
        return DeviceMemory(found.allocated_bytes, found.peak_bytes, found.allocated_bytes, found.peak_bytes)

    def reset_peaks(self, device: torch.device | int) -> None:
        found = MACHINE.devices[self._index(device)]
        found.peak_bytes = found.allocated_bytes

    def empty_cache(self) -> None:
        pass

    def count_free_bytes(self, device: torch.device) -> int:
        return MACHINE.devices[self._index(device)].free_bytes

    def count_total_bytes(self, device: torch.device) -> int:
        return MACHINE.devices[self._index(device)].total_bytes

    def limit(self, device: torch.device, num_bytes: int) -> None:
        MACHINE.devices[self._index(device)].limit_bytes = num_bytes

    def read_random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def restore_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def start_history(self) -> None:
        MACHINE.history = []

    def read_history(self) -> dict[str, Any]:
        return {"device_traces": [MACHINE.history] * len(MACHINE.devices)}

    def stop_history(self) -> None:
        MACHINE.history = None

    def _index(self, device: torch.device | int | None) -> int:
        if isinstance(device, int):
            return device
        return MACHINE.current if device is None or device.index is None else device.index


class PretendModule:
    """What torch itself asks the module of a device."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return MACHINE.current

    def device_count(self) -> int:
        return len(MACHINE.devices)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


def install() -> None:
    """Register the device with torch and with the seam, for the rest of this process."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=PretendModule())
    DEVICES[NAME] = KIND
    DRIVERS[NAME] = PretendDriver(KIND)
    torch.autograd.set_multithreading_enabled(False)  # backward stays in the thread that has the mode


@contextmanager
def fresh_machine() -> Iterator[Machine]:
    """Two devices with nothing on them."""
    MACHINE.__init__()  # type: ignore[misc]
    with PretendMode():
        yield MACHINE
