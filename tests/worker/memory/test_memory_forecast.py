"""Forecasts of memory: nothing is allocated, whatever the size, and what cannot be forecast says why."""

from __future__ import annotations

import textwrap
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.records.observations import MemoryReport, RankReport
from scalelab.records.settings import Spreading, StepShape
from scalelab.records.tasks import Forecast
from scalelab.records.trial import Trial
from scalelab.worker.memory import allocator
from scalelab.worker.memory.allocator import has_kernels, measure_call, measure_scratchpad, shorten_operand
from scalelab.worker.memory.forecast import (
    convert_by_replacing,
    forecast_memory,
    list_units,
    stay_fake,
)
from tests.worker.trials import make_trial


@pytest.fixture(autouse=True)
def cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fake tensors load torch's compiler, which puts the name of a directory into the environment."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def make_forecast_trial(**fields: Any) -> Trial:
    num_ranks = fields.get("num_ranks", 1)
    defaults: dict[str, Any] = {
        "configuration": "forecast",
        "strategy": "single",
        "num_ranks": num_ranks,
        "global_batch": 8 * num_ranks,
        "task": Forecast(),
    }
    return make_trial(**(defaults | fields))


def forecast(**fields: Any) -> MemoryReport:
    report = forecast_memory(make_forecast_trial(**fields), RankReport(rank=0)).memory
    assert report is not None
    return report


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_no_machine_here_could_hold_takes_no_memory(dtype: str) -> None:
    before = psutil.Process().memory_info().rss
    dim, depth, size = 32768, 8, getattr(torch, dtype).itemsize
    memory = forecast(options={"dim": dim, "depth": depth}, dtype=dtype)
    assert memory.by_category["parameters"] == size * depth * (dim * dim + dim)
    assert memory.peak_bytes > 4 * size * depth * dim * dim
    assert psutil.Process().memory_info().rss - before < 200e6


def test_a_scratchpad_is_what_a_product_takes_beyond_its_result_on_the_threads_of_a_rank() -> None:
    before, seen = torch.get_num_threads(), []

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        result = torch.empty(len(left), len(right), dtype=torch.uint8)
        torch.empty(1000, dtype=torch.uint8)
        return result

    operand = ((64, 64), (64, 1), torch.bfloat16)
    assert measure_scratchpad(multiply, [operand, operand], before + 1) == 1000
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_a_product_without_onednn_takes_no_more_than_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    operand = ((64, 64), (64, 1), torch.bfloat16)
    assert not has_kernels(torch.bfloat16)
    assert measure_scratchpad(torch.ops.aten.mm.default, [operand, operand], 1) == 0


def test_a_long_operand_is_measured_short_and_in_its_own_order() -> None:
    with stay_fake():
        plain, wide = torch.empty(8, 64), torch.empty(3000, 5000)
        assert shorten_operand(plain.t()) == ((64, 8), (1, 64), torch.float32)
        assert shorten_operand(wide) == ((2048, 2048), (2048, 1), torch.float32)
        assert shorten_operand(wide.t()) == ((2048, 2048), (1, 2048), torch.float32)
        assert shorten_operand(wide[0]) == ((2048,), (1,), torch.float32)


def test_eight_ranks_are_forecast_without_eight_processes() -> None:
    trial = make_forecast_trial(strategy="fsdp-full", num_ranks=8)
    assert trial.num_processes == 1
    assert trial.batch_per_pass == 8
    one = forecast(options={"dim": 64, "depth": 4})
    eight = forecast(options={"dim": 64, "depth": 4}, strategy="fsdp-full", num_ranks=8)
    assert eight.by_category["parameters"] == one.by_category["parameters"] / 8


def test_the_output_of_a_language_model_is_a_category_of_its_own() -> None:
    options = {"sequence": 16, "vocabulary": 4096}
    memory = forecast(workload="gpt2", options=options)
    logits = 4 * 8 * 16 * 4096
    assert memory.by_category["output"] == logits + 4  # and the loss itself
    assert memory.peak_phase == "backward"


def test_checkpointing_keeps_fewer_activations() -> None:
    options = {"sequence": 32}
    plain = forecast(workload="gpt2", options=options)
    full = forecast(workload="gpt2", options=options, shape=StepShape(checkpointing="full"))
    assert full.phase_peaks["forward"] < plain.phase_peaks["forward"]


def test_every_built_in_workload_can_be_forecast() -> None:
    for workload, options in {
        "lenet": {"data": "digits", "workers": 2},
        "resnet18": {"data": "digits"},
        "transformer": {"samples": 64, "encoder_layers": 1, "decoder_layers": 1},
    }.items():
        assert forecast(workload=workload, options=options).by_category["batch"] > 0


def write_own(directory: Path, loss: str) -> str:
    path = directory / "own_forecast.py"
    path.write_text(
        textwrap.dedent(f"""
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        def loss(model, batch):
            {loss}

        def build(batch_size):
            data = TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
            model = nn.Linear(4, 3).to(torch.float32)
            return model, DataLoader(data, batch_size=batch_size, shuffle=True), loss
        """)
    )
    return f"{path}:build"


def test_a_workload_of_the_users_own_with_a_shuffling_loader_can_be_forecast(tmp_path: Path) -> None:
    spec = write_own(tmp_path, "return nn.functional.cross_entropy(model(batch[0]), batch[1])")
    assert forecast(workload=spec, options={}).by_category["batch"] == 8 * 4 * 4 + 8 * 8


def test_a_loss_that_reads_values_is_refused_with_the_reason(tmp_path: Path) -> None:
    spec = write_own(tmp_path, "return model(batch[0]).sum() * batch[0].sum().item()")
    with pytest.raises(UsageError, match=r"reads tensor values at own_forecast\.py:7 "):
        forecast(workload=spec, options={})


def test_a_constructor_that_reads_values_is_forecast_as_one_that_does_not(tmp_path: Path) -> None:
    plain = write_own(tmp_path, "return nn.functional.cross_entropy(model(batch[0]), batch[1])")
    text = Path(plain.removesuffix(":build")).read_text()
    reading = tmp_path / "own_reading.py"
    rates = "rates = [x.item() for x in torch.linspace(0, 0.1, 3)]\n    model = "
    reading.write_text(text.replace("model = ", rates, 1))
    assert forecast(workload=f"{reading}:build", options={}) == forecast(workload=plain, options={})


def test_replicas_in_threads_are_refused() -> None:
    with pytest.raises(UsageError, match="memory cannot be estimated for dp"):
        forecast(strategy="dp", num_ranks=2)


def test_torch_is_left_as_it_was() -> None:
    before = nn.Module._apply
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forecast(spreading=Spreading())
    assert nn.Module._apply is before
    assert type(torch.empty(1)) is torch.Tensor


def test_converting_keeps_what_is_shared_shared() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    with stay_fake():
        convert_by_replacing(model, lambda tensor: tensor.to(torch.bfloat16))
    assert model[1].weight is model[0].weight
    assert model[0].weight.dtype is torch.bfloat16


def test_units_are_the_blocks_and_first_what_is_in_none() -> None:
    model = nn.ModuleDict({"head": nn.Linear(2, 2), "blocks": nn.ModuleList([nn.Linear(3, 3), nn.Linear(4, 4)])})
    assert [sum(p.numel() for p in unit) for unit in list_units(model)] == [6, 12, 20]


def test_a_convolution_of_a_large_batch_takes_what_two_small_ones_say() -> None:
    image, weight = torch.ones(64, 3, 16, 16), torch.ones(8, 3, 5, 5)
    rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    convolve = torch.ops.aten.convolution.default
    whole = measure_call(convolve, (image, weight, *rest), 1)
    with patch.object(allocator, "MOST_CONVOLVED", image.nbytes // 8):
        assert measure_call(convolve, (image, weight, *rest), 1) == pytest.approx(whole, rel=0.02)
