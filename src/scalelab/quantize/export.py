"""A quantized network as an ONNX file, in one of two forms that onnxruntime executes by the same integer kernels.

`qdq`, the default, is the form that other runtimes read too: operators on numbers, with a QuantizeLinear behind each
and a DequantizeLinear before. A runtime that knows integer kernels merges the three. onnxruntime does so when its graph
optimizations are on; with them off it computes numbers in float32, and sums that are rounded at every addition end on
the other side of a tie once in about 100,000 results, which later layers take on.

`operators` names the integer operators themselves (QLinearConv of ONNX; QGemm, QLinearAdd and the average poolings of
onnxruntime). They run as they are, optimizations on or off, to the same integers. Only onnxruntime reads it.

Choices that both share:

- Activations are uint8, weights int8 with one scale per output channel, biases int32 in units of s_x·s_w: what x86
  multiplies fastest. Grids with negative integers are written as int8. On x86, onnxruntime merges no qdq around signed
  activations, and they run in float; as `operators` they run in int8.
- A ReLU costs nothing where the zero point is the least integer: saturation is the ReLU, and no node is written. With
  another zero point it is a Clip of bytes behind the layer. A float Relu in between would keep onnxruntime from
  merging, and the layer would silently run in float.
- A last layer that is not rounded has no QuantizeLinear behind it: onnxruntime has a QGemm whose result is float32.
- Max pooling and flattening are written on bytes. They compute nothing that has to be rounded.
- A layer that is kept in float has a Max between it and its QuantizeLinear: with 0 for a ReLU, otherwise with the least
  number of its grid, which changes nothing. Without it onnxruntime would quantize the float weights itself, with one
  scale for the tensor, and run in int8 what was meant to stay in float.

Every file is checked by ONNX's checker and run once before it is called written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from scalelab.errors import UsageError
from scalelab.quantize.export_nodes import (
    MICROSOFT,
    GraphParts,
    add_float_weight,
    add_grid,
    add_operation,
    add_weight,
    add_weight_numbers,
    list_attributes,
    load_package,
)
from scalelab.quantize.network import PASSING, Grid, Network, QuantizedLayer, QuantizedNetwork
from scalelab.quantize.sessions import open_session, run_session
from scalelab.records.files import storage_errors

Form = Literal["qdq", "operators"]
OPSET = 19
IR_VERSION = 9
"""Those of ONNX 1.14: what onnxruntime 1.15 and later read."""
INPUT, OUTPUT = "images", "logits"


def export_onnx(quantized: QuantizedNetwork, path: Path | str, *, form: Form = "qdq") -> int:
    """Writes the int8 model; its size in bytes. Images in float32 go in, logits in float32 come out."""
    parts = GraphParts()
    sources = {layer.name: layer for layer in quantized.layers}
    for layer in quantized.layers:
        grids = [sources[name].output for name in layer.layer.inputs]
        add_quantized_layer(parts, layer, grids, form)
    if not quantized.layers[-1].is_unrounded:
        add_numbers(parts, quantized.layers[-1], OUTPUT)
    return write_model(parts, quantized.input_shape, Path(path))


def export_float_onnx(network: Network, path: Path | str) -> int:
    """Writes the same graph in float32; its size in bytes."""
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


def name_result(network: Network, name: str) -> str:
    if name == network.layers[0].name:
        return INPUT
    return OUTPUT if name == network.output else f"{name}/y"


def add_quantized_layer(parts: GraphParts, layer: QuantizedLayer, sources: list[Grid], form: Form) -> None:
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
    clips = what.has_relu and not layer.is_float and layer.output.zero_point != layer.output.low
    result = OUTPUT if layer.is_unrounded else f"{name}/sum" if clips else f"{name}/q"
    if form == "operators" and not layer.is_float:
        add_integer_operator(parts, layer, sources, result)
    else:
        add_rounded_operation(parts, layer, sources, result)
    if clips:
        add_clip(parts, layer, result, f"{name}/relu")


def add_rounded_operation(parts: GraphParts, layer: QuantizedLayer, sources: list[Grid], result: str) -> None:
    """Numbers in, the operation, rounded to the layer's grid if there is one."""
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


def add_integer_operator(parts: GraphParts, layer: QuantizedLayer, sources: list[Grid], result: str) -> None:
    """The operator on integers that onnxruntime would make of the same layer."""
    what = layer.layer
    inputs: list[str] = []
    for source, grid in zip(what.inputs, sources, strict=True):
        inputs += [f"{source}/q", *add_grid(parts, source, grid)]
    own = [] if layer.is_unrounded else add_grid(parts, layer.name, layer.output)
    bias = [] if layer.bias is None else [parts.add_constant(f"{layer.name}/b", layer.bias.numpy())]
    attributes = list_attributes(what)
    if what.op == "conv":
        inputs += [*add_weight(parts, layer), *own, *bias]
        parts.add_node("QLinearConv", inputs, result, layer.name, attributes)
        return
    if what.op == "linear":
        inputs += [*add_weight(parts, layer), *(bias or [""]), *own]
        parts.add_node("QGemm", inputs, result, layer.name, {"transB": 1}, MICROSOFT)
        return
    pooling = "QLinearGlobalAveragePool" if what.kernel is None else "QLinearAveragePool"
    op = "QLinearAdd" if what.op == "add" else pooling
    parts.add_node(op, inputs + own, result, layer.name, attributes, MICROSOFT)


def add_clip(parts: GraphParts, layer: QuantizedLayer, integers: str, name: str) -> None:
    """A ReLU on integers: none below the zero point."""
    zero_point = add_grid(parts, layer.name, layer.output)[1]
    parts.add_node("Clip", [integers, zero_point], f"{layer.name}/q", name)


def add_numbers(parts: GraphParts, layer: QuantizedLayer, output: str) -> None:
    """The result of the last layer in float32."""
    inputs = [f"{layer.name}/q", *add_grid(parts, layer.name, layer.output)]
    parts.add_node("DequantizeLinear", inputs, output, f"/{output}")


def require_same_grid(layer: QuantizedLayer, source: Grid) -> None:
    if layer.output != source:
        raise UsageError(
            f"layer {layer.name} ({layer.layer.op}) has a different grid than its input, {layer.output} and {source}: "
            f"use the grid of its input"
        )


def write_model(parts: GraphParts, input_shape: tuple[int, ...], path: Path) -> int:
    """A file that ONNX's checker and onnxruntime have accepted; its size in bytes."""
    onnx, helper = load_package("onnx"), load_package("onnx.helper")
    images = helper.make_tensor_value_info(INPUT, onnx.TensorProto.FLOAT, ["batch", *input_shape])
    logits = helper.make_tensor_value_info(OUTPUT, onnx.TensorProto.FLOAT, ["batch", None])
    graph = helper.make_graph(parts.nodes, "scalelab", [images], [logits], list(parts.constants.values()))
    domains = sorted({node.domain for node in parts.nodes} | {""})
    opsets = [helper.make_opsetid(domain, 1 if domain else OPSET) for domain in domains]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="scalelab")
    content: bytes = model.SerializeToString()
    onnx.checker.check_model(content)
    check_running(content, input_shape)
    with storage_errors(path, "path"):
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        scratch.write_bytes(content)
        scratch.replace(path)
    return len(content)


def check_running(model: Any, input_shape: tuple[int, ...]) -> None:
    """One run on two empty images: a model that cannot be executed is not written."""
    logits = run_session(open_session(model), torch.zeros(2, *input_shape))
    if not np.isfinite(logits.numpy()).all():
        raise UsageError("the exported model returns non-finite values: check its weights and scales")
