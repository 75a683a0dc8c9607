"""Export a network to ONNX, in float32 and in int8.

The int8 file is in QDQ form, which other runtimes read too: float operators with a QuantizeLinear behind and a
DequantizeLinear before each. onnxruntime fuses the three into integer kernels when graph optimizations are on. With
them off it computes in float32, and about one result in 100,000 lands on the other side of a tie.

- Activations are uint8, weights int8 with one scale per output channel, biases int32 in units of s_x·s_w: what x86
  multiplies fastest.
- A ReLU costs nothing if the zero point is the least integer: saturation is the ReLU. With another zero point it is
  a Clip of bytes; a float Relu would keep onnxruntime from fusing, and the layer would silently run in float.
- An unrounded last layer has no QuantizeLinear: onnxruntime has a QGemm with float32 output.
- Max pooling and flatten are written on bytes.
- A layer kept in float has a Max between it and its QuantizeLinear: with 0 for a ReLU, otherwise with the least number
  of its grid, which changes nothing. Without it onnxruntime would quantize the float weights by itself.

Tensors are named after their layer: `conv1/q` its integers, `conv1/f` their numbers, `conv1/y` its output before
rounding. Only a layer's own node has a name without a slash, so whatever ran can be traced back to its layer.

Every file passes ONNX's checker and one run before it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scalelab.errors import UsageError
from scalelab.quantize.network import PASSING, CapturedNetwork, Grid, Layer, QuantizedLayer, QuantizedNetwork
from scalelab.quantize.sessions import (
    LayerKernel,
    list_fallbacks,
    load_package,
    open_session,
    profile_layers,
    run_session,
)
from scalelab.records.files import storage_errors, write_atomically
from scalelab.records.quantized import LayerReport

OPSET = 19
IR_VERSION = 9
"""Those of ONNX 1.14: what onnxruntime 1.15 and later read."""
INPUT, OUTPUT = "images", "logits"
FLOAT_FILE, INT8_FILE = "float32.onnx", "int8.onnx"
Run = Callable[[torch.Tensor], torch.Tensor]


def export_models(network: CapturedNetwork, quantized: QuantizedNetwork, directory: Path) -> dict[str, Run]:
    """Write and open both models; returns what runs them, by runtime."""
    export_float_onnx(network, directory / FLOAT_FILE)
    export_onnx(quantized, directory / INT8_FILE)
    files = {"onnxruntime-float32": FLOAT_FILE, "onnxruntime-int8": INT8_FILE}
    return {name: partial(run_session, open_session(directory / file)) for name, file in files.items()}


def list_sizes(directory: Path) -> tuple[tuple[str, int], ...]:
    """Bytes of the files."""
    return tuple((name, (directory / name).stat().st_size) for name in (FLOAT_FILE, INT8_FILE))


def name_kernels(
    directory: Path, layers: Sequence[LayerReport], images: torch.Tensor
) -> tuple[tuple[LayerReport, ...], tuple[str, ...]]:
    """The layers with their int8 kernel and the times of both models, and remarks on fallbacks."""
    found = profile_layers(directory / INT8_FILE, images)
    int8 = {kernel.layer: kernel for kernel in found}
    floats = {kernel.layer: kernel for kernel in profile_layers(directory / FLOAT_FILE, images)}
    told = tuple(_add_kernel(layer, int8.get(layer.name), floats.get(layer.name)) for layer in layers)
    return told, list_fallbacks(found)


def _add_kernel(layer: LayerReport, int8: LayerKernel | None, before: LayerKernel | None) -> LayerReport:
    kernel = "" if int8 is None else "float" if int8.is_float else int8.kernel
    return replace(
        layer,
        kernel=kernel,
        seconds=None if int8 is None or not int8.kernel else int8.seconds,
        float_seconds=before.seconds or None if before is not None else None,
    )


def export_onnx(quantized: QuantizedNetwork, path: Path | str) -> int:
    """Write the int8 model (float32 images to float32 logits); returns its size in bytes."""
    parts = GraphParts()
    sources = {layer.name: layer for layer in quantized.layers}
    for layer in quantized.layers:
        grids = [sources[name].output for name in layer.layer.inputs]
        add_quantized_layer(parts, layer, grids)
    if not quantized.layers[-1].is_unrounded:
        add_numbers(parts, quantized.layers[-1], OUTPUT)
    return write_model(parts, quantized.input_shape, Path(path))


def export_float_onnx(network: CapturedNetwork, path: Path | str) -> int:
    """Write the same graph in float32; returns its size in bytes."""
    parts = GraphParts()
    for layer in network.layers[1:]:
        inputs = [name_result(network, name) for name in layer.inputs]
        if layer.is_weighted:
            inputs += add_float_weight(parts, layer)
        result = name_result(network, layer.name)
        add_operation(parts, layer, inputs, f"{layer.name}/sum" if layer.has_relu else result)
        if layer.has_relu:
            parts.add_node("Relu", [f"{layer.name}/sum"], result, f"{layer.name}/relu")
    return write_model(parts, network.input_shape, Path(path))


def name_result(network: CapturedNetwork, name: str) -> str:
    if name == network.layers[0].name:
        return INPUT
    return OUTPUT if name == network.output else f"{name}/y"


def add_quantized_layer(parts: GraphParts, layer: QuantizedLayer, sources: list[Grid]) -> None:
    """The nodes from the integers of a layer's inputs to its own, `name/q`."""
    what, name = layer.layer, layer.name
    integers = [f"{source}/q" for source in what.inputs]
    if what.op == "input":
        parts.add_node("QuantizeLinear", [INPUT, *add_grid(parts, name, layer.output)], f"{name}/q", name)
        return
    if what.op in PASSING and not layer.is_float:
        require_same_grid(layer, sources[0])
        if what.op == "relu":
            add_clip(parts, layer, integers[0], name)
        else:
            add_operation(parts, what, integers, f"{name}/q")
        return
    clips = what.has_relu and not layer.is_float and layer.output.zero_point != 0
    result = OUTPUT if layer.is_unrounded else f"{name}/sum" if clips else f"{name}/q"
    add_rounded_operation(parts, layer, sources, result)
    if clips:
        add_clip(parts, layer, result, f"{name}/relu")


def add_rounded_operation(parts: GraphParts, layer: QuantizedLayer, sources: list[Grid], result: str) -> None:
    """Dequantize the inputs, compute, and quantize to the layer's grid."""
    what, name = layer.layer, layer.name
    inputs = []
    for source, grid in zip(what.inputs, sources, strict=True):
        inputs.append(f"{source}/f")
        if not any(node.output[0] == f"{source}/f" for node in parts.nodes):
            quantized = [f"{source}/q", *add_grid(parts, source, grid)]
            parts.add_node("DequantizeLinear", quantized, f"{source}/f", f"{source}/f")
    if what.is_weighted:
        inputs += add_float_weight(parts, what) if layer.is_float else add_weight_numbers(parts, layer, sources[0])
    if layer.is_unrounded:
        add_operation(parts, what, inputs, result)
        return
    numbers = add_operation(parts, what, inputs, f"{name}/y")
    if layer.is_float:
        least = np.float32(0 if what.has_relu else layer.output.range[0])
        numbers = parts.add_node("Max", [numbers, parts.add_constant(f"{name}/least", least)], f"{name}/r", f"{name}/r")
    parts.add_node("QuantizeLinear", [numbers, *add_grid(parts, name, layer.output)], result, f"{name}/q")


def add_clip(parts: GraphParts, layer: QuantizedLayer, integers: str, name: str) -> None:
    """A ReLU on integers: a lower bound at the zero point."""
    zero_point = add_grid(parts, layer.name, layer.output)[1]
    parts.add_node("Clip", [integers, zero_point], f"{layer.name}/q", name)


def add_numbers(parts: GraphParts, layer: QuantizedLayer, output: str) -> None:
    """Dequantize the last layer."""
    inputs = [f"{layer.name}/q", *add_grid(parts, layer.name, layer.output)]
    parts.add_node("DequantizeLinear", inputs, output, f"/{output}")


def require_same_grid(layer: QuantizedLayer, source: Grid) -> None:
    if layer.output != source:
        raise UsageError(
            f"layer {layer.name} ({layer.layer.op}) has a different grid than its input, {layer.output} and {source}: "
            f"use the grid of its input"
        )


def write_model(parts: GraphParts, input_shape: tuple[int, ...], path: Path) -> int:
    """Check, run and write a model; returns its size in bytes."""
    onnx, helper = load_package("onnx"), load_package("onnx.helper")
    images = helper.make_tensor_value_info(INPUT, onnx.TensorProto.FLOAT, ["batch", *input_shape])
    logits = helper.make_tensor_value_info(OUTPUT, onnx.TensorProto.FLOAT, ["batch", None])
    graph = helper.make_graph(parts.nodes, "scalelab", [images], [logits], list(parts.constants.values()))
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="scalelab")
    content: bytes = model.SerializeToString()
    onnx.checker.check_model(content)
    check_running(content, input_shape)
    with storage_errors(path, "path"):
        write_atomically(path, content)
    return len(content)


def check_running(model: Any, input_shape: tuple[int, ...]) -> None:
    """One run on two empty images: a model that does not run is not written."""
    logits = run_session(open_session(model), torch.zeros(2, *input_shape))
    if not np.isfinite(logits.numpy()).all():
        raise UsageError("the exported model returns non-finite values: check its weights and scales")


@dataclass(frozen=True, kw_only=True)
class GraphParts:
    """Nodes in execution order, and constants by name."""

    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)

    def add_constant(self, name: str, values: np.ndarray[Any, Any] | np.generic) -> str:
        """Add a constant unless it is there; returns its name."""
        if name not in self.constants:
            self.constants[name] = load_package("onnx.numpy_helper").from_array(np.asarray(values), name)
        return name

    def add_node(
        self,
        op: str,
        inputs: list[str],
        output: str,
        name: str,
        attributes: Mapping[str, object] | None = None,
    ) -> str:
        """Add a node with one output; returns the output's name."""
        make_node = load_package("onnx.helper").make_node
        self.nodes.append(make_node(op, inputs, [output], name=name, **(attributes or {})))
        return output


def add_grid(parts: GraphParts, name: str, grid: Grid) -> list[str]:
    """The names of a layer's output scale and zero point."""
    scale = parts.add_constant(f"{name}/s", np.float32(grid.scale))
    return [scale, parts.add_constant(f"uint8/{grid.zero_point}", np.uint8(grid.zero_point))]


def add_weight(parts: GraphParts, layer: QuantizedLayer) -> list[str]:
    """The names of a layer's integer weights, scales and zero points (0)."""
    assert layer.weight is not None
    assert layer.weight_scale is not None
    scales = shape_scales(layer.weight_scale)
    zeros = np.zeros(scales.shape, np.int8)
    return [
        parts.add_constant(f"{layer.name}/w", layer.weight.numpy()),
        parts.add_constant(f"{layer.name}/ws", scales),
        # onnxruntime rewrites zero points where VNNI is missing, and fails on one that two layers share.
        parts.add_constant(f"{layer.name}/wz", zeros),
    ]


def add_weight_numbers(parts: GraphParts, layer: QuantizedLayer, source: Grid) -> list[str]:
    """The names of a layer's dequantized weights and bias."""
    assert layer.weight_scale is not None
    name = layer.name
    axis: dict[str, object] = {"axis": 0} if layer.weight_scale.numel() > 1 else {}
    names = [parts.add_node("DequantizeLinear", add_weight(parts, layer), f"{name}/wf", f"{name}/wf", axis)]
    if layer.bias is not None:
        unit = torch.tensor(source.scale, dtype=torch.float32) * layer.weight_scale
        scale = parts.add_constant(f"{name}/bs", shape_scales(unit))
        bias = parts.add_constant(f"{name}/b", layer.bias.numpy())
        names.append(parts.add_node("DequantizeLinear", [bias, scale], f"{name}/bf", f"{name}/bf", axis))
    return names


def add_float_weight(parts: GraphParts, layer: Layer) -> list[str]:
    assert layer.weight is not None
    names = [parts.add_constant(f"{layer.name}/w", layer.weight.detach().numpy())]
    if layer.bias is not None:
        names.append(parts.add_constant(f"{layer.name}/b", layer.bias.detach().numpy()))
    return names


def shape_scales(scales: torch.Tensor) -> np.ndarray[Any, Any]:
    """A single scale becomes a scalar."""
    values: np.ndarray[Any, Any] = scales.to(torch.float32).numpy()
    return values if values.size > 1 else values.reshape(())


def list_attributes(layer: Layer) -> dict[str, object]:
    """Attributes of a convolution or pooling that differ from ONNX's defaults."""
    attributes: dict[str, object] = {}
    if layer.kernel is not None:
        attributes["kernel_shape"] = layer.kernel
    if layer.stride != (1, 1):
        attributes["strides"] = layer.stride
    if layer.padding != (0, 0):
        attributes["pads"] = [*layer.padding, *layer.padding]
    if layer.dilation != (1, 1):
        attributes["dilations"] = layer.dilation
    if layer.groups != 1:
        attributes["group"] = layer.groups
    if layer.op == "average_pool" and layer.kernel is not None:
        attributes["count_include_pad"] = 1
    return attributes


def add_operation(parts: GraphParts, layer: Layer, inputs: list[str], output: str) -> str:
    """The node of a layer without its ReLU; max pooling, flatten and ReLU also work on integers."""
    if layer.op == "linear":
        return parts.add_node("Gemm", inputs, output, layer.name, {"transB": 1})
    names = {"conv": "Conv", "add": "Add", "max_pool": "MaxPool", "flatten": "Flatten", "relu": "Relu"}
    op = names.get(layer.op, "AveragePool" if layer.kernel is not None else "GlobalAveragePool")
    return parts.add_node(op, inputs, output, layer.name, list_attributes(layer))
