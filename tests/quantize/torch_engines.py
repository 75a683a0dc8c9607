"""Layers by the int8 kernels of torch itself, by engine: what the profiles qnnpack and fbgemm are held against.

An engine is chosen for all of torch when weights are packed, so it is set for one call and put back. Its kernels take
weights as quantized tensors and the bias as numbers; qnnpack turns that back into the int32 it came from.

torch calls these operators deprecated, and a later one may not have them: `list_engines` says which are there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from scalelab.errors import UnknownName
from scalelab.quantize.network import Grid, QuantizedLayer, QuantizedNetwork
from scalelab.quantize.simulate import compute_integers, dequantize_bias, find_profile
from tests.quantize.simulated import simulate

ENGINES = ("qnnpack", "fbgemm")


def list_engines() -> tuple[str, ...]:
    """Those of torch's engines that a profile reproduces and that this torch still has."""
    if not hasattr(torch.ops.quantized, "conv2d_prepack"):
        return ()
    return tuple(name for name in ENGINES if name in torch.backends.quantized.supported_engines)


@contextmanager
def use_engine(name: str) -> Iterator[None]:
    """That engine inside, the one that was set before afterwards."""
    if name not in list_engines():
        raise UnknownName("int8 engine of this torch", name, list_engines())
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.quantized.engine = before


def run_kernel(engine: str, layer: QuantizedLayer, integers: torch.Tensor, source: Grid) -> torch.Tensor:
    """The integers of a convolution or linear layer by an engine's kernel, from those of its input."""
    what, grid, operators = layer.layer, layer.output, torch.ops.quantized
    bias = None if layer.bias is None else dequantize_bias(layer, source)
    with use_engine(engine), torch.no_grad():
        inputs = torch._make_per_tensor_quantized_tensor(integers, source.scale, source.zero_point)
        if what.op == "linear":
            packed = operators.linear_prepack(make_quantized_weight(layer), bias)
            run = operators.linear_relu if what.has_relu else operators.linear
        else:
            shape = (list(what.stride), list(what.padding), list(what.dilation), what.groups)
            packed = operators.conv2d_prepack(make_quantized_weight(layer), bias, *shape)
            run = operators.conv2d_relu if what.has_relu else operators.conv2d
        result: torch.Tensor = run(inputs, packed, grid.scale, grid.zero_point).int_repr()
    return result


def make_quantized_weight(layer: QuantizedLayer) -> torch.Tensor:
    """The weights of a layer as torch's quantized tensor."""
    assert layer.weight is not None
    assert layer.weight_scale is not None
    scales = layer.weight_scale
    if len(scales) == 1:
        return torch._make_per_tensor_quantized_tensor(layer.weight, float(scales), 0)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    return torch._make_per_channel_quantized_tensor(layer.weight, scales.to(torch.float64), zeros, 0)


def count_differences(quantized: QuantizedNetwork, images: torch.Tensor, engine: str) -> dict[str, int]:
    """How many integers of each convolution and linear layer the engine's kernel and its profile give differently, for
    the same integers of its input."""
    results = simulate(quantized, images, engine)
    differences = {}
    for layer in quantized.layers:
        if layer.layer.is_weighted and not layer.is_float:
            name = layer.layer.inputs[0]
            source = quantized.find(name).output
            rounded = replace(layer, is_unrounded=False)
            ours = compute_integers(rounded, [results[name]], [source], find_profile(engine))
            differences[layer.name] = int((run_kernel(engine, rounded, results[name], source) != ours).sum())
    return differences
