"""A captured network in float32: the result of every layer, which is what int8 is held against.

The operations are torch's own, with the batch norms folded, so results differ from the module's in the last bits only.
A `change` may stand in between: a quantizer rounds what a layer gave before the next one sees it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from scalelab.quantize.network import Layer, Network

Change = Callable[[Layer, torch.Tensor], torch.Tensor]
"""What is made of a layer's result before other layers see it."""


def run_float(network: Network, images: torch.Tensor, change: Change | None = None) -> dict[str, torch.Tensor]:
    """The float32 results of every layer by name, those with a ReLU after it."""
    results: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for layer in network.layers:
            inputs = [images.to(torch.float32)] if layer.op == "input" else [results[name] for name in layer.inputs]
            result = compute_layer(layer, inputs)
            results[layer.name] = change(layer, result) if change is not None else result
    return results


def compute_layer(layer: Layer, inputs: list[torch.Tensor]) -> torch.Tensor:
    """One layer in the numbers of its inputs, its ReLU included."""
    result = compute_sum(layer, inputs)
    return result.relu() if layer.has_relu else result


def compute_sum(layer: Layer, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The same before its ReLU."""
    first = inputs[0]
    if layer.op == "conv":
        assert layer.weight is not None
        shape = (layer.stride, layer.padding, layer.dilation)
        return functional.conv2d(first, layer.weight, layer.bias, *shape, groups=layer.groups)
    if layer.op == "linear":
        assert layer.weight is not None
        return functional.linear(first, layer.weight, layer.bias)
    if layer.op == "add":
        return first + inputs[1]
    if layer.op == "relu":
        return first.relu()
    if layer.op == "flatten":
        return first.flatten(1)
    return pool(layer, first) if layer.op != "input" else first


def pool(layer: Layer, images: torch.Tensor) -> torch.Tensor:
    if layer.op == "max_pool":
        assert layer.kernel is not None
        return functional.max_pool2d(images, layer.kernel, layer.stride, layer.padding, layer.dilation)
    if layer.kernel is None:
        return images.mean(dim=(2, 3), keepdim=True)
    return functional.avg_pool2d(images, layer.kernel, layer.stride, layer.padding)
