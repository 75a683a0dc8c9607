"""The kinds of devices: one record each, which says where they differ; without torch.

What a device can do is asked of its record, never of its name. `worker/device.py` drives it by torch's own seam and
the module that torch has for its kind. ROCm's devices are called `cuda` by torch and go by the same record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One kind of device."""

    name: str
    """torch's name of its type."""
    title: str
    """One of them, in a sentence."""
    backend: str = "gloo"
    """The backend of its process groups, unless another is asked for."""
    is_accelerator: bool = True
    """Whether its work is queued: a clock is right only after a synchronise, and memory is the device's own."""
    activity: str = ""
    """What torch's profiler calls its kernels; empty: it records none."""
    block_bytes: int = 1
    """What its caching allocator rounds an allocation up to."""
    has_peaks: bool = True
    """Whether its allocator keeps the highest of what was allocated."""
    has_history: bool = False
    """Whether its allocator keeps a history, from which memory is recorded by category."""
    may_have_float8: bool = False
    """Whether some of the kind multiply in 8 bits."""
    has_graphs: bool = False
    """Whether torch.compile can record its kernels in graphs that start as a whole."""
    is_listed: bool = False
    """Whether nvidia-smi lists it, so that a study can refuse more ranks than there are before it starts any."""


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """What the self-test expected of a device, and what it saw."""

    name: str
    expectation: str
    figure: str
    is_right: bool | None
    """None: it could not be checked."""
    next_step: str = ""


_KNOWN = (
    DeviceKind(name="cpu", title="CPU", is_accelerator=False, has_peaks=False),
    DeviceKind(
        name="cuda",
        title="GPU",
        backend="nccl",
        activity="CUDA",
        block_bytes=512,
        has_history=True,
        may_have_float8=True,
        has_graphs=True,
        is_listed=True,
    ),
    DeviceKind(name="xpu", title="XPU", backend="xccl", activity="XPU", block_bytes=512),
    DeviceKind(name="mps", title="MPS device", has_peaks=False),
)
DEVICES: dict[str, DeviceKind] = {kind.name: kind for kind in _KNOWN}
DeviceChoice = Literal["auto", "cpu", "cuda", "xpu", "mps"]
"""The type of --device."""


def find_kind(name: str) -> DeviceKind:
    """The record of a kind; an unknown one is taken for an accelerator of which nothing is known."""
    return DEVICES.get(name) or DeviceKind(name=name, title=name, has_peaks=False)
