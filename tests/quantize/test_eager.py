"""The eager runtime gives, integer by integer, what its profile says; shapes, aliases, float layers and bad input."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from scalelab.errors import ScalelabError, UsageError
from scalelab.quantize import eager_kernels
from scalelab.quantize.eager import make_eager
from scalelab.quantize.network import Grid, Layer, QuantizedLayer, QuantizedNetwork
from scalelab.quantize.pipeline import quantize_model
from scalelab.quantize.scales import quantize_network
from scalelab.records.tasks import Quantization
from scalelab.worker.models.networks import Lenet
from tests.quantize.nets import Resnet20
from tests.quantize.simulated import run_eager, simulate, simulate_eager

SIDE = 8


class Corners(nn.Module):
    """What networks seldom have: padded pooling, dilation, groups, a shortcut that is used again, a ReLU by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding=2, dilation=2)
        self.grouped = nn.Conv2d(12, 12, (3, 1), padding=(1, 0), groups=3)
        self.maxima = nn.MaxPool2d(3, stride=(2, 1), padding=1)
        self.average = nn.AvgPool2d(2, stride=1, padding=1)
        self.wide = nn.Linear(12 * 5 * 9, 20)
        self.same = nn.Linear(20, 20, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.first(images)
        y = self.grouped(x) + x
        z = x + y
        doubled = z + z
        x = self.average(self.maxima(doubled)).relu().flatten(1)
        rows = self.wide(x)
        return self.same(rows.relu()) + rows


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_network(
    model: nn.Module, side: int = SIDE, settings: Quantization | None = None, keep_float: tuple[str, ...] = ()
) -> QuantizedNetwork:
    made = quantize_model(model.eval(), [draw(4, 3, side, side)], settings or Quantization())
    return quantize_network(made.network, made.calibration, settings, keep_float)


@functools.cache
def make_corners() -> QuantizedNetwork:
    torch.manual_seed(0)
    return make_network(Corners())


@functools.cache
def make_small_resnet() -> QuantizedNetwork:
    torch.manual_seed(0)
    model = Resnet20(num_blocks=1, width=16)
    with torch.no_grad():
        model.train()(draw(16, 3, 16, 16, seed=3))
    return make_network(model, 16)


@functools.cache
def make_lenet() -> QuantizedNetwork:
    torch.manual_seed(0)
    return make_network(Lenet("all"), 32)


def count_differences(quantized: QuantizedNetwork, images: torch.Tensor) -> dict[str, int]:
    """Layers that differ from the simulation, by how many integers."""
    found, expected = run_eager(quantized, images), simulate_eager(quantized, images)
    assert set(found) == set(expected) - {"logits"}
    counts = {name: int((found[name] != expected[name]).sum()) for name in found}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("make", [make_lenet, make_small_resnet, make_corners])
@pytest.mark.parametrize("num_images", [1, 5])
def test_every_integer_is_that_of_the_profile(make, num_images):
    quantized = make()
    assert count_differences(quantized, draw(num_images, *quantized.input_shape, seed=1)) == {}


@pytest.mark.parametrize("make", [make_lenet, make_small_resnet, make_corners])
def test_logits_are_those_of_the_integers_also_where_memory_is_reused(make):
    quantized = make()
    images = draw(4, *quantized.input_shape, seed=2)
    module = make_eager(quantized)
    expected = simulate_eager(quantized, images)["logits"]
    assert torch.equal(module(images), expected)
    assert torch.equal(module(images), expected), "a second call found what the first had left"


def test_integers_of_images_have_channels_last_as_the_kernels_do():
    quantized = make_lenet()
    found = run_eager(quantized, draw(2, *quantized.input_shape))
    assert found["input"].is_contiguous(memory_format=torch.channels_last)


def test_a_network_of_linear_layers_takes_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4))
    quantized = quantize_model(model.eval(), [draw(8, 20)], Quantization()).quantized
    assert count_differences(quantized, draw(7, 20, seed=1)) == {}


def test_one_scale_for_all_channels_gives_the_integers_of_the_profile():
    torch.manual_seed(0)
    quantized = make_network(Lenet("all"), 32, Quantization(is_per_tensor=True))
    assert count_differences(quantized, draw(3, 3, 32, 32)) == {}


def make_one_conv(*, bias: bool, zero_point: int, scale: float = 0.05) -> QuantizedNetwork:
    """A convolution with scales that make ties frequent."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randint(-127, 128, (32, 3, 3, 3), generator=generator, dtype=torch.int8)
    scales = torch.tensor([0.001, 0.002, 0.0005, 0.003]).repeat(8)
    layer = Layer(name="conv", op="conv", inputs=("input",), weight=weight.float(), padding=(1, 1), has_relu=True)
    biases = torch.randint(-30000, 30000, (32,), generator=generator, dtype=torch.int32) if bias else None
    layers = (
        QuantizedLayer(layer=Layer(name="input", op="input"), output=Grid(scale=0.02)),
        QuantizedLayer(
            layer=layer,
            output=Grid(scale=scale, zero_point=zero_point),
            weight=weight,
            weight_scale=scales,
            bias=biases,
        ),
    )
    return QuantizedNetwork(layers=layers, input_shape=(3, 16, 16))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("zero_point", [0, 128])
def test_ties_are_rounded_as_the_profile_says(bias, zero_point):
    quantized = make_one_conv(bias=bias, zero_point=zero_point)
    images = draw(16, 3, 16, 16)
    assert count_differences(quantized, images) == {}
    other = simulate(quantized, images, "onnxruntime")["conv"]
    num_apart = int((simulate_eager(quantized, images)["conv"] != other).sum())
    assert (num_apart == 0) == (not bias and zero_point == 0), "ties were not frequent enough to tell profiles apart"


def test_sums_of_two_layers_are_exact_for_every_pair_of_bytes():
    """An image of all bytes, added to its transpose with scales that make ties frequent."""
    pairs = torch.arange(256.0).repeat(256, 1)
    images = torch.stack([pairs, pairs.T])[None] - 128
    eye = torch.eye(2, dtype=torch.int8)[:, :, None, None]
    copy_layer = Layer(name="straight", op="conv", inputs=("input",), weight=eye.float())
    straight = QuantizedLayer(layer=copy_layer, output=Grid(scale=1.0), weight=eye, weight_scale=torch.ones(1))
    swapped = replace(straight, layer=replace(copy_layer, name="swapped"), weight=eye.flip(0))
    for scale in (1.1, 1.3, 2.0):
        total = Layer(name="sum", op="add", inputs=("straight", "swapped"))
        layers = (
            QuantizedLayer(layer=Layer(name="input", op="input"), output=Grid(scale=1.0)),
            replace(straight, output=Grid(scale=0.7)),
            replace(swapped, output=Grid(scale=1.3, zero_point=120)),
            QuantizedLayer(layer=total, output=Grid(scale=scale, zero_point=3)),
        )
        assert count_differences(QuantizedNetwork(layers=layers, input_shape=(2, 256, 256)), images) == {}


def test_layers_kept_in_float_are_computed_in_float_and_named():
    torch.manual_seed(0)
    quantized = make_network(Lenet("all"), 32, keep_float=("conv1", "fc2"))
    module = make_eager(quantized)
    assert any("conv1, fc2" in remark for remark in module.remarks)
    images = draw(4, 3, 32, 32, seed=1)
    apart = (module(images) - simulate_eager(quantized, images)["logits"]).abs().max()
    assert apart <= 3 * quantized.layers[-1].output.scale


def test_every_kind_of_layer_can_be_kept_in_float():
    torch.manual_seed(0)
    names = [layer.name for layer in make_corners().layers if layer.layer.op != "input"]
    torch.manual_seed(0)
    model = Corners()
    quantized = make_network(model, keep_float=tuple(names))
    images = draw(3, 3, SIDE, SIDE, seed=1)
    found, expected = run_eager(quantized, images), simulate_eager(quantized, images)
    for name in names[:-1]:
        apart = (found[name].int() - expected[name].int()).abs()
        assert apart.max() <= 2, name
        assert (apart > 0).float().mean() < 0.01, name


def test_a_network_without_float_layers_has_no_remark_about_them():
    assert not any("float32, with" in remark for remark in make_eager(make_lenet()).remarks)


def test_images_of_any_layout_and_type_give_the_same_logits():
    module, images = make_eager(make_small_resnet()), draw(3, 3, 16, 16)
    expected = module(images)
    assert torch.equal(module(images.contiguous(memory_format=torch.channels_last)), expected)
    assert torch.equal(module(images.double()), expected)
    assert torch.equal(torch.cat([module(image[None]) for image in images]), expected)


def test_logits_are_float32_without_a_gradient():
    logits = make_eager(make_lenet())(draw(2, 3, 32, 32).requires_grad_())
    assert logits.dtype == torch.float32
    assert not logits.requires_grad


def test_threads_do_not_change_an_integer():
    module, images, before = make_eager(make_small_resnet()), draw(5, 3, 16, 16), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = module(images)
        torch.set_num_threads(2)
        assert torch.equal(module(images), expected)
    finally:
        torch.set_num_threads(before)


def test_images_of_another_size_are_refused_with_both_shapes():
    with pytest.raises(UsageError, match=r"\(2, 3, 28, 28\).*\(3, 32, 32\)"):
        make_eager(make_lenet())(draw(2, 3, 28, 28))


@pytest.fixture
def fresh_probe():
    probes = (eager_kernels.probe_kernels, eager_kernels.sums_exactly)
    for probe in probes:
        probe.cache_clear()
    yield
    for probe in probes:
        probe.cache_clear()


def test_a_processor_without_vnni_is_remarked_on(monkeypatch, fresh_probe):
    monkeypatch.setattr(eager_kernels, "has_vnni", lambda: False)
    assert any("VNNI" in remark for remark in make_eager(make_lenet()).remarks)


def test_a_build_without_the_kernels_says_what_to_do_instead(monkeypatch, fresh_probe):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ScalelabError, match=re.escape("run the exported ONNX file")):
        make_eager(make_lenet())


@pytest.mark.parametrize("make", [make_lenet, make_small_resnet, make_corners])
def test_where_kernels_saturate_sums_are_exact_all_the_same(make, monkeypatch, fresh_probe):
    """As if products were added in 16 bits, as on x86 without VNNI."""
    monkeypatch.setattr(eager_kernels, "multiply_largest", lambda: 32 * 32767)
    quantized = make()
    images = draw(3, *quantized.input_shape, seed=1)
    assert count_differences(quantized, images) == {}
    module = make_eager(quantized)
    assert torch.equal(module(images), simulate_eager(quantized, images)["logits"])
    assert any("saturate" in remark for remark in module.remarks)


def test_sums_beyond_float32_are_taken_in_float64(monkeypatch, fresh_probe):
    """An odd sum above 2²⁴, which no float32 has, from 600 of the largest products and a 1."""
    monkeypatch.setattr(eager_kernels, "multiply_largest", lambda: 32 * 32767)
    weight = torch.full((1, 601), 127, dtype=torch.int8)
    weight[0, -1] = 1
    what = Layer(name="sum", op="linear", inputs=("input",), weight=weight.float())
    layers = (
        QuantizedLayer(layer=Layer(name="input", op="input"), output=Grid(scale=1.0, zero_point=0)),
        QuantizedLayer(
            layer=what, output=Grid(scale=1.0), weight=weight, weight_scale=torch.ones(1), is_unrounded=True
        ),
    )
    module = make_eager(QuantizedNetwork(layers=layers, input_shape=(601,)))
    assert f".to({eager_kernels.FLOAT64})" in module.text
    assert module(torch.full((1, 601), 255.0)).item() == torch.tensor(600.0 * 255 * 127 + 255, dtype=torch.float32)


class Shared(nn.Module):
    """A sum whose first input is read again, after its second one has been read for the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
        self.last = nn.Linear(8 * SIDE * SIDE, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.first(images)
        together = x + self.second(x)
        return self.last((together + x).flatten(1))


def test_a_result_that_is_read_again_is_not_overwritten():
    torch.manual_seed(0)
    quantized = make_network(Shared())
    images = draw(2, *quantized.input_shape, seed=4)
    assert torch.equal(make_eager(quantized)(images), simulate_eager(quantized, images)["logits"])


def test_sums_are_exact_only_if_none_of_64_products_saturates(monkeypatch):
    for total, is_exact in ((2_072_640, True), (2_072_639, False)):
        monkeypatch.setattr(eager_kernels, "multiply_largest", lambda total=total: total)
        assert eager_kernels.sums_exactly.__wrapped__() is is_exact
