"""The recipe that users run and benchmarks measure: on digits, int8 answers as float does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from scalelab.data.images import load_digits
from scalelab.errors import UsageError
from scalelab.quantize.calibrate import Method
from scalelab.quantize.network import CapturedNetwork, QuantizedNetwork, run_float
from scalelab.quantize.pipeline import QuantizedModel, quantize_model
from scalelab.quantize.scales import quantize_network
from scalelab.records.tasks import Quantization
from scalelab.worker.models.networks import Lenet
from tests.quantize.nets import Small, draw_images, make_net


def read_digits(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits("train" if split == "train" else "test")
    return (torch.from_numpy(digits.images).float() / 255 - 0.5) / 0.5, torch.from_numpy(digits.labels)


def run_rounded(quantized: QuantizedNetwork, images: torch.Tensor) -> torch.Tensor:
    """The network in float, with weights, biases and results rounded as integers would be."""
    named = {layer.name: layer for layer in quantized.layers}
    layers = []
    for each in quantized.layers:
        layer = each.layer
        if each.weight is not None and each.weight_scale is not None:
            scale = each.weight_scale.double()
            weight = (each.weight * scale.reshape(-1, *[1] * (each.weight.dim() - 1))).float()
            unit = scale * named[layer.inputs[0]].output.scale
            layer = replace(layer, weight=weight, bias=None if each.bias is None else (each.bias * unit).float())
        layers.append(layer)

    def change(layer: object, result: torch.Tensor) -> torch.Tensor:
        grid = named[layer.name].output  # type: ignore[attr-defined]
        integers = ((result / grid.scale).round() + grid.zero_point).clamp(0, 255)
        return (integers - grid.zero_point) * grid.scale

    network = CapturedNetwork(layers=tuple(layers), input_shape=quantized.input_shape)
    return run_float(network, images, change)[network.output]


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """lenet after three passes through the digits."""
    torch.manual_seed(0)
    model = Lenet("all")
    images, labels = read_digits("train")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    for _ in range(3):
        for part in torch.randperm(len(images)).split(32):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[part]), labels[part]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def digits_model(trained: nn.Module) -> QuantizedModel:
    return quantize_model(trained, read_digits("train")[0][:256].split(64), Quantization())


def test_int8_loses_hardly_anything_on_digits(trained: nn.Module, digits_model: QuantizedModel) -> None:
    images, labels = read_digits("test")
    with torch.no_grad():
        float_classes = trained(images).argmax(1)
    classes = run_rounded(digits_model.quantized, images).argmax(1)
    assert float((float_classes == labels).double().mean()) > 0.85
    assert float((classes == float_classes).double().mean()) >= 0.98
    assert int((float_classes == labels).sum()) - int((classes == labels).sum()) <= 3
    assert digits_model.calibration.num_samples == 256


@pytest.mark.parametrize("method", ["minmax", "percentile", "mse", "entropy"])
def test_results_keep_their_signal_whatever_chooses_the_ranges(method: Method, digits_model: QuantizedModel) -> None:
    images, _ = read_digits("test")
    quantized = quantize_network(digits_model.network, replace(digits_model.calibration, method=method))
    expected = run_float(digits_model.network, images)[digits_model.network.output]
    noise = run_rounded(quantized, images) - expected
    assert 10 * torch.log10(expected.square().sum() / noise.square().sum()) > 20


def test_an_average_or_a_mean_may_come_anywhere() -> None:
    made = quantize_model(make_net(Small), [draw_images(8)], Quantization())
    expected = run_float(made.network, draw_images(8))[made.network.output]
    assert (run_rounded(made.quantized, draw_images(8)) - expected).abs().max() < 0.1 * expected.abs().max()


def test_settings_reach_the_network() -> None:
    settings = Quantization(method="percentile", is_per_tensor=True, rounds_logits=True)
    made = quantize_model(make_net(Small), [draw_images(4)], settings)
    assert made.calibration.method == "percentile"
    conv = made.quantized.find("conv1")
    assert conv.weight_scale is not None
    assert len(conv.weight_scale) == 1
    assert not made.quantized.layers[-1].is_unrounded


@pytest.mark.parametrize("batches", [[], [torch.zeros(0, 3, 32, 32)]])
def test_without_samples_there_is_no_calibration(batches: list[torch.Tensor]) -> None:
    with pytest.raises(UsageError, match="there are no calibration samples"):
        quantize_model(make_net(Small), batches, Quantization())


def test_an_empty_batch_is_skipped_and_the_lab_is_refused() -> None:
    model, images = make_net(Small), draw_images(4)
    found, expected = (
        quantize_model(model, batches, Quantization()).calibration for batches in ([images[:0], images], [images])
    )
    assert found.ranges == expected.ranges
    with pytest.raises(UsageError, match="calibration batch 0 has NaN"):
        quantize_model(model, [images * float("nan")], Quantization())
    with pytest.raises(UsageError, match="use run_lab"):
        quantize_model(model, [images], Quantization(method="lab"))
