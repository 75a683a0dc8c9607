"""--dtype float8: refused in one line where a device does not have it, handed to torchao where it does."""

from __future__ import annotations

import copy
import importlib.util
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.records.refusals import check_strategy
from scalelab.records.settings import DEVICES
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


def test_torchao_itself_converts_layers_that_then_train_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed: pip install --no-deps torchao")
    monkeypatch.setitem(DRIVERS, "cuda", Capable((9, 0)))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(torch.bfloat16)
    converted = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own, about kernels of GPUs
        convert_linears(converted, torch.device("cuda", 0))
    assert [type(layer).__name__ for layer in converted] == ["Float8Linear", "ReLU", "Linear"]
    inputs, labels = torch.randn(32, 64, dtype=torch.bfloat16), torch.randint(10, (32,))
    losses: dict[str, list[float]] = {"bfloat16": [], "float8": []}
    for name, model in (("bfloat16", plain), ("float8", converted)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            loss = nn.functional.cross_entropy(model(inputs).float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses["float8"] == pytest.approx(losses["bfloat16"], rel=0.02)
    assert losses["float8"] != losses["bfloat16"], "multiplied in 16 bits"
    assert losses["float8"][-1] < 0.95 * losses["float8"][0]
