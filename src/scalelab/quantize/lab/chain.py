"""Q2, Q4 and Q5: a chain of layers in integers: its scales, weights and biases, forward pass and ONNX file.

A scale n is a factor here: the integer is n times the number, rounded. A weight has n_w = 127 / max|w|, or 127 / 3σ;
the input has n_in = K / max|x|. A layer's sums are n_w · n_in times too large, and so on along the chain, so the factor
that brings a layer's sums to K / max|a| is

    n_out = (K / max|a|) / (n_w · n_in · Π n_wᵢ · n_oᵢ)        over the layers i before it

What follows n_w is the scale of the layer's input. A bias becomes the int32 round(b · n_w · n_in · Π n_wᵢ · n_oᵢ).

K = 127 uses all of int8. With the published K = 255 and the clamp at 127, everything above 127/255 of the largest
activation becomes 127.

Sums are formed in float64, exact below 2⁵³; layers whose sums can reach 2²⁴ are refused, so float32 and int32 would
give the same. sum · n_out in float32 is rounded half to even and clamped to [−128, 127]. ReLU and max pooling commute
with rounding. Every layer checks that its input is int8.

The exported ONNX file gives bit-equal logits: ConvInteger and MatMulInteger, bias, one float32 multiplication, Round
(half to even), Clip, in the same order. Integers are stored as uint8 with zero point 128, weights too: kernels for
signed weights add pairs of products in 16 bits on CPUs without VNNI, which silently saturates. That costs speed, which
is not the lab's subject.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import nn

from scalelab.checks import check_at_least
from scalelab.errors import ScalelabError, UsageError
from scalelab.quantize.export import INPUT, OUTPUT, GraphParts, write_model
from scalelab.quantize.network import PASSING, CapturedNetwork, Layer, compute_layer, compute_sum
from scalelab.quantize.sessions import load_package

if TYPE_CHECKING:
    from scalelab.quantize.lab.observe import Observed, Seen

LOW, HIGH = -128, 127
"""The range of int8; outputs are clamped to it."""
PEAKS = (127, 255)
"""The integer that the largest activation maps to: the largest int8, or the published value, half of it clamped."""
DEVIATIONS = 3
"""Standard deviations of a range that leaves out the few outlier weights."""

BiasRule = Literal["scaled", "raw", "none"]
WeightRange = Literal["max", "3sigma"]


@dataclass(frozen=True, kw_only=True)
class LabSettings:
    """The lab's integer network; the variants it is compared with always run."""

    peak: int = HIGH
    """K: the integer that the largest activation maps to, 127 or the published 255."""
    bias: BiasRule = "scaled"
    """scaled: an int32 in units of the sums; raw: rounded without a scale; none: no bias."""
    weight_range: WeightRange = "max"
    """The weight that becomes 127: the largest, or three standard deviations, beyond which weights are clamped."""
    samples: int = 400
    """Calibration images."""
    observed: Literal["after", "before"] = "after"
    """Whether a layer's largest activation is taken before or after its ReLU."""

    def __post_init__(self) -> None:
        check_at_least("samples", self.samples, 1)
        if self.peak not in PEAKS:
            raise UsageError(f"--lab-peak must be 127, or 255 as published, got {self.peak}")

    @property
    def other_peak(self) -> int:
        return PEAKS[self.peak == PEAKS[0]]

    @property
    def other_range(self) -> WeightRange:
        return "3sigma" if self.weight_range == "max" else "max"


ELSEWHERE = "use a --calibration other than lab"
EXACT_LIMIT = 2**24
"""float32 holds every integer below."""
INT32_LIMIT = 2**31


@dataclass(frozen=True, kw_only=True, eq=False)
class LabLayer:
    """A layer of the lab's network."""

    layer: Layer
    scale: float
    """Integer per unit of its output."""
    weight: torch.Tensor | None = None
    """int8."""
    weight_scale: float = 1.0
    """n_w."""
    bias: torch.Tensor | None = None
    """int32, in the units of the sums."""
    output_scale: float = 1.0
    """n_out, a float32."""

    @property
    def name(self) -> str:
        return self.layer.name


@dataclass(frozen=True, kw_only=True, eq=False)
class LabNetwork:
    """The input first."""

    layers: tuple[LabLayer, ...]
    input_shape: tuple[int, ...]

    @property
    def input_scale(self) -> float:
        """n_in."""
        return self.layers[0].scale


def check_chain(model: nn.Module, network: CapturedNetwork) -> None:
    """The lab knows layers one after the other, without norms between them."""
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UsageError(f"{path} is a batch norm, which the lab does not support: {ELSEWHERE}")
    before = network.layers[0].name
    for layer in network.layers[1:]:
        if layer.op not in ("conv", "linear", *PASSING):
            raise UsageError(f"{layer.name} is of type {layer.op}, which the lab does not support: {ELSEWHERE}")
        if layer.inputs != (before,):
            raise UsageError(
                f"{layer.name} does not follow {before}, but the lab's scales need a chain of layers: {ELSEWHERE}"
            )
        if layer.is_weighted and layer.name not in dict(model.named_modules()):
            raise UsageError(f"{layer.name} is not a module, so a hook cannot see its output: {ELSEWHERE}")
        before = layer.name


def find_weight_limit(seen: Seen, weight_range: WeightRange) -> float:
    """The weight that becomes 127."""
    return seen.magnitude if weight_range == "max" else DEVIATIONS * seen.deviation


def scale_to(peak: float, limit: float) -> float:
    """peak / limit as a float32; 1 where there is nothing but zeros, which stay zeros."""
    return round_scale(peak / limit) if limit > 0 else 1.0


def round_scale(scale: float) -> float:
    return float(torch.tensor(scale, dtype=torch.float32))


def round_to_int8(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Halves to even, as torch rounds, and clamped."""
    return torch.clamp(torch.round(values.float() * scale), LOW, HIGH)


def scale_network(network: CapturedNetwork, observed: Observed, settings: LabSettings) -> LabNetwork:
    first = network.layers[0]
    scale = scale_to(settings.peak, observed[first.name, "after"].magnitude)
    made = [LabLayer(layer=first, scale=scale)]
    for layer in network.layers[1:]:
        made.append(scale_layer(layer, made[-1].scale, observed, settings))
    return LabNetwork(layers=tuple(made), input_shape=network.input_shape)


def scale_layer(layer: Layer, input_scale: float, observed: Observed, settings: LabSettings) -> LabLayer:
    """`input_scale`: n_in · Π n_wᵢ · n_oᵢ of the layers before."""
    if layer.weight is None:
        return LabLayer(layer=layer, scale=input_scale)
    limit = find_weight_limit(observed[layer.name, "weights"], settings.weight_range)
    weight_scale = scale_to(HIGH, limit)
    sum_scale = weight_scale * input_scale
    wanted = scale_to(settings.peak, observed[layer.name, settings.observed].magnitude)
    output_scale = round_scale(wanted / sum_scale)
    weight = round_to_int8(layer.weight, weight_scale)
    bias = round_bias(layer, sum_scale, settings)
    check_sums(layer, weight, bias)
    return LabLayer(
        layer=layer,
        scale=sum_scale * output_scale,
        weight=weight.to(torch.int8),
        weight_scale=weight_scale,
        bias=bias,
        output_scale=output_scale,
    )


def round_bias(layer: Layer, sum_scale: float, settings: LabSettings) -> torch.Tensor | None:
    if layer.bias is None or settings.bias == "none":
        return None
    rounded = torch.round(layer.bias.double() * (sum_scale if settings.bias == "scaled" else 1.0))
    if rounded.abs().max() >= INT32_LIMIT:
        raise UsageError(
            f"the bias of {layer.name} is up to {rounded.abs().max():.3g} in units of its sums, more than an int32"
            f" holds: its input or weights are tiny in comparison; {ELSEWHERE}"
        )
    return rounded.to(torch.int32)


def check_sums(layer: Layer, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Reject a layer whose sums may exceed exact float32."""
    largest = weight.double().flatten(1).abs().sum(1) * -LOW
    if bias is not None:
        largest = largest + bias.double().abs()
    if largest.max() >= EXACT_LIMIT:
        raise UsageError(
            f"a sum of {layer.name} can reach {int(largest.max()):,}, but float32 is exact only below {EXACT_LIMIT:,}"
            f", so the lab's arithmetic would round it: {ELSEWHERE}"
        )


Look = Callable[[LabLayer, torch.Tensor, torch.Tensor], None]
"""Called with a layer, its sums times n_out, and the resulting integers."""


def run_integers(network: LabNetwork, images: torch.Tensor, look: Look | None = None) -> torch.Tensor:
    """The logits of float images: integers from −128 to 127, as float32."""
    return run_layers(network.layers[1:], round_to_int8(images, network.input_scale), look)


def run_layers(layers: tuple[LabLayer, ...], integers: torch.Tensor, look: Look | None = None) -> torch.Tensor:
    """Consecutive layers, from the first one's input integers."""
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
    """The last layer's sums as logits, before scaling and rounding."""
    *before, last = network.layers[1:]
    return add_products(last, run_layers(tuple(before), round_to_int8(images, network.input_scale)))


def add_products(one: LabLayer, integers: torch.Tensor) -> torch.Tensor:
    """A layer's sums with bias: exact integers, as float32."""
    assert one.weight is not None
    check_integers(one.name, integers)
    bias = None if one.bias is None else one.bias.double()
    exact = replace(one.layer, weight=one.weight.double(), bias=bias)
    return compute_sum(exact, [integers.double()]).float()


def check_integers(name: str, integers: torch.Tensor) -> None:
    """Raise unless a layer's input is int8."""
    wrong = integers[integers != torch.round(integers)]
    if wrong.numel():
        raise ScalelabError(
            f"{name} received {wrong[0].item():g}, which is not an integer: round the output of the previous layer"
        )
    outside = integers[(integers < LOW) | (integers > HIGH)]
    if outside.numel():
        raise ScalelabError(
            f"{name} received {outside[0].item():g}, which is not an int8: clamp the output of the previous layer to"
            f" [{LOW}, {HIGH}]"
        )


ZERO = -LOW
"""The zero point."""


def export_lab(network: LabNetwork, path: Path) -> int:
    """Write a model from float images to logits, integers from −128 to 127 as float32; returns its size in bytes."""
    types = load_package("onnx").TensorProto
    parts = GraphParts()
    scaled = add_named(parts, "Mul", [INPUT, hold_number(parts, network.input_scale)], "input/scaled")
    value = add_rounding(parts, scaled, "input", LOW)
    for one in network.layers[1:]:
        if one.weight is None:
            value = add_passing(parts, one.layer, value)
        else:
            scaled = add_scaling(parts, one, add_product_nodes(parts, one, value))
            value = add_rounding(parts, scaled, one.name, 0 if one.layer.has_relu else LOW)
    unsigned = add_named(parts, "Cast", [value], "logits/unsigned", to=types.FLOAT)
    add_named(parts, "Sub", [unsigned, hold_number(parts, ZERO)], OUTPUT)
    return write_model(parts, network.input_shape, path)


def add_named(parts: GraphParts, op: str, inputs: list[str], name: str, **attributes: object) -> str:
    """A node named after its result."""
    return parts.add_node(op, inputs, name, name, attributes)


def hold_number(parts: GraphParts, value: float) -> str:
    return parts.add_constant(f"number/{value!r}", np.float32(value))


def hold_zero(parts: GraphParts, name: str) -> str:
    """A zero point per node: onnxruntime may rewrite a shared one."""
    return parts.add_constant(f"{name}/zero", np.uint8(ZERO))


def add_product_nodes(parts: GraphParts, one: LabLayer, value: str) -> str:
    """A layer's int32 sums with bias."""
    assert one.weight is not None
    weight = (one.weight.to(torch.int16) + ZERO).to(torch.uint8)
    is_conv = one.layer.op == "conv"
    stored = weight if is_conv else weight.t().contiguous()
    inputs = [
        value,
        parts.add_constant(f"{one.name}/w", stored.numpy()),
        hold_zero(parts, f"{one.name}/x"),
        hold_zero(parts, f"{one.name}/w"),
    ]
    attributes: dict[str, object] = {}
    if is_conv:
        height, width = weight.shape[2:]
        attributes = {**describe_window(one.layer, (height, width)), "group": one.layer.groups}
    op = "ConvInteger" if is_conv else "MatMulInteger"
    sums = parts.add_node(op, inputs, f"{one.name}/products", one.name, attributes)
    if one.bias is None:
        return sums
    shape = (1, -1, 1, 1) if is_conv else (1, -1)
    return add_named(
        parts, "Add", [sums, parts.add_constant(f"{one.name}/b", one.bias.reshape(shape).numpy())], f"{one.name}/sums"
    )


def describe_window(layer: Layer, kernel: tuple[int, int]) -> dict[str, object]:
    """Attributes that convolutions and poolings share."""
    return {
        "kernel_shape": list(kernel),
        "strides": list(layer.stride),
        "pads": [*layer.padding, *layer.padding],
        "dilations": list(layer.dilation),
    }


def add_scaling(parts: GraphParts, one: LabLayer, sums: str) -> str:
    as_float = add_named(parts, "Cast", [sums], f"{one.name}/float", to=load_package("onnx").TensorProto.FLOAT)
    return add_named(parts, "Mul", [as_float, hold_number(parts, one.output_scale)], f"{one.name}/scaled")


def add_rounding(parts: GraphParts, scaled: str, name: str, low: int) -> str:
    """Round, clamp and store. `low` is 0 behind a ReLU."""
    rounded = add_named(parts, "Round", [scaled], f"{name}/rounded")
    ends = [hold_number(parts, low), hold_number(parts, HIGH)]
    clamped = add_named(parts, "Clip", [rounded, *ends], f"{name}/clamped")
    shifted = add_named(parts, "Add", [clamped, hold_number(parts, ZERO)], f"{name}/shifted")
    return add_named(parts, "Cast", [shifted], f"{name}/q", to=load_package("onnx").TensorProto.UINT8)


def add_passing(parts: GraphParts, layer: Layer, value: str) -> str:
    """Pooling, flatten and ReLU on the stored integers."""
    result = f"{layer.name}/q"
    if layer.op == "flatten":
        return parts.add_node("Flatten", [value], result, layer.name, {"axis": 1})
    if layer.op == "relu":
        return parts.add_node("Clip", [value, hold_zero(parts, layer.name)], result, layer.name)
    assert layer.kernel is not None
    return parts.add_node("MaxPool", [value], result, layer.name, describe_window(layer, layer.kernel))
