"""The nodes of which an exported graph is made: constants that are shared, pairs of Quantize and Dequantize, layers.

A tensor is called after its layer: `conv1/q` are its integers, `conv1/f` the numbers that they stand for, `conv1/y` its
result before it is rounded. Only a node that is a layer has a name without a slash, so whatever runs can be led back to
it, also after onnxruntime has merged and renamed nodes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from scalelab.errors import UsageError
from scalelab.quantize.integer_ops import choose_dtype
from scalelab.quantize.network import Grid, Layer, QuantizedLayer

MICROSOFT = "com.microsoft"
"""The domain of integer operators that ONNX itself does not have."""


def load_package(name: str) -> Any:
    """`onnx` or `onnxruntime`, or what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"an int8 model needs {error.name}, which is not installed: pip install 'scalelab[quantize]'"
        ) from error


@dataclass(frozen=True, kw_only=True)
class GraphParts:
    """Nodes in the order of execution, and constants by name."""

    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)

    def add_constant(self, name: str, values: np.ndarray[Any, Any] | np.generic) -> str:
        """A constant; one of the same name is there already and is the same."""
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
        domain: str = "",
    ) -> str:
        """A node with one output, whose name comes back."""
        make_node = load_package("onnx.helper").make_node
        self.nodes.append(make_node(op, inputs, [output], name=name, domain=domain or None, **(attributes or {})))
        return output


def add_grid(parts: GraphParts, name: str, grid: Grid) -> list[str]:
    """The names of scale and zero point of a layer's result."""
    dtype = np.int8 if choose_dtype(grid) == torch.int8 else np.uint8
    scale = parts.add_constant(f"{name}/s", np.float32(grid.scale))
    return [scale, parts.add_constant(f"{dtype.__name__}/{grid.zero_point}", dtype(grid.zero_point))]


def add_weight(parts: GraphParts, layer: QuantizedLayer) -> list[str]:
    """The names of the integer weights of a layer, their scales and their zero points, which are 0."""
    assert layer.weight is not None
    assert layer.weight_scale is not None
    scales = shape_scales(layer.weight_scale)
    zeros = np.zeros(scales.shape, np.int8)
    # onnxruntime rewrites scalars where VNNI is missing, and fails on one that two layers share.
    zeros_name = f"zeros/{zeros.size}" if zeros.ndim else f"{layer.name}/wz"
    return [
        parts.add_constant(f"{layer.name}/w", layer.weight.numpy()),
        parts.add_constant(f"{layer.name}/ws", scales),
        parts.add_constant(zeros_name, zeros),
    ]


def add_weight_numbers(parts: GraphParts, layer: QuantizedLayer, source: Grid) -> list[str]:
    """The names of weights and bias of a layer behind the nodes that make numbers of them."""
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
    """One number for all channels is a scalar."""
    values: np.ndarray[Any, Any] = scales.to(torch.float32).numpy()
    return values if values.size > 1 else values.reshape(())


def list_attributes(layer: Layer) -> dict[str, object]:
    """The attributes of a convolution or a pooling, those that are not ONNX's defaults."""
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
    """The node of a layer on numbers, without its ReLU; for max pooling, flattening and ReLU on integers too."""
    if layer.op == "linear":
        return parts.add_node("Gemm", inputs, output, layer.name, {"transB": 1})
    names = {"conv": "Conv", "add": "Add", "max_pool": "MaxPool", "flatten": "Flatten", "relu": "Relu"}
    op = names.get(layer.op, "AveragePool" if layer.kernel is not None else "GlobalAveragePool")
    return parts.add_node(op, inputs, output, layer.name, list_attributes(layer))
