"""A quantized network executed with exact integers, by the rules of a profile: no kernel, no export, any machine.

Every layer's integers are there to be compared, and two executions that disagree do so first in one layer, which is
the one to look at. A layer that is kept in float is computed by torch in float32 from the numbers that its inputs stand
for; its last bits depend on how torch sums, so behind such a layer a kernel may differ by a tie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch.nn import functional

from scalelab.quantize.integer_ops import Accumulator, choose_dtype, finish, round_to_grid, sum_products, to_numbers
from scalelab.quantize.network import Grid, QuantizedLayer, QuantizedNetwork, compute_layer
from scalelab.quantize.profiles import Profile, find_profile

LOGITS = "logits"
"""The key of the last layer's result as float32. A layer of this name has it too, in place of its integers."""


def simulate(
    quantized: QuantizedNetwork,
    images: torch.Tensor,
    profile: str = "onnxruntime",
    *,
    accumulate: Accumulator = "float64",
) -> dict[str, torch.Tensor]:
    """The integers of every layer by name, and the result in float32 under `logits`, and under the name of a last layer
    that is not rounded."""
    results = dict(run_layers(quantized, images, find_profile(profile), accumulate))
    results[LOGITS] = read_logits(quantized.layers[-1], results[quantized.output])
    return results


def read_logits(last: QuantizedLayer, result: torch.Tensor) -> torch.Tensor:
    """The result of the last layer in float32."""
    return result if last.is_unrounded else to_numbers(result, last.output)


def simulate_logits(
    quantized: QuantizedNetwork,
    images: torch.Tensor,
    profile: str = "onnxruntime",
    *,
    accumulate: Accumulator = "float64",
    batch: int = 64,
) -> torch.Tensor:
    """The result alone, in float32, for any number of images: in batches, and no layer is kept longer than needed."""
    rules, last = find_profile(profile), quantized.layers[-1]
    results = []
    for start in range(0, len(images), batch):
        for name, integers in run_layers(quantized, images[start : start + batch], rules, accumulate):
            if name == last.name:
                results.append(read_logits(last, integers))
    return torch.cat(results)


def run_layers(
    quantized: QuantizedNetwork, images: torch.Tensor, profile: Profile, accumulator: Accumulator
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and integers of one layer after the other; what no later layer needs is let go."""
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
                integers = compute_integers(layer, [kept[name] for name in names], sources, profile, accumulator)
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
    accumulator: Accumulator = "float64",
) -> torch.Tensor:
    """One layer from the integers of its inputs, which lie on the grids `sources`."""
    what, grid = layer.layer, layer.output
    if layer.is_float:
        numbers = [to_numbers(tensor, source) for tensor, source in zip(inputs, sources, strict=True)]
        result = compute_layer(what, numbers)
        return result if layer.is_unrounded else round_to_grid(result, grid)
    if what.is_weighted:
        sums = sum_products(layer, inputs[0], sources[0], accumulator)
        if layer.is_unrounded:
            return profile.to_logits(sums, layer, sources[0])
        return finish(profile.scale(sums, layer, sources[0]), grid, what.has_relu)
    if what.op == "add":
        return profile.add(inputs, sources, grid, what.has_relu)
    if what.op == "average_pool":
        return profile.average(what, inputs[0], sources[0], grid)
    return pass_on(layer, inputs[0])


def pass_on(layer: QuantizedLayer, integers: torch.Tensor) -> torch.Tensor:
    """Layers that compute nothing which would have to be rounded: integers stay on the grid of the input."""
    what = layer.layer
    if what.op == "flatten":
        return integers.flatten(1)
    if what.op == "relu":
        return integers.clamp(min=layer.output.zero_point)
    assert what.kernel is not None
    largest = functional.max_pool2d(integers.to(torch.float32), what.kernel, what.stride, what.padding, what.dilation)
    return largest.to(choose_dtype(layer.output))
