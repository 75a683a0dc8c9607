"""A network as quantization sees it: a list of layers in the order of execution, in float or in int8.

The user's module is captured into a `Network` (`capture.py`): batch norms are folded into the convolutions before them
and a ReLU that follows a layer belongs to it, because kernels compute both at once and only what comes out is rounded.
`scales.py` makes a `QuantizedNetwork` of it; the simulation, the ONNX export and the eager runtime are three ways to
execute that one object, and so can be compared integer by integer.

A real number r is stood for by the integer q of r = scale · (q − zero_point). Activations are uint8 (x86 multiplies
unsigned by signed bytes) with zero point 128, or 0 where nothing is negative, as after a ReLU; weights are int8 with
zero point 0, one scale for the tensor or one per output channel. A bias is an int32 with the scale s_x · s_w and zero
point 0, so that it is added to the products as it is.

A captured network in float32: the result of every layer, which is what int8 is held against.

The operations are torch's own, with the batch norms folded, so results differ from the module's in the last bits only.
A `change` may stand in between: a quantizer rounds what a layer gave before the next one sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

Op = Literal["input", "conv", "linear", "add", "relu", "max_pool", "average_pool", "flatten"]
"""What a layer computes. average_pool without a kernel is over the whole image and leaves 1 × 1; a `mean` over it is
that and a flatten. Padding counts as zeros in an average, and not at all in a maximum."""
WEIGHTED: tuple[Op, ...] = ("conv", "linear")
PASSING: tuple[Op, ...] = ("max_pool", "flatten", "relu")
"""Layers whose results have the scale of their input: they compute nothing that would have to be rounded."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One layer in float, with its batch norm folded in."""

    name: str
    """The path of its module, such as `stage1.0.conv1`; of an operation without a module, one that is made from its
    kind and a number. Unique."""
    op: Op
    inputs: tuple[str, ...] = ()
    """The names of the layers whose results it takes."""
    weight: torch.Tensor | None = None
    """Of a convolution (out, in / groups, height, width) or a linear layer (out, in); float32."""
    bias: torch.Tensor | None = None
    kernel: tuple[int, int] | None = None
    """Of a pooling."""
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    has_relu: bool = False
    """Whether negative results become zero before they are rounded."""

    @property
    def is_weighted(self) -> bool:
        return self.op in WEIGHTED


@dataclass(frozen=True, kw_only=True, eq=False)
class Network:
    """A captured module: `input` first, the last layer gives the result."""

    layers: tuple[Layer, ...]
    input_shape: tuple[int, ...]
    """Of one sample, without the batch."""

    @property
    def output(self) -> str:
        return self.layers[-1].name

    def find(self, name: str) -> Layer:
        return next(layer for layer in self.layers if layer.name == name)


HIGHEST = 255
"""The integers of a grid are 0 to 255."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The integers that stand for the numbers of a tensor."""

    scale: float
    """A float32 value: what one step is worth."""
    zero_point: int = 128

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest number that it can stand for."""
        return self.scale * -self.zero_point, self.scale * (HIGHEST - self.zero_point)


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedLayer:
    """A layer with the grid of its result and, where it has weights, those as integers."""

    layer: Layer
    output: Grid
    weight: torch.Tensor | None = None
    """int8, of the shape of the float weight."""
    weight_scale: torch.Tensor | None = None
    """float32: one number, or one per output channel."""
    bias: torch.Tensor | None = None
    """int32, in units of s_x · s_w."""
    is_float: bool = False
    """Whether it is kept in float: its inputs are turned back into numbers, its result is rounded to its grid."""
    is_unrounded: bool = False
    """Whether its result stays the float32 numbers that its sums stand for, float32(acc + bias) · (s_x · s_w), and no
    grid is used: the logits, which no layer reads."""

    @property
    def name(self) -> str:
        return self.layer.name


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedNetwork:
    """The same layers in the same order; the result of the last one is float32, or is turned back into it."""

    layers: tuple[QuantizedLayer, ...]
    input_shape: tuple[int, ...]

    @property
    def output(self) -> str:
        return self.layers[-1].name

    def find(self, name: str) -> QuantizedLayer:
        return next(layer for layer in self.layers if layer.name == name)


Change = Callable[[Layer, torch.Tensor], torch.Tensor]
"""What is made of a layer's result before other layers see it."""


def run_float(network: Network, images: torch.Tensor, change: Change | None = None) -> dict[str, torch.Tensor]:
    """The float32 results of every layer by name, those with a ReLU after it."""
    results: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for layer in network.layers:
            inputs = [images.to(torch.float32)] if layer.op == "input" else [results[name] for name in layer.inputs]
            result = compute_layer(layer, inputs)
            results[layer.name] = change(layer, result) if change is not None else result
    return results


def compute_layer(layer: Layer, inputs: list[torch.Tensor]) -> torch.Tensor:
    """One layer in the numbers of its inputs, its ReLU included."""
    result = compute_sum(layer, inputs)
    return result.relu() if layer.has_relu else result


def compute_sum(layer: Layer, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The same before its ReLU."""
    first = inputs[0]
    if layer.op == "conv":
        assert layer.weight is not None
        shape = (layer.stride, layer.padding, layer.dilation)
        return functional.conv2d(first, layer.weight, layer.bias, *shape, groups=layer.groups)
    if layer.op == "linear":
        assert layer.weight is not None
        return functional.linear(first, layer.weight, layer.bias)
    if layer.op == "add":
        return first + inputs[1]
    if layer.op == "relu":
        return first.relu()
    if layer.op == "flatten":
        return first.flatten(1)
    return pool(layer, first) if layer.op != "input" else first


def pool(layer: Layer, images: torch.Tensor) -> torch.Tensor:
    if layer.op == "max_pool":
        assert layer.kernel is not None
        return functional.max_pool2d(images, layer.kernel, layer.stride, layer.padding, layer.dilation)
    if layer.kernel is None:
        return images.mean(dim=(2, 3), keepdim=True)
    return functional.avg_pool2d(images, layer.kernel, layer.stride, layer.padding)
