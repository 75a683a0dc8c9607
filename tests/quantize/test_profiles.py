"""Tests of the profiles: what each of them rounds differently, on numbers where it shows."""

from __future__ import annotations

import pytest
import torch

from scalelab.quantize.network import Grid, Layer, QuantizedLayer
from scalelab.quantize.simulate import PROFILES, find_profile, fuse_multiply_add


def make_layer(scale: float, grid: Grid, bias: int = 0, channels: int = 1) -> QuantizedLayer:
    return QuantizedLayer(
        layer=Layer(name="dense", op="linear", inputs=("input",)),
        output=grid,
        weight=torch.ones(channels, 1, dtype=torch.int8),
        weight_scale=torch.full((channels,), scale, dtype=torch.float32),
        bias=torch.full((channels,), bias, dtype=torch.int32),
    )


@pytest.mark.parametrize("name", PROFILES)
def test_all_profiles_agree_where_every_step_is_exact(name: str) -> None:
    layer, source = make_layer(0.25, Grid(scale=0.5), bias=4), Grid(scale=0.5)
    sums = torch.tensor([[-9.0], [0.0], [2.0], [400.0]], dtype=torch.float64)
    assert find_profile(name).scale(sums, layer, source).flatten().tolist() == [-1.25, 1.0, 1.5, 101.0]


def test_the_order_of_float32_operations_decides_about_a_tie() -> None:
    # s_x·s_w/s_y is exactly 2^-4 when divided, and less than that when multiplied by a rounded 1/s_y.
    unit = torch.tensor(0.7, dtype=torch.float32) * torch.tensor(1.1, dtype=torch.float32)
    output = float(unit) * 16
    layer, source = make_layer(1.1, Grid(scale=output)), Grid(scale=float(torch.tensor(0.7)))
    tie = torch.tensor([[24.0]], dtype=torch.float64)
    divided = find_profile("onnxruntime").scale(tie, layer, source)
    multiplied = find_profile("qnnpack").scale(tie, layer, source)
    assert divided.item() == 1.5
    assert multiplied.item() < 1.5


def test_a_fused_multiply_add_is_rounded_once() -> None:
    value = torch.tensor(1 + 2.0**-12, dtype=torch.float32)
    third = torch.tensor(-1.0, dtype=torch.float32)
    assert fuse_multiply_add(value, value, third).item() == 2.0**-11 + 2.0**-24
    assert (value * value + third).item() == 2.0**-11


def test_an_addition_saturates_at_both_ends_and_its_relu_at_the_zero_point() -> None:
    source, grid = Grid(scale=1.0), Grid(scale=0.5)
    first, second = torch.tensor([0, 255, 120], dtype=torch.uint8), torch.tensor([0, 255, 130], dtype=torch.uint8)
    for profile in PROFILES.values():
        assert profile.add([first, second], [source, source], grid, False).tolist() == [0, 255, 116]
        assert profile.add([first, second], [source, source], grid, True).tolist() == [128, 255, 128]


@pytest.mark.parametrize("name", PROFILES)
def test_averages_are_of_the_numbers_and_padding_counts_as_zeros(name: str) -> None:
    profile, grid = find_profile(name), Grid(scale=1.0)
    images = torch.tensor([[[[118, 120], [134, 136]]]], dtype=torch.uint8)
    whole = profile.average(Layer(name="mean", op="average_pool"), images, grid, grid)
    assert whole.tolist() == [[[[127]]]]
    window = Layer(name="mean", op="average_pool", kernel=(2, 2), stride=(2, 2), padding=(1, 1))
    # −10/4 and 6/4 are ties, to the even integer; −8/4 and 8/4 are none.
    assert profile.average(window, images, grid, grid).tolist() == [[[[126, 126], [130, 130]]]]
