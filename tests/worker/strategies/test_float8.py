"""--dtype float8: refused in one line where a device does not have it, handed to torchao where it does."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.records.devices import DEVICES
from scalelab.records.refusals import check_strategy
from scalelab.worker.device import DRIVERS, DeviceDriver
from scalelab.worker.strategies.apply import convert_linears
from scalelab.worker.training import find_dtype
from tests.worker.trials import make_trial


class Capable(DeviceDriver):
    """A GPU of some compute capability."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__(DEVICES["cuda"])
        self.capability = capability

    @property
    def module(self) -> Any:
        return SimpleNamespace(get_device_capability=lambda _: self.capability, get_device_name=lambda _: "A100")


def test_a_device_without_it_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="--dtype float8 needs a GPU that multiplies in 8 bits, got cpu"):
        check_strategy(make_trial(dtype="float8"))
    check_strategy(make_trial(dtype="float8", device="cuda"))


def test_an_older_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRIVERS, "cuda", Capable((8, 0)))
    with pytest.raises(UsageError, match="and A100 does not: use bfloat16"):
        convert_linears(nn.Linear(16, 16), torch.device("cuda", 0))


def test_layers_of_whole_tiles_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, bool] = {}

    def convert(model: nn.Module, module_filter_fn: Any) -> None:
        seen.update({name: module_filter_fn(module, name) for name, module in model.named_modules() if name})

    monkeypatch.setitem(DRIVERS, "cuda", Capable((9, 0)))
    monkeypatch.setitem(sys.modules, "torchao.float8", SimpleNamespace(convert_to_float8_training=convert))
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace())
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    convert_linears(model, torch.device("cuda", 0))
    assert seen == {"0": True, "1": False, "2": False}
    assert find_dtype(make_trial(dtype="float8", device="cuda")) is torch.bfloat16


def test_without_torchao_the_next_step_is_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRIVERS, "cuda", Capable((9, 0)))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UsageError, match=r"pip install 'scalelab\[float8\]'"):
        convert_linears(nn.Linear(16, 16), torch.device("cuda", 0))
