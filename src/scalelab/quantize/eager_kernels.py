"""torch's int8 kernels for plain uint8 tensors, as calls in a program: one function per kind of layer.

torch 2.13 has three families. `quantized.*` (fbgemm, qnnpack) takes quantized tensors, whose construction is
deprecated. `aten._int_mm` only multiplies matrices. `onednn.*` takes plain tensors and packed weights, is what
torch.compile lowers to, and is at least as fast for whole networks (resnet18, 64 images: 0.92 of onnxruntime's time,
fbgemm 1.3). Two of its operators do everything: convolution and linear, each with a factor per channel, bias, ReLU and
zero point.

    addition   a 1×1 convolution of ones over the second input, accumulated onto the first. `onednn.qadd` reads bytes
               above 127 as negative in torch 2.13.
    averages   a depthwise convolution of ones
    maxima     of shifted views, rows then columns: torch's max_pool2d is 100 times slower for bytes and refuses
               channels_last images of more than 255 pixels

Activation scales are passed as 1: everything is in the factors per channel, so a sum is multiplied once. Weights are
packed once for images of the network's size.

Calling an operator with 17 arguments from Python takes ten microseconds, a third of its overhead. So calls are written
as lines of TorchScript, compiled once by `torch.jit.CompilationUnit` (not deprecated in torch 2.13) and run without
Python.

oneDNN rounds differently from onnxruntime (oneDNN 3.12, torch 2.13; tests check every layer):

    convolution, linear   v = float32(acc) · m + float32(bias · m),  m = (s_x · s_w) / s_y; product and sum are rounded
                          separately
    addition              v = fma(a − z_a, s_a/s_y, float32((b − z_b) · s_b/s_y))
    average               v = float32(Σ(x − z_x)) · m,  m = s_x / (s_y · n)
    output                ReLU, then float32(v + z_y), rounded half to even and clamped

The bias is added after the factor, and the zero point before rounding: both decide ties and near ties. Without a bias
and with zero point 0, as after a ReLU, the two runtimes agree.

On x86 without VNNI these kernels add pairs of products in int16, which saturates. There convolutions and linear layers
sum integers in floating point, which is exact below 2²⁴ in float32 and below 2⁵³ in float64, and round as above.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from scalelab.errors import ScalelabError
from scalelab.quantize.network import HIGHEST, Grid, Layer, QuantizedLayer
from scalelab.quantize.simulate import bound_sum, make_average_multiplier, make_channels, make_scalar


def make_multiplier(layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    """(s_x · s_w) / s_y per output channel; s_y is 1 for unrounded output."""
    assert layer.weight is not None
    assert layer.weight_scale is not None
    step = make_scalar(1.0 if layer.is_unrounded else layer.output.scale)
    multiplier = (make_scalar(source.scale) * layer.weight_scale) / step
    return multiplier.reshape(-1).expand(len(layer.weight)).contiguous()


def make_bias(layer: QuantizedLayer, multiplier: torch.Tensor) -> torch.Tensor | None:
    """The bias in steps of the output grid."""
    return (
        None if layer.bias is None else (layer.bias.to(torch.float64) * multiplier.to(torch.float64)).to(torch.float32)
    )


Shape = tuple[int, ...]
"""Without the batch."""
Window = tuple[list[int], list[int], list[int], int]
"""Stride, padding, dilation and groups."""
FLOAT64, FLOAT32, UINT8 = 7, 6, 0
"""torch's numbers for dtypes, as programs name them."""
FLOAT32_EXACT = 2**24
"""Integers below it are exact in float32, in any order of summation."""
CHANNELS_LAST, PRESERVED = 2, 1
"""The same for memory formats."""
NO_KERNELS = (
    "this build of torch has no int8 kernels for plain tensors (onednn.qconv2d_pointwise, from torch 2.7 on x86): run"
    " the exported ONNX file with onnxruntime instead"
)


@dataclass
class Program:
    """Lines of code and the tensors they use."""

    lines: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)

    def write(self, text: str) -> str:
        """Add a line that computes `text`; returns the name of its result."""
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def keep(self, tensor: torch.Tensor | None) -> str:
        """The name of a tensor in the program."""
        if tensor is None:
            return "None"
        self.tensors.append(tensor)
        return f"t[{len(self.tensors) - 1}]"

    def finish(self, result: str, kind: str) -> str:
        """The source of a function of images that returns `result`."""
        body = "\n".join(f"    {line}" for line in (*self.lines, f"return {result}"))
        none = "    none: List[Optional[number]] = []"
        return f"def run(images: Tensor, t: List[Tensor]) -> {kind}:\n{none}\n{body}\n"


def write_conv(program: Program, layer: QuantizedLayer, source: Grid, shape: Shape, images: str) -> str:
    """A convolution with bias and ReLU. `shape`: of its input."""
    assert layer.weight is not None
    multiplier = make_multiplier(layer, source)
    if not sums_exactly():
        return write_exact(program, layer, source, multiplier, images)
    parts = (layer.weight, multiplier, make_bias(layer, multiplier))
    return write_window(program, layer.layer, parts, (source, layer.output), shape, images)


def write_window(
    program: Program,
    layer: Layer,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    grids: tuple[Grid, Grid],
    shape: Shape,
    images: str,
) -> str:
    """A convolution with the window of `layer`; `parts`: weights, factors, bias; `grids`: input, output."""
    weight, multiplier, bias = parts
    window = list_window(layer)
    packed = pack_weight(weight, multiplier, grids[0].zero_point, window, shape)
    return program.write(
        f"torch.ops.onednn.qconv2d_pointwise({images}, 1.0, {grids[0].zero_point}, {program.keep(packed)},"
        f" {program.keep(multiplier)}, {keep_zeros(program, weight)}, {program.keep(bias)}, {name_window(window)}, 1.0,"
        f' {grids[1].zero_point}, {UINT8}, {name_relu(layer)}, none, "")'
    )


def write_linear(program: Program, layer: QuantizedLayer, source: Grid, _: Shape, rows: str) -> str:
    assert layer.weight is not None
    multiplier = make_multiplier(layer, source)
    if not sums_exactly():
        return write_exact(program, layer, source, multiplier, rows)
    packed = torch.ops.onednn.qlinear_prepack(layer.weight, None)
    result = f"0, {FLOAT32}" if layer.is_unrounded else f"{layer.output.zero_point}, {UINT8}"
    return program.write(
        f"torch.ops.onednn.qlinear_pointwise({rows}, 1.0, {source.zero_point}, {program.keep(packed)},"
        f" {program.keep(multiplier)}, {keep_zeros(program, layer.weight)},"
        f" {program.keep(make_bias(layer, multiplier))}, 1.0, {result},"
        f' {name_relu(layer.layer)}, none, "")'
    )


def write_exact(program: Program, layer: QuantizedLayer, source: Grid, multiplier: torch.Tensor, integers: str) -> str:
    """A convolution or linear layer whose integers are summed in floating point, rounded as the int8 kernels do."""
    assert layer.weight is not None
    what, num_dims = layer.layer, layer.weight.dim()
    number, dtype = (FLOAT32, torch.float32) if bound_sum(layer, source) < FLOAT32_EXACT else (FLOAT64, torch.float64)
    parts = f"{integers}.to({number}) - {source.zero_point}, {program.keep(layer.weight.to(dtype))}"
    if what.op == "linear":
        sums = f"torch.ops.aten.linear({parts})"
    else:
        window = f"{list(what.stride)}, {list(what.padding)}, {list(what.dilation)}, {what.groups}"
        sums = f"torch.ops.aten.conv2d({parts}, None, {window})"
    steps = program.write(f"{sums}.to({FLOAT32}) * {program.keep(make_channels(multiplier, num_dims))}")
    bias = make_bias(layer, multiplier)
    if bias is not None:
        steps = program.write(f"{steps} + {program.keep(make_channels(bias, num_dims))}")
    if what.has_relu:
        steps = program.write(f"torch.clamp_min({steps}, 0)")
    if layer.is_unrounded:
        return steps
    rounded = program.write(f"torch.clamp(torch.round({steps} + {layer.output.zero_point}), 0, {HIGHEST}).to({UINT8})")
    return program.write(f"{rounded}.contiguous({name_order(num_dims)})")


def write_add(
    program: Program,
    layer: QuantizedLayer,
    sources: list[Grid],
    shape: Shape,
    inputs: list[str],
    *,
    is_overwritten: bool,
) -> str:
    """The sum of two inputs. `is_overwritten`: the result may overwrite the first input."""
    grid, num_channels, is_flat = layer.output, shape[0], len(shape) == 1
    first, second = (make_scalar(source.scale) / make_scalar(grid.scale) for source in sources)
    ones, multiplier = torch.ones(num_channels, 1, 1, 1, dtype=torch.int8), second.repeat(num_channels)
    window = list_window(Layer(name=layer.name, op="conv", groups=num_channels))
    packed = pack_weight(ones, multiplier, sources[1].zero_point, window, (*shape, 1, 1) if is_flat else shape)
    onto, added = inputs
    if not is_overwritten:
        onto = program.write(f"torch.clone({onto}, memory_format={PRESERVED})")
    if is_flat:
        onto, added = (program.write(f"{name}[:, :, None, None]") for name in (onto, added))
    result = program.write(
        f"torch.ops.onednn.qconv2d_pointwise({added}, 1.0, {sources[1].zero_point}, {program.keep(packed)},"
        f" {program.keep(multiplier)}, {keep_zeros(program, ones)}, {onto}, None, {name_window(window)}, 1.0,"
        f' {grid.zero_point}, {UINT8}, {float(first)!r}, {sources[0].zero_point}, "sum", 1.0,'
        f" {name_relu(layer.layer)}, none, None)"
    )
    return program.write(f"torch.flatten({result}, 1)") if is_flat else result


def write_average(program: Program, layer: QuantizedLayer, source: Grid, shape: Shape, images: str) -> str:
    """Average over windows, or over whole images of this shape."""
    what, num_channels = layer.layer, shape[0]
    kernel = what.kernel or (shape[1], shape[2])
    ones = torch.ones(num_channels, 1, *kernel, dtype=torch.int8)
    multiplier = make_average_multiplier(source, layer.output, kernel[0] * kernel[1]).repeat(num_channels)
    window = Layer(name=what.name, op="conv", stride=what.stride, padding=what.padding, groups=num_channels)
    return write_window(program, window, (ones, multiplier, None), (source, layer.output), shape, images)


def write_max(program: Program, layer: QuantizedLayer, _: Grid, shape: Shape, images: str) -> str:
    """Maxima over windows, padded with 0."""
    what = layer.layer
    assert what.kernel is not None
    rows, columns = what.padding
    if rows or columns:
        images = program.write(f"torch.constant_pad_nd({images}, {[columns, columns, rows, rows]}, 0)")
    for axis, before in ((0, ":, :, "), (1, ":, :, :, ")):
        size, stride, dilation = what.kernel[axis], what.stride[axis], what.dilation[axis]
        num_places = (shape[1 + axis] + 2 * what.padding[axis] - dilation * (size - 1) - 1) // stride + 1
        span = (num_places - 1) * stride + 1
        starts = [dilation * place for place in range(size)]
        views = [program.write(f"{images}[{before}{start}:{start + span}:{stride}]") for start in starts]
        images = functools.reduce(lambda one, other: program.write(f"torch.maximum({one}, {other})"), views)
    return images


def write_flatten(program: Program, _: QuantizedLayer, __: Grid, ___: Shape, images: str) -> str:
    return program.write(f"torch.flatten({images}, 1).contiguous()")


def write_relu(program: Program, layer: QuantizedLayer, _: Grid, __: Shape, integers: str) -> str:
    return program.write(f"torch.clamp_min({integers}, {layer.output.zero_point})")


def write_rounding(program: Program, grid: Grid, numbers: str, num_dims: int) -> str:
    """Numbers as integers of a grid, in the memory format of the kernels."""
    low, high = -grid.zero_point, HIGHEST - grid.zero_point
    steps = f"torch.round(torch.clamp({numbers} / {program.keep(make_scalar(grid.scale))}, {low}, {high}))"
    integers = program.write(f"({steps} + {grid.zero_point}).to({UINT8})")
    return program.write(f"{integers}.contiguous({name_order(num_dims)})")


def write_numbers(program: Program, grid: Grid, integers: str) -> str:
    scale = program.keep(make_scalar(grid.scale))
    return program.write(f"({integers}.to({FLOAT32}) - {grid.zero_point}) * {scale}")


def pack_weight(
    weight: torch.Tensor, multiplier: torch.Tensor, zero_point: int, window: Window, shape: Shape
) -> torch.Tensor:
    """Convolution weights in the kernel's layout.

    torch caches layouts by shapes, but weights for a nonzero zero point carry their sums along; the wrong layout is
    repacked in every call. A different batch size keeps the two apart.
    """
    batch = 2 if zero_point else 1
    packed: torch.Tensor = torch.ops.onednn.qconv_prepack(weight, multiplier, 1.0, zero_point, *window, [batch, *shape])
    return packed


def keep_zeros(program: Program, weight: torch.Tensor) -> str:
    """Zero points of weights."""
    return program.keep(torch.zeros(len(weight), dtype=torch.int64))


def list_window(layer: Layer) -> Window:
    return list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups


def name_window(window: Window) -> str:
    return ", ".join(str(part) for part in window)


def name_order(num_dims: int) -> str:
    """The memory format of the kernels, as an argument."""
    return f"memory_format={CHANNELS_LAST}" if num_dims == 4 else ""


def name_relu(layer: Layer) -> str:
    return '"relu"' if layer.has_relu else '"none"'


@functools.cache
def probe_kernels() -> tuple[str, ...]:
    """Check that this torch and CPU have the kernels; returns remarks on what is slow."""
    if not hasattr(torch.ops.onednn, "qconv2d_pointwise") or not torch.backends.mkldnn.is_available():
        raise ScalelabError(NO_KERNELS)
    try:
        is_exact = sums_exactly()
    except RuntimeError as error:
        raise ScalelabError(f"{NO_KERNELS} ({str(error).splitlines()[0]})") from error
    remarks = []
    if not has_vnni():
        remarks.append("this processor has no VNNI: int8 in torch gains little or nothing over float32")
    if not is_exact:
        remarks.append(
            "torch's int8 sums saturate at 16 bits on this processor: convolutions and linear layers are summed in"
            " floating point instead, which is exact but slower"
        )
    return tuple(remarks)


@functools.cache
def sums_exactly() -> bool:
    """Whether torch's int8 kernels add products of bytes without saturating."""
    return multiply_largest() == 64 * 255 * 127


def multiply_largest() -> int:
    """A sum of 64 products of the largest bytes, by the kernel."""
    window = list_window(Layer(name="", op="conv"))
    weight, ones = torch.full((16, 64, 1, 1), 127, dtype=torch.int8), torch.ones(16)
    packed = pack_weight(weight, ones, 0, window, (64, 2, 2))
    images = torch.full((1, 64, 2, 2), 255, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    zeros = torch.zeros(16, dtype=torch.int64)
    result = torch.ops.onednn.qconv2d_pointwise(
        images, 1.0, 0, packed, ones, zeros, None, *window, 1.0, 0, torch.float32, "none", [], ""
    )
    return int(result[0, 0, 0, 0])


def has_vnni() -> bool:
    """Whether this CPU sums products of bytes in int32, never in 16 bits."""
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(found.get("avx512_vnni") or found.get("avx_vnni") or torch.cpu._is_vnni_supported())
