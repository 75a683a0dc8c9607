"""Execute a quantized network with exact integers, rounded as a family of kernels does, on any machine.

**Sums.** A convolution or linear layer sums products of an activation, |q_x − zero point| ≤ 255, and a weight,
|q_w| ≤ 128. Every partial sum, in any order, stays within

    bound = max over output channels of  Σ|q_w| · max|q_x − zero point| + |bias|

float64 holds every integer below 2⁵³, so float64 matrix products are exact. Kernels accumulate in int32: a layer whose
bound exceeds it is refused.

**From a sum to the next layer's integer**, by profile:

                  multiplier of the sum (float32)     bias                          addition
    onnxruntime   (s_x·s_w) / s_y                     int32, on the sum             two fused multiply-adds
    qnnpack       (s_w·s_x) · (1/s_y)                 int32, on the sum             float32, times 1/s_y
    fbgemm        (s_x·s_w) / s_y                     float32, b / (s_x·s_w)        float32, times 1/s_y

All round half to even (`cvtps2dq`) and clamp to the grid, where the ReLU is a lower bound. They differ in the order of
float32 operations, where the bias is added, and what is fused (rounded once instead of twice): each decides ties, and a
tie decides an integer. A simulation that is right "except for rounding" looks like a wrong one, so tests
compare each profile with its kernels integer by integer.

Fused multiply-adds are computed in float64 and rounded once more: a byte times a float32 has 32 bits, so the float64
sum is exact where its terms lie within 2²⁰ of each other.

Limits: x86 with FMA. On ARM, onnxruntime adds with fixed-point multipliers. Without VNNI, uint8 × int8 kernels add
pairs of products in int16, which saturates: sessions ask onnxruntime for its slower exact kernels, the eager runtime
sums in floating point, fbgemm saturates. Of qnnpack and fbgemm only convolutions and linear layers are compared;
qnnpack's own addition is in fixed point. A layer kept in float is computed by torch, so behind it a kernel may differ
by a tie.

Sources: onnxruntime `core/mlas/lib` (`quantize.cpp`, `qlgavgpool.cpp`, `intrinsics/avx2/qladd_avx2.cpp`) and
`contrib_ops/cpu/quantization/qlinear_pool.cc`; FBGEMM's `requantizeOutputProcessingAvx2`; torch's `qnnpack_utils.h`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from scalelab.errors import UnknownName, UsageError
from scalelab.quantize.network import HIGHEST, Grid, Layer, QuantizedLayer, QuantizedNetwork, compute_layer

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


def make_scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def make_channels(values: torch.Tensor, num_dims: int) -> torch.Tensor:
    """One value per channel (or one for all), shaped to broadcast over an output of so many dimensions."""
    return values.reshape(1, -1, *[1] * (num_dims - 2))


def fuse_multiply_add(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> torch.Tensor:
    """first · second + third in float32, rounded once."""
    exact = first.to(torch.float64) * second.to(torch.float64) + third.to(torch.float64)
    return exact.to(torch.float32)


def add_bias(sums: torch.Tensor, layer: QuantizedLayer) -> torch.Tensor:
    return sums if layer.bias is None else sums + make_channels(layer.bias.to(torch.float64), sums.dim())


def rescale(sums: torch.Tensor, layer: QuantizedLayer, multiplier: torch.Tensor) -> torch.Tensor:
    return add_bias(sums, layer).to(torch.float32) * make_channels(multiplier, sums.dim())


def scale_by_quotient(sums: torch.Tensor, layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    """float32(acc + bias) · ((s_x · s_w) / s_y), each operation rounded to float32."""
    assert layer.weight_scale is not None
    return rescale(sums, layer, (make_scalar(source.scale) * layer.weight_scale) / make_scalar(layer.output.scale))


def scale_to_numbers(sums: torch.Tensor, layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    """float32(acc + bias) · (s_x · s_w): a QGemm with float32 output."""
    assert layer.weight_scale is not None
    return rescale(sums, layer, make_scalar(source.scale) * layer.weight_scale)


def scale_by_inverse(sums: torch.Tensor, layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    """float32(acc + bias) · ((s_w · s_x) · (1 / s_y)), each operation rounded to float32."""
    assert layer.weight_scale is not None
    return rescale(
        sums, layer, (layer.weight_scale * make_scalar(source.scale)) * (1 / make_scalar(layer.output.scale))
    )


def scale_with_float_bias(sums: torch.Tensor, layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    """(float32(acc) + b / (s_x · s_w)) · ((s_x · s_w) / s_y) for a float32 bias b.

    With one scale for all channels, b · (1 / (s_x · s_w)) is fused with the sum.
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
    """The float32 bias that kernels take."""
    assert layer.bias is not None
    assert layer.weight_scale is not None
    return layer.bias.to(torch.float32) * (make_scalar(source.scale) * layer.weight_scale)


def add_fused(integers: list[torch.Tensor], sources: list[Grid], grid: Grid, has_relu: bool) -> torch.Tensor:
    """fma(a, s_a/s_y, fma(b, s_b/s_y, z_y − (s_a/s_y · z_a + s_b/s_y · z_b))), rounded with the zero point included."""
    first, second = (make_scalar(source.scale) / make_scalar(grid.scale) for source in sources)
    fixed = grid.zero_point - (first * sources[0].zero_point + second * sources[1].zero_point)
    result = fuse_multiply_add(integers[1], second, fixed)
    return finish_with_zero_point(fuse_multiply_add(integers[0], first, result), grid, has_relu)


def add_by_inverse(integers: list[torch.Tensor], sources: list[Grid], grid: Grid, has_relu: bool) -> torch.Tensor:
    """(s_a · (a − z_a) + s_b · (b − z_b)) · (1 / s_y) in float32."""
    first, second = (to_numbers(tensor, source) for tensor, source in zip(integers, sources, strict=True))
    return finish((first + second) * (1 / make_scalar(grid.scale)), grid, has_relu)


def finish_with_zero_point(steps: torch.Tensor, grid: Grid, has_relu: bool = False) -> torch.Tensor:
    """Steps that include the zero point: rounded half to even and clamped."""
    low = grid.zero_point if has_relu else 0
    return torch.round(steps).clamp(low, HIGHEST).to(torch.uint8)


def average_sums(layer: Layer, integers: torch.Tensor, source: Grid, grid: Grid) -> torch.Tensor:
    """float32(Σ(q − z)) · (s_x / (s_y · n)): integer sums."""
    centred = integers.to(torch.float64) - source.zero_point
    if layer.kernel is None:
        sums, count = centred.sum(dim=(2, 3), keepdim=True), centred.shape[2] * centred.shape[3]
    else:
        count = layer.kernel[0] * layer.kernel[1]
        sums = functional.avg_pool2d(centred, layer.kernel, layer.stride, layer.padding, divisor_override=1)
    return finish(sums.to(torch.float32) * make_average_multiplier(source, grid, count), grid)


def make_average_multiplier(source: Grid, grid: Grid, count: int) -> torch.Tensor:
    """s_x / (s_y · n)."""
    return make_scalar(source.scale) / (make_scalar(grid.scale) * make_scalar(float(count)))


def average_windows(layer: Layer, integers: torch.Tensor, source: Grid, grid: Grid) -> torch.Tensor:
    """Global: integer sums. Windows: float32 sums row by row, divided by their count and s_y; the zero point is added
    before rounding. Padding counts as zeros."""
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


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The arithmetic of one family of kernels."""

    scale: Callable[[torch.Tensor, QuantizedLayer, Grid], torch.Tensor]
    """From the sums of a weighted layer, and its input's grid, to float32 steps of its own grid."""
    add: Callable[[list[torch.Tensor], list[Grid], Grid, bool], torch.Tensor]
    """Two integer tensors, their grids, the output grid, whether there is a ReLU."""
    average: Callable[[Layer, torch.Tensor, Grid, Grid], torch.Tensor]
    to_logits: Callable[[torch.Tensor, QuantizedLayer, Grid], torch.Tensor] = scale_to_numbers
    """From the sums of an unrounded last layer to float32."""


PROFILES: dict[str, Profile] = {
    "onnxruntime": Profile(scale=scale_by_quotient, add=add_fused, average=average_windows),
    "qnnpack": Profile(scale=scale_by_inverse, add=add_by_inverse, average=average_sums),
    "fbgemm": Profile(scale=scale_with_float_bias, add=add_by_inverse, average=average_sums),
}


def find_profile(name: str) -> Profile:
    if name not in PROFILES:
        raise UnknownName("kernel profile", name, PROFILES)
    return PROFILES[name]


BATCH = 64


def simulate_logits(quantized: QuantizedNetwork, images: torch.Tensor, profile: str = "onnxruntime") -> torch.Tensor:
    """The logits in float32, for any number of images."""
    rules, last = find_profile(profile), quantized.layers[-1]
    results = []
    for some in images.split(BATCH):
        for name, integers in run_layers(quantized, some, rules):
            if name == last.name:
                results.append(read_logits(last, integers))
    return torch.cat(results)


def read_logits(last: QuantizedLayer, result: torch.Tensor) -> torch.Tensor:
    """The last layer's output in float32."""
    return result if last.is_unrounded else to_numbers(result, last.output)


def run_layers(
    quantized: QuantizedNetwork, images: torch.Tensor, profile: Profile
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and integers of each layer in turn; tensors that no later layer needs are freed."""
    grids = {layer.name: layer.output for layer in quantized.layers}
    uses = Counter(name for layer in quantized.layers for name in layer.layer.inputs)
    kept: dict[str, torch.Tensor] = {}
    for layer in quantized.layers:
        names = layer.layer.inputs
        with torch.no_grad():
            if layer.layer.op == "input":
                integers = round_to_grid(images, layer.output)
            else:
                sources = [grids[name] for name in names]
                integers = compute_integers(layer, [kept[name] for name in names], sources, profile)
        yield layer.name, integers
        kept[layer.name] = integers
        uses.subtract(names)
        for name in set(names):
            if not uses[name]:
                del kept[name]


def compute_integers(
    layer: QuantizedLayer,
    inputs: list[torch.Tensor],
    sources: list[Grid],
    profile: Profile,
) -> torch.Tensor:
    """One layer, from the integers of its inputs on the grids `sources`."""
    what, grid = layer.layer, layer.output
    if layer.is_float:
        numbers = [to_numbers(tensor, source) for tensor, source in zip(inputs, sources, strict=True)]
        result = compute_layer(what, numbers)
        return result if layer.is_unrounded else round_to_grid(result, grid)
    if what.is_weighted:
        sums = sum_products(layer, inputs[0], sources[0])
        if layer.is_unrounded:
            return profile.to_logits(sums, layer, sources[0])
        return finish(profile.scale(sums, layer, sources[0]), grid, what.has_relu)
    if what.op == "add":
        return profile.add(inputs, sources, grid, what.has_relu)
    if what.op == "average_pool":
        return profile.average(what, inputs[0], sources[0], grid)
    return pass_on(layer, inputs[0])


def pass_on(layer: QuantizedLayer, integers: torch.Tensor) -> torch.Tensor:
    """Layers that round nothing: integers stay on the grid of the input."""
    what = layer.layer
    if what.op == "flatten":
        return integers.flatten(1)
    if what.op == "relu":
        return integers.clamp(min=layer.output.zero_point)
    assert what.kernel is not None
    largest = functional.max_pool2d(integers.to(torch.float32), what.kernel, what.stride, what.padding, what.dilation)
    return largest.to(torch.uint8)
