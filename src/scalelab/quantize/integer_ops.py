"""Exact sums of integer products, and conversion between numbers and integers.

A convolution or linear layer sums products of an activation, |q_x − zero point| ≤ 255, and a weight, |q_w| ≤ 128. Every
partial sum, in any order, stays within

    bound = max over output channels of  Σ|q_w| · max|q_x − zero point| + |bias|

float64 holds every integer below 2⁵³, so float64 matrix products are exact. Kernels accumulate in int32: a layer whose
bound exceeds it is refused.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from scalelab.errors import UsageError
from scalelab.quantize.network import HIGHEST, Grid, Layer, QuantizedLayer

INT32_LARGEST = 2**31 - 1


def round_to_grid(numbers: torch.Tensor, grid: Grid) -> torch.Tensor:
    """ONNX QuantizeLinear: divide by the scale in float32, clamp, round half to even."""
    return finish(numbers.to(torch.float32) / torch.tensor(grid.scale, dtype=torch.float32), grid)


def finish(steps: torch.Tensor, grid: Grid, has_relu: bool = False) -> torch.Tensor:
    """Float32 steps, without the zero point, as integers: clamped and rounded half to even."""
    low = 0 if has_relu else -grid.zero_point
    rounded = torch.round(steps.clamp(low, HIGHEST - grid.zero_point))
    return (rounded + grid.zero_point).to(torch.uint8)


def to_numbers(integers: torch.Tensor, grid: Grid) -> torch.Tensor:
    """ONNX DequantizeLinear, in float32."""
    return (integers.to(torch.float32) - grid.zero_point) * torch.tensor(grid.scale, dtype=torch.float32)


def bound_sum(layer: QuantizedLayer, source: Grid) -> int:
    """The largest magnitude of any partial sum, bias included, for any input on the grid `source`."""
    assert layer.weight is not None
    furthest = max(source.zero_point, HIGHEST - source.zero_point)
    totals = layer.weight.to(torch.int64).abs().flatten(1).sum(dim=1) * furthest
    if layer.bias is not None:
        totals = totals + layer.bias.to(torch.int64).abs()
    return int(totals.max())


def sum_products(layer: QuantizedLayer, integers: torch.Tensor, source: Grid) -> torch.Tensor:
    """The exact sums of a weighted layer without its bias: integers in a float64 tensor."""
    bound = bound_sum(layer, source)
    if bound > INT32_LARGEST:
        raise UsageError(
            f"layer {layer.name}: its sum can reach {bound:,}, beyond int32 ({INT32_LARGEST:,}):"
            " keep it in float, or choose a larger scale for its weights"
        )
    assert layer.weight is not None
    centred, weight = integers.to(torch.float64) - source.zero_point, layer.weight.to(torch.float64)
    if layer.layer.op == "linear":
        return centred @ weight.T
    shape = layer.layer
    return functional.conv2d(centred, weight, None, shape.stride, shape.padding, shape.dilation, groups=shape.groups)


def find_size(layer: Layer, image: tuple[int, int], kernel: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the output of a convolution or pooling."""
    height, width = (
        (image[axis] + 2 * layer.padding[axis] - layer.dilation[axis] * (kernel[axis] - 1) - 1) // layer.stride[axis]
        + 1
        for axis in (0, 1)
    )
    return height, width
