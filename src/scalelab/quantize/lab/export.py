"""Export the lab's integer network to ONNX, with bit-equal logits.

ConvInteger and MatMulInteger give int32 sums; then bias, one float32 multiplication, Round (half to even), Clip: the
operations of `chain.py` in the same order.

Integers are stored as uint8 with zero point 128, weights too: kernels for signed weights add pairs of products in 16
bits on CPUs without VNNI, which silently saturates. That costs speed, which is not the lab's subject.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from scalelab.quantize.export import INPUT, OUTPUT, GraphParts, write_model
from scalelab.quantize.lab.chain import HIGH, LOW, LabLayer, LabNetwork
from scalelab.quantize.network import Layer
from scalelab.quantize.sessions import load_package

ZERO = -LOW
"""The zero point."""


def export_lab(network: LabNetwork, path: Path) -> int:
    """Write a model from float images to logits, integers from −128 to 127 as float32; returns its size in bytes."""
    types = load_package("onnx").TensorProto
    parts = GraphParts()
    scaled = add(parts, "Mul", [INPUT, hold_number(parts, network.input_scale)], "input/scaled")
    value = add_integers(parts, scaled, "input", LOW)
    for one in network.layers[1:]:
        if one.weight is None:
            value = pass_integers(parts, one.layer, value)
        else:
            scaled = scale_sums(parts, one, add_products(parts, one, value))
            value = add_integers(parts, scaled, one.name, 0 if one.layer.has_relu else LOW)
    unsigned = add(parts, "Cast", [value], "logits/unsigned", to=types.FLOAT)
    add(parts, "Sub", [unsigned, hold_number(parts, ZERO)], OUTPUT)
    return write_model(parts, network.input_shape, path)


def add(parts: GraphParts, op: str, inputs: list[str], name: str, **attributes: object) -> str:
    """A node named after its result."""
    return parts.add_node(op, inputs, name, name, attributes)


def hold_number(parts: GraphParts, value: float) -> str:
    return parts.add_constant(f"number/{value!r}", np.float32(value))


def hold_zero(parts: GraphParts, name: str) -> str:
    """A zero point per node: onnxruntime may rewrite a shared one."""
    return parts.add_constant(f"{name}/zero", np.uint8(ZERO))


def add_products(parts: GraphParts, one: LabLayer, value: str) -> str:
    """A layer's int32 sums with bias."""
    assert one.weight is not None
    weight = (one.weight.to(torch.int16) + ZERO).to(torch.uint8)
    is_conv = one.layer.op == "conv"
    stored = weight if is_conv else weight.t().contiguous()
    inputs = [
        value,
        parts.add_constant(f"{one.name}/w", stored.numpy()),
        hold_zero(parts, f"{one.name}/x"),
        hold_zero(parts, f"{one.name}/w"),
    ]
    attributes: dict[str, object] = {}
    if is_conv:
        height, width = weight.shape[2:]
        attributes = {**describe_window(one.layer, (height, width)), "group": one.layer.groups}
    op = "ConvInteger" if is_conv else "MatMulInteger"
    sums = parts.add_node(op, inputs, f"{one.name}/products", one.name, attributes)
    if one.bias is None:
        return sums
    shape = (1, -1, 1, 1) if is_conv else (1, -1)
    return add(
        parts, "Add", [sums, parts.add_constant(f"{one.name}/b", one.bias.reshape(shape).numpy())], f"{one.name}/sums"
    )


def describe_window(layer: Layer, kernel: tuple[int, int]) -> dict[str, object]:
    """Attributes that convolutions and poolings share."""
    return {
        "kernel_shape": list(kernel),
        "strides": list(layer.stride),
        "pads": [*layer.padding, *layer.padding],
        "dilations": list(layer.dilation),
    }


def scale_sums(parts: GraphParts, one: LabLayer, sums: str) -> str:
    as_float = add(parts, "Cast", [sums], f"{one.name}/float", to=load_package("onnx").TensorProto.FLOAT)
    return add(parts, "Mul", [as_float, hold_number(parts, one.output_scale)], f"{one.name}/scaled")


def add_integers(parts: GraphParts, scaled: str, name: str, low: int) -> str:
    """Round, clamp and store. `low` is 0 behind a ReLU."""
    rounded = add(parts, "Round", [scaled], f"{name}/rounded")
    ends = [hold_number(parts, low), hold_number(parts, HIGH)]
    clamped = add(parts, "Clip", [rounded, *ends], f"{name}/clamped")
    shifted = add(parts, "Add", [clamped, hold_number(parts, ZERO)], f"{name}/shifted")
    return add(parts, "Cast", [shifted], f"{name}/q", to=load_package("onnx").TensorProto.UINT8)


def pass_integers(parts: GraphParts, layer: Layer, value: str) -> str:
    """Pooling, flatten and ReLU on the stored integers."""
    result = f"{layer.name}/q"
    if layer.op == "flatten":
        return parts.add_node("Flatten", [value], result, layer.name, {"axis": 1})
    if layer.op == "relu":
        return parts.add_node("Clip", [value, hold_zero(parts, layer.name)], result, layer.name)
    assert layer.kernel is not None
    return parts.add_node("MaxPool", [value], result, layer.name, describe_window(layer, layer.kernel))
