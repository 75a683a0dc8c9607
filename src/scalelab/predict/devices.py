"""Known devices: published numbers, and the usual node around them. Nothing here is measured.

Peaks are for dense matrix products without sparsity, float32 without TF32. `link_rate` is the link between devices of
a node, per device and direction; `node_rate` is the link of a whole node to others, per direction, in its common form.
Watts are the board's limit. Prices are rounded on-demand prices per hour at a large public cloud: they change, so give
your own. A TPU's links form a torus across all slices: `link_rate` is the sum over all directions of a chip, and a node
is a block of the torus (4 × 4 × 4, or 8 × 8) whose faces lead to the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from scalelab.errors import UnknownName, UsageError
from scalelab.units import format_bytes

TERA = 1e12
GIGA = 1e9
GIBI = 2**30
DTYPE_BYTES = {"float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 2}
"""Of an activation; with float8 only the inputs of products have 8 bits."""

HOPPER_REACH = 0.90
"""Found on the four rows without a pipeline of Megatron-Core's table for H100s (r0.8, 2024)."""
CAPPED_REACH = 0.78
"""Of H100s with less power: so that Llama 3.1 8B with FSDP and torch.compile trains as fast on 8 as published
(torchtitan, benchmarks of December 2024, table 1)."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One accelerator, as part of a node."""

    name: str
    peaks: Mapping[str, float]
    """Operations per second by data type."""
    memory_bytes: float
    memory_rate: float
    """Bytes per second of its own memory."""
    link_rate: float
    """Bytes per second to others of its node, per direction."""
    per_node: int
    node_rate: float
    """Bytes per second from node to node, of all devices of a node together."""
    watts: float | None = None
    price: float | None = None
    """Dollars an hour."""
    reach: float = 1.0
    """How much of its peak it gets, over what an A100 gets of its own; 1 where nothing is known."""
    source: str = "declared"

    def __post_init__(self) -> None:
        for what, value in (
            ("peak", min(self.peaks.values(), default=0.0)),
            ("memory", self.memory_bytes),
            ("memory bandwidth", self.memory_rate),
            ("bandwidth inside a node", self.link_rate),
            ("bandwidth between nodes", self.node_rate),
        ):
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"device {self.name}: {what} must be finite and > 0, got {value:g}")
        if self.per_node < 1:
            raise UsageError(f"device {self.name}: devices per node must be ≥ 1, got {self.per_node}")

    def peak(self, dtype: str) -> float:
        if dtype not in self.peaks:
            raise UnknownName(f"data type of {self.name}", dtype, self.peaks)
        return self.peaks[dtype]

    @property
    def words(self) -> str:
        return f"{self.name} ({format_bytes(self.memory_bytes)}, {self.per_node} per node)"


def _peaks(
    half: float, single: float, *, tf32: float | None = None, float8: float | None = None, has_bfloat16: bool = True
) -> dict[str, float]:
    """Tera-operations as published, by data type."""
    found = {"float32": single * TERA, "float16": half * TERA}
    if has_bfloat16:
        found["bfloat16"] = half * TERA
    if tf32 is not None:
        found["tf32"] = tf32 * TERA
    if float8 is not None:
        found["float8"] = float8 * TERA
    return found


def _make(
    name: str, peaks: dict[str, float], memory: float, rate: float, link: float, node: float,
    *, per_node: int = 8, watts: float, price: float | None = None, reach: float = 1.0, source: str,
) -> Accelerator:  # fmt: skip
    """Memory in GiB, the rates in GB/s."""
    return Accelerator(
        name=name, peaks=peaks, memory_bytes=memory * GIBI, memory_rate=rate * GIGA, link_rate=link * GIGA,
        per_node=per_node, node_rate=node * GIGA, watts=watts, price=price, reach=reach, source=source,
    )  # fmt: skip


_A100 = _peaks(312, 19.5, tf32=156)
_H100 = _peaks(989.4, 66.9, tf32=494.7, float8=1978.9)
DEVICES: dict[str, Accelerator] = {
    device.name: device
    for device in (
        _make("a100-40gb", _A100, 40, 1555, 300, 200, watts=400, price=4.1,
              source="NVIDIA A100 datasheet; 8 HDR links of 200 Gbit/s, DGX A100 datasheet"),
        _make("a100-80gb", _A100, 80, 2039, 300, 200, watts=400, price=5.1,
              source="NVIDIA A100 datasheet; 8 HDR links of 200 Gbit/s, DGX A100 datasheet"),
        _make("h100-sxm", _H100, 80, 3350, 450, 400, watts=700, price=12.3, reach=HOPPER_REACH,
              source="NVIDIA H100 datasheet; 8 NDR links of 400 Gbit/s, DGX H100 datasheet"),
        _make("h100-500w", _H100, 96e9 / GIBI, 2400, 450, 400, watts=500, reach=CAPPED_REACH,
              source="torchtitan, benchmarks of December 2024: 96 GB of HBM2e, 500 W, 400 Gbit/s a device"),
        _make("h100-pcie", _peaks(756, 51.2, tf32=378, float8=1513), 80, 2000, 64, 50, watts=350, reach=CAPPED_REACH,
              source="NVIDIA H100 PCIe product brief; PCIe 5 inside, two links of 200 Gbit/s assumed"),
        _make("h200", _H100, 141e9 / GIBI, 4800, 450, 400, watts=700, reach=HOPPER_REACH,
              source="NVIDIA H200 datasheet; 8 NDR links of 400 Gbit/s, DGX H200 datasheet"),
        _make("b200", _peaks(2250, 75, tf32=1125, float8=4500), 180e9 / GIBI, 7700, 900, 400, watts=1000,
              source="NVIDIA DGX B200 datasheet, dense"),
        _make("v100", _peaks(125, 15.7, has_bfloat16=False), 32, 900, 150, 50, watts=300, price=3.1,
              source="NVIDIA V100 datasheet; 4 EDR links of 100 Gbit/s, DGX-1 datasheet"),
        _make("p100", _peaks(21.2, 10.6, has_bfloat16=False), 16, 732, 80, 12.5, per_node=4, watts=300, price=1.5,
              source="NVIDIA P100 datasheet; one link of 100 Gbit/s assumed"),
        _make("mi250x", _peaks(383, 47.9), 128, 3277, 250, 100, per_node=4, watts=560,
              source="AMD MI250X datasheet, both dies; 4 links of 200 Gbit/s, Frontier user guide"),
        _make("mi300x", _peaks(1307, 163.4, tf32=653.7, float8=2614.9), 192, 5300, 448, 400, watts=750,
              source="AMD MI300X datasheet, dense; 8 links of 400 Gbit/s assumed"),
        _make("l40s", _peaks(362, 91.6, tf32=183, float8=733), 48, 864, 32, 50, watts=350,
              source="NVIDIA L40S datasheet; PCIe 4 inside, two links of 200 Gbit/s assumed"),
        _make("a10", _peaks(125, 31.2, tf32=62.5), 24, 600, 32, 12.5, per_node=4, watts=150, price=1.2,
              source="NVIDIA A10 datasheet; PCIe 4 inside, one link of 100 Gbit/s assumed"),
        _make("t4", _peaks(65, 8.1, has_bfloat16=False), 16, 320, 16, 6.25, per_node=4, watts=70, price=0.53,
              source="NVIDIA T4 datasheet; PCIe 3 inside, one link of 50 Gbit/s assumed"),
        _make("rtx-4090", _peaks(165.2, 82.6, tf32=82.6), 24, 1008, 32, 1.25, watts=450,
              source="NVIDIA Ada architecture whitepaper, float32 accumulation; PCIe 4, 10 Gbit/s assumed"),
        _make("h800", _H100, 80, 3350, 200, 400, watts=700, reach=HOPPER_REACH,
              source="as h100-sxm with NVLink of 400 GB/s both ways; DeepSeek-V3 report, section 3.1"),
        _make("a800", _A100, 80, 2039, 200, 200, watts=400,
              source="as a100-80gb with NVLink of 400 GB/s both ways, NVIDIA A800 datasheet"),
        _make("tpu-v3", _peaks(123, 15.4), 32, 900, 175, 5600, per_node=32, watts=220, price=2.0,
              source="Google Cloud TPU v3 documentation, a chip of two cores; 5 of 6 torus links assumed"),
        _make("tpu-v4", _peaks(275, 34.4), 32, 1228, 150, 4800, per_node=64, watts=192, price=3.2,
              source="Jouppi et al. 2023, TPU v4, table 4; float32 taken as an eighth"),
        _make("tpu-v5e", _peaks(197, 24.6), 16, 819, 100, 3200, per_node=64, watts=200, price=1.2,
              source="Google Cloud TPU v5e documentation; float32 taken as an eighth, watts assumed"),
        _make("tpu-v5p", _peaks(459, 57.4), 95e9 / GIBI, 2765, 300, 9600, per_node=64, watts=350, price=4.2,
              source="Google Cloud TPU v5p documentation; float32 taken as an eighth, watts assumed"),
        _make("tpu-v6e", _peaks(918, 114.8), 32e9 / GIBI, 1640, 224, 7168, per_node=64, watts=300, price=2.7,
              source="Google Cloud TPU v6e documentation; float32 taken as an eighth, watts assumed"),
    )
}  # fmt: skip


def recognize_device(name: str, memory_bytes: int) -> Accelerator | None:
    """A device of the table by the name that its driver gives."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if words & {"a100", "a100x"}:
        return DEVICES["a100-80gb" if memory_bytes > 60e9 else "a100-40gb"]
    if "h100" in words:
        return DEVICES["h100-pcie" if "pcie" in words else "h100-sxm"]
    if "4090" in words:
        return DEVICES["rtx-4090"]
    for key in ("h200", "h800", "a800", "b200", "v100", "p100", "mi250x", "mi300x", "l40s", "a10", "t4"):
        if words & {key, f"{key}g"}:
            return DEVICES[key]
    return None


def find_device(name: str) -> Accelerator:
    """A device of the table."""
    if name not in DEVICES:
        raise UnknownName("device", name, DEVICES, "Or declare one: --device-peak 300T --device-memory 80GB …")
    return DEVICES[name]


def declare_device(
    base: Accelerator | None, dtype: str, *, peak: float | None = None, memory_bytes: float | None = None,
    memory_rate: float | None = None, link_rate: float | None = None, per_node: int | None = None,
    node_rate: float | None = None, watts: float | None = None, price: float | None = None,
) -> Accelerator:  # fmt: skip
    """A device of the table with some of its numbers replaced, or one of which all that matters is given."""
    given = {
        "memory_bytes": memory_bytes, "memory_rate": memory_rate, "link_rate": link_rate, "per_node": per_node,
        "node_rate": node_rate, "watts": watts, "price": price,
    }  # fmt: skip
    changed = {name: value for name, value in given.items() if value is not None}
    if base is not None:
        peaks = base.peaks if peak is None else {**base.peaks, dtype: peak}
        return replace(base, peaks=peaks, **changed) if changed or peak is not None else base  # type: ignore[arg-type]
    flags = {
        "peak": "--device-peak", "memory_bytes": "--device-memory", "memory_rate": "--device-bandwidth",
        "link_rate": "--device-link", "per_node": "--devices-per-node", "node_rate": "--node-link",
    }  # fmt: skip
    missing = [text for name, text in flags.items() if name not in changed and not (name == "peak" and peak)]
    if peak is None or missing:
        raise UsageError(f"a declared device also needs {', '.join(missing)}; or name a known one with --device")
    return Accelerator(name="declared", peaks={dtype: peak}, **changed)  # type: ignore[arg-type]
