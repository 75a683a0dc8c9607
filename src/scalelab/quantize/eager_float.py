"""Layers of an int8 program that are kept in float: from bytes to numbers, computed by torch, and back to bytes."""

from __future__ import annotations

from scalelab.quantize.eager_kernels import Program, Shape, write_numbers, write_rounding
from scalelab.quantize.network import Grid, Layer, QuantizedLayer


def write_float(program: Program, layer: QuantizedLayer, sources: list[Grid], inputs: list[str], shape: Shape) -> str:
    """One layer in float32. `shape`: of its result."""
    numbers = [write_numbers(program, grid, name) for grid, name in zip(sources, inputs, strict=True)]
    result = program.write(describe(program, layer.layer, numbers))
    if layer.layer.has_relu:
        result = program.write(f"torch.ops.aten.relu({result})")
    return result if layer.is_unrounded else write_rounding(program, layer.output, result, 1 + len(shape))


def describe(program: Program, layer: Layer, numbers: list[str]) -> str:
    """The call that computes a layer."""
    first = numbers[0]
    window = f"{list(layer.stride)}, {list(layer.padding)}"
    if layer.op in ("conv", "linear"):
        parts = f"{first}, {program.keep(layer.weight)}, {program.keep(layer.bias)}"
        if layer.op == "linear":
            return f"torch.ops.aten.linear({parts})"
        return f"torch.ops.aten.conv2d({parts}, {window}, {list(layer.dilation)}, {layer.groups})"
    if layer.op == "add":
        return f"{first} + {numbers[1]}"
    if layer.op == "average_pool" and layer.kernel is None:
        return f"torch.ops.aten.mean({first}, [2, 3], True)"
    if layer.kernel is not None:
        size = f"{first}, {list(layer.kernel)}, {window}"
        return (
            f"torch.ops.aten.avg_pool2d({size})"
            if layer.op == "average_pool"
            else f"torch.ops.aten.max_pool2d({size}, {list(layer.dilation)})"
        )
    return f"torch.ops.aten.flatten({first}, 1)" if layer.op == "flatten" else f"torch.ops.aten.relu({first})"
