"""Sums of integer products, exact by construction, and the way from numbers to integers and back.

A convolution or linear layer in int8 sums products of an activation, |q_x − zero point| ≤ 255, and a weight, |q_w| ≤
128. Every partial sum, in whatever order, lies within

    bound = max over output channels of  Σ|q_w| · max|q_x − zero point| + |bias|

A floating-point unit that adds integers makes no error as long as every partial sum is an integer that it can hold:
below 2⁵³ in float64, below 2²⁴ in float32. So the sums are computed by float64 matrix products, which are quick, after
the bound was checked; float32 is refused where a sum can reach 2²⁴, and on request int64 is used, where nothing is
ever rounded. float32 goes through matrix products as well, in full precision: a convolution kernel might be Winograd's,
which divides, and torch may be set to multiply in fewer bits, where it is refused too.

Kernels accumulate in int32, so a layer whose sum could leave its range is refused for all of them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from scalelab.errors import UsageError
from scalelab.quantize.network import Grid, Layer, QuantizedLayer

Accumulator = Literal["float64", "float32", "int64"]
FLOAT32_INTEGERS = 2**24
"""Every integer below is a float32, and not every one above."""
FLOAT64_INTEGERS = 2**53
INT32_LARGEST = 2**31 - 1


def choose_dtype(grid: Grid) -> torch.dtype:
    return torch.int8 if grid.low < 0 else torch.uint8


def round_to_grid(numbers: torch.Tensor, grid: Grid) -> torch.Tensor:
    """QuantizeLinear of ONNX: divided by the scale in float32, held to the range, rounded half to even."""
    return finish(numbers.to(torch.float32) / torch.tensor(grid.scale, dtype=torch.float32), grid)


def finish(steps: torch.Tensor, grid: Grid, has_relu: bool = False) -> torch.Tensor:
    """Float32 numbers of steps, without the zero point, as integers: held to the range and rounded half to even."""
    low = 0 if has_relu else grid.low - grid.zero_point
    rounded = torch.round(steps.clamp(low, grid.high - grid.zero_point))
    return (rounded + grid.zero_point).to(choose_dtype(grid))


def to_numbers(integers: torch.Tensor, grid: Grid) -> torch.Tensor:
    """DequantizeLinear of ONNX, in float32."""
    return (integers.to(torch.float32) - grid.zero_point) * torch.tensor(grid.scale, dtype=torch.float32)


def bound_sum(layer: QuantizedLayer, source: Grid) -> int:
    """What no partial sum of the layer exceeds in magnitude, its bias included, for any input on the grid `source`."""
    assert layer.weight is not None
    furthest = max(source.zero_point - source.low, source.high - source.zero_point)
    totals = layer.weight.to(torch.int64).abs().flatten(1).sum(dim=1) * furthest
    if layer.bias is not None:
        totals = totals + layer.bias.to(torch.int64).abs()
    return int(totals.max())


def check_bound(layer: QuantizedLayer, source: Grid, accumulator: Accumulator) -> None:
    """Refuses a layer whose sums `accumulator`, or the int32 of every kernel, could not hold."""
    bound = bound_sum(layer, source)
    if bound > INT32_LARGEST:
        raise UsageError(
            f"layer {layer.name}: its sum can reach {bound:,}, beyond int32 ({INT32_LARGEST:,}):"
            " keep it in float, or choose a larger scale for its weights"
        )
    if accumulator == "float32" and bound >= FLOAT32_INTEGERS:
        raise UsageError(
            f"layer {layer.name}: its sum can reach {bound:,}, but float32 is exact only below 2^24 ="
            f" {FLOAT32_INTEGERS:,}: use accumulate='float64'"
        )
    if accumulator == "float32" and torch.get_float32_matmul_precision() != "highest":
        raise UsageError(
            "accumulate='float32' loses bits unless torch.set_float32_matmul_precision is 'highest': "
            "set it, or use accumulate='float64'"
        )
    assert bound < FLOAT64_INTEGERS


def sum_products(layer: QuantizedLayer, integers: torch.Tensor, source: Grid, accumulator: Accumulator) -> torch.Tensor:
    """The sums of products of a weighted layer, exact, without its bias: integers in a float64 tensor."""
    check_bound(layer, source, accumulator)
    assert layer.weight is not None
    dtype = getattr(torch, accumulator)
    centred, weight = integers.to(dtype) - source.zero_point, layer.weight.to(dtype)
    if layer.layer.op == "linear":
        return (centred @ weight.T).to(torch.float64)
    if accumulator == "float64":
        shape = layer.layer
        return functional.conv2d(
            centred, weight, None, shape.stride, shape.padding, shape.dilation, groups=shape.groups
        )
    return multiply_patches(layer.layer, centred, weight).to(torch.float64)


def multiply_patches(layer: Layer, images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A convolution as the matrix products that it is, in the type of its operands."""
    size = (weight.shape[2], weight.shape[3])
    moved = images if images.is_floating_point() else images.to(torch.float64)
    patches = functional.unfold(moved, size, layer.dilation, layer.padding, layer.stride).to(images.dtype)
    num_images, _, num_places = patches.shape
    grouped = patches.reshape(num_images, layer.groups, -1, num_places)
    rows = weight.reshape(layer.groups, weight.shape[0] // layer.groups, -1)
    sums = torch.matmul(rows, grouped).reshape(num_images, weight.shape[0], num_places)
    height, width = find_size(layer, (images.shape[2], images.shape[3]), size)
    return sums.reshape(num_images, weight.shape[0], height, width)


def find_size(layer: Layer, image: tuple[int, int], kernel: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the result of a convolution or pooling."""
    height, width = (
        (image[axis] + 2 * layer.padding[axis] - layer.dilation[axis] * (kernel[axis] - 1) - 1) // layer.stride[axis]
        + 1
        for axis in (0, 1)
    )
    return height, width
