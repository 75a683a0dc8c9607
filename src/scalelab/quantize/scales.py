"""Grids for every result, integers for every weight and bias.

**Activations** are uint8. Where nothing negative was seen (after a ReLU there cannot be), the zero point is 0 and all
256 integers stand for [0, max]; everywhere else it is 128 and the grid is symmetric, scale = max|a| / 127. With a zero
point of 0 the clamp to the grid is the ReLU, so that kernels need none of their own, and the range is resolved twice as
finely as with 128. Zero is an integer of every grid, so padding is exact.

**Weights** are int8 from −127 to 127, symmetric, scale = max|w| / 127 per output channel (or for the tensor). A channel
without any weight but zero has the scale of the layer's largest.

**Biases** are int32 in units of s_x · s_w, as a float32 product, and are added to the sums of products as they are. A
bias that would leave less room than these sums need below 2³¹ (a channel with weights of 10⁻⁸ and a bias of 1) makes
the weight scale of its channel larger until it fits: those weights lose digits that the bias had drowned before.

**Logits** are read by no layer, so a linear layer at the end leaves its sums as the float32 numbers they stand for.
Rounded to a byte, the two largest of a sample become equal now and then (`rounds_logits`, as the other layers).

**Kept in float**: a layer of `keep_float` has no integers; its result is rounded to its grid all the same.

Kernels for x86 processors without VNNI add pairs of products of a uint8 and an int8 in 16 bits, which saturate at
32767: two products of 255 · 127 do. `reduce_range` (weights to ±64) avoids that, 2 · 255 · 64 = 32640, at the price of
one bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from scalelab.errors import UnknownName, UsageError
from scalelab.quantize.calibrate import Calibration
from scalelab.quantize.network import PASSING, Grid, Layer, Network, QuantizedLayer, QuantizedNetwork
from scalelab.quantize.ranges import RangeSettings, choose_weight_limit

WEIGHT_LIMIT = 127
REDUCED_WEIGHT_LIMIT = 64
LARGEST_INT32 = 2**31 - 1
SMALLEST_SCALE = 2.0**-100
"""Below it, products of scales would leave the range of float32; a tensor that needs less is as good as zero."""


class Integers(NamedTuple):
    """The parameters of a layer."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None


def quantize_network(
    network: Network,
    calibration: Calibration,
    *,
    per_channel: bool = True,
    keep_float: Collection[str] = (),
    weights: RangeSettings | None = None,
    reduce_range: bool = False,
    rounds_logits: bool = False,
) -> QuantizedNetwork:
    """The network in int8, by what was counted. `weights`: how their ranges are chosen; min–max unless given."""
    check_names(network, calibration, keep_float)
    grids: dict[str, Grid] = {}
    layers = []
    limit = REDUCED_WEIGHT_LIMIT if reduce_range else WEIGHT_LIMIT
    for layer in network.layers:
        grids[layer.name] = grid = choose_grid(layer, calibration, grids)
        is_float, is_unrounded = layer.name in keep_float, not rounds_logits and gives_logits(layer, network)
        made = QuantizedLayer(layer=layer, output=grid, is_float=is_float, is_unrounded=is_unrounded)
        if layer.is_weighted and not is_float:
            limits = choose_weight_limits(layer, per_channel, weights or RangeSettings())
            parts = quantize_weights(layer, limits, grids[layer.inputs[0]].scale, limit)
            made = replace(made, weight=parts.weight, weight_scale=parts.scale, bias=parts.bias)
        layers.append(made)
    return QuantizedNetwork(layers=tuple(layers), input_shape=network.input_shape)


def gives_logits(layer: Layer, network: Network) -> bool:
    """Whether its sums are the network's result, as they are: of kernels, only that of a linear layer gives numbers."""
    return layer.op == "linear" and layer.name == network.output and not layer.has_relu


def list_remarks(network: Network, calibration: Calibration) -> tuple[str, ...]:
    """What works, but is hardly meant: channels without weights, layers that always give the same."""
    remarks = []
    for layer in network.layers:
        dead = list_dead_channels(layer)
        if dead:
            few = ", ".join(map(str, dead[:5])) + (f" and {len(dead) - 5} more" if len(dead) > 5 else "")
            which = f"channel {few} has" if len(dead) == 1 else f"channels {few} have"
            remarks.append(f"{layer.name}: {which} only zero weights")
        histogram = calibration.histograms.get(layer.name)
        if histogram is not None and histogram.is_constant:
            remarks.append(f"{layer.name} outputs {histogram.least:g} for every calibration sample")
    return tuple(remarks)


def list_dead_channels(layer: Layer) -> list[int]:
    if layer.weight is None:
        return []
    is_dead: list[bool] = (layer.weight.reshape(len(layer.weight), -1) == 0).all(dim=1).tolist()
    return [channel for channel, dead in enumerate(is_dead) if dead]


def check_names(network: Network, calibration: Calibration, keep_float: Collection[str]) -> None:
    names = [layer.name for layer in network.layers]
    for name in keep_float:
        if name not in names:
            raise UnknownName("layer to keep in float", name, names)
    for layer in network.layers:
        if layer.op not in PASSING and layer.name not in calibration.histograms:
            raise UsageError(f"layer {layer.name} was not calibrated: calibrate this same network")


def choose_grid(layer: Layer, calibration: Calibration, grids: Mapping[str, Grid]) -> Grid:
    """The grid of a layer's result: its own, or that of its input."""
    if layer.op in PASSING:
        return grids[layer.inputs[0]]
    return make_grid(*calibration.ranges[layer.name])


def make_grid(low: float, high: float) -> Grid:
    """The uint8 grid for a range: zero point 0 where it has nothing below zero, otherwise 128 and symmetric."""
    if low >= 0:
        return Grid(scale=make_scale(high / 255), zero_point=0)
    return Grid(scale=make_scale(max(-low, high) / 127), zero_point=128)


def make_scale(step: float) -> float:
    """A float32 value; one for a tensor of zeros, which every scale stands for."""
    return float(np.float32(step)) if step >= SMALLEST_SCALE else 1.0


def choose_weight_limits(layer: Layer, per_channel: bool, settings: RangeSettings) -> torch.Tensor:
    """The largest magnitude of each output channel, or of all, as float64; of a dead channel, the layer's largest."""
    assert layer.weight is not None
    rows = layer.weight.reshape(len(layer.weight), -1) if per_channel else layer.weight.reshape(1, -1)
    limits = torch.tensor([choose_weight_limit(row, settings) for row in rows.numpy()], dtype=torch.float64)
    is_dead = limits < SMALLEST_SCALE * WEIGHT_LIMIT
    largest = float(limits.max())
    return torch.where(is_dead, 1.0 if bool(is_dead.all()) else largest, limits)


def quantize_weights(layer: Layer, limits: torch.Tensor, input_scale: float, largest: int = WEIGHT_LIMIT) -> Integers:
    """Weights and bias as integers; `limits` are the magnitudes that become ±`largest`."""
    assert layer.weight is not None
    scale = (limits / largest).to(torch.float32)
    if layer.bias is not None:
        scale = widen_for_bias(layer, scale, input_scale)
    shaped = scale.to(torch.float64).reshape(-1, *[1] * (layer.weight.dim() - 1))
    weight = (layer.weight.to(torch.float64) / shaped).round().clamp(-largest, largest).to(torch.int8)
    bias = None
    if layer.bias is not None:
        unit = (scale * torch.tensor(input_scale, dtype=torch.float32)).to(torch.float64)
        bias = (layer.bias.to(torch.float64) / unit).round().to(torch.int32)
    return Integers(weight, scale, bias)


def widen_for_bias(layer: Layer, scale: torch.Tensor, input_scale: float) -> torch.Tensor:
    """Scales with which the bias and the largest sum of products stay within int32 together."""
    assert layer.bias is not None
    needed = layer.bias.abs().to(torch.float64) / (input_scale * count_bias_room(layer))
    if len(scale) == 1:
        needed = needed.max().reshape(1)
    # A float32 that is rounded down must not undo what it is for.
    widened = (needed * (1 + 2.0**-22)).to(torch.float32)
    return torch.maximum(scale, widened)


def count_bias_room(layer: Layer) -> int:
    """How large an integer bias may be, beside the largest sum of products."""
    assert layer.weight is not None
    num_products = layer.weight[0].numel()
    room = LARGEST_INT32 - num_products * 255 * WEIGHT_LIMIT
    if room <= 0:
        raise UsageError(
            f"layer {layer.name} sums {num_products} products, which can overflow int32: keep it in float, or make it"
            " smaller"
        )
    return room
