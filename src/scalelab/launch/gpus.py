"""What the driver says of GPUs, during a run and to the doctor: utilization, clock, power, temperature, reasons to slow
down, ECC, MIG, other tenants.

NVIDIA's by the library nvidia-ml-py where it is installed (`pip install 'scalelab[gpu]'`), otherwise by nvidia-smi;
AMD's by the library amdsmi (`scalelab[rocm]`, or as it comes with ROCm). A sensor that a GPU does not have, or that
this user may not read, is None. NVML's power is the mean of about a second on several generations, so single steps have
no energy of their own.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from scalelab.records.observations import DeviceLoad

PERIOD_SECONDS = 0.05
SLOW_PERIOD_SECONDS = 0.2
"""For nvidia-smi, which takes tens of milliseconds to answer."""
SM_CLOCK, BOARD_SENSOR = 1, 0
"""NVML's numbers of the clock of multiprocessors and of the GPU's thermometer."""
SLOWING: Mapping[int, str] = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's reasons for a lowered clock (nvmlClocksEventReason…), without idling and clocks that someone has set."""
SMI_FIELDS = (
    "utilization.gpu", "memory.used", "clocks.sm", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active",
)  # fmt: skip


class LoadReader(Protocol):
    """Samples devices; the first sample only starts the interval."""

    period_seconds: float

    def read(self) -> list[DeviceLoad]: ...


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """What the sensors of one GPU say now; None: not known."""

    busy: float | None = None
    memory_bytes: int | None = None
    clock_hertz: float | None = None
    most_clock_hertz: float | None = None
    power_watts: float | None = None
    most_power_watts: float | None = None
    temperature_celsius: float | None = None
    slowed: tuple[str, ...] = ()
    """Why its clock is lowered."""
    has_mig: bool | None = None
    has_ecc: bool | None = None
    num_errors: int | None = None
    """Memory errors that ECC could not correct, since the driver was loaded."""
    processes: tuple[int, ...] = ()
    """That compute on it."""

    def make_load(self, now: float, seconds: float, number: int) -> DeviceLoad | None:
        """As one sample of a run; None if not even utilization is known, as of a slice (MIG)."""
        if self.busy is None:
            return None
        return DeviceLoad(
            seconds=now,
            device=f"gpu {number}",
            busy=min(1.0, max(0.0, self.busy)),
            interval_seconds=seconds,
            memory_bytes=self.memory_bytes,
            clock_hertz=self.clock_hertz,
            power_watts=self.power_watts,
            temperature_celsius=self.temperature_celsius,
            slowed=self.slowed,
            num_others=max(0, len(self.processes) - 1),  # one device per rank; containers hide which process it is
        )


def open_gpus(num_gpus: int, stack: ExitStack) -> LoadReader | None:
    """The GPUs of a run by NVML, amdsmi or nvidia-smi; None: none of them is here."""
    nvml = open_nvml(stack)
    if nvml is not None:
        try:
            return GpuReader([find_nvml_gpu(nvml, name) for name in list_visible(num_gpus)])
        except nvml.NVMLError:
            return None
    amd = open_amdsmi(stack)
    if amd is not None:
        handles = amd.amdsmi_get_processor_handles()
        numbers = [int(name) for name in list_visible(num_gpus, "HIP_VISIBLE_DEVICES") if name.isdigit()]
        return GpuReader([_ask_amd_later(amd, handles[number]) for number in numbers if number < len(handles)])
    return SmiReader(num_gpus) if shutil.which("nvidia-smi") else None


def open_nvml(stack: ExitStack) -> Any:
    """NVML by its library; None: it is not installed, or finds no driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    stack.callback(nvml.nvmlShutdown)
    return nvml


def open_amdsmi(stack: ExitStack) -> Any:
    """AMD's library; None: it is not installed, or finds no driver."""
    try:
        amd = importlib.import_module("amdsmi")
        amd.amdsmi_init()
    except Exception:  # noqa: BLE001 - it loads a library whose absence raises anything
        return None
    stack.callback(amd.amdsmi_shut_down)
    return amd


def list_visible(num_gpus: int, variable: str = "CUDA_VISIBLE_DEVICES") -> list[str]:
    """The driver's names of torch's first GPUs: CUDA_VISIBLE_DEVICES renumbers them."""
    visible = [part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()]
    return visible[:num_gpus] or [str(index) for index in range(num_gpus)]


def find_nvml_gpu(nvml: Any, name: str) -> Callable[[], GpuState]:
    """Reads the sensors of one GPU, by its number or UUID."""
    by_number = name.isdigit()
    handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else nvml.nvmlDeviceGetHandleByUUID(name)
    return lambda: read_nvml(nvml, handle)


def read_nvml(nvml: Any, handle: Any) -> GpuState:
    """All sensors of a GPU by NVML; what one of them cannot say is None."""

    def ask(*names: str, words: tuple[Any, ...] = ()) -> Any:
        for name in names:
            try:
                return getattr(nvml, name)(handle, *words)
            except (nvml.NVMLError, AttributeError):  # this GPU, this user or this version of the library cannot ask
                continue
        return None

    rates, memory = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    mig, ecc = ask("nvmlDeviceGetMigMode"), ask("nvmlDeviceGetEccMode")
    errors = ask("nvmlDeviceGetTotalEccErrors", words=(1, 0))  # not corrected, since the driver was loaded
    return GpuState(
        busy=None if rates is None else rates.gpu / 100,
        memory_bytes=None if memory is None else int(memory.used),
        clock_hertz=_scale(ask("nvmlDeviceGetClockInfo", words=(SM_CLOCK,)), 1e6),
        most_clock_hertz=_scale(ask("nvmlDeviceGetMaxClockInfo", words=(SM_CLOCK,)), 1e6),
        power_watts=_scale(ask("nvmlDeviceGetPowerUsage"), 1e-3),
        most_power_watts=_scale(ask("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
        temperature_celsius=_scale(ask("nvmlDeviceGetTemperature", words=(BOARD_SENSOR,)), 1.0),
        slowed=name_reasons(reasons),
        has_mig=None if mig is None else bool(mig[0]),
        has_ecc=None if ecc is None else bool(ecc[0]),
        num_errors=errors,
        processes=tuple(one.pid for one in ask("nvmlDeviceGetComputeRunningProcesses") or ()),
    )


def name_reasons(mask: int) -> tuple[str, ...]:
    return tuple(words for bit, words in SLOWING.items() if mask & bit)


def _scale(value: Any, factor: float) -> float | None:
    return None if value is None else float(value) * factor


def _ask_amd_later(amd: Any, handle: Any) -> Callable[[], GpuState]:
    return lambda: read_amdsmi(amd, handle)


def read_amdsmi(amd: Any, handle: Any) -> GpuState:
    """The sensors of one of AMD's GPUs; values that it does not have are the text N/A."""

    def ask(name: str, *words: Any) -> Any:
        try:
            return getattr(amd, name)(handle, *words)
        except Exception:  # noqa: BLE001 - its errors are of classes that differ between versions
            return {}

    def read(found: Any, *keys: str) -> float | None:
        values = (found.get(key) for key in keys) if isinstance(found, Mapping) else (found,)
        return next((float(value) for value in values if isinstance(value, int | float)), None)

    sensor, metric = getattr(amd, "AmdSmiTemperatureType", None), getattr(amd, "AmdSmiTemperatureMetric", None)
    heat = ask("amdsmi_get_temp_metric", sensor.HOTSPOT, metric.CURRENT) if sensor and metric else None
    clocks = ask("amdsmi_get_clock_info", amd.AmdSmiClkType.GFX) if hasattr(amd, "AmdSmiClkType") else {}
    memory = read(ask("amdsmi_get_gpu_vram_usage"), "vram_used")
    processes = ask("amdsmi_get_gpu_process_list")
    return GpuState(
        busy=_scale(read(ask("amdsmi_get_gpu_activity"), "gfx_activity"), 0.01),
        memory_bytes=None if memory is None else int(memory) << 20,
        clock_hertz=_scale(read(clocks, "clk", "cur_clk"), 1e6),
        most_clock_hertz=_scale(read(clocks, "max_clk"), 1e6),
        power_watts=read(ask("amdsmi_get_power_info"), "current_socket_power", "average_socket_power"),
        temperature_celsius=read(heat),
        processes=tuple(range(len(processes))) if isinstance(processes, Sequence) else (),
    )


class GpuReader:
    """GPUs by a library of their driver."""

    period_seconds = PERIOD_SECONDS

    def __init__(self, gpus: Sequence[Callable[[], GpuState]]) -> None:
        self._gpus = gpus
        self._last = time.perf_counter()

    def read(self) -> list[DeviceLoad]:
        now, seconds = time.perf_counter(), time.perf_counter() - self._last
        self._last = now
        loads = (read().make_load(now, seconds, number) for number, read in enumerate(self._gpus))
        return [load for load in loads if load is not None]


class SmiReader:
    """GPUs by nvidia-smi, asked again each time."""

    period_seconds = SLOW_PERIOD_SECONDS

    def __init__(self, num_gpus: int) -> None:
        self._names = list_visible(num_gpus)
        self._last = time.perf_counter()

    def read(self) -> list[DeviceLoad]:
        command = ["nvidia-smi", f"--id={','.join(self._names)}", f"--query-gpu={','.join(SMI_FIELDS)}"]
        command.append("--format=csv,noheader,nounits")
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
        now, seconds = time.perf_counter(), time.perf_counter() - self._last
        self._last = now
        loads = [
            parse_smi_line(line).make_load(now, seconds, number) for number, line in enumerate(done.stdout.splitlines())
        ]
        return [load for load in loads if load is not None]


def parse_smi_line(line: str) -> GpuState:
    """One GPU as nvidia-smi lists `SMI_FIELDS`; what it does not know is in brackets."""
    fields = [part.strip() for part in line.split(",")]
    known = dict(zip(SMI_FIELDS, fields, strict=False))

    def read(name: str, factor: float) -> float | None:
        try:
            return float(known[name]) * factor
        except (KeyError, ValueError):
            return None

    memory, mask = read("memory.used", 2**20), known.get("clocks_throttle_reasons.active", "")
    return GpuState(
        busy=None if memory is None else read("utilization.gpu", 0.01),
        memory_bytes=None if memory is None else int(memory),
        clock_hertz=read("clocks.sm", 1e6),
        power_watts=read("power.draw", 1.0),
        temperature_celsius=read("temperature.gpu", 1.0),
        slowed=name_reasons(int(mask, 16)) if mask.startswith("0x") else (),
    )
