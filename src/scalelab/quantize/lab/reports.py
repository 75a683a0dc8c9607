"""Signal-to-noise ratios and histograms of the lab's layers, accumulated over the test set.

SQNR = 10 · log₁₀(Σ a² / Σ (a − q/n)²) over a layer's float outputs a and integers q of scale n. Records hold steps, as
everywhere in scalelab: 1/n, the size of one integer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from scalelab.quantize.diagnosis import count_tied, measure_sqnr
from scalelab.quantize.lab.chain import HIGH, LOW, LabLayer, LabNetwork, LabSettings, find_weight_limit, round_to_int8
from scalelab.quantize.lab.observe import Observed, make_histogram
from scalelab.quantize.network import CapturedNetwork, Layer, run_float
from scalelab.records.quantized import Histogram, LayerReport


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
    least: torch.Tensor | None = None
    """Per output channel."""
    largest: torch.Tensor | None = None

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
        by_channel = integers.transpose(0, 1).flatten(1)
        least, largest = by_channel.amin(1), by_channel.amax(1)
        self.least = least if self.least is None else torch.minimum(self.least, least)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def count_answer(self, exact: torch.Tensor, alone: torch.Tensor) -> None:
        """Add a batch of logits in float, and with only this layer in int8."""
        self.answer_signal += float(exact.double().square().sum())
        self.answer_noise += float((exact.double() - alone.double()).square().sum())

    @property
    def num_dead(self) -> int | None:
        if self.least is None or self.largest is None:
            return None
        return int((self.least == self.largest).sum())


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
                dead_outputs=tally.num_dead,
                tied_outputs=tallies.num_tied if one is network.layers[-1] else None,
            )
        )
    return tuple(made)


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
