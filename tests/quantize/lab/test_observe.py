"""What hooks see of weights and activations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.quantize.capture import capture_network
from scalelab.quantize.lab.chain import LabLayer, LabSettings, scale_network
from scalelab.quantize.lab.observe import (
    LayerTally,
    Seen,
    Tallies,
    make_histogram,
    observe_activations,
    report_histograms,
    report_layers,
)
from tests.quantize.lab.chains import make_images, make_lab, make_plain, observe


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
    assert (made.low, made.high, made.mean, made.deviation) == (1.5, 2.5, 2.0, 0.0)
    assert (made.chosen_low, made.chosen_high) == (None, None)


def test_a_histogram_has_the_range_that_becomes_int8() -> None:
    model, images = make_plain(), make_images()
    network, seen = observe(model, images)
    lab = scale_network(network, seen, LabSettings())
    found = {(one.layer, one.kind): one for one in report_histograms(lab, seen, LabSettings())}
    assert {kind for _, kind in found} == {"weights", "before", "after"}
    for one in lab.layers:
        if one.weight is not None:
            assert one.layer.weight is not None
            largest = float(one.layer.weight.abs().max())
            weights, before, after = (found[one.name, kind] for kind in ("weights", "before", "after"))
            assert (weights.chosen_low, weights.chosen_high) == pytest.approx((-largest, largest))
            assert (before.chosen_low, before.chosen_high) == (-128 / one.scale, 127 / one.scale)
            low = 0.0 if one.layer.has_relu else -128 / one.scale
            assert (after.chosen_low, after.chosen_high) == (low, 127 / one.scale)
    assert {one.layer.has_relu for one in lab.layers if one.weight is not None} == {True, False}


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


def test_a_layer_is_tallied_with_its_noise_and_what_is_clipped() -> None:
    lab = make_lab(make_plain(), make_images())
    one = next(one for one in lab.layers if one.weight is not None and not one.layer.has_relu)
    tally = LayerTally()
    integers = torch.tensor([[127.0, -128.0], [10.0, 0.0]])
    exact = integers / one.scale + torch.tensor([[0.0, 3.0], [4.0, 0.0]])
    for _ in range(2):
        tally.count(one, torch.tensor([[127.6, -128.6], [127.4, -128.4]]), integers, exact)
        tally.count_answer(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 2.0]))
    assert tally.signal == pytest.approx(2 * float(exact.double().square().sum()), rel=1e-6)
    assert tally.noise == pytest.approx(2 * 25, rel=1e-5)
    assert (tally.num_results, tally.num_clipped, tally.sample_results) == (8, 4, 2)
    assert (tally.answer_signal, tally.answer_noise) == (50, 8)
    relu = LabLayer(**{**vars(one), "layer": replace(one.layer, has_relu=True)})
    tally.count(relu, torch.tensor([[127.6, -128.6], [127.4, -128.4]]), integers, exact)
    assert tally.num_clipped == 5, "what the ReLU takes is not clipped"
    assert report_layers(lab, Tallies()) == ()
    (report,) = report_layers(lab, Tallies(by_layer={one.name: tally}))
    assert one.weight is not None
    assert (report.num_weights, report.multiply_adds) == (one.weight.numel(), 2 * one.weight[0].numel())
    assert (report.scale, report.weight_scales) == (1 / one.scale, (1 / one.weight_scale,))
    assert report.output_sqnr == pytest.approx(10 * math.log10(50 / 8))
    assert report.clipped_share == 5 / 12
