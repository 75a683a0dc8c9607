"""Execute a quantized network with exact integers, by the rules of a kernel profile, on any machine.

A layer kept in float is computed by torch in float32, so behind it a kernel may differ by a tie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch.nn import functional

from scalelab.quantize.integer_ops import finish, round_to_grid, sum_products, to_numbers
from scalelab.quantize.network import Grid, QuantizedLayer, QuantizedNetwork, compute_layer
from scalelab.quantize.profiles import Profile, find_profile

BATCH = 64


def simulate_logits(quantized: QuantizedNetwork, images: torch.Tensor, profile: str = "onnxruntime") -> torch.Tensor:
    """The logits in float32, for any number of images."""
    rules, last = find_profile(profile), quantized.layers[-1]
    results = []
    for some in images.split(BATCH):
        for name, integers in run_layers(quantized, some, rules):
            if name == last.name:
                results.append(read_logits(last, integers))
    return torch.cat(results)


def read_logits(last: QuantizedLayer, result: torch.Tensor) -> torch.Tensor:
    """The last layer's output in float32."""
    return result if last.is_unrounded else to_numbers(result, last.output)


def run_layers(
    quantized: QuantizedNetwork, images: torch.Tensor, profile: Profile
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and integers of each layer in turn; tensors that no later layer needs are freed."""
    grids = {layer.name: layer.output for layer in quantized.layers}
    uses = Counter(name for layer in quantized.layers for name in layer.layer.inputs)
    kept: dict[str, torch.Tensor] = {}
    for layer in quantized.layers:
        names = layer.layer.inputs
        with torch.no_grad():
            if layer.layer.op == "input":
                integers = round_to_grid(images, layer.output)
            else:
                sources = [grids[name] for name in names]
                integers = compute_integers(layer, [kept[name] for name in names], sources, profile)
        yield layer.name, integers
        kept[layer.name] = integers
        uses.subtract(names)
        for name in set(names):
            if not uses[name]:
                del kept[name]


def compute_integers(
    layer: QuantizedLayer,
    inputs: list[torch.Tensor],
    sources: list[Grid],
    profile: Profile,
) -> torch.Tensor:
    """One layer, from the integers of its inputs on the grids `sources`."""
    what, grid = layer.layer, layer.output
    if layer.is_float:
        numbers = [to_numbers(tensor, source) for tensor, source in zip(inputs, sources, strict=True)]
        result = compute_layer(what, numbers)
        return result if layer.is_unrounded else round_to_grid(result, grid)
    if what.is_weighted:
        sums = sum_products(layer, inputs[0], sources[0])
        if layer.is_unrounded:
            return profile.to_logits(sums, layer, sources[0])
        return finish(profile.scale(sums, layer, sources[0]), grid, what.has_relu)
    if what.op == "add":
        return profile.add(inputs, sources, grid, what.has_relu)
    if what.op == "average_pool":
        return profile.average(what, inputs[0], sources[0], grid)
    return pass_on(layer, inputs[0])


def pass_on(layer: QuantizedLayer, integers: torch.Tensor) -> torch.Tensor:
    """Layers that round nothing: integers stay on the grid of the input."""
    what = layer.layer
    if what.op == "flatten":
        return integers.flatten(1)
    if what.op == "relu":
        return integers.clamp(min=layer.output.zero_point)
    assert what.kernel is not None
    largest = functional.max_pool2d(integers.to(torch.float32), what.kernel, what.stride, what.padding, what.dilation)
    return largest.to(torch.uint8)
