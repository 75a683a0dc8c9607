"""Every layer's integers, simulated and by the eager runtime, so that two executions can be compared layer by layer."""

from __future__ import annotations

import torch
from torch.nn import functional

from scalelab.quantize.eager import compile_text, write_layers
from scalelab.quantize.eager_kernels import make_average_multiplier, make_bias, make_multiplier
from scalelab.quantize.network import Grid, Layer, QuantizedLayer, QuantizedNetwork
from scalelab.quantize.simulate import (
    Profile,
    find_profile,
    finish,
    fuse_multiply_add,
    make_channels,
    make_scalar,
    read_logits,
    run_layers,
)


def simulate(
    quantized: QuantizedNetwork, images: torch.Tensor, profile: str = "onnxruntime"
) -> dict[str, torch.Tensor]:
    """The integers of every layer by name, and float32 `logits`."""
    return run_by(quantized, images, find_profile(profile))


def simulate_eager(quantized: QuantizedNetwork, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the eager runtime must give."""
    return run_by(quantized, images, ONEDNN)


def run_by(quantized: QuantizedNetwork, images: torch.Tensor, rules: Profile) -> dict[str, torch.Tensor]:
    results = dict(run_layers(quantized, images, rules))
    results["logits"] = read_logits(quantized.layers[-1], results[quantized.output])
    return results


def run_eager(quantized: QuantizedNetwork, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """The integers of every layer by torch's kernels; nothing is overwritten."""
    program, results = write_layers(quantized, reuses_memory=False)
    run = compile_text(program.finish(f"[{', '.join(results)}]", "List[Tensor]"))
    with torch.no_grad():
        found = run(images.to(torch.float32), program.tensors)
    return {layer.name: integers for layer, integers in zip(quantized.layers, found, strict=True)}


def scale_then_add_bias(sums: torch.Tensor, layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    return round_with_zero_point(scale_to_steps(sums, layer, source), layer.output)


def scale_to_steps(sums: torch.Tensor, layer: QuantizedLayer, source: Grid) -> torch.Tensor:
    """Before rounding; of a layer that is not rounded, the numbers that sums stand for."""
    multiplier = make_multiplier(layer, source)
    bias = make_bias(layer, multiplier)
    result = sums.to(torch.float32) * make_channels(multiplier, sums.dim())
    return result if bias is None else result + make_channels(bias, sums.dim())


def add_accumulated(integers: list[torch.Tensor], sources: list[Grid], grid: Grid, has_relu: bool) -> torch.Tensor:
    first, second = (
        tensor.to(torch.float32) - source.zero_point for tensor, source in zip(integers, sources, strict=True)
    )
    ratios = [make_scalar(source.scale) / make_scalar(grid.scale) for source in sources]
    steps = fuse_multiply_add(first, ratios[0], second * ratios[1])
    return finish(round_with_zero_point(steps, grid), grid, has_relu)


def average_by_ones(layer: Layer, integers: torch.Tensor, source: Grid, grid: Grid) -> torch.Tensor:
    centred = integers.to(torch.float64) - source.zero_point
    kernel = layer.kernel or (centred.shape[2], centred.shape[3])
    sums = functional.avg_pool2d(centred, kernel, layer.stride, layer.padding, divisor_override=1)
    multiplier = make_average_multiplier(source, grid, kernel[0] * kernel[1])
    return finish(round_with_zero_point(sums.to(torch.float32) * multiplier, grid), grid, layer.has_relu)


def round_with_zero_point(steps: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Steps rounded with the zero point in them, which is then taken off again: nothing is left to be rounded."""
    return torch.round(steps + grid.zero_point) - grid.zero_point


ONEDNN = Profile(scale=scale_then_add_bias, add=add_accumulated, average=average_by_ones, to_logits=scale_to_steps)
