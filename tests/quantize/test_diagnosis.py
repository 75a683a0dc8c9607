"""The diagnosis: what each layer does to the answer, and that a layer with something wrong is found."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from scalelab.quantize.calibrate import calibrate
from scalelab.quantize.capture import capture_network
from scalelab.quantize.diagnosis import (
    IMAGES,
    LayerDiagnosis,
    choose_evenly,
    choose_num_tested,
    count_multiply_adds,
    diagnose,
    draw_histogram,
    list_histograms,
    make_rounding,
    measure_gap,
    measure_sqnr,
    round_to_grid,
)
from scalelab.quantize.histogram import count_values
from scalelab.quantize.network import CapturedNetwork, Grid, QuantizedNetwork
from scalelab.quantize.scales import quantize_network
from scalelab.quantize.sessions import one_thread
from scalelab.quantize.simulate import simulate_logits
from scalelab.records.quantized import Quantized
from scalelab.records.tasks import Quantization
from scalelab.studies.quantize.answer import rank_layers
from scalelab.worker.models.networks import Lenet
from tests.quantize.nets import Resnet20, make_net
from tests.quantize.simulated import simulate


def draw_images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def quantize(
    model: nn.Module, *, per_channel: bool = True, rounds_logits: bool = False
) -> tuple[CapturedNetwork, QuantizedNetwork]:
    images = draw_images(16)
    network = capture_network(model, images[:2])
    calibration = calibrate(network, [images])
    return network, quantize_network(
        network, calibration, Quantization(is_per_tensor=not per_channel, rounds_logits=rounds_logits)
    )


def rank(diagnosis: LayerDiagnosis) -> list[str]:
    quantized = Quantized(labels=(), stages=(), layers=diagnosis.layers)
    return [blame.layer.name for blame in rank_layers(quantized)]


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    """Small products wait longer for a second thread than they take."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def lenet() -> nn.Module:
    torch.manual_seed(0)
    return Lenet("all").eval()


def test_everything_in_int8_is_what_the_simulation_computes(lenet: nn.Module) -> None:
    network, quantized = quantize(lenet)
    rounding = make_rounding(network, quantized)
    images = draw_images(16, seed=1)
    with torch.no_grad():
        logits = rounding.run({IMAGES: images}, rounding.grids)[network.output]
    step = quantized.layers[-1].output.scale
    assert (logits - simulate_logits(quantized, images)).abs().max() <= 1.01 * step


def test_with_no_layer_in_int8_nothing_differs_from_float(lenet: nn.Module) -> None:
    network, quantized = quantize(lenet)
    images = draw_images(4, seed=1)
    with torch.no_grad():
        logits = make_rounding(network, quantized).run({IMAGES: images}, ())[network.output]
        assert torch.allclose(logits, lenet(images), atol=1e-5)


def test_layers_that_round_are_reported_and_those_that_pass_on_are_not(lenet: nn.Module) -> None:
    network, quantized = quantize(lenet)
    images = draw_images(40, seed=1)
    with torch.no_grad():
        labels = lenet(images).argmax(1)
    found = diagnose(network, quantized, images, labels)
    assert [layer.name for layer in found.layers] == ["input", "conv1", "conv2", "fc1", "fc2", "fc3"]
    assert found.correct_float == 40
    assert found.correct_int8 is not None
    assert found.correct_int8 >= 36
    for layer in found.layers:
        assert layer.sqnr is not None
        assert layer.sqnr_alone is not None
        assert 15 < layer.sqnr <= layer.sqnr_alone + 3
        assert layer.num_tested == 40
        assert layer.correct_only is not None
        assert layer.correct_only >= found.correct_int8 - 2
    assert sum(layer.multiply_adds for layer in found.layers) == 651_720


def test_the_input_alone_in_int8_is_the_network_on_rounded_images(lenet: nn.Module) -> None:
    network, quantized = quantize(lenet)
    images = draw_images(20, seed=1)
    grid = quantized.layers[0].output
    low, high = -grid.zero_point * grid.scale, (255 - grid.zero_point) * grid.scale
    rounded = torch.fake_quantize_per_tensor_affine(images, grid.scale, grid.zero_point, 0, 255)
    outside = int(((images < low - grid.scale / 2) | (images > high + grid.scale / 2)).sum())
    with torch.no_grad():
        logits, found = lenet(images), diagnose(network, quantized, images, lenet(images).argmax(1)).layers[0]
        alone = lenet(rounded)
    assert outside > 0
    assert found.clipped_share == outside / images.numel()
    assert found.sqnr == found.sqnr_alone == pytest.approx(compute_decibels(images, rounded), rel=1e-6)
    assert found.output_sqnr == pytest.approx(compute_decibels(logits, alone), rel=1e-4)
    assert found.correct_only == int((alone.argmax(1) == logits.argmax(1)).sum())


def compute_decibels(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    exact, rounded = exact.double(), rounded.double()
    return 10 * float(torch.log10(exact.square().sum() / (rounded - exact).square().sum()))


def test_without_classes_there_are_ratios_and_no_counts(lenet: nn.Module) -> None:
    found = diagnose(*quantize(lenet), draw_images(8), None)
    assert found.correct_float is None
    assert {layer.correct_only for layer in found.layers} == {None}
    assert all(layer.output_sqnr for layer in found.layers)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("name", ["conv1", "conv2", "fc1", "fc2", "fc3"])
def test_a_layer_with_one_weight_a_hundred_times_too_large_ranks_first(
    lenet: nn.Module, name: str, per_channel: bool
) -> None:
    planted = copy.deepcopy(lenet)
    with torch.no_grad():
        weight = planted.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        weight.view(-1)[11] *= 100
    found = diagnose(*quantize(planted, per_channel=per_channel), draw_images(24, seed=1), None)
    assert rank(found)[0] == name


@pytest.mark.parametrize("name", ["stem.0", "blocks.1.conv2", "blocks.2.shortcut.0", "head"])
def test_so_it_does_in_a_residual_network(name: str) -> None:
    planted = make_net(lambda: Resnet20(num_blocks=1, width=8))  # type: ignore[arg-type]
    with torch.no_grad():
        weight = planted.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        weight.view(-1)[5] *= 100
    found = diagnose(*quantize(planted), draw_images(8, seed=1), None)
    assert rank(found)[0] == name


@pytest.mark.parametrize("name", ["input", "conv1", "conv2", "fc1", "fc2", "fc3"])
def test_a_layer_whose_results_saturate_ranks_first_and_is_seen_to_clip(name: str) -> None:
    torch.manual_seed(0)
    # Without a bias, because that has the scale of its input, which is changed here.
    network, quantized = quantize(Lenet("none").eval(), rounds_logits=True)
    layers = tuple(
        replace(layer, output=replace(layer.output, scale=layer.output.scale / 8)) if layer.name == name else layer
        for layer in quantized.layers
    )
    found = diagnose(network, replace(quantized, layers=layers), draw_images(24, seed=1), None)
    assert rank(found)[0] == name
    clipped = {layer.name: layer.clipped_share for layer in found.layers}
    assert (clipped[name] or 0) > 0.05
    assert all((share or 0) < 0.01 for other, share in clipped.items() if other != name)


def test_channels_without_weights_are_dead() -> None:
    torch.manual_seed(0)
    model = Lenet("all").eval()
    with torch.no_grad():
        model.conv2.weight[3] = 0
        assert model.conv2.bias is not None
        model.conv2.bias[3] = 0
    found = diagnose(*quantize(model), draw_images(8), None)
    dead = {layer.name: layer.dead_outputs for layer in found.layers}
    assert dead["conv2"] == count_dead_by_ints(model, "conv2")
    assert dead["conv2"] >= 1
    assert dead["input"] is None


def count_dead_by_ints(model: nn.Module, name: str) -> int:
    """Channels whose integers never change, by the simulation."""
    _, quantized = quantize(model)
    channels = simulate(quantized, draw_images(8))[name].transpose(0, 1).flatten(1)
    return int((channels.amin(1) == channels.amax(1)).sum())


def test_a_network_of_zeros_has_no_ratio_at_all() -> None:
    model = Lenet("none").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = diagnose(*quantize(model), draw_images(4), None)
    assert all(layer.output_sqnr is None for layer in found.layers)
    assert all(layer.sqnr is None for layer in found.layers if layer.name != "input")


def test_the_ratio_of_half_a_step_is_six_decibels_per_bit() -> None:
    numbers = torch.linspace(-1, 1, 10_001)
    sqnr = []
    for bits in (6, 7):
        rounded = round_to_grid(numbers, Grid(scale=2 / 2**bits, zero_point=128))
        sqnr.append(measure_sqnr(float(numbers.square().sum()), float((rounded - numbers).square().sum())))
    assert sqnr[0] is not None
    assert sqnr[1] is not None
    assert sqnr[1] - sqnr[0] == pytest.approx(6.02, abs=0.1)
    assert measure_sqnr(0.0, 1.0) is None
    assert measure_sqnr(1.0, 0.0) is None


def test_a_gap_is_the_factor_between_the_two_largest_weights_of_a_channel() -> None:
    assert measure_gap(torch.tensor([[1.0, -2.0, 0.5], [0.1, 5.0, -0.5]])) == pytest.approx(10.0)
    assert measure_gap(torch.tensor([[2.0, -8.0], [3.0, 3.0]])) == 4.0
    assert measure_gap(torch.tensor([[1.0], [2.0]])) is None
    assert measure_gap(torch.zeros(2, 3)) is None
    assert measure_gap(None) is None


def test_weights_are_drawn_with_the_range_of_the_widest_channel(lenet: nn.Module) -> None:
    images = draw_images(16)
    network = capture_network(lenet, images[:2])
    calibration = calibrate(network, [images])
    quantized = quantize_network(network, calibration, Quantization())
    drawn = {(one.layer, one.kind): one for one in list_histograms(quantized, calibration)}
    for name in ("conv1", "fc3"):
        weight = quantized.find(name).layer.weight
        assert weight is not None
        found, largest = drawn[name, "weights"], float(weight.abs().max())
        assert found.chosen_high == pytest.approx(largest, rel=1e-6)
        assert found.chosen_low == pytest.approx(-largest, rel=1e-6)
        assert (found.low, found.high) == (float(weight.min()), float(weight.max()))
        assert sum(found.counts) == weight.numel()
    assert (drawn["conv1", "after"].chosen_low, drawn["conv1", "after"].chosen_high) == quantized.find(
        "conv1"
    ).output.range
    assert (drawn["fc3", "after"].chosen_low, drawn["fc3", "after"].chosen_high) == (None, None), "not rounded"


def test_a_constant_is_drawn_in_a_bin_around_it() -> None:
    for value, low, high in ((0.0, -0.5, 0.5), (0.25, -0.25, 0.75), (-4.0, -6.0, -2.0)):
        found = draw_histogram("fc", "after", count_values(torch.full((7,), value)), None, None)
        assert (found.low, found.high, sum(found.counts), found.mean) == (low, high, 7, value)
        assert found.counts[len(found.counts) // 2] + found.counts[len(found.counts) // 2 - 1] == 7


def test_how_many_samples_are_tried_follows_from_the_arithmetic(lenet: nn.Module) -> None:
    network, _ = quantize(lenet)
    assert choose_num_tested(network, 10_000, None) == 10_000
    assert choose_num_tested(network, 10_000, 7) == 7
    assert choose_num_tested(network, 5, 7) == 5
    assert count_multiply_adds(network, (3, 32, 32))["conv1"] == 28 * 28 * 450
    assert choose_evenly(10, 5) == [0, 2, 4, 6, 8]
    assert choose_evenly(3, 3) == [0, 1, 2]
