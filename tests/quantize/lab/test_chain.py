"""The lab's scales: what they are by formula, and what they cannot be of."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.quantize.capture import capture_network
from scalelab.quantize.lab.chain import LabSettings, check_chain, check_sums, scale_network
from scalelab.quantize.network import Layer
from tests.quantize.lab.chains import make_images, make_lab, make_plain, observe


@pytest.mark.parametrize("peak", [127, 255])
@pytest.mark.parametrize("observed", ["after", "before"])
def test_the_chained_scales_are_those_of_the_formula(peak: int, observed: str) -> None:
    settings = LabSettings(peak=peak, observed="before" if observed == "before" else "after")
    network, seen = observe(make_plain(), make_images())
    lab = scale_network(network, seen, settings)
    assert lab.input_scale == pytest.approx(peak / make_images().abs().max().item())
    before = 1.0  # Π n_wᵢ · n_oᵢ
    for one in lab.layers:
        if one.weight is None:
            continue
        largest = seen[one.name, settings.observed].magnitude
        wanted = (peak / largest) / (one.weight_scale * lab.input_scale * before)
        assert one.output_scale == pytest.approx(wanted, rel=1e-6)
        assert one.scale == pytest.approx(peak / largest, rel=1e-6)
        before *= one.weight_scale * one.output_scale


def test_the_largest_weight_becomes_127_and_none_is_lost() -> None:
    for one in make_lab(make_plain(), make_images()).layers:
        if one.weight is not None and one.layer.weight is not None:
            assert one.weight.dtype == torch.int8
            assert one.weight.abs().max() == 127
            error = (one.weight / one.weight_scale - one.layer.weight).abs().max()
            assert error <= 0.5 / one.weight_scale * 1.0001


def test_three_deviations_clamp_the_weights_beyond_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(288, 30, bias=False)).eval()
    nn.init.normal_(model[1].weight)
    lab = make_lab(model, make_images(), LabSettings(weight_range="3sigma"))
    (one,) = (one for one in lab.layers if one.weight is not None)
    weight = model[1].weight.detach()
    assert one.weight_scale == pytest.approx(127 / (3 * weight.std(correction=0).item()), rel=1e-5)
    assert one.weight is not None
    is_beyond = weight.abs() > 3.02 * weight.std()
    assert is_beyond.any()
    assert set(one.weight[is_beyond].tolist()) <= {-128, 127}


def test_a_bias_is_in_the_units_of_the_sums() -> None:
    lab = make_lab(make_plain(), make_images())
    scale = lab.input_scale
    for one in lab.layers:
        if one.weight is not None:
            assert one.bias is not None
            assert one.layer.bias is not None
            assert one.bias.dtype == torch.int32
            wanted = torch.round(one.layer.bias.double() * one.weight_scale * scale)
            assert one.bias.tolist() == wanted.tolist()
        scale = one.scale


def test_a_raw_bias_is_rounded_as_it_is_and_none_is_left_out() -> None:
    raw = make_lab(make_plain(), make_images(), LabSettings(bias="raw")).layers[-1]
    assert raw.bias is not None
    assert raw.bias.tolist() == [0] * 5
    assert make_lab(make_plain(), make_images(), LabSettings(bias="none")).layers[-1].bias is None


def test_a_layer_of_zeros_stays_one() -> None:
    model = make_plain(bias=False)
    nn.init.zeros_(model[0].weight)
    lab = make_lab(model, make_images())
    assert all(math.isfinite(one.scale) and one.scale > 0 for one in lab.layers)
    assert lab.layers[1].weight is not None
    assert not lab.layers[1].weight.any()


def test_sums_that_float32_cannot_hold_are_refused() -> None:
    weight = torch.full((1, 1032), 127.0)
    check_sums(Layer(name="fc", op="linear"), weight, torch.tensor([1023]))
    with pytest.raises(UsageError, match="a sum of fc can reach 16,777,216, but float32 is exact only below 16,777,"):
        check_sums(Layer(name="fc", op="linear"), weight, torch.tensor([-1024]))


def test_a_bias_that_no_int32_holds_is_refused() -> None:
    network, seen = observe(make_plain(), make_images())
    last = network.layers[-1]
    huge = replace(last, bias=torch.full((5,), 1e8))
    with pytest.raises(UsageError, match=r"the bias of 6 is up to .* more than an int32 holds"):
        scale_network(replace(network, layers=(*network.layers[:-1], huge)), seen, LabSettings())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.two(x)


class Twice(nn.Module):
    """One module in two places: a hook would see both as one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.fc(x))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten()), "1 is a batch norm"),
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.AvgPool2d(2), nn.Flatten()), "is of type average_pool"),
    ],
)
def test_what_the_lab_does_not_know_is_named(model: nn.Module, words: str) -> None:
    model.eval()
    with pytest.raises(UsageError, match=f"{words}.*use a --calibration other than lab"):
        check_chain(model, capture_network(model, make_images(2)))


def test_a_branch_is_named() -> None:
    model = Branching().eval()
    with pytest.raises(UsageError, match="two does not follow one, but the lab's scales need a chain"):
        check_chain(model, capture_network(model, torch.rand(2, 4)))


def test_a_module_that_is_called_twice_is_named() -> None:
    model = Twice().eval()
    with pytest.raises(UsageError, match="fc#2 is not a module, so a hook cannot see its output"):
        check_chain(model, capture_network(model, torch.rand(2, 4)))


def test_only_the_two_peaks_are_known() -> None:
    with pytest.raises(UsageError, match="--lab-peak must be 127, or 255 as published, got 128"):
        LabSettings(peak=128)
