"""Tests of the integer simulation: exact sums, rounding of ties, what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from scalelab.errors import UnknownName, UsageError
from scalelab.quantize import simulate as simulation
from scalelab.quantize.network import Grid, Layer, QuantizedLayer, QuantizedNetwork, compute_layer
from scalelab.quantize.simulate import bound_sum, find_size, simulate_logits, sum_products
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
