"""Choose a grid for every output, and integers for every weight and bias.

**Activations** are uint8. Where nothing negative was seen (as after a ReLU) the zero point is 0 and 256 integers cover
[0, max]; elsewhere it is 128 and the grid is symmetric, scale = max|a| / 127. With zero point 0 the clamp to the grid
is the ReLU. Zero is an integer of every grid, so padding is exact.

**Weights** are int8 in ±127, symmetric, scale = max|w| / 127 per output channel (or per tensor). A channel of zeros
gets the layer's largest scale.

**Biases** are int32 in units of s_x · s_w (a float32 product), added to the integer sums. A bias that leaves those sums
too little room below 2³¹ (weights of 10⁻⁸, a bias of 1) widens its channel's weight scale until it fits.

**Logits** are read by no layer, so a final linear layer returns its sums as float32. Rounded to a byte
(`rounds_logits`) the two largest sometimes tie.

A layer of `keep_float` keeps its float weights; its output is still rounded to its grid.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from scalelab.errors import UnknownName, UsageError
from scalelab.quantize.calibrate import Calibration
from scalelab.quantize.network import PASSING, CapturedNetwork, Grid, Layer, QuantizedLayer, QuantizedNetwork
from scalelab.records.tasks import Quantization
from scalelab.units import list_some

WEIGHT_LIMIT = 127
LARGEST_INT32 = 2**31 - 1
SMALLEST_SCALE = 2.0**-100
"""Products of smaller scales would leave float32; a tensor that needs one is treated as zero."""


class Integers(NamedTuple):
    """Integer parameters of a layer."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None


def quantize_network(
    network: CapturedNetwork,
    calibration: Calibration,
    settings: Quantization | None = None,
    keep_float: Collection[str] = (),
) -> QuantizedNetwork:
    """The network in int8. `keep_float`: layers that keep their float weights."""
    settings = settings or Quantization()
    check_names(network, calibration, keep_float)
    grids: dict[str, Grid] = {}
    layers = []
    for layer in network.layers:
        grids[layer.name] = grid = choose_grid(layer, calibration, grids)
        is_unrounded = not settings.rounds_logits and gives_logits(layer, network)
        made = QuantizedLayer(layer=layer, output=grid, is_float=layer.name in keep_float, is_unrounded=is_unrounded)
        if layer.is_weighted and not made.is_float:
            limits = choose_weight_limits(layer, per_channel=not settings.is_per_tensor)
            parts = quantize_weights(layer, limits, grids[layer.inputs[0]].scale)
            made = replace(made, weight=parts.weight, weight_scale=parts.scale, bias=parts.bias)
        layers.append(made)
    return QuantizedNetwork(layers=tuple(layers), input_shape=network.input_shape)


def gives_logits(layer: Layer, network: CapturedNetwork) -> bool:
    """Whether its sums are the network's output: only linear kernels can return float32."""
    return layer.op == "linear" and layer.name == network.output and not layer.has_relu


def list_remarks(network: CapturedNetwork, calibration: Calibration) -> tuple[str, ...]:
    """Dead channels and layers with constant output: valid, but probably not intended."""
    remarks = []
    for layer in network.layers:
        dead = list_dead_channels(layer)
        if dead:
            which = f"channel {dead[0]} has" if len(dead) == 1 else f"channels {list_some(dead, 5)} have"
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


def check_names(network: CapturedNetwork, calibration: Calibration, keep_float: Collection[str]) -> None:
    names = [layer.name for layer in network.layers]
    for name in keep_float:
        if name not in names:
            raise UnknownName("layer to keep in float", name, names)
    for layer in network.layers:
        if layer.op not in PASSING and layer.name not in calibration.histograms:
            raise UsageError(f"layer {layer.name} was not calibrated: calibrate this same network")


def choose_grid(layer: Layer, calibration: Calibration, grids: Mapping[str, Grid]) -> Grid:
    """Its own grid, or its input's."""
    if layer.op in PASSING:
        return grids[layer.inputs[0]]
    return make_grid(*calibration.ranges[layer.name])


def make_grid(low: float, high: float) -> Grid:
    """The uint8 grid for a range: zero point 0 if nothing is negative, otherwise 128 and symmetric."""
    if low >= 0:
        return Grid(scale=make_scale(high / 255), zero_point=0)
    return Grid(scale=make_scale(max(-low, high) / 127), zero_point=128)


def make_scale(step: float) -> float:
    """A float32 value; 1 for a tensor of zeros."""
    return float(np.float32(step)) if step >= SMALLEST_SCALE else 1.0


def choose_weight_limits(layer: Layer, per_channel: bool) -> torch.Tensor:
    """The largest magnitude per output channel, or of all, as float64; of a dead channel, the layer's largest."""
    assert layer.weight is not None
    rows = layer.weight.reshape(len(layer.weight), -1) if per_channel else layer.weight.reshape(1, -1)
    limits = rows.abs().amax(dim=1).to(torch.float64)
    is_dead = limits < SMALLEST_SCALE * WEIGHT_LIMIT
    largest = float(limits.max())
    return torch.where(is_dead, 1.0 if bool(is_dead.all()) else largest, limits)


def quantize_weights(layer: Layer, limits: torch.Tensor, input_scale: float) -> Integers:
    """Weights and bias as integers; `limits` are the magnitudes that become ±127."""
    assert layer.weight is not None
    scale = (limits / WEIGHT_LIMIT).to(torch.float32)
    if layer.bias is not None:
        scale = widen_for_bias(layer, scale, input_scale)
    shaped = scale.to(torch.float64).reshape(-1, *[1] * (layer.weight.dim() - 1))
    weight = (layer.weight.to(torch.float64) / shaped).round().clamp(-WEIGHT_LIMIT, WEIGHT_LIMIT).to(torch.int8)
    bias = None
    if layer.bias is not None:
        unit = (scale * torch.tensor(input_scale, dtype=torch.float32)).to(torch.float64)
        bias = (layer.bias.to(torch.float64) / unit).round().to(torch.int32)
    return Integers(weight, scale, bias)


def widen_for_bias(layer: Layer, scale: torch.Tensor, input_scale: float) -> torch.Tensor:
    """Scales with which bias plus largest sum of products fit in int32."""
    assert layer.bias is not None
    needed = layer.bias.abs().to(torch.float64) / (input_scale * count_bias_room(layer))
    if len(scale) == 1:
        needed = needed.max().reshape(1)
    # Rounding down to float32 must not undo the widening.
    widened = (needed * (1 + 2.0**-22)).to(torch.float32)
    return torch.maximum(scale, widened)


def count_bias_room(layer: Layer) -> int:
    """The largest integer bias that fits beside the largest sum of products."""
    assert layer.weight is not None
    num_products = layer.weight[0].numel()
    room = LARGEST_INT32 - num_products * 255 * WEIGHT_LIMIT
    if room <= 0:
        raise UsageError(
            f"layer {layer.name} sums {num_products} products, which can overflow int32: keep it in float, or make it"
            " smaller"
        )
    return room
