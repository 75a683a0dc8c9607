"""Grids, integers of weights and biases, and the corners: dead channels, huge biases, nothing but zeros."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from scalelab.errors import UnknownName, UsageError
from scalelab.quantize.calibrate import Calibration, calibrate
from scalelab.quantize.capture import capture_network
from scalelab.quantize.histogram import count_values
from scalelab.quantize.network import CapturedNetwork, Layer, QuantizedNetwork
from scalelab.quantize.scales import (
    LARGEST_INT32,
    SMALLEST_SCALE,
    choose_weight_limits,
    list_remarks,
    make_grid,
    quantize_network,
    quantize_weights,
)
from scalelab.records.tasks import Quantization
from tests.quantize.nets import Resnet20, Small, draw_images, make_net


def quantize(model: nn.Module) -> tuple[CapturedNetwork, Calibration, QuantizedNetwork]:
    network = capture_network(model, draw_images(2))
    calibration = calibrate(network, [draw_images(4)])
    return network, calibration, quantize_network(network, calibration)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Layer:
    return Layer(name="fc", op="linear", inputs=("input",), weight=weight, bias=bias)


def test_a_result_without_negatives_has_all_integers_above_zero() -> None:
    grid = make_grid(0.0, 5.1)
    assert (grid.zero_point, grid.scale) == (0, float(np.float32(5.1 / 255)))
    assert grid.range == (0.0, pytest.approx(5.1))


def test_a_result_with_negatives_is_symmetric_around_128() -> None:
    grid = make_grid(-2.54, 1.0)
    assert (grid.zero_point, grid.scale) == (128, float(np.float32(2.54 / 127)))
    assert grid.range == (pytest.approx(-2.56), pytest.approx(2.54))


def test_a_tensor_of_zeros_has_a_scale() -> None:
    assert make_grid(0.0, 0.0).scale == 1.0
    assert make_grid(-1e-44, 1e-44).scale == 1.0


def test_relus_have_zero_point_0_and_layers_that_only_pass_share_a_grid() -> None:
    network, _, quantized = quantize(make_net(Resnet20))
    for layer in quantized.layers:
        if layer.layer.has_relu:
            assert layer.output.zero_point == 0
    assert quantized.find("flatten_1").output == quantized.find("pool").output
    assert quantized.find("blocks.0.conv2").output.zero_point == 128
    assert [layer.name for layer in quantized.layers] == [layer.name for layer in network.layers]


def test_weights_are_within_half_a_step_and_reach_127_in_every_channel() -> None:
    _, _, quantized = quantize(make_net(Small))
    for layer in quantized.layers:
        if layer.weight is None:
            continue
        assert layer.weight_scale is not None
        assert layer.layer.weight is not None
        assert (layer.weight.dtype, layer.weight_scale.dtype) == (torch.int8, torch.float32)
        scale = layer.weight_scale.double().reshape(-1, *[1] * (layer.weight.dim() - 1))
        assert bool(((layer.weight * scale - layer.layer.weight).abs() <= scale * 0.5001).all())
        assert layer.weight.reshape(len(layer.weight), -1).abs().amax(1).tolist() == [127] * len(layer.weight)


def test_one_scale_for_the_tensor_is_that_of_its_largest_weight() -> None:
    network, calibration, _ = quantize(make_net(Small))
    quantized = quantize_network(network, calibration, Quantization(is_per_tensor=True))
    scale, weight = quantized.find("conv1").weight_scale, network.find("conv1").weight
    assert scale is not None
    assert weight is not None
    assert scale.tolist() == [float(np.float32(weight.abs().max() / 127))]


def test_a_bias_is_counted_in_products_of_the_two_scales() -> None:
    layer = make_linear(torch.tensor([[1.27], [2.54]]), torch.tensor([0.5, -0.5]))
    parts = quantize_weights(layer, torch.tensor([1.27, 2.54], dtype=torch.float64), 0.1)
    assert parts.bias is not None
    assert parts.bias.dtype == torch.int32
    assert parts.bias.tolist() == [500, -250]


def test_a_channel_without_weights_has_the_scale_of_the_largest_and_keeps_its_bias() -> None:
    layer = make_linear(torch.tensor([[1.0, -2.0], [0.0, 0.0]]), torch.tensor([0.0, 0.75]))
    parts = quantize_weights(layer, choose_weight_limits(layer, True), 0.1)
    assert parts.scale[0] == parts.scale[1]
    assert parts.weight[1].tolist() == [0, 0]
    assert parts.bias is not None
    assert float(parts.bias[1] * parts.scale[1] * 0.1) == pytest.approx(0.75, abs=float(parts.scale[1]) * 0.1)


def test_a_channel_is_dead_if_its_scale_would_be_below_the_smallest() -> None:
    limits = [127 * SMALLEST_SCALE, 126 * SMALLEST_SCALE, 2.0]
    layer = make_linear(torch.tensor([[limit] for limit in limits]), torch.zeros(3))
    assert choose_weight_limits(layer, True).tolist() == [127 * SMALLEST_SCALE, 2.0, 2.0]


def test_a_layer_without_any_weight_is_all_zeros_and_bias() -> None:
    layer = make_linear(torch.zeros(2, 3), torch.tensor([1.0, -1.0]))
    parts = quantize_weights(layer, choose_weight_limits(layer, True), 0.5)
    assert parts.weight.abs().max() == 0
    assert parts.bias is not None
    assert (parts.bias * parts.scale * 0.5).tolist() == pytest.approx([1.0, -1.0], rel=0.01)


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_bias_too_large_for_int32_widens_the_scale_of_its_channel(per_channel: bool) -> None:
    weight = torch.tensor([[1e-9] * 1000, [1e-9] * 1000])
    layer = make_linear(weight, torch.tensor([4.0, 1e-9]))
    parts = quantize_weights(layer, choose_weight_limits(layer, per_channel), 0.01)
    assert parts.bias is not None
    assert int(parts.bias.abs().max()) + 1000 * 255 * 127 <= LARGEST_INT32
    assert int(parts.bias[0]) * float(parts.scale[0]) * 0.01 == pytest.approx(4.0, rel=1e-5)
    if per_channel:
        assert float(parts.scale[1]) == float(np.float32(1e-9 / 127))


def test_a_layer_whose_sums_can_leave_int32_is_refused() -> None:
    layer = make_linear(torch.ones(1, 70_000), torch.zeros(1))
    with pytest.raises(UsageError, match="layer fc sums 70000 products"):
        quantize_weights(layer, torch.ones(1, dtype=torch.float64), 0.1)


def test_a_layer_that_is_kept_in_float_has_no_integers() -> None:
    network, calibration, _ = quantize(make_net(Small))
    kept = quantize_network(network, calibration, keep_float=("conv2",)).find("conv2")
    assert (kept.is_float, kept.weight) == (True, None)
    with pytest.raises(UnknownName, match="layer to keep in float 'conv9'"):
        quantize_network(network, calibration, keep_float=("conv9",))


def test_the_calibration_of_another_network_is_refused() -> None:
    network, _, _ = quantize(make_net(Small))
    images = {"input": count_values(draw_images(1))}
    with pytest.raises(UsageError, match="layer conv1 was not calibrated"):
        quantize_network(network, Calibration(histograms=images, num_samples=1))


def test_dead_channels_and_constant_results_are_remarked_and_work() -> None:
    model = make_net(Small)
    assert isinstance(model, Small)
    nn.init.zeros_(model.conv3.weight)
    with torch.no_grad():
        model.conv2.weight[3] = 0
    network, calibration, quantized = quantize(model)
    assert list_remarks(network, calibration)[0] == "conv2: channel 3 has only zero weights"
    assert "conv3 outputs 0 for every calibration sample" in list_remarks(network, calibration)
    scales = [layer.weight_scale for layer in quantized.layers if layer.weight_scale is not None]
    assert all(bool(torch.isfinite(scale).all()) and bool((scale > 0).all()) for scale in scales)
