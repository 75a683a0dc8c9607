"""What int8 does to every layer, and what the layer then does to the answer.

A layer is rounded in two places: its weights, to their integers, and its result, to its grid. Both are played in
float32 here, so that any set of layers can be in int8 and the others in float, which no runtime offers:

    all       every layer rounds: what the int8 network computes, but for rare results that lie half-way between two
              integers
    only      one layer rounds, on inputs that are exact
    without   all layers round but one

    SQNR = 10 · log₁₀( Σ x² / Σ (x − x̂)² )   in decibels, x in float, x̂ with rounding; 6 dB are one bit

SQNR of a layer's own result can mislead: a channel with a large range hides the rounding of the others in its own
signal. What counts is the noise in the logits with only this layer in int8 (`output_sqnr`), and how many samples are
still right. Where logits are rounded too (`rounds_logits`), that is left out of it: in a sound network it is the
largest part, which would make the last layer the worst of all. Layers that only pass integers on (pooling by maximum,
flattening) round nothing and are not looked at.

All layers before the one that is changed are taken from a run that was made anyway: a trial costs the layers after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from scalelab.quantize.network import (
    HIGHEST,
    PASSING,
    Grid,
    Layer,
    Network,
    QuantizedLayer,
    QuantizedNetwork,
    compute_layer,
)
from scalelab.records.quantized import LayerReport

Results = dict[str, torch.Tensor]

CHUNK = 32
"""Samples at once: the results of all layers are kept for them, twice."""
MOST_MULTIPLY_ADDS = 2e12
"""What trying every layer alone may cost: about a minute on one core."""
FEWEST_TESTED = 64
IMAGES = ""
"""What the samples themselves are called among results; no layer has this name."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Every layer that rounds, in the order of execution."""

    layers: tuple[LayerReport, ...]
    correct_float: int | None
    """Right predictions among the samples; None without their classes."""
    correct_int8: int | None


@dataclass
class Tally:
    """Sums over samples of one layer."""

    signal: float = 0.0
    noise: float = 0.0
    noise_alone: float = 0.0
    output_noise: float = 0.0
    num_results: int = 0
    num_clipped: int = 0
    correct_only: int = 0
    correct_without: int = 0
    least: torch.Tensor | None = None
    largest: torch.Tensor | None = None


@dataclass
class Rounding:
    """The network with, for every layer that rounds, the layer on rounded weights and the grid of its result."""

    network: Network
    rounded: Mapping[str, Layer]
    grids: Mapping[str, Grid | None]
    """None where the result is not rounded."""
    places: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.places = {layer.name: number for number, layer in enumerate(self.network.layers)}

    def run(self, results: Results, names: Iterable[str], first: int = 0) -> Results:
        """The results from layer number `first` on, with these layers in int8; `results` has those before it."""
        chosen, found = set(names), dict(results)
        for layer in self.network.layers[first:]:
            found[layer.name] = self.compute(layer, found, is_rounded=layer.name in chosen)
        return found

    def compute(self, layer: Layer, results: Results, *, is_rounded: bool) -> torch.Tensor:
        inputs = [results[IMAGES]] if layer.op == "input" else [results[name] for name in layer.inputs]
        if not is_rounded:
            return compute_layer(layer, inputs)
        grid = self.grids[layer.name]
        numbers = compute_layer(self.rounded[layer.name], inputs)
        return numbers if grid is None else round_to_grid(numbers, grid)

    def clip_output(self, results: Results) -> torch.Tensor:
        """The answer from rounded weights, held to its range but not rounded."""
        last = self.rounded[self.network.output]
        answer = compute_layer(last, [results[name] for name in last.inputs or (IMAGES,)])
        grid = self.grids[last.name]
        return answer if grid is None else answer.clamp(*grid.range)


def make_rounding(network: Network, quantized: QuantizedNetwork) -> Rounding:
    """What every layer that rounds would be; layers that are kept in float keep their weights."""
    named = {layer.name: layer for layer in quantized.layers}
    rounding = [layer for layer in quantized.layers if layer.layer.op not in PASSING]
    return Rounding(
        network=network,
        rounded={layer.name: dequantize_layer(layer, named) for layer in rounding},
        grids={layer.name: None if layer.is_unrounded else layer.output for layer in rounding},
    )


def dequantize_layer(quantized: QuantizedLayer, named: Mapping[str, QuantizedLayer]) -> Layer:
    """The layer with the numbers that its integers stand for."""
    layer, scale = quantized.layer, quantized.weight_scale
    if quantized.is_float or quantized.weight is None or scale is None:
        return layer
    shape = (-1,) + (1,) * (quantized.weight.dim() - 1)
    weight = quantized.weight.to(torch.float32) * scale.reshape(shape)
    bias = layer.bias
    if quantized.bias is not None:
        bias = (
            quantized.bias.to(torch.float64) * scale.double().reshape(-1) * named[layer.inputs[0]].output.scale
        ).float()
    return replace(layer, weight=weight, bias=bias)


def round_to_grid(numbers: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The nearest numbers that the grid has."""
    steps = torch.round(numbers / grid.scale) + grid.zero_point
    return (steps.clamp_(0, HIGHEST) - grid.zero_point) * grid.scale


def diagnose(
    network: Network, quantized: QuantizedNetwork, images: torch.Tensor, labels: torch.Tensor | None
) -> Diagnosis:
    """Every layer tried on these samples: alone in int8, and alone in float."""
    rounding = make_rounding(network, quantized)
    tallies = {name: Tally() for name in rounding.grids}
    totals = [0, 0]
    output_signal = 0.0
    with torch.no_grad():
        for chunk, truth in split_samples(images, labels):
            exact = rounding.run({IMAGES: chunk}, ())
            noisy = rounding.run({IMAGES: chunk}, rounding.grids)
            output_signal += sum_squares(exact[network.output])
            for number, results in enumerate((exact, noisy)):
                totals[number] += count_right(results[network.output], truth)
            for name, tally in tallies.items():
                look_at_result(tally, exact[name], noisy[name], rounding.grids[name])
                try_only(rounding, name, exact, truth, tally)
                try_without(rounding, name, noisy, truth, tally)
    num_tested = None if labels is None else len(images)
    counts = count_multiply_adds(network, images.shape[1:])
    reports = [
        replace(make_report(quantized.find(name), tally, output_signal, num_tested), multiply_adds=counts.get(name, 0))
        for name, tally in tallies.items()
    ]
    count_float, count_int8 = (None if labels is None else total for total in totals)
    return Diagnosis(layers=tuple(reports), correct_float=count_float, correct_int8=count_int8)


def split_samples(
    images: torch.Tensor, labels: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    for start in range(0, len(images), CHUNK):
        yield images[start : start + CHUNK], None if labels is None else labels[start : start + CHUNK]


def look_at_result(tally: Tally, exact: torch.Tensor, noisy: torch.Tensor, grid: Grid | None) -> None:
    """How far the layer's result is from float with everything in int8, what is clipped, which channels never move."""
    tally.signal += sum_squares(exact)
    tally.noise += sum_squares(noisy - exact)
    if grid is not None:
        (low, high), half = grid.range, grid.scale / 2
        tally.num_clipped += int(((exact < low - half) | (exact > high + half)).sum())
    tally.num_results += exact.numel()
    channels = noisy.transpose(0, 1).flatten(1)
    least, largest = channels.amin(dim=1), channels.amax(dim=1)
    tally.least = least if tally.least is None else torch.minimum(tally.least, least)
    tally.largest = largest if tally.largest is None else torch.maximum(tally.largest, largest)


def try_only(rounding: Rounding, name: str, exact: Results, labels: torch.Tensor | None, tally: Tally) -> None:
    """The layer alone in int8: the noise of its result, and what it does to the answer."""
    place, output = rounding.places[name], rounding.network.output
    results = rounding.run(exact, (name,), place)
    tally.noise_alone += sum_squares(results[name] - exact[name])
    answer = results[output] if name != output else rounding.clip_output(exact)
    tally.output_noise += sum_squares(answer - exact[output])
    tally.correct_only += count_right(results[output], labels)


def try_without(rounding: Rounding, name: str, noisy: Results, labels: torch.Tensor | None, tally: Tally) -> None:
    """All layers but this one in int8."""
    if labels is None:
        return
    others = (other for other in rounding.grids if other != name)
    results = rounding.run(noisy, others, rounding.places[name])
    tally.correct_without += count_right(results[rounding.network.output], labels)


def count_right(logits: torch.Tensor, labels: torch.Tensor | None) -> int:
    return 0 if labels is None else int((logits.argmax(-1) == labels).sum())


def count_tied(logits: torch.Tensor) -> int:
    """Samples whose largest logit two classes share."""
    return int(((logits == logits.amax(dim=1, keepdim=True)).sum(dim=1) > 1).sum())


def sum_squares(numbers: torch.Tensor) -> float:
    return float(numbers.double().square().sum())


def measure_sqnr(signal: float, noise: float) -> float | None:
    """In decibels; None where there is no signal, or no noise."""
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None


def make_report(
    quantized: QuantizedLayer,
    tally: Tally,
    output_signal: float,
    num_tested: int | None,
) -> LayerReport:
    """The sums of one layer as ratios and counts."""
    layer, scales = quantized.layer, quantized.weight_scale
    return LayerReport(
        name=quantized.name,
        op=layer.op,
        num_weights=0 if layer.weight is None else layer.weight.numel(),
        scale=None if quantized.is_unrounded else quantized.output.scale,
        weight_scales=() if scales is None else tuple(scales.reshape(-1).tolist()),
        weight_gap=measure_gap(layer.weight),
        sqnr=measure_sqnr(tally.signal, tally.noise),
        sqnr_alone=measure_sqnr(tally.signal, tally.noise_alone),
        output_sqnr=measure_sqnr(output_signal, tally.output_noise),
        clipped_share=tally.num_clipped / tally.num_results if tally.num_results else None,
        dead_outputs=count_dead(tally) if layer.is_weighted else None,
        correct_only=None if num_tested is None else tally.correct_only,
        correct_without=None if num_tested is None else tally.correct_without,
        num_tested=num_tested,
        is_float=quantized.is_float,
    )


def count_dead(tally: Tally) -> int | None:
    """Output channels that were the same number everywhere."""
    if tally.least is None or tally.largest is None:
        return None
    return int(torch.eq(tally.least, tally.largest).sum())


def measure_gap(weight: torch.Tensor | None) -> float | None:
    """The factor from the second largest to the largest weight of a channel, of the channel where that is most."""
    if weight is None or weight[0].numel() < 2:
        return None
    first, second = weight.reshape(len(weight), -1).abs().topk(2, dim=1).values.unbind(dim=1)
    is_alive = second > 0
    return float((first[is_alive] / second[is_alive]).max()) if bool(is_alive.any()) else None


def count_multiply_adds(network: Network, input_shape: Sequence[int]) -> dict[str, int]:
    """Of one sample, layer by layer, from the shapes of results."""
    rounding = Rounding(network=network, rounded={}, grids={})
    with torch.no_grad():
        results = rounding.run({IMAGES: torch.zeros(1, *input_shape)}, ())
    counts = {}
    for layer in network.layers:
        if layer.weight is not None:
            places = math.prod(results[layer.name].shape[2:]) if layer.op == "conv" else 1
            counts[layer.name] = layer.weight.numel() * places
    return counts


def choose_num_tested(network: Network, num_samples: int, wanted: int | None) -> int:
    """Number of samples to try layers on: as requested, or what the compute budget allows."""
    if wanted is not None:
        return min(wanted, num_samples)
    counts = count_multiply_adds(network, network.input_shape)
    num_trials = sum(layer.op not in PASSING for layer in network.layers)
    affordable = int(MOST_MULTIPLY_ADDS / max(1, sum(counts.values()) * num_trials))
    return min(num_samples, max(FEWEST_TESTED, affordable))


def choose_evenly(num_samples: int, count: int) -> list[int]:
    """So many of the samples, at even distances: stored sets may be sorted by class."""
    return [index * num_samples // count for index in range(count)]
