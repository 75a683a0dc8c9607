"""How torch's int8 kernels round, which is how oneDNN does: the profile that the eager runtime is held to.

    convolution, linear   v = float32(acc) · m + float32(bias · m),  m = (s_x · s_w) / s_y in float32; product and sum
                          are rounded one after the other
    addition              v = fma(a − z_a, s_a/s_y, float32((b − z_b) · s_b/s_y)) for a + b: the first input is what
                          the second is accumulated onto
    average               v = float32(Σ(x − z_x)) · m,  m = s_x / (s_y · n) in float32: a convolution with ones
    result                ReLU, then float32(v + z_y), rounded half to even and held to the range

Two things differ from onnxruntime and decide about ties and near ties. The bias is added behind the factor and not to
the integer sum; and the zero point is added before rounding, where float32 may have no digits left for the distance
from a tie. Without a bias and with zero point 0, as after a ReLU, both are the same. Found by trying scales that make
ties frequent (oneDNN 3.12, torch 2.13); the tests hold every layer to it.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from scalelab.quantize.integer_ops import finish
from scalelab.quantize.network import Grid, Layer, QuantizedLayer, QuantizedNetwork
from scalelab.quantize.profiles import Profile
from scalelab.quantize.rounding import fuse_multiply_add, make_channels, make_scalar
from scalelab.quantize.simulate import LOGITS, read_logits, run_layers


def simulate_eager(quantized: QuantizedNetwork, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """The integers of every layer by name as the eager runtime must give them, and float32 logits."""
    results = dict(run_layers(quantized, images, ONEDNN, "float64"))
    results[LOGITS] = read_logits(quantized.layers[-1], results[quantized.output])
    return results


def make_multiplier(layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    """(s_x · s_w) / s_y of every output channel; s_y is 1 where the result is not rounded."""
    assert layer.weight is not None
    assert layer.weight_scale is not None
    step = make_scalar(1.0 if layer.is_unrounded else layer.output.scale)
    multiplier = (make_scalar(source.scale) * layer.weight_scale) / step
    return multiplier.reshape(-1).expand(len(layer.weight)).contiguous()


def make_bias(layer: QuantizedLayer, multiplier: torch.Tensor) -> torch.Tensor | None:
    """The bias in steps of the result's grid."""
    return (
        None if layer.bias is None else (layer.bias.to(torch.float64) * multiplier.to(torch.float64)).to(torch.float32)
    )


def make_average_multiplier(source: Grid, grid: Grid, count: int) -> torch.Tensor:
    """s_x / (s_y · n)."""
    return make_scalar(source.scale) / (make_scalar(grid.scale) * make_scalar(float(count)))


def scale_then_add_bias(sums: torch.Tensor, layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    return round_with_zero_point(scale_to_steps(sums, layer, source), layer.output)


def scale_to_steps(sums: torch.Tensor, layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    """Before rounding; of a layer that is not rounded, the numbers that sums stand for."""
    multiplier = make_multiplier(layer, source)
    bias = make_bias(layer, multiplier)
    result = sums.to(torch.float32) * make_channels(multiplier, sums.dim())
    return result if bias is None else result + make_channels(bias, sums.dim())


def add_accumulated(integers: list[torch.Tensor], sources: list[Grid], grid: Grid, has_relu: bool) -> torch.Tensor:
    first, second = (
        tensor.to(torch.float32) - source.zero_point for tensor, source in zip(integers, sources, strict=True)
    )
    ratios = [make_scalar(source.scale) / make_scalar(grid.scale) for source in sources]
    steps = fuse_multiply_add(first, ratios[0], second * ratios[1])
    return finish(round_with_zero_point(steps, grid), grid, has_relu)


def average_by_ones(layer: Layer, integers: torch.Tensor, source: Grid, grid: Grid) -> torch.Tensor:
    centred = integers.to(torch.float64) - source.zero_point
    kernel = layer.kernel or (centred.shape[2], centred.shape[3])
    sums = functional.avg_pool2d(centred, kernel, layer.stride, layer.padding, divisor_override=1)
    multiplier = make_average_multiplier(source, grid, kernel[0] * kernel[1])
    return finish(round_with_zero_point(sums.to(torch.float32) * multiplier, grid), grid, layer.has_relu)


def round_with_zero_point(steps: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Steps rounded with the zero point in them, which is then taken off again: nothing is left to be rounded."""
    return torch.round(steps + grid.zero_point) - grid.zero_point


ONEDNN = Profile(
    name="onednn",
    sentence="torch's own int8 kernels, which are oneDNN's",
    rounding="half to even, after the zero point was added in float32",
    multiplier="(s_x·s_w)/s_y in float32, times float32 of the sum",
    bias="float32 of bias·multiplier, added in float32 behind the multiplication",
    relu="before the zero point is added",
    addition="the second input times its ratio in float32, then the first by a fused multiply-add",
    averaging="float32 of the integer sum times s_x/(s_y·n)",
    scale=scale_then_add_bias,
    add=add_accumulated,
    average=average_by_ones,
    to_logits=scale_to_steps,
)
