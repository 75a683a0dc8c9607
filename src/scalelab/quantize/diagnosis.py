"""What int8 does to every layer, and what the layer then does to the logits.

A layer rounds in two places: weights to their integers and output to its grid. Both are simulated in float32, so any
subset of layers can be in int8, which no runtime offers:

    all       every layer rounds: the int8 network, except for rare results half-way between two integers
    only      one layer rounds, on exact inputs
    without   all layers round but one

    SQNR = 10 · log₁₀( Σ x² / Σ (x − x̂)² )   in dB, x in float, x̂ rounded; 6 dB are one bit

A layer's own SQNR can mislead: a channel with a large range hides the rounding of the others. What counts is the noise
in the logits with only this layer in int8 (`output_sqnr`), and how many samples stay right. Rounded logits
(`rounds_logits`) are left out of it: they would make the last layer of a sound network the worst.

Layers before the changed one are reused from an earlier run, so a trial costs only the layers after it.

Histograms for the report: calibration's bins are narrow near zero and are redistributed over 100 equal ones, exact but
for bins cut by an edge, with the range of the layer's grid or of its largest weight scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from scalelab.quantize.calibrate import Calibration
from scalelab.quantize.histogram import ValueHistogram, Values, count_values, rebin
from scalelab.quantize.network import (
    HIGHEST,
    PASSING,
    CapturedNetwork,
    Grid,
    Layer,
    QuantizedLayer,
    QuantizedNetwork,
    compute_layer,
)
from scalelab.quantize.scales import WEIGHT_LIMIT
from scalelab.records.quantized import Histogram, HistogramKind, LayerReport

Results = dict[str, torch.Tensor]

CHUNK = 32
"""Samples at once: all layer outputs are kept for them, twice."""
MOST_MULTIPLY_ADDS = 2e12
"""Budget of trying every layer alone: about a minute on one core."""
FEWEST_TESTED = 64
NUM_BINS = 100
IMAGES = ""
"""The key of the input images among results."""


@dataclass(frozen=True, kw_only=True)
class LayerDiagnosis:
    """Every layer that rounds, in execution order."""

    layers: tuple[LayerReport, ...]
    correct_float: int | None
    """Right predictions; None without labels."""
    correct_int8: int | None


@dataclass
class ChannelRange:
    """The smallest and the largest output of every channel, over all samples."""

    least: torch.Tensor | None = None
    largest: torch.Tensor | None = None

    def see(self, results: torch.Tensor) -> None:
        by_channel = results.transpose(0, 1).flatten(1)
        least, largest = by_channel.amin(dim=1), by_channel.amax(dim=1)
        self.least = least if self.least is None else torch.minimum(self.least, least)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    @property
    def num_dead(self) -> int | None:
        """Channels with constant output."""
        if self.least is None or self.largest is None:
            return None
        return int(torch.eq(self.least, self.largest).sum())


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
    channels: ChannelRange = field(default_factory=ChannelRange)


@dataclass
class Rounding:
    """The network, and for every layer that rounds its rounded weights and output grid."""

    network: CapturedNetwork
    rounded: Mapping[str, Layer]
    grids: Mapping[str, Grid | None]
    """None for unrounded output."""
    places: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.places = {layer.name: number for number, layer in enumerate(self.network.layers)}

    def run(self, results: Results, names: Iterable[str], first: int = 0) -> Results:
        """Results from layer `first` on with these layers in int8; `results` holds the earlier ones."""
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
        """The logits from rounded weights, clamped but not rounded."""
        last = self.rounded[self.network.output]
        answer = compute_layer(last, [results[name] for name in last.inputs or (IMAGES,)])
        grid = self.grids[last.name]
        return answer if grid is None else answer.clamp(*grid.range)


def make_rounding(network: CapturedNetwork, quantized: QuantizedNetwork) -> Rounding:
    """Every layer that rounds, with rounded weights unless kept in float."""
    named = {layer.name: layer for layer in quantized.layers}
    rounding = [layer for layer in quantized.layers if layer.layer.op not in PASSING]
    return Rounding(
        network=network,
        rounded={layer.name: dequantize_layer(layer, named) for layer in rounding},
        grids={layer.name: None if layer.is_unrounded else layer.output for layer in rounding},
    )


def dequantize_layer(quantized: QuantizedLayer, named: Mapping[str, QuantizedLayer]) -> Layer:
    """The layer with dequantized weights."""
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
    """The nearest numbers on the grid."""
    steps = torch.round(numbers / grid.scale) + grid.zero_point
    return (steps.clamp_(0, HIGHEST) - grid.zero_point) * grid.scale


def diagnose(
    network: CapturedNetwork, quantized: QuantizedNetwork, images: torch.Tensor, labels: torch.Tensor | None
) -> LayerDiagnosis:
    """Try every layer on these samples: alone in int8, and alone in float."""
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
    return LayerDiagnosis(layers=tuple(reports), correct_float=count_float, correct_int8=count_int8)


def split_samples(
    images: torch.Tensor, labels: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    for start in range(0, len(images), CHUNK):
        yield images[start : start + CHUNK], None if labels is None else labels[start : start + CHUNK]


def look_at_result(tally: Tally, exact: torch.Tensor, noisy: torch.Tensor, grid: Grid | None) -> None:
    """Noise with everything in int8, clipped values, and the range of every channel."""
    tally.signal += sum_squares(exact)
    tally.noise += sum_squares(noisy - exact)
    if grid is not None:
        (low, high), half = grid.range, grid.scale / 2
        tally.num_clipped += int(((exact < low - half) | (exact > high + half)).sum())
    tally.num_results += exact.numel()
    tally.channels.see(noisy)


def try_only(rounding: Rounding, name: str, exact: Results, labels: torch.Tensor | None, tally: Tally) -> None:
    """The layer alone in int8: its noise, and its effect on the logits."""
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
    return 0 if labels is None else int((logits.argmax(1) == labels).sum())


def count_tied(logits: torch.Tensor) -> int:
    """Samples whose largest logit is shared by two classes."""
    return int(((logits == logits.amax(dim=1, keepdim=True)).sum(dim=1) > 1).sum())


def sum_squares(numbers: torch.Tensor) -> float:
    return float(numbers.double().square().sum())


def measure_sqnr(signal: float, noise: float) -> float | None:
    """In dB; None without signal or noise."""
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None


def make_report(
    quantized: QuantizedLayer,
    tally: Tally,
    output_signal: float,
    num_tested: int | None,
) -> LayerReport:
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
        dead_outputs=tally.channels.num_dead if layer.is_weighted else None,
        correct_only=None if num_tested is None else tally.correct_only,
        correct_without=None if num_tested is None else tally.correct_without,
        num_tested=num_tested,
        is_float=quantized.is_float,
    )


def measure_gap(weight: torch.Tensor | None) -> float | None:
    """The largest ratio, over channels, of the largest to the second largest weight."""
    if weight is None or weight[0].numel() < 2:
        return None
    first, second = weight.reshape(len(weight), -1).abs().topk(2, dim=1).values.unbind(dim=1)
    is_alive = second > 0
    return float((first[is_alive] / second[is_alive]).max()) if bool(is_alive.any()) else None


def count_multiply_adds(network: CapturedNetwork, input_shape: Sequence[int]) -> dict[str, int]:
    """Per sample and layer, from output shapes."""
    rounding = Rounding(network=network, rounded={}, grids={})
    with torch.no_grad():
        results = rounding.run({IMAGES: torch.zeros(1, *input_shape)}, ())
    counts = {}
    for layer in network.layers:
        if layer.weight is not None:
            places = math.prod(results[layer.name].shape[2:]) if layer.op == "conv" else 1
            counts[layer.name] = layer.weight.numel() * places
    return counts


def choose_num_tested(network: CapturedNetwork, num_samples: int, wanted: int | None) -> int:
    """Samples to try layers on: as requested, or what the compute budget allows."""
    if wanted is not None:
        return min(wanted, num_samples)
    counts = count_multiply_adds(network, network.input_shape)
    num_trials = sum(layer.op not in PASSING for layer in network.layers)
    affordable = int(MOST_MULTIPLY_ADDS / max(1, sum(counts.values()) * num_trials))
    return min(num_samples, max(FEWEST_TESTED, affordable))


def choose_evenly(num_samples: int, count: int) -> list[int]:
    """Evenly spaced samples: stored sets may be sorted by class."""
    return [index * num_samples // count for index in range(count)]


def list_histograms(quantized: QuantizedNetwork, calibration: Calibration) -> tuple[Histogram, ...]:
    """Weights and counted outputs of every layer."""
    return tuple(one for layer in quantized.layers for one in _list_layer(layer, calibration))


def _list_layer(layer: QuantizedLayer, calibration: Calibration) -> Iterator[Histogram]:
    weight = layer.layer.weight
    if weight is not None:
        scale = None if layer.weight_scale is None else float(layer.weight_scale.max())
        limit = None if scale is None else WEIGHT_LIMIT * scale
        yield draw_histogram(layer.name, "weights", count_values(weight), None if limit is None else -limit, limit)
    counted = calibration.histograms.get(layer.name)
    if counted is not None:
        chosen = (None, None) if layer.is_unrounded else layer.output.range
        yield draw_histogram(layer.name, "after", counted, *chosen)


def draw_histogram(
    name: str, kind: HistogramKind, counted: ValueHistogram, chosen_low: float | None, chosen_high: float | None
) -> Histogram:
    """Equal bins from minimum to maximum; a constant gets a bin around it."""
    low, high = counted.least, counted.largest
    if not low < high:
        half = max(abs(low) / 2, 0.5)
        low, high = low - half, high + half
    edges = np.linspace(low, high, NUM_BINS + 1)
    shares = rebin(counted.list_bins(), edges)
    return Histogram(
        layer=name,
        kind=kind,
        low=float(low),
        high=float(high),
        counts=_make_whole(shares, counted.num_values),
        least=counted.least,
        largest=counted.largest,
        mean=counted.mean,
        deviation=counted.deviation,
        chosen_low=chosen_low,
        chosen_high=chosen_high,
    )


def _make_whole(shares: Values, total: int) -> tuple[int, ...]:
    """Integer counts with the right total: cumulative sums are rounded, not bins."""
    sums = [0, *(min(total, math.floor(value + 0.5)) for value in np.cumsum(shares))]
    sums[-1] = total
    return tuple(max(0, after - before) for before, after in pairwise(sums))
