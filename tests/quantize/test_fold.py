"""Batch norms disappear into what is before them, and where they cannot they stay what they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.quantize.capture import capture_network
from scalelab.quantize.network import CapturedNetwork, run_float
from tests.quantize.nets import draw_images


def capture(*modules: nn.Module) -> tuple[nn.Module, CapturedNetwork]:
    torch.manual_seed(0)
    model = nn.Sequential(*modules)
    for module in model:
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.1, 3)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    model.eval()
    return model, capture_network(model, draw_images(2))


def assert_same(model: nn.Module, network: CapturedNetwork) -> None:
    images = draw_images(2, seed=5)
    with torch.no_grad():
        torch.testing.assert_close(run_float(network, images)[network.output], model(images), rtol=1e-4, atol=1e-4)


def test_a_batch_norm_after_a_convolution_changes_its_weights_as_the_formula_says() -> None:
    conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=0.5)
    model, network = capture(conv, norm)
    assert [layer.name for layer in network.layers] == ["input", "0"]
    assert norm.running_var is not None
    factor = norm.weight.double() / torch.sqrt(norm.running_var.double() + 0.5)
    weight = network.layers[1].weight
    assert weight is not None
    assert torch.equal(weight, (conv.weight.double() * factor.reshape(-1, 1, 1, 1)).float())
    assert_same(model, network)


@pytest.mark.parametrize(
    "modules",
    [
        (nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.ReLU()),
        (nn.Conv2d(3, 6, 3, groups=3), nn.Dropout(), nn.BatchNorm2d(6, affine=False)),
        (nn.Flatten(), nn.Linear(3072, 5), nn.BatchNorm1d(5), nn.ReLU()),
    ],
)
def test_a_folded_batch_norm_leaves_one_layer_that_computes_both(modules: tuple[nn.Module, ...]) -> None:
    model, network = capture(*modules)
    assert sum(layer.is_weighted for layer in network.layers) == 1
    assert_same(model, network)


def test_a_batch_norm_after_something_else_stays_as_a_convolution_of_each_channel() -> None:
    model, network = capture(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.ReLU())
    assert [(layer.name, layer.op, layer.groups) for layer in network.layers[1:]] == [
        ("0", "conv", 3),
        ("1", "conv", 1),
        ("3", "conv", 4),
    ]
    assert [layer.has_relu for layer in network.layers] == [False, False, True, True]
    assert_same(model, network)


def test_a_batch_norm_of_features_that_follows_no_linear_layer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"1 is nn\.BatchNorm1d, which does not follow its own linear layer"):
        capture(nn.Flatten(), nn.BatchNorm1d(3072))


class Shared(nn.Module):
    """A convolution whose result is used with and without a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        result: torch.Tensor = self.norm(y) + y
        return result


def test_a_convolution_that_is_used_without_its_batch_norm_too_keeps_its_weights() -> None:
    model = Shared().eval()
    network = capture_network(model, draw_images(2))
    assert [layer.name for layer in network.layers] == ["input", "conv", "norm", "add_1"]
    assert_same(model, network)


def test_a_relu_moves_ahead_of_pooling_and_flattening() -> None:
    model, network = capture(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.ReLU())
    assert [(layer.op, layer.has_relu) for layer in network.layers[1:]] == [
        ("conv", True),
        ("max_pool", False),
        ("flatten", False),
    ]
    assert_same(model, network)


def test_a_relu_after_an_average_or_the_input_stays() -> None:
    model, network = capture(nn.ReLU(), nn.Conv2d(3, 4, 3), nn.AvgPool2d(2), nn.ReLU())
    assert [layer.op for layer in network.layers] == ["input", "relu", "conv", "average_pool", "relu"]
    assert_same(model, network)
