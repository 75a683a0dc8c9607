"""A network as quantization sees it: layers in execution order, in float or int8.

`capture.py` makes a `CapturedNetwork` of the user's module: batch norms are folded into the convolutions before them,
and a ReLU belongs to the layer it follows, because kernels compute both at once and round only the result. `scales.py`
makes a `QuantizedNetwork`; the simulation, the ONNX export and the eager runtime all execute that one object.

A real number r is represented by the integer q with r = scale · (q − zero_point). Activations are uint8 (x86 multiplies
unsigned by signed bytes) with zero point 128, or 0 where nothing is negative; weights are int8 with zero point 0; a
bias is int32 with scale s_x · s_w.

`run_float` computes the captured network with torch's own operations; results differ from the module's in the last
bits only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

Op = Literal["input", "conv", "linear", "add", "relu", "max_pool", "average_pool", "flatten"]
"""average_pool without a kernel is global and leaves 1 × 1; a `mean` is that and a flatten. Padding counts as zeros in
an average, and not at all in a maximum."""
WEIGHTED: tuple[Op, ...] = ("conv", "linear")
PASSING: tuple[Op, ...] = ("max_pool", "flatten", "relu")
"""Layers that round nothing: their output has the scale of their input."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One layer in float, with its batch norm folded in."""

    name: str
    """The path of its module, such as `stage1.0.conv1`, or kind and number of a function. Unique."""
    op: Op
    inputs: tuple[str, ...] = ()
    """Names of the layers it reads."""
    weight: torch.Tensor | None = None
    """Convolution (out, in / groups, height, width) or linear (out, in); float32."""
    bias: torch.Tensor | None = None
    kernel: tuple[int, int] | None = None
    """Of a pooling."""
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    has_relu: bool = False
    """Whether negative results become zero before rounding."""

    @property
    def is_weighted(self) -> bool:
        return self.op in WEIGHTED


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedNetwork:
    """A captured module: `input` first, the output layer last."""

    layers: tuple[Layer, ...]
    input_shape: tuple[int, ...]
    """Of one sample."""

    @property
    def output(self) -> str:
        return self.layers[-1].name

    def find(self, name: str) -> Layer:
        return next(layer for layer in self.layers if layer.name == name)


HIGHEST = 255
"""The integers of a grid are 0 to 255."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How the integers of a tensor map to numbers."""

    scale: float
    """A float32 value: the size of one step."""
    zero_point: int = 128

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and largest number it represents."""
        return self.scale * -self.zero_point, self.scale * (HIGHEST - self.zero_point)


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedLayer:
    """A layer with its output grid and integer weights."""

    layer: Layer
    output: Grid
    weight: torch.Tensor | None = None
    """int8, same shape as the float weight."""
    weight_scale: torch.Tensor | None = None
    """float32: one, or one per output channel."""
    bias: torch.Tensor | None = None
    """int32, in units of s_x · s_w."""
    is_float: bool = False
    """Whether it is computed in float: inputs are dequantized, the output is rounded to its grid."""
    is_unrounded: bool = False
    """Whether its output stays float32, float32(acc + bias) · (s_x · s_w): logits, which no layer reads."""

    @property
    def name(self) -> str:
        return self.layer.name


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedNetwork:
    """The same layers in the same order."""

    layers: tuple[QuantizedLayer, ...]
    input_shape: tuple[int, ...]

    @property
    def output(self) -> str:
        return self.layers[-1].name

    def find(self, name: str) -> QuantizedLayer:
        return next(layer for layer in self.layers if layer.name == name)


Change = Callable[[Layer, torch.Tensor], torch.Tensor]
"""Applied to a layer's output before other layers read it."""


def run_float(network: CapturedNetwork, images: torch.Tensor, change: Change | None = None) -> dict[str, torch.Tensor]:
    """The float32 output of every layer by name, after its ReLU."""
    results: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for layer in network.layers:
            inputs = [images.to(torch.float32)] if layer.op == "input" else [results[name] for name in layer.inputs]
            result = compute_layer(layer, inputs)
            results[layer.name] = change(layer, result) if change is not None else result
    return results


def compute_layer(layer: Layer, inputs: list[torch.Tensor]) -> torch.Tensor:
    """One layer with its ReLU."""
    result = compute_sum(layer, inputs)
    return result.relu() if layer.has_relu else result


def compute_sum(layer: Layer, inputs: list[torch.Tensor]) -> torch.Tensor:
    """One layer before its ReLU."""
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
