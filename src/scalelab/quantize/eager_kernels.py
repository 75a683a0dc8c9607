"""The int8 kernels that torch has for plain uint8 tensors, one function per kind of layer.

torch 2.13 has three families. `quantized.*` (fbgemm, qnnpack) takes torch's own quantized tensors, whose making is
deprecated. `aten._int_mm` multiplies matrices and nothing more. `onednn.*` takes plain tensors and packed weights, is
what torch.compile lowers to, and was as quick as the best of the others or quicker in most shapes tried (a 3×3
convolution of 64 channels and 64 images of 32 × 32 took 8.2 ms, fbgemm's 15.1 ms). So all is done by two of its
operators, a convolution and a linear layer, both with a factor per channel, a bias, a ReLU and a zero point:

    addition   the second input through a convolution of 1×1 that multiplies every channel by one, accumulated onto the
               first. `onednn.qadd`, made for this, reads bytes above 127 as negative in torch 2.13 and is not used.
    averages   a convolution of every channel with weights of one
    maxima     of shifted views, rows first and then columns: torch's own max_pool2d is a hundred times slower for bytes
               and refuses images of more than 255 pixels in channels_last

Scales of activations are given to the kernels as 1: everything is in the factors per channel, so that a sum is
multiplied once. Weights are packed once for images of the network's size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from scalelab.errors import ScalelabError
from scalelab.quantize.eager_rounding import make_average_multiplier, make_bias, make_multiplier
from scalelab.quantize.integer_ops import round_to_grid, to_numbers
from scalelab.quantize.network import Grid, Layer, QuantizedLayer
from scalelab.quantize.rounding import make_scalar
from scalelab.quantize.run_float import compute_layer

Kernel = Callable[..., torch.Tensor]
"""From the integers of the inputs to those of the result; images are channels_last."""
Shape = tuple[int, ...]
Window = tuple[list[int], list[int], list[int], int]
"""Stride, padding, dilation and groups."""

NO_KERNELS = (
    "this build of torch has no int8 kernels for plain tensors (onednn.qconv2d_pointwise, from torch 2.7 on x86): run"
    " the exported ONNX file with onnxruntime instead"
)


def make_conv(layer: QuantizedLayer, source: Grid, shape: Shape) -> Kernel:
    """A convolution with its bias and ReLU. `shape`: of its input, without the batch."""
    assert layer.weight is not None
    multiplier = make_multiplier(layer, source)
    return pack_conv(
        layer.layer,
        layer.weight,
        multiplier,
        make_bias(layer, multiplier),
        zero_points=(source.zero_point, layer.output.zero_point),
        shape=shape,
    )


def pack_conv(
    layer: Layer,
    weight: torch.Tensor,
    multiplier: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    zero_points: tuple[int, int],
    shape: Shape,
) -> Kernel:
    """A convolution with the stride, padding and so on of `layer`, from one zero point to another."""
    window = (list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups)
    packed = pack_weight(weight, multiplier, zero_points[0], window, shape)
    before = (1.0, zero_points[0], packed, multiplier, torch.zeros(len(weight), dtype=torch.int64), bias, *window)
    after: tuple[Any, ...] = (1.0, zero_points[1], torch.uint8, "relu" if layer.has_relu else "none", [], "")
    operator = torch.ops.onednn.qconv2d_pointwise.default

    def run(images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = operator(images, *before, *after)
        return result

    return run


def pack_weight(
    weight: torch.Tensor, multiplier: torch.Tensor, zero_point: int, window: Window, shape: Shape
) -> torch.Tensor:
    """Weights of a convolution in the layout that its kernel wants.

    torch remembers layouts by the shapes of images and weights, not by whether there is a zero point, for which weights
    carry their sums along; with the wrong one they are packed again in every call. Another batch size keeps them apart.
    """
    batch = 2 if zero_point else 1
    packed: torch.Tensor = torch.ops.onednn.qconv_prepack(weight, multiplier, 1.0, zero_point, *window, [batch, *shape])
    return packed


def make_linear(layer: QuantizedLayer, source: Grid, _: Shape) -> Kernel:
    assert layer.weight is not None
    multiplier = make_multiplier(layer, source)
    packed = torch.ops.onednn.qlinear_prepack(layer.weight, None)
    zeros = torch.zeros(len(layer.weight), dtype=torch.int64)
    before = (1.0, source.zero_point, packed, multiplier, zeros, make_bias(layer, multiplier))
    after: tuple[Any, ...] = (
        1.0,
        layer.output.zero_point,
        torch.uint8,
        "relu" if layer.layer.has_relu else "none",
        [],
        "",
    )
    operator = torch.ops.onednn.qlinear_pointwise.default

    def run(rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = operator(rows, *before, *after)
        return result

    return run


def make_add(layer: QuantizedLayer, sources: list[Grid], shape: Shape, is_overwritten: bool) -> Kernel:
    """The sum of two inputs. `is_overwritten`: nobody else needs the first one, so the result may take its place."""
    grid, num_channels = layer.output, shape[0]
    first, second = (make_scalar(source.scale) / make_scalar(grid.scale) for source in sources)
    ones, multiplier = torch.ones(num_channels, 1, 1, 1, dtype=torch.int8), second.repeat(num_channels)
    window = ([1, 1], [0, 0], [1, 1], num_channels)
    packed = pack_weight(ones, multiplier, sources[1].zero_point, window, shape if len(shape) == 3 else (*shape, 1, 1))
    before = (1.0, sources[1].zero_point, packed, multiplier, torch.zeros(num_channels, dtype=torch.int64))
    after = (None, *window, 1.0, grid.zero_point, torch.uint8, float(first), sources[0].zero_point, "sum", 1.0)
    relu: tuple[Any, ...] = ("relu" if layer.layer.has_relu else None, [], None)
    operator = torch.ops.onednn.qconv2d_pointwise.binary

    def run(onto: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        if not is_overwritten:
            onto = onto.clone(memory_format=torch.preserve_format)
        if len(shape) == 1:
            onto, added = onto[:, :, None, None], added[:, :, None, None]
        result: torch.Tensor = operator(added, *before, onto, *after, *relu)
        return result.flatten(1) if len(shape) == 1 else result

    return run


def make_average(layer: QuantizedLayer, source: Grid, shape: Shape) -> Kernel:
    """Averages over windows, or over images of this shape."""
    what, num_channels = layer.layer, shape[0]
    kernel = what.kernel or (shape[1], shape[2])
    ones = torch.ones(num_channels, 1, *kernel, dtype=torch.int8)
    multiplier = make_average_multiplier(source, layer.output, kernel[0] * kernel[1]).repeat(num_channels)
    window = Layer(
        name=what.name,
        op="conv",
        stride=what.stride,
        padding=what.padding,
        groups=num_channels,
        has_relu=what.has_relu,
    )
    zero_points = (source.zero_point, layer.output.zero_point)
    return pack_conv(window, ones, multiplier, None, zero_points=zero_points, shape=shape)


def make_max(layer: QuantizedLayer, _: Grid, __: Shape) -> Kernel:
    """Maxima over windows. Padding is the least byte, which is no larger than anything."""
    what = layer.layer
    assert what.kernel is not None
    kernel, (rows, columns) = what.kernel, what.padding

    def run(images: torch.Tensor) -> torch.Tensor:
        if rows or columns:
            images = functional.pad(images, (columns, columns, rows, rows))
        for dim, size, stride, dilation in zip((2, 3), kernel, what.stride, what.dilation, strict=True):
            num_places = (images.shape[dim] - dilation * (size - 1) - 1) // stride + 1
            span = (num_places - 1) * stride + 1
            views = [images.narrow(dim, dilation * place, span) for place in range(size)]
            if stride > 1:
                views = [view[:, :, ::stride] if dim == 2 else view[:, :, :, ::stride] for view in views]
            images = functools.reduce(torch.maximum, views)
        return images

    return run


def make_flatten(_: QuantizedLayer, __: Grid, ___: Shape) -> Kernel:
    return lambda images: images.flatten(1).contiguous()


def make_relu(layer: QuantizedLayer, _: Grid, __: Shape) -> Kernel:
    zero = layer.output.zero_point
    return lambda integers: integers.clamp_min(zero)


def make_input(grid: Grid) -> Kernel:
    """`round_to_grid`, with as few operations as there can be: they count where the batch is one image."""
    scale = make_scalar(grid.scale)
    low, high, zero = grid.low - grid.zero_point, grid.high - grid.zero_point, grid.zero_point

    def run(images: torch.Tensor) -> torch.Tensor:
        steps = torch.div(images.to(torch.float32), scale).clamp_(low, high).round_()
        return (steps.add_(zero) if zero else steps).to(torch.uint8, memory_format=torch.channels_last)

    return run


def make_output(grid: Grid) -> Kernel:
    """`to_numbers`, likewise."""
    scale, zero = make_scalar(grid.scale), grid.zero_point
    return lambda integers: integers.to(torch.float32).sub_(zero).mul_(scale)


def make_float(layer: QuantizedLayer, sources: list[Grid]) -> Kernel:
    """A layer that is kept in float, from integers to integers."""
    what, grid = layer.layer, layer.output

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        numbers = [to_numbers(tensor, source) for tensor, source in zip(inputs, sources, strict=True)]
        return arrange(round_to_grid(compute_layer(what, numbers), grid))

    return run


def arrange(integers: torch.Tensor) -> torch.Tensor:
    """In the order in memory that the kernels want: channels last."""
    return integers.contiguous(memory_format=torch.channels_last) if integers.dim() == 4 else integers.contiguous()


@functools.cache
def probe_kernels() -> tuple[str, ...]:
    """Whether this build and this processor can do it; gives remarks on what is slow or inexact here."""
    if not hasattr(torch.ops.onednn, "qconv2d_pointwise") or not torch.backends.mkldnn.is_available():
        raise ScalelabError(NO_KERNELS)
    layer = Layer(name="probe", op="conv")
    shape = (64, 2, 2)
    weight, multiplier = torch.full((16, 64, 1, 1), 127, dtype=torch.int8), torch.full((16,), 2.0**-13)
    try:
        kernel = pack_conv(layer, weight, multiplier, None, zero_points=(0, 0), shape=shape)
        largest = kernel(arrange(torch.full((1, *shape), 255, dtype=torch.uint8)))
    except RuntimeError as error:
        raise ScalelabError(f"{NO_KERNELS} ({str(error).splitlines()[0]})") from error
    remarks = []
    if not has_vnni():
        remarks.append(
            "this processor has no VNNI: int8 in torch gains little or nothing over float32, and runs on kernels that"
            " add in 16 bits"
        )
    if int(largest[0, 0, 0, 0]) != round(64 * 255 * 127 / 2**13):
        remarks.append(
            "int8 sums saturate at 16 bits on this processor, so results differ from the simulation: quantize with"
            " reduce_range=True"
        )
    return tuple(remarks)


def has_vnni() -> bool:
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(found.get("avx512_vnni") or found.get("avx_vnni") or torch.cpu._is_vnni_supported())
