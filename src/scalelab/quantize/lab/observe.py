"""Q1 and Q3: the distribution of every layer's weights, and of its outputs before and after ReLU.

Forward hooks on the user's modules see the outputs. The images are read twice: first for minimum, maximum, mean and
deviation, then for the histogram between them. Only sums are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.quantize.network import Layer
from scalelab.records.quantized import Histogram, HistogramKind

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
