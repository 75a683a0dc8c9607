"""One seam for every device: kinds differ in a table, and no other module asks torch for one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import torch

import scalelab
from scalelab.errors import UsageError
from scalelab.launch.agreement import Assignment
from scalelab.records.settings import DEVICES, DeviceChoice, find_kind
from scalelab.worker.device import (
    DRIVERS,
    choose_device,
    choose_synchronize,
    find_driver,
    find_driver_of,
    find_used_driver,
    list_activities,
)
from scalelab.worker.doctor.self_test import run_self_test
from scalelab.worker.worker import prepare_process
from tests.worker.trials import make_trial

PACKAGE = Path(scalelab.__file__).parent
SEAM = PACKAGE / "worker" / "device.py"
DIRECT = re.compile(r"torch\.(cuda|xpu|mps|accelerator)\b|\.is_cuda\b|from torch import (cuda|xpu|mps|accelerator)\b")


def test_no_module_but_the_seam_asks_torch_for_a_device() -> None:
    files = [file for file in PACKAGE.rglob("*.py") if file != SEAM and "scripts" not in file.parts]
    assert len(files) > 300
    assert [str(file) for file in files if DIRECT.search(file.read_text(encoding="utf-8"))] == []
    assert DIRECT.search(SEAM.read_text(encoding="utf-8"))


def test_every_accelerator_has_a_record_a_driver_and_a_choice() -> None:
    assert set(get_args(DeviceChoice)) == {"auto", *DEVICES}
    assert set(DRIVERS) == {name for name, kind in DEVICES.items() if kind.is_accelerator}
    assert find_kind("hpu").is_accelerator  # torch may know more kinds than we do


@pytest.mark.parametrize("name", [name for name, kind in DEVICES.items() if kind.is_accelerator])
def test_torch_has_what_the_record_of_a_kind_says(name: str) -> None:
    """As far as a build without the device shows: modules, classes and functions exist, and are not called."""
    kind, module = DEVICES[name], getattr(torch, name)
    wanted = ["Event", "empty_cache", "get_rng_state", "set_rng_state", "is_available", "device_count"]
    peaks = ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"]
    wanted += [*peaks, "reset_peak_memory_stats"] if kind.has_peaks else ["current_allocated_memory"]
    assert [one for one in wanted if not hasattr(module, one)] == []
    assert not kind.has_history or hasattr(module.memory, "_record_memory_history")
    assert not kind.activity or hasattr(torch.profiler.ProfilerActivity, kind.activity)


def test_a_cpu_needs_no_driver_and_nothing_is_waited_for() -> None:
    cpu = torch.device("cpu")
    assert find_driver(cpu) is find_driver("cpu") is find_driver_of([torch.zeros(1)]) is None
    assert choose_device("cpu", 3, 3) == cpu
    assert choose_synchronize(cpu) is choose_synchronize(cpu)
    assert choose_synchronize(cpu)() is None  # type: ignore[func-returns-value]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(("name", "title"), [("cuda", "GPU"), ("xpu", "XPU"), ("mps", "MPS device")])
def test_a_rank_without_a_device_says_what_is_missing(name: str, title: str) -> None:
    with pytest.raises(UsageError, match=rf"rank 5 needs {title} 1, but torch .* sees 0: use --device cpu"):
        choose_device(name, 5, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nothing_is_in_use_before_a_process_has_begun_to_use_it() -> None:
    assert find_used_driver() is None
    assert list_activities() == [torch.profiler.ProfilerActivity.CPU]


def test_the_self_test_of_a_cpu_trains() -> None:
    (check,) = run_self_test("cpu")
    assert (check.name, check.is_right) == ("training on cpu", True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_self_test_stops_where_there_is_no_device() -> None:
    (check,) = run_self_test("cuda")
    assert (check.name, check.figure, check.is_right) == ("devices", "0", False)


def test_a_rank_computes_with_its_threads_on_the_device_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it joins the others: torchrun's OMP_NUM_THREADS=1 and NCCL's guess of a device do not matter."""
    done: list[object] = []
    monkeypatch.setattr("torch.set_num_threads", done.append)
    monkeypatch.setattr("scalelab.worker.worker.choose_device", lambda *arguments: done.append(arguments))
    prepare_process(make_trial(threads_per_rank=3), Assignment(directory="", rank=5, cores=(), local_rank=1))
    assert done == [3, ("cpu", 5, 1)]
