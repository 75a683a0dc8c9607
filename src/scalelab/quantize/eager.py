"""A quantized network as a torch module on torch's own int8 kernels.

Float32 images in, float32 logits out, uint8 channels_last in between, on `eager_kernels.py`'s kernels in a program that
torch compiles from text and runs without Python. Its integers are oneDNN's: about three in a million lie so near a tie
that onnxruntime rounds them differently.

The module is packed for images of the network's size, any batch size. It has no parameters. A layer kept in float is
dequantized, computed by torch and quantized again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.quantize.eager_kernels import (
    Program,
    Shape,
    probe_kernels,
    write_add,
    write_average,
    write_conv,
    write_flatten,
    write_linear,
    write_max,
    write_numbers,
    write_relu,
    write_rounding,
)
from scalelab.quantize.network import Grid, Layer, Op, QuantizedLayer, QuantizedNetwork, compute_layer


def write_float(program: Program, layer: QuantizedLayer, sources: list[Grid], inputs: list[str], shape: Shape) -> str:
    """One layer in float32. `shape`: of its output."""
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


WRITERS: dict[Op, Callable[[Program, QuantizedLayer, Grid, Shape, str], str]] = {
    "conv": write_conv,
    "linear": write_linear,
    "average_pool": write_average,
    "max_pool": write_max,
    "flatten": write_flatten,
    "relu": write_relu,
}


def make_eager(quantized: QuantizedNetwork) -> EagerNetwork:
    """The network on torch's own integer kernels."""
    return EagerNetwork(quantized)


class EagerNetwork(nn.Module):
    """`remarks` says what is slow or inexact on this machine."""

    def __init__(self, quantized: QuantizedNetwork) -> None:
        super().__init__()
        self.remarks = (*probe_kernels(), *remark_on_float(quantized))
        self._quantized = quantized
        program, results = write_layers(quantized, reuses_memory=True)
        last = quantized.layers[-1]
        logits = results[-1] if last.is_unrounded else write_numbers(program, last.output, results[-1])
        self.text = program.finish(logits, "Tensor")
        self._run, self._tensors = compile_text(self.text), program.tensors
        self.eval()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Float32 logits of a batch of images."""
        self._check(images)
        with torch.no_grad():
            logits: torch.Tensor = self._run(images.to(torch.float32), self._tensors)
            return logits

    def _check(self, images: torch.Tensor) -> None:
        if tuple(images.shape[1:]) != self._quantized.input_shape:
            raise UsageError(
                f"images have shape {tuple(images.shape)}, but this int8 module is packed for"
                f" {self._quantized.input_shape}: quantize the network for that size"
            )


def compile_text(text: str) -> Callable[[torch.Tensor, list[torch.Tensor]], Any]:
    run: Callable[[torch.Tensor, list[torch.Tensor]], Any] = torch.jit.CompilationUnit(text).run
    return run


def write_layers(quantized: QuantizedNetwork, *, reuses_memory: bool) -> tuple[Program, list[str]]:
    """All layers as a program, and the names of their results."""
    program, names = Program(), dict[str, str]()
    shapes, last_uses = find_shapes(quantized), find_last_uses(quantized)
    for place, layer in enumerate(quantized.layers):
        what = layer.layer
        inputs = [names[name] for name in what.inputs]
        sources = [quantized.find(name).output for name in what.inputs]
        if what.op == "input":
            result = write_rounding(program, layer.output, "images", 1 + len(quantized.input_shape))
        elif layer.is_float:
            result = write_float(program, layer, sources, inputs, shapes[layer.name])
        elif what.op == "add":
            is_last_use = len(set(what.inputs)) == 2 and last_uses[what.inputs[0]] == place
            shape = shapes[layer.name]
            result = write_add(program, layer, sources, shape, inputs, is_overwritten=reuses_memory and is_last_use)
        else:
            result = WRITERS[what.op](program, layer, sources[0], shapes[what.inputs[0]], inputs[0])
        names[layer.name] = result
    return program, list(names.values())


def find_last_uses(quantized: QuantizedNetwork) -> dict[str, int]:
    """The number of the last layer that reads each result; a flatten may share its input's memory."""
    uses: dict[str, int] = {}
    for place, layer in enumerate(quantized.layers):
        uses.update(dict.fromkeys(layer.layer.inputs, place))
    uses.setdefault(quantized.output, len(quantized.layers))
    for layer in reversed(quantized.layers):
        if layer.layer.op == "flatten":
            source = layer.layer.inputs[0]
            uses[source] = uses[layer.name] = max(uses[source], uses[layer.name])
    return uses


def find_shapes(quantized: QuantizedNetwork) -> dict[str, Shape]:
    """Output shapes without the batch, from an empty batch."""
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for layer in quantized.layers:
            inputs = [found[name] for name in layer.layer.inputs] or [torch.empty(0, *quantized.input_shape)]
            found[layer.name] = compute_layer(layer.layer, inputs)
    return {name: tuple(result.shape[1:]) for name, result in found.items()}


def remark_on_float(quantized: QuantizedNetwork) -> tuple[str, ...]:
    names = [layer.name for layer in quantized.layers if layer.is_float]
    if not names:
        return ()
    return (f"in float32, including the conversions: {', '.join(names)}",)
