"""What is seen of the lab's layers: their values in float (Q1, Q3), and what integers make of them.

The distribution of every layer's weights, and of its outputs before and after ReLU: forward hooks on the user's modules
see the outputs. The images are read twice: first for minimum, maximum, mean and deviation, then for the histogram
between them. Only sums are kept.

Over the test set, SQNR = 10 · log₁₀(Σ a² / Σ (a − q/n)²) of a layer's float outputs a and integers q of scale n.
Records hold steps, as everywhere in scalelab: 1/n, the size of one integer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.quantize.diagnosis import ChannelRange, count_tied, measure_sqnr
from scalelab.quantize.lab.chain import HIGH, LOW, LabLayer, LabNetwork, LabSettings, find_weight_limit, round_to_int8
from scalelab.quantize.network import CapturedNetwork, Layer, run_float
from scalelab.records.quantized import Histogram, HistogramKind, LayerReport

NUM_BINS = 100

Look = Callable[[str, HistogramKind, torch.Tensor], None]
"""Called with a layer's outputs."""


@dataclass(kw_only=True)
class Seen:
    """The values of one tensor over all batches."""

    least: float = math.inf
    largest: float = -math.inf
    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(NUM_BINS, dtype=torch.float64))

    def measure(self, values: torch.Tensor) -> None:
        """First pass."""
        exact = values.double()
        self.least = min(self.least, float(values.min()))
        self.largest = max(self.largest, float(values.max()))
        self.count += values.numel()
        self.total += float(exact.sum())
        self.squares += float(exact.square().sum())

    def sort(self, values: torch.Tensor) -> None:
        """Second pass: equal bins between the ends."""
        low, high = self.ends
        self.counts += torch.histc(values.double(), NUM_BINS, low, high)

    @property
    def ends(self) -> tuple[float, float]:
        """The range of the bins, never empty."""
        return (self.least, self.largest) if self.least < self.largest else (self.least - 0.5, self.least + 0.5)

    @property
    def magnitude(self) -> float:
        return max(abs(self.least), abs(self.largest))

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def deviation(self) -> float:
        return math.sqrt(max(0.0, self.squares / self.count - self.mean**2))


Observed = dict[tuple[str, HistogramKind], Seen]


def observe_weights(layers: Sequence[Layer]) -> Observed:
    found: Observed = {}
    for layer in layers:
        if layer.weight is not None:
            seen = found[layer.name, "weights"] = Seen()
            seen.measure(layer.weight)
            seen.sort(layer.weight)
    return found


def observe_activations(model: nn.Module, layers: Sequence[Layer], batches: Sequence[torch.Tensor]) -> Observed:
    """Of the input and every layer with weights."""
    found: Observed = {}

    def measure(name: str, kind: HistogramKind, values: torch.Tensor) -> None:
        if not torch.isfinite(values).all():
            raise UsageError(f"{name} is not finite on the calibration images: look for NaN in them or in the weights")
        found.setdefault((name, kind), Seen()).measure(values)

    def sort(name: str, kind: HistogramKind, values: torch.Tensor) -> None:
        found[name, kind].sort(values)

    for look in (measure, sort):
        with watch_layers(model, layers, look), torch.no_grad():
            for images in batches:
                look(layers[0].name, "after", images)
                model(images)
    return found


@contextmanager
def watch_layers(model: nn.Module, layers: Sequence[Layer], look: Look) -> Iterator[None]:
    """Forward hooks on every layer with weights."""

    def make_hook(layer: Layer) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def show(_module: nn.Module, _inputs: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
            look(layer.name, "before", result)
            look(layer.name, "after", result.relu() if layer.has_relu else result)

        return show

    handles = [
        model.get_submodule(layer.name).register_forward_hook(make_hook(layer)) for layer in layers if layer.is_weighted
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def make_histogram(name: str, kind: HistogramKind, seen: Seen, chosen: tuple[float, float] | None) -> Histogram:
    low, high = seen.ends
    chosen_low, chosen_high = chosen or (None, None)
    return Histogram(
        layer=name,
        kind=kind,
        low=low,
        high=high,
        counts=tuple(int(count) for count in seen.counts),
        least=seen.least,
        largest=seen.largest,
        mean=seen.mean,
        deviation=seen.deviation,
        chosen_low=chosen_low,
        chosen_high=chosen_high,
    )


def report_histograms(network: LabNetwork, observed: Observed, settings: LabSettings) -> tuple[Histogram, ...]:
    """Weights, then outputs before and after ReLU, with the range of int8."""
    made = []
    for one in network.layers:
        for kind in ("weights", "before", "after"):
            seen = observed.get((one.name, kind))
            if seen is None:
                continue
            if kind == "weights":
                limit = find_weight_limit(seen, settings.weight_range)
                chosen = (-limit, limit)
            else:
                is_positive = one.layer.has_relu and kind == "after"
                chosen = (0.0 if is_positive else LOW / one.scale, HIGH / one.scale)
            made.append(make_histogram(one.name, kind, seen, chosen))
    return tuple(made)


@dataclass(kw_only=True)
class LayerTally:
    """One layer over the test set."""

    signal: float = 0.0
    noise: float = 0.0
    num_results: int = 0
    num_clipped: int = 0
    sample_results: int = 0
    """Per image."""
    answer_signal: float = 0.0
    answer_noise: float = 0.0
    """Of the logits, with only this layer in int8."""
    channels: ChannelRange = field(default_factory=ChannelRange)

    def count(self, one: LabLayer, scaled: torch.Tensor, integers: torch.Tensor, exact: torch.Tensor) -> None:
        """Add a batch: sums times n_out, their integers, and the float outputs."""
        self.signal += float(exact.double().square().sum())
        self.noise += float((exact.double() - integers.double() / one.scale).square().sum())
        rounded = torch.round(scaled)
        # Negative values lost to the ReLU are not clipped.
        is_clipped = (rounded > HIGH) if one.layer.has_relu else (rounded > HIGH) | (rounded < LOW)
        self.num_results += integers.numel()
        self.num_clipped += int(is_clipped.sum())
        self.sample_results = integers[0].numel()
        self.channels.see(integers)

    def count_answer(self, exact: torch.Tensor, alone: torch.Tensor) -> None:
        """Add a batch of logits in float, and with only this layer in int8."""
        self.answer_signal += float(exact.double().square().sum())
        self.answer_noise += float((exact.double() - alone.double()).square().sum())


def run_alone(network: CapturedNetwork, one: LabLayer, images: torch.Tensor) -> torch.Tensor:
    """The logits with only this layer rounded."""
    assert one.weight is not None
    weight = one.weight.float() / one.weight_scale
    layers = (replace(layer, weight=weight) if layer.name == one.name else layer for layer in network.layers)

    def round_result(layer: Layer, result: torch.Tensor) -> torch.Tensor:
        return round_to_int8(result, one.scale) / one.scale if layer.name == one.name else result

    return run_float(replace(network, layers=tuple(layers)), images, round_result)[network.output]


@dataclass(kw_only=True)
class Tallies:
    """All layers, and tied logits."""

    by_layer: dict[str, LayerTally] = field(default_factory=dict)
    num_tied: int = 0

    def count_layer(
        self, exact: Mapping[str, torch.Tensor], one: LabLayer, scaled: torch.Tensor, integers: torch.Tensor
    ) -> None:
        self.by_layer.setdefault(one.name, LayerTally()).count(one, scaled, integers, exact[one.name])

    def count_alone(self, network: CapturedNetwork, lab: LabNetwork, images: torch.Tensor, exact: torch.Tensor) -> None:
        """Each layer alone in int8, on a batch with float logits `exact`."""
        for one in lab.layers:
            if one.weight is not None:
                tally = self.by_layer.setdefault(one.name, LayerTally())
                tally.count_answer(exact, run_alone(network, one, images))

    def count_ties(self, logits: torch.Tensor) -> None:
        self.num_tied += count_tied(logits)


def report_layers(network: LabNetwork, tallies: Tallies) -> tuple[LayerReport, ...]:
    made = []
    for one in network.layers:
        tally = tallies.by_layer.get(one.name)
        if tally is None or one.weight is None:
            continue
        made.append(
            LayerReport(
                name=one.name,
                op=one.layer.op,
                num_weights=one.weight.numel(),
                multiply_adds=tally.sample_results * one.weight[0].numel(),
                scale=1 / one.scale,
                weight_scales=(1 / one.weight_scale,),
                output_scale=one.output_scale,
                bias=() if one.bias is None else tuple(one.bias.tolist()),
                sqnr=measure_sqnr(tally.signal, tally.noise),
                output_sqnr=measure_sqnr(tally.answer_signal, tally.answer_noise),
                clipped_share=tally.num_clipped / tally.num_results,
                dead_outputs=tally.channels.num_dead,
                tied_outputs=tallies.num_tied if one is network.layers[-1] else None,
            )
        )
    return tuple(made)
