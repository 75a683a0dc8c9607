"""How kernels come from an exact integer sum to the next layer's integer: the arithmetic of every profile.

All of them round half to even, with the rounding of the processor (`cvtps2dq`), and all hold results to the range of
the grid, where the ReLU is a lower end. What differs is what is rounded: in which order float32 factors are multiplied
and divided, where the bias is added, and where products and sums are fused (one rounding instead of two). Each of these
decides about ties, and a tie decides about an integer.

Fused multiply-adds are computed in float64 and rounded once more. A product of a byte and a float32 has 32 bits, so the
float64 sum is exact wherever its terms lie within 2²⁰ of each other.

Sources: onnxruntime, `core/mlas/lib` (`quantize.cpp`, `qlgavgpool.cpp`, `intrinsics/avx2/qladd_avx2.cpp`) and
`contrib_ops/cpu/quantization/qlinear_pool.cc`; FBGEMM's `requantizeOutputProcessingAvx2`; torch's `qnnpack_utils.h`;
what they say was checked against the kernels with scales that make ties frequent.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from scalelab.quantize.integer_ops import choose_dtype, find_size, finish, to_numbers
from scalelab.quantize.network import Grid, Layer, QuantizedLayer


def make_scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def make_channels(values: torch.Tensor, num_dims: int) -> torch.Tensor:
    """A number for each channel, or one for all, in the shape that applies to a result of so many dimensions."""
    return values.reshape(1, -1, *[1] * (num_dims - 2))


def fuse_multiply_add(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> torch.Tensor:
    """first · second + third in float32 with one rounding."""
    exact = first.to(torch.float64) * second.to(torch.float64) + third.to(torch.float64)
    return exact.to(torch.float32)


def add_bias(sums: torch.Tensor, layer: QuantizedLayer) -> torch.Tensor:
    """The int32 bias on top of integer sums."""
    return sums if layer.bias is None else sums + make_channels(layer.bias.to(torch.float64), sums.dim())


def scale_by_quotient(sums: torch.Tensor, layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    """float32(acc + bias) · ((s_x · s_w) / s_y), each operation rounded to float32."""
    assert layer.weight_scale is not None
    multiplier = (make_scalar(source.scale) * layer.weight_scale) / make_scalar(layer.output.scale)
    return add_bias(sums, layer).to(torch.float32) * make_channels(multiplier, sums.dim())


def scale_to_numbers(sums: torch.Tensor, layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    """float32(acc + bias) · (s_x · s_w): what a QGemm without a grid for its result gives."""
    assert layer.weight_scale is not None
    unit = make_scalar(source.scale) * layer.weight_scale
    return add_bias(sums, layer).to(torch.float32) * make_channels(unit, sums.dim())


def scale_by_inverse(sums: torch.Tensor, layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    """float32(acc + bias) · ((s_w · s_x) · (1 / s_y)), each operation rounded to float32."""
    assert layer.weight_scale is not None
    multiplier = (layer.weight_scale * make_scalar(source.scale)) * (1 / make_scalar(layer.output.scale))
    return add_bias(sums, layer).to(torch.float32) * make_channels(multiplier, sums.dim())


def scale_once(sums: torch.Tensor, layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    """float32(acc + bias) · float32(s_x · s_w / s_y), the factor computed in float64 and rounded once."""
    assert layer.weight_scale is not None
    multiplier = (source.scale * layer.weight_scale.to(torch.float64) / layer.output.scale).to(torch.float32)
    return add_bias(sums, layer).to(torch.float32) * make_channels(multiplier, sums.dim())


def scale_with_float_bias(sums: torch.Tensor, layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    """(float32(acc) + b / (s_x · s_w)) · ((s_x · s_w) / s_y) for a bias b in float32, as it is given to the kernel.

    With one scale for all channels b is multiplied by the reciprocal 1 / (s_x · s_w), and that is fused with the sum.
    """
    assert layer.weight_scale is not None
    unit = make_scalar(source.scale) * layer.weight_scale
    result = sums.to(torch.float32)
    if layer.bias is not None:
        bias = make_channels(dequantize_bias(layer, source), sums.dim())
        if len(unit) == 1:
            result = fuse_multiply_add(bias, 1 / unit, result)
        else:
            result = result + bias / make_channels(unit, sums.dim())
    return result * make_channels(unit / make_scalar(layer.output.scale), sums.dim())


def dequantize_bias(layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    """The bias in float32: what a kernel that takes numbers is given."""
    assert layer.bias is not None
    assert layer.weight_scale is not None
    return layer.bias.to(torch.float32) * (make_scalar(source.scale) * layer.weight_scale)


def add_fused(integers: list[torch.Tensor], sources: list[Grid], grid: Grid, has_relu: bool) -> torch.Tensor:
    """fma(a, s_a/s_y, fma(b, s_b/s_y, z_y − (s_a/s_y · z_a + s_b/s_y · z_b))), rounded with the zero point in it."""
    first, second = (make_scalar(source.scale) / make_scalar(grid.scale) for source in sources)
    fixed = grid.zero_point - (first * sources[0].zero_point + second * sources[1].zero_point)
    result = fuse_multiply_add(integers[1], second, fixed)
    return finish_with_zero_point(fuse_multiply_add(integers[0], first, result), grid, has_relu)


def add_numbers(integers: list[torch.Tensor], sources: list[Grid], grid: Grid, has_relu: bool) -> torch.Tensor:
    """(s_a · (a − z_a) + s_b · (b − z_b)) / s_y in float32."""
    first, second = (to_numbers(tensor, source) for tensor, source in zip(integers, sources, strict=True))
    return finish((first + second) / make_scalar(grid.scale), grid, has_relu)


def add_by_inverse(integers: list[torch.Tensor], sources: list[Grid], grid: Grid, has_relu: bool) -> torch.Tensor:
    """(s_a · (a − z_a) + s_b · (b − z_b)) · (1 / s_y) in float32."""
    first, second = (to_numbers(tensor, source) for tensor, source in zip(integers, sources, strict=True))
    return finish((first + second) * (1 / make_scalar(grid.scale)), grid, has_relu)


def finish_with_zero_point(steps: torch.Tensor, grid: Grid, has_relu: bool = False) -> torch.Tensor:
    """Steps that have the zero point in them already, rounded half to even and held to the range."""
    low = grid.zero_point if has_relu else grid.low
    return torch.round(steps).clamp(low, grid.high).to(choose_dtype(grid))


def average_sums(layer: Layer, integers: torch.Tensor, source: Grid, grid: Grid) -> torch.Tensor:
    """float32(Σ(q − z)) · (s_x / (s_y · n)): integers are summed."""
    centred = integers.to(torch.float64) - source.zero_point
    if layer.kernel is None:
        sums, count = centred.sum(dim=(2, 3), keepdim=True), centred.shape[2] * centred.shape[3]
    else:
        count = layer.kernel[0] * layer.kernel[1]
        sums = functional.avg_pool2d(centred, layer.kernel, layer.stride, layer.padding, divisor_override=1)
    multiplier = make_scalar(source.scale) / (make_scalar(grid.scale) * make_scalar(float(count)))
    return finish(sums.to(torch.float32) * multiplier, grid)


def average_windows(layer: Layer, integers: torch.Tensor, source: Grid, grid: Grid) -> torch.Tensor:
    """Over the whole image, integers are summed. In windows, numbers are, in float32 row by row, and divided by their
    count and by s_y; the zero point is added before rounding. Padding counts as zeros."""
    if layer.kernel is None:
        return average_sums(layer, integers, source, grid)
    (rows, columns), (down, right) = layer.padding, layer.stride
    padded = functional.pad(to_numbers(integers, source), (columns, columns, rows, rows))
    height, width = find_size(layer, (integers.shape[2], integers.shape[3]), layer.kernel)
    total = torch.zeros(*integers.shape[:2], height, width)
    for row in range(layer.kernel[0]):
        for column in range(layer.kernel[1]):
            total = total + padded[:, :, row : row + down * height : down, column : column + right * width : right]
    average = total / float(layer.kernel[0] * layer.kernel[1])
    return finish_with_zero_point(average / make_scalar(grid.scale) + grid.zero_point, grid)
