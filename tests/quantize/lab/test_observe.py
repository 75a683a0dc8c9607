"""What hooks see of weights and activations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.quantize.capture import capture_network
from scalelab.quantize.lab.observe import Seen, make_histogram, observe_activations
from tests.quantize.lab.chains import make_images, make_plain, observe


def test_a_histogram_has_every_number_once() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    seen = Seen()
    for part in values.split(300):
        seen.measure(part)
    for part in values.split(77):
        seen.sort(part)
    made = make_histogram("fc", "weights", seen, (-1.0, 1.0))
    assert sum(made.counts) == 1000
    assert (made.low, made.high) == (made.least, made.largest) == (values.min().item(), values.max().item())
    assert made.mean == pytest.approx(values.mean().item(), abs=1e-6)
    assert made.deviation == pytest.approx(values.std(correction=0).item(), rel=1e-6)
    assert (made.chosen_low, made.chosen_high) == (-1.0, 1.0)


def test_numbers_that_are_all_the_same_have_a_histogram() -> None:
    seen = Seen()
    seen.measure(torch.full((7,), 2.0))
    seen.sort(torch.full((7,), 2.0))
    made = make_histogram("fc", "before", seen, None)
    assert sum(made.counts) == 7
    assert made.low < made.high
    assert made.deviation == 0


def test_results_are_seen_before_and_after_relu() -> None:
    network, seen = observe(make_plain(), make_images())
    hidden = next(layer.name for layer in network.layers if layer.op == "linear" and layer.has_relu)
    before, after = seen[hidden, "before"], seen[hidden, "after"]
    assert before.least < 0
    assert after.least == 0
    assert before.largest == after.largest
    assert before.count == after.count == before.counts.sum() == after.counts.sum()


def test_batches_make_no_difference_and_hooks_are_taken_off() -> None:
    model, images = make_plain(), make_images()
    layers = capture_network(model, images).layers
    whole = observe_activations(model, layers, [images])
    parts = observe_activations(model, layers, list(images.split(7)))
    for key, seen in whole.items():
        assert parts[key].magnitude == pytest.approx(seen.magnitude, rel=1e-6)
        assert parts[key].counts.sum() == seen.counts.sum()
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_are_taken_off_after_a_failure_too() -> None:
    model = make_plain()
    layers = capture_network(model, make_images()).layers
    with pytest.raises(UsageError, match="input is not finite on the calibration images"):
        observe_activations(model, layers, [make_images() * float("nan")])
    assert not any(module._forward_hooks for module in model.modules())


def test_weights_are_seen_layer_by_layer() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(288, 4, bias=False)).eval()
    _, seen = observe(model, make_images())
    assert seen["1", "weights"].count == 288 * 4
    assert seen["1", "weights"].largest == model[1].weight.max().item()
