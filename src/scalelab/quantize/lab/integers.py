"""Q4 and Q5: the forward pass in integers, rounded and clamped after every layer.

Sums are formed in float64, where every integer below 2⁵³ is exact whatever the order, and no sum reaches 2²⁴
(`chain.py` refuses that), so that they are also what float32 and int32 would give. One product of float32 numbers, sum
times n_out, is rounded with halves to even and clamped to [−128, 127]. ReLU and max pooling take integers as they are:
they commute with rounding.

Before a layer multiplies, its input is looked at: a number that is no integer or no int8 is an error, and not a network
that is a little better than the integers allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from scalelab.errors import ScalelabError
from scalelab.quantize.lab.chain import LabLayer, LabNetwork, round_to_int8
from scalelab.quantize.lab.settings import HIGH, LOW
from scalelab.quantize.run_float import compute_layer, compute_sum

Look = Callable[[LabLayer, torch.Tensor, torch.Tensor], None]
"""Is shown a layer, its sums times n_out, and the integers that become of them."""


def run_integers(network: LabNetwork, images: torch.Tensor, look: Look | None = None) -> torch.Tensor:
    """The logits of images in float: integers from −128 to 127, as float32."""
    return run_layers(network.layers[1:], round_to_int8(images, network.input_scale), look)


def run_layers(layers: tuple[LabLayer, ...], integers: torch.Tensor, look: Look | None = None) -> torch.Tensor:
    """Some layers in a row, from the integers that the first one takes."""
    for one in layers:
        if one.weight is None:
            integers = compute_layer(one.layer, [integers])
            continue
        scaled = add_products(one, integers) * one.output_scale
        integers = torch.clamp(torch.round(scaled), LOW, HIGH)
        integers = integers.relu() if one.layer.has_relu else integers
        if look is not None:
            look(one, scaled, integers)
    return integers


def run_to_sums(network: LabNetwork, images: torch.Tensor) -> torch.Tensor:
    """The sums of the last layer as logits, before they are scaled and rounded."""
    *before, last = network.layers[1:]
    return add_products(last, run_layers(tuple(before), round_to_int8(images, network.input_scale)))


def add_products(one: LabLayer, integers: torch.Tensor) -> torch.Tensor:
    """The sums of a layer with its bias: exact integers, as float32."""
    assert one.weight is not None
    check_integers(one.name, integers)
    bias = None if one.bias is None else one.bias.double()
    exact = replace(one.layer, weight=one.weight.double(), bias=bias)
    return compute_sum(exact, [integers.double()]).float()


def check_integers(name: str, integers: torch.Tensor) -> None:
    """Raise unless a layer is given int8 values."""
    wrong = integers[integers != torch.round(integers)]
    if wrong.numel():
        raise ScalelabError(
            f"{name} was given {wrong[0].item():g}, which is no integer: round the result of the layer before it"
        )
    outside = integers[(integers < LOW) | (integers > HIGH)]
    if outside.numel():
        raise ScalelabError(
            f"{name} was given {outside[0].item():g}, which is no int8: clamp the result of the layer before it to"
            f" [{LOW}, {HIGH}]"
        )
