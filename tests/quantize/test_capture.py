"""Modules as people write them become layers that compute the same; what cannot is refused by its path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from scalelab.errors import UsageError
from scalelab.quantize.capture import TOLERANCE, capture_network, check_results
from scalelab.quantize.network import CapturedNetwork, run_float
from scalelab.worker.models.networks import Lenet, Resnet18
from tests.quantize.nets import Resnet20, Small, draw_images, make_net


class Written(nn.Module):
    """A module whose forward is the function that a test is about."""

    def __init__(self, forward: Callable[[Written, torch.Tensor], object], **modules: nn.Module) -> None:
        super().__init__()
        self.written = forward
        self.conv = nn.Conv2d(3, 4, 3)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, images: torch.Tensor) -> object:
        return self.written(self, images)


def capture(forward: Callable[[Written, torch.Tensor], object], **modules: nn.Module) -> CapturedNetwork:
    return capture_network(Written(forward, **modules).eval(), draw_images(2))


def list_ops(network: CapturedNetwork) -> list[str]:
    return [layer.op + ("+relu" if layer.has_relu else "") for layer in network.layers]


@pytest.mark.parametrize("kind", [Lenet, Resnet18, Resnet20, Small])
def test_a_captured_network_computes_what_the_module_computes(kind: type[nn.Module]) -> None:
    model, images = make_net(kind), draw_images(3, seed=1)
    network = capture_network(model, draw_images(2))
    with torch.no_grad():
        expected = model(images)
    found = run_float(network, images)[network.output]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_lenet_has_its_relus_in_its_layers_and_the_names_of_its_modules() -> None:
    network = capture_network(Lenet("last").eval(), draw_images(1))
    assert [layer.name for layer in network.layers] == [
        *("input", "conv1", "max_pool_1", "conv2", "max_pool_2", "flatten_1", "fc1", "fc2", "fc3")
    ]
    assert [layer.name for layer in network.layers if layer.has_relu] == ["conv1", "conv2", "fc1", "fc2"]
    assert network.input_shape == (3, 32, 32)


def test_resnet18_has_no_batch_norm_and_no_relu_left() -> None:
    network = capture_network(Resnet18().eval(), draw_images(1))
    assert set(list_ops(network)) == {"input", "conv", "conv+relu", "add+relu", "average_pool", "flatten", "linear"}
    assert sum(layer.op == "conv" for layer in network.layers) == 20
    assert network.find("add_3").inputs == ("stage2.0.conv2", "stage2.0.projection")


@pytest.mark.parametrize(
    ("forward", "ops"),
    [
        (lambda m, x: functional.relu(functional.max_pool2d(m.conv(x), 2)), ["input", "conv+relu", "max_pool"]),
        (lambda m, x: torch.relu(m.conv(x)).relu(), ["input", "conv+relu"]),
        (lambda m, x: m.conv(x).relu_().contiguous(), ["input", "conv+relu"]),
        (lambda m, x: m.conv(x).mean((-1, -2), keepdim=True), ["input", "conv", "average_pool"]),
        (lambda m, x: torch.mean(m.conv(x), [2, 3]), ["input", "conv", "average_pool", "flatten"]),
        (lambda m, x: functional.adaptive_avg_pool2d(m.conv(x), (5, 3)), ["input", "conv", "average_pool"]),
        (lambda m, x: functional.avg_pool2d(m.conv(x), 30), ["input", "conv", "average_pool"]),
        (lambda m, x: m.conv(x).view(x.shape[0], -1), ["input", "conv", "flatten"]),
        (lambda m, x: m.conv(x).reshape(x.size(0), -1), ["input", "conv", "flatten"]),
        (lambda m, x: torch.flatten(m.conv(x).flatten(1), 1), ["input", "conv", "flatten"]),
        (lambda m, x: functional.dropout(m.conv(x), training=m.training), ["input", "conv"]),
        (lambda m, x: m.conv(torch.add(x, x)), ["input", "add", "conv"]),
        (lambda m, x: m.conv(x.add_(x)), ["input", "add", "conv"]),
        (lambda m, x: functional.max_pool2d(m.conv(x), 2, ceil_mode=True), ["input", "conv", "max_pool"]),
        (lambda m, x: functional.max_pool2d(m.conv(x), 3, 1, padding=1), ["input", "conv", "max_pool"]),
    ],
)
def test_ways_to_write_the_same_are_read_alike(
    forward: Callable[[Written, torch.Tensor], object], ops: list[str]
) -> None:
    assert list_ops(capture(forward)) == ops


@pytest.mark.parametrize(("size", "kernel"), [(30, None), (15, (15, 15))])
def test_a_window_as_large_as_the_image_is_read_as_the_average_of_the_image(
    size: int, kernel: tuple[int, int] | None
) -> None:
    network = capture(lambda m, x: functional.avg_pool2d(m.conv(x), size))
    assert network.layers[-1].kernel == kernel


def test_a_result_that_is_also_used_without_its_relu_keeps_both() -> None:
    def forward(m: Written, x: torch.Tensor) -> torch.Tensor:
        y = m.conv(x)
        return torch.relu(y) + y

    assert list_ops(capture(forward)) == ["input", "conv", "relu", "add"]


def test_a_tensor_that_a_relu_overwrote_is_read_as_overwritten() -> None:
    def forward(m: Written, x: torch.Tensor) -> torch.Tensor:
        y = m.conv(x)
        return functional.relu(y, inplace=True) + y

    network = capture(forward)
    assert list_ops(network) == ["input", "conv+relu", "add"]
    assert network.layers[-1].inputs == ("conv", "conv")


def test_what_leads_nowhere_is_left_out() -> None:
    def forward(m: Written, x: torch.Tensor) -> torch.Tensor:
        m.get_submodule("other")(x)
        result: torch.Tensor = m.conv(x)
        return result

    assert [layer.name for layer in capture(forward, other=nn.Conv2d(3, 3, 1)).layers] == ["input", "conv"]


def test_a_module_that_is_called_twice_becomes_two_layers_of_equal_weights() -> None:
    def forward(m: Written, x: torch.Tensor) -> torch.Tensor:
        same = m.get_submodule("same")
        result: torch.Tensor = same(same(x))
        return result

    network = capture(forward, same=nn.Conv2d(3, 3, 3, padding="same"))
    assert [layer.name for layer in network.layers] == ["input", "same", "same#2"]
    first, second = network.layers[1].weight, network.layers[2].weight
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    assert network.layers[1].padding == (1, 1)


def test_modules_named_like_made_names_do_not_collide_with_them() -> None:
    def forward(m: Written, x: torch.Tensor) -> torch.Tensor:
        return m.get_submodule("input")(x) + m.get_submodule("add_1")(x)  # type: ignore[no-any-return]

    names = [layer.name for layer in capture(forward, input=nn.Conv2d(3, 3, 1), add_1=nn.Conv2d(3, 3, 1)).layers]
    assert names == ["input_2", "input", "add_1", "add_2"]


def test_data_parallel_is_looked_through() -> None:
    network = capture_network(nn.DataParallel(Lenet()).eval(), draw_images(1))
    assert network.layers[1].name == "conv1"


REFUSED = {
    "act is nn.SiLU, which has no int8 kernel here: train with nn.ReLU": nn.SiLU(),
    "act is nn.ReLU6": nn.ReLU6(),
    "act is nn.ConvTranspose2d": nn.ConvTranspose2d(4, 4, 2),
    "act is nn.LayerNorm": nn.LayerNorm(30),
    "act is nn.Conv2d, padding_mode 'reflect'": nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "act is nn.Conv2d, padding='same' is not symmetric": nn.Conv2d(4, 4, 2, padding="same"),
    r"act is nn.Linear, which receives a tensor of shape \(2, 4, 30, 30\)": nn.Linear(30, 3),
    "act is nn.MaxPool2d, ceil_mode=True": nn.MaxPool2d(4, ceil_mode=True),
    "act is nn.AvgPool2d, count_include_pad=False": nn.AvgPool2d(2, padding=1, count_include_pad=False),
    "act is nn.AvgPool2d, divisor_override": nn.AvgPool2d(2, divisor_override=3),
    "act is nn.AdaptiveAvgPool2d, 30 × 30 does not divide into 7 × 7": nn.AdaptiveAvgPool2d(7),
    "act is nn.BatchNorm2d, it depends on the batch": nn.BatchNorm2d(4, track_running_stats=False),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("message", "module"), REFUSED.items(), ids=lambda value: type(value).__name__)
def test_a_module_without_int8_kernel_is_named_by_its_path(message: str, module: nn.Module) -> None:
    model = nn.Sequential()
    model.add_module("stage", nn.Sequential())
    stage = model.get_submodule("stage")
    stage.add_module("conv", nn.Conv2d(3, 4, 3))
    stage.add_module("act", module)
    with pytest.raises(UsageError, match="stage." + message):
        capture_network(model.eval(), draw_images(2))


@pytest.mark.parametrize(
    ("message", "forward"),
    [
        ("forward calls sigmoid after conv, which has no int8 kernel", lambda m, x: torch.sigmoid(m.conv(x))),
        ("forward calls cat after conv", lambda m, x: torch.cat([m.conv(x), m.conv(x)])),
        ("forward calls add after conv, adding a number", lambda m, x: m.conv(x) + 1),
        ("forward calls add after conv, shapes", lambda m, x: m.conv(x) + m.conv(x).mean((2, 3), keepdim=True)),
        ("forward calls mean after conv, mean has", lambda m, x: m.conv(x).mean(1)),
        (r"which reshapes \(2, 4, 30, 30\) to \(4, 1800\)", lambda m, x: m.conv(x).view(-1, 1800)),
        ("training=True keeps it random", lambda m, x: functional.dropout(m.conv(x), training=True)),
        ("the model returns a tuple", lambda m, x: (m.conv(x), x)),
        ("Written.forward cannot be traced", lambda m, x: m.conv(x) if x.sum() > 0 else x),
        ("forward calls getitem after conv", lambda m, x: m.conv(x)[:, :2]),
        ("forward calls add, with conv.weight: constants and parameters", lambda m, x: m.conv.weight + m.conv.weight),
    ],
)
def test_a_function_without_int8_kernel_is_named(
    message: str, forward: Callable[[Written, torch.Tensor], object]
) -> None:
    with pytest.raises(UsageError, match=message):
        capture(forward)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Lenet is in training mode: call model.eval\(\)"):
        capture_network(Lenet().train(), draw_images(1))
    model = make_net(Small)
    model.get_submodule("norm1").train()
    with pytest.raises(UsageError, match="norm1 is in training mode"):
        capture_network(model, draw_images(1))


def test_weights_that_are_no_finite_float32_are_refused() -> None:
    with pytest.raises(UsageError, match=r"conv1.weight is torch.float64.*call model.float\(\)"):
        capture_network(Lenet().double().eval(), draw_images(1))
    model = Lenet().eval()
    nn.init.constant_(model.fc2.weight, float("nan"))
    with pytest.raises(UsageError, match=r"fc2\.weight has non-finite weights"):
        capture_network(model, draw_images(1))


def test_an_example_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"fails on an example of shape \(1, 3, 28, 28\)"):
        capture_network(Lenet().eval(), draw_images(1)[:, :, :28, :28])
    with pytest.raises(UsageError, match="at least one sample"):
        capture_network(Lenet().eval(), draw_images(0))


def test_a_hook_that_changes_results_is_found_out() -> None:
    model = Lenet().eval()
    model.fc3.register_forward_hook(lambda module, inputs, result: result * 2)
    with pytest.raises(UsageError, match="hooks that change outputs"):
        capture_network(model, draw_images(1))


def test_a_relu_after_a_relu_is_in_the_layer_too() -> None:
    network = capture(lambda self, x: self.conv(x).relu().relu().flatten(1))
    assert list_ops(network) == ["input", "conv+relu", "flatten"]


@pytest.mark.parametrize("size", [1e-5, 1.0, 1e5])
def test_outputs_may_differ_by_a_share_of_the_largest_however_small_that_is(size: float) -> None:
    network = capture(lambda self, x: self.conv(x).flatten(1))
    images = draw_images(2)
    expected = run_float(network, images)[network.output]
    conv = network.layers[1]
    assert conv.weight is not None
    assert conv.bias is not None
    layers = (network.layers[0], replace(conv, weight=conv.weight * size, bias=conv.bias * size), network.layers[2])
    network, expected = replace(network, layers=layers), expected * size
    largest = float(expected.abs().max())
    check_results(network, images, expected + 0.9 * TOLERANCE * largest)
    with pytest.raises(UsageError, match="differs from the model"):
        check_results(network, images, expected + 1.2 * TOLERANCE * largest)


def test_capturing_leaves_the_module_as_it_was() -> None:
    model = make_net(Small)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    capture_network(model, draw_images(2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model.training
