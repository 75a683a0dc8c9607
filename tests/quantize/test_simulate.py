"""Tests of the integer simulation: exact sums, rounding of ties, what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from scalelab.errors import UnknownName, UsageError
from scalelab.quantize import simulate as simulation
from scalelab.quantize.eager_kernels import make_average_multiplier, make_bias, make_multiplier
from scalelab.quantize.network import Grid, Layer, QuantizedLayer, QuantizedNetwork, compute_layer
from scalelab.quantize.simulate import (
    bound_sum,
    find_profile,
    find_size,
    scale_to_numbers,
    simulate_logits,
    sum_products,
)
from tests.quantize.integer_nets import make_images, make_network
from tests.quantize.simulated import simulate

BYTES = Grid(scale=1.0, zero_point=0)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, step: float = 1.0) -> QuantizedLayer:
    """A linear layer whose sums are steps of its result divided by `step`."""
    layer = Layer(name="dense", op="linear", inputs=("input",))
    scales = torch.ones(1, dtype=torch.float32)
    return QuantizedLayer(layer=layer, output=Grid(scale=step), weight=weight, weight_scale=scales, bias=bias)


def make_tiny(dense: QuantizedLayer) -> QuantizedNetwork:
    first = QuantizedLayer(layer=Layer(name="input", op="input"), output=BYTES)
    assert dense.weight is not None
    return QuantizedNetwork(layers=(first, dense), input_shape=(dense.weight.shape[1],))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("per_channel", [True, False])
def test_sums_are_those_of_integer_arithmetic(seed: int, per_channel: bool) -> None:
    network, images = make_network(seed, per_channel=per_channel), make_images(seed)
    results = simulate(network, images)
    for layer in network.layers:
        if layer.weight is None:
            continue
        (name,) = layer.layer.inputs
        source = network.find(name).output
        sums = sum_products(layer, results[name], source)
        assert torch.equal(sums, multiply_integers(layer, results[name], source).to(torch.float64)), layer.name


def multiply_integers(layer: QuantizedLayer, integers: torch.Tensor, source: Grid) -> torch.Tensor:
    """The same in int64, where nothing is ever rounded."""
    what, weight = layer.layer, layer.weight
    assert weight is not None
    centred = integers.to(torch.int64) - source.zero_point
    if what.op == "linear":
        return centred @ weight.to(torch.int64).T
    size = (weight.shape[2], weight.shape[3])
    patches = functional.unfold(centred.double(), size, what.dilation, what.padding, what.stride).to(torch.int64)
    grouped = patches.reshape(len(integers), what.groups, -1, patches.shape[2])
    rows = weight.to(torch.int64).reshape(what.groups, len(weight) // what.groups, -1)
    height, width = find_size(what, (integers.shape[2], integers.shape[3]), size)
    return torch.matmul(rows, grouped).reshape(len(integers), len(weight), height, width)


def test_integers_lie_on_the_grid_and_reach_both_ends_of_it() -> None:
    results = simulate(make_network(1), make_images(1, 16))
    assert results["block.conv"].dtype == torch.uint8
    assert int(results["input"].min()) == 0
    assert int(results["input"].max()) == 255
    assert int(results["stem"].max()) == 255


def test_a_sum_beyond_float32_is_exact() -> None:
    dense = make_linear(torch.full((1, 600), 127, dtype=torch.int8), step=2.0**17)
    integers = torch.full((1, 600), 255, dtype=torch.uint8)
    integers[0, 0] = 254
    assert bound_sum(dense, BYTES) == 600 * 127 * 255 > 2**24
    assert sum_products(dense, integers, BYTES).tolist() == [[127 * (599 * 255 + 254)]]


def test_a_sum_that_leaves_int32_is_refused() -> None:
    dense = make_linear(torch.full((1, 70_000), 127, dtype=torch.int8))
    with pytest.raises(UsageError, match=r"layer dense: .* beyond int32"):
        sum_products(dense, torch.zeros(1, 70_000, dtype=torch.uint8), BYTES)


def test_ties_are_rounded_to_the_even_integer_on_both_sides_of_zero() -> None:
    weight = torch.tensor([[1], [-1]], dtype=torch.int8)
    network = make_tiny(make_linear(weight, step=2.0))
    results = simulate(network, torch.tensor([[1.0], [3.0], [5.0], [4.0]]))
    # 0.5, 1.5, 2.5 and 2: to 0, 2, 2, 2.
    assert (results["dense"].to(torch.int64) - 128).tolist() == [[0, 0], [2, -2], [2, -2], [2, -2]]
    assert results["logits"].tolist() == [[0.0, 0.0], [4.0, -4.0], [4.0, -4.0], [4.0, -4.0]]


def test_the_bias_is_added_before_rounding() -> None:
    network = make_tiny(make_linear(torch.tensor([[1]], dtype=torch.int8), torch.tensor([2], dtype=torch.int32), 4.0))
    results = simulate(network, torch.tensor([[3.0], [4.0]]))
    # 5/4 and 6/4, where 3/4 + 2/4 rounded one by one would be 1 + 0 and 1 + 0.
    assert (results["dense"].to(torch.int64) - 128).tolist() == [[1], [2]]


def test_results_that_leave_the_grid_are_held_at_its_ends() -> None:
    network = make_tiny(make_linear(torch.tensor([[127], [-127]], dtype=torch.int8)))
    assert simulate(network, torch.tensor([[255.0], [1.0]]))["dense"].tolist() == [[255, 0], [255, 1]]


def test_logits_do_not_depend_on_how_images_are_cut_into_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    network, images = make_network(5), make_images(5, 11)
    whole = simulate(network, images)["logits"]
    for batch in (1, 4, 64):
        monkeypatch.setattr(simulation, "BATCH", batch)
        assert torch.equal(simulate_logits(network, images), whole)


def test_a_layer_that_is_kept_in_float_is_computed_from_the_numbers_of_its_input() -> None:
    network, images = make_network(6), make_images(6)
    stem = network.find("stem")
    assert stem.weight is not None
    weight = torch.randn(stem.weight.shape, generator=torch.Generator().manual_seed(6))
    layer = replace(stem.layer, weight=weight)
    kept = replace(stem, layer=layer, weight=None, weight_scale=None, bias=None, is_float=True)
    mixed = replace(network, layers=tuple(kept if each.name == "stem" else each for each in network.layers))
    results, source = simulate(mixed, images), network.find("input").output
    numbers = source.scale * (results["input"].to(torch.float32) - source.zero_point)
    expected = (compute_layer(layer, [numbers]) / stem.output.scale).round().clamp(0, 255)
    assert (results["stem"].to(torch.float32) - expected).abs().max() <= 1
    assert (results["stem"].to(torch.float32) != expected).float().mean() < 0.001


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="fbgemm, onnxruntime, qnnpack"):
        simulate(make_network(0), make_images(0), "onnx")


SOURCE, TARGET = Grid(scale=0.5, zero_point=100), Grid(scale=4.0, zero_point=10)


def make_layer(*, scales: tuple[float, ...] = (0.25, 2.0), bias: bool = True, **fields: Any) -> QuantizedLayer:
    """Weights 3, −4 and 5, 6 with bias 7 and −8: powers of two as scales, so that nothing is rounded."""
    return QuantizedLayer(
        layer=Layer(name="fc", op="linear", weight=torch.zeros(2, 2)),
        output=TARGET,
        weight=torch.tensor([[3, -4], [5, 6]], dtype=torch.int8),
        weight_scale=torch.tensor(scales),
        bias=torch.tensor([7, -8], dtype=torch.int32) if bias else None,
        **fields,
    )


def test_the_largest_sum_is_that_of_the_end_furthest_from_the_zero_point() -> None:
    assert bound_sum(make_layer(), SOURCE) == 11 * 155 + 8
    assert bound_sum(make_layer(bias=False), Grid(scale=1.0, zero_point=200)) == 11 * 200


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["onnxruntime", "qnnpack", "fbgemm"])
@pytest.mark.parametrize("scales", [(0.25, 2.0), (0.5, 0.5), (0.5,)])
def test_sums_become_steps_by_the_scales_of_input_weight_and_output(
    name: str, bias: bool, scales: tuple[float, ...]
) -> None:
    layer, sums = make_layer(scales=scales, bias=bias), torch.tensor([[16.0, 24.0], [-32.0, 8.0]], dtype=torch.float64)
    expected = (sums + (torch.tensor([7, -8]) if bias else 0)) * 0.5 * torch.tensor(scales) / 4
    assert find_profile(name).scale(sums, layer, SOURCE).tolist() == expected.tolist()
    assert scale_to_numbers(sums, layer, SOURCE).tolist() == (4 * expected).tolist()
    if bias:
        multiplier = make_multiplier(layer, SOURCE)
        assert multiplier.tolist() == [0.5 * scale / 4 for scale in (scales * 2)[:2]]
        found = make_bias(layer, multiplier)
        assert found is not None
        assert found.tolist() == [7 * float(multiplier[0]), -8 * float(multiplier[1])]


def test_of_an_unrounded_layer_sums_become_numbers() -> None:
    layer = make_layer(is_unrounded=True)
    assert make_multiplier(layer, SOURCE).tolist() == [0.125, 1.0]
    assert make_bias(make_layer(bias=False), torch.ones(2)) is None
    assert float(make_average_multiplier(SOURCE, TARGET, 8)) == 0.5 / (4 * 8)


@pytest.mark.parametrize("name", ["onnxruntime", "qnnpack"])
def test_sums_and_averages_are_those_of_the_numbers(name: str) -> None:
    rules, other = find_profile(name), Grid(scale=2.0, zero_point=50)
    one, two = (torch.tensor([[value]], dtype=torch.uint8) for value in (140, 58))
    # (140 − 100) · 0.5 + (58 − 50) · 2 = 36, which is 9 steps of 4.
    assert rules.add([one, two], [SOURCE, other], TARGET, False).tolist() == [[19]]
    low = torch.tensor([[0]], dtype=torch.uint8)
    assert rules.add([low, two], [SOURCE, other], TARGET, False).tolist() == [[2]]  # −50 + 16 = −34: −8.5 to even
    assert rules.add([low, two], [SOURCE, other], TARGET, True).tolist() == [[10]]
    images = torch.tensor([[[[140, 180], [100, 116]]]], dtype=torch.uint8)  # 20, 40, 0 and 8: 17 in the mean
    whole = Layer(name="pool", op="average_pool")
    assert rules.average(whole, images, SOURCE, TARGET).flatten().tolist() == [10 + 4]
    padded = replace(whole, kernel=(2, 2), stride=(1, 2), padding=(1, 0))
    assert rules.average(padded, images, SOURCE, TARGET).flatten().tolist() == [10 + 4, 10 + 4, 10]


def test_the_size_of_a_window_is_that_of_torch() -> None:
    layer = Layer(name="conv", op="conv", stride=(2, 3), padding=(1, 2), dilation=(2, 1))
    for image in ((9, 11), (10, 12), (13, 8)):
        expected = torch.nn.functional.conv2d(
            torch.zeros(1, 1, *image), torch.zeros(1, 1, 3, 4), None, (2, 3), (1, 2), (2, 1)
        )
        assert find_size(layer, image, (3, 4)) == tuple(expected.shape[2:])
