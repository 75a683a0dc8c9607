"""What GPUs say during a run: by NVML, by amdsmi and by nvidia-smi, each of them played."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalelab.launch.gpus import (
    GpuReader,
    GpuState,
    SmiReader,
    find_nvml_gpu,
    list_visible,
    open_gpus,
    parse_smi_line,
    read_amdsmi,
    read_nvml,
)


class FakeNvml(SimpleNamespace):
    """The part of nvidia-ml-py that is used, for GPUs that are busy by their number."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        super().__init__(calls=[])

    def nvmlInit(self) -> None:  # noqa: N802 - the library's name
        self.calls.append("init")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.calls.append("shutdown")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:  # noqa: N802
        return int(name[-1])

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=10 * handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=handle * 2**30)


@pytest.mark.parametrize("visible", ["5,7", "GPU-aa5,GPU-bb7"])
def test_gpus_are_those_that_torch_may_use(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = FakeNvml()
    loads = GpuReader([find_nvml_gpu(nvml, name) for name in list_visible(2)]).read()
    assert [(load.device, load.busy, load.memory_bytes) for load in loads] == [
        ("gpu 0", 0.5, 5 * 2**30),
        ("gpu 1", 0.7, 7 * 2**30),
    ]


def test_without_a_list_gpus_are_numbered_from_nought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list_visible(3) == ["0", "1", "2"]


def test_the_library_is_opened_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with ExitStack() as stack:
        assert isinstance(open_gpus(1, stack), GpuReader)
    assert nvml.calls == ["init", "shutdown"]


def test_a_gpu_that_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slices(FakeNvml):
        def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
            if handle == 1:
                raise self.NVMLError("Not Supported")
            return super().nvmlDeviceGetUtilizationRates(handle)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = [find_nvml_gpu(Slices(), name) for name in list_visible(3)]
    assert [load.device for load in GpuReader(gpus).read()] == ["gpu 0", "gpu 2"]


def test_a_gpu_that_the_library_does_not_find_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden(FakeNvml):
        def nvmlDeviceGetHandleByUUID(self, name: str) -> int:  # noqa: N802
            raise self.NVMLError(f"{name} not found")

    nvml = Hidden()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with ExitStack() as stack:
        assert open_gpus(1, stack) is None
    assert nvml.calls == ["init", "shutdown"]


def test_without_the_library_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '50, 2048'\necho '[N/A], 0'\necho '100, 1024'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with ExitStack() as stack:
        reader = open_gpus(3, stack)
        assert isinstance(reader, SmiReader)
    assert [(load.device, load.busy, load.memory_bytes) for load in reader.read()] == [
        ("gpu 0", 0.5, 2 * 2**30),
        ("gpu 2", 1.0, 2**30),
    ]


def test_without_either_nothing_can_look_at_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with ExitStack() as stack:
        assert open_gpus(1, stack) is None


class HotNvml(FakeNvml):
    """A GPU with all sensors, that is slowed, cut and shared."""

    def __getattr__(self, name: str) -> Any:
        known = {
            "nvmlDeviceGetClockInfo": 705,
            "nvmlDeviceGetMaxClockInfo": 1410,
            "nvmlDeviceGetPowerUsage": 399_000,
            "nvmlDeviceGetEnforcedPowerLimit": 400_000,
            "nvmlDeviceGetTemperature": 84,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x44,
            "nvmlDeviceGetMigMode": [1, 1],
            "nvmlDeviceGetEccMode": [1, 1],
            "nvmlDeviceGetTotalEccErrors": 2,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7), SimpleNamespace(pid=9)],
        }
        if name not in known:
            raise AttributeError(name)
        return lambda handle, *words: known[name]


def test_every_sensor_is_read_in_base_units() -> None:
    state = read_nvml(HotNvml(), 3)
    assert state == GpuState(
        busy=0.3,
        memory_bytes=3 * 2**30,
        clock_hertz=705e6,
        most_clock_hertz=1410e6,
        power_watts=399.0,
        most_power_watts=400.0,
        temperature_celsius=84.0,
        slowed=("software power cap", "hardware thermal slowdown"),
        has_mig=True,
        has_ecc=True,
        num_errors=2,
        processes=(7, 9),
    )
    load = state.make_load(1.0, 0.1, 3)
    assert load is not None
    assert (load.clock_hertz, load.power_watts, load.num_others, load.slowed) == (705e6, 399.0, 1, state.slowed)


def test_a_line_of_nvidia_smi_has_the_same_sensors() -> None:
    state = parse_smi_line("50, 2048, 1410, 250.5, 60, 0x0000000000000004")
    assert (state.busy, state.memory_bytes, state.clock_hertz, state.power_watts) == (0.5, 2 * 2**30, 1410e6, 250.5)
    assert (state.temperature_celsius, state.slowed) == (60.0, ("software power cap",))
    unknown = parse_smi_line("50, 2048, [N/A], [Not Supported], [N/A], [N/A]")
    assert (unknown.clock_hertz, unknown.power_watts, unknown.slowed) == (None, None, ())


def test_amds_library_says_as_much() -> None:
    amd = SimpleNamespace(
        AmdSmiTemperatureType=SimpleNamespace(HOTSPOT=1),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT=0),
        AmdSmiClkType=SimpleNamespace(GFX=0),
        amdsmi_get_temp_metric=lambda *_: 71,
        amdsmi_get_clock_info=lambda *_: {"clk": 1700, "max_clk": 2100},
        amdsmi_get_gpu_activity=lambda _: {"gfx_activity": 90},
        amdsmi_get_power_info=lambda _: {"current_socket_power": "N/A", "average_socket_power": 480},
        amdsmi_get_gpu_vram_usage=lambda _: {"vram_used": 1024},
        amdsmi_get_gpu_process_list=lambda _: [object()],
    )
    state = read_amdsmi(amd, 0)
    assert (state.busy, state.clock_hertz, state.power_watts) == (0.9, 1700e6, 480.0)
    assert (state.temperature_celsius, state.memory_bytes, len(state.processes)) == (71.0, 2**30, 1)
    assert read_amdsmi(SimpleNamespace(), 0) == GpuState()
