"""Count the values of every layer on the calibration images, as histograms.

Scales do not depend on the batch size or the order of the samples, bit for bit: kernels sum in another order for
another batch size or thread count, so every sample runs alone, in a batch of one on one thread. (Two threads gain
nothing on a batch of one; lenet took 20 times as long on a busy machine.) Memory is bounded by the histograms, about
half a megabyte per layer, and a buffer of four megabytes per layer.

Counted are the layers with a grid of their own; max pooling, flatten and a separate ReLU share their input's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

import torch

from scalelab.errors import UnknownName, UsageError
from scalelab.quantize.histogram import ValueHistogram, count_values, merge_histograms
from scalelab.quantize.network import PASSING, CapturedNetwork, run_float
from scalelab.quantize.ranges import Method, Range, choose_range
from scalelab.quantize.timing import one_thread

BUFFER_VALUES = 1 << 20
"""Values of a layer counted at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """The counts, and how to choose ranges from them."""

    histograms: Mapping[str, ValueHistogram]
    """Outputs of the layers with a grid of their own, after the ReLU."""
    num_samples: int
    method: Method = "mse"

    @functools.cached_property
    def ranges(self) -> Mapping[str, Range]:
        """The range chosen for each, symmetric where something negative was seen."""
        return {
            name: choose_range(histogram, self.method, is_symmetric=histogram.least < 0)
            for name, histogram in self.histograms.items()
        }


def calibrate(network: CapturedNetwork, batches: Iterable[torch.Tensor], method: Method = "mse") -> Calibration:
    """Count the outputs of every layer on batches of images."""
    if method not in get_args(Method):
        raise UnknownName("calibration method", method, get_args(Method))
    recorder = OutputRecorder(names=[layer.name for layer in network.layers if layer.op not in PASSING])
    num_samples = 0
    for number, images in number_batches(network, batches):
        with one_thread():
            for sample in images:
                results = run_float(network, sample.unsqueeze(0).clone(memory_format=torch.contiguous_format))
                check_finite(number, results)
                recorder.record(results)
        num_samples += len(images)
    histograms = recorder.finish()
    check_counted(network, histograms, num_samples)
    return Calibration(histograms=histograms, num_samples=num_samples, method=method)


@dataclass(kw_only=True)
class OutputRecorder:
    """Buffers outputs until there are enough to count."""

    names: list[str]
    waiting: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    num_waiting: dict[str, int] = field(default_factory=dict)
    histograms: dict[str, ValueHistogram] = field(default_factory=dict)

    def record(self, results: Mapping[str, torch.Tensor]) -> None:
        for name in self.names:
            self.waiting.setdefault(name, []).append(results[name].flatten())
            self.num_waiting[name] = self.num_waiting.get(name, 0) + results[name].numel()
            if self.num_waiting[name] >= BUFFER_VALUES:
                self.count(name)

    def count(self, name: str) -> None:
        counted = count_values(torch.cat(self.waiting.pop(name)))
        self.num_waiting[name] = 0
        self.histograms[name] = merge_histograms([self.histograms.get(name, ValueHistogram()), counted])

    def finish(self) -> dict[str, ValueHistogram]:
        for name in list(self.waiting):
            self.count(name)
        return {name: self.histograms[name] for name in self.names if name in self.histograms}


def number_batches(network: CapturedNetwork, batches: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Every batch with its number from 0, checked."""
    for number, images in enumerate(batches):
        if tuple(images.shape[1:]) != network.input_shape:
            raise UsageError(
                f"calibration batch {number} has shape {tuple(images.shape)}: it must be"
                f" (samples, {', '.join(map(str, network.input_shape))})"
            )
        yield number, images.detach().to("cpu", torch.float32)


def check_finite(number: int, results: Mapping[str, torch.Tensor]) -> None:
    for name, values in results.items():
        if not torch.isfinite(values).all():
            kind = "NaN" if torch.isnan(values).any() else "infinite numbers"
            raise UsageError(
                f"calibration batch {number} produces {kind} in layer {name}: "
                + ("check how its images are read and normalised" if name == "input" else "the model overflows there")
            )


def check_counted(network: CapturedNetwork, histograms: Mapping[str, ValueHistogram], num_samples: int) -> None:
    if num_samples == 0:
        raise UsageError("there are no calibration samples: pass at least one batch; a few hundred samples are usual")
    images = histograms[network.layers[0].name]
    if images.is_constant:
        raise UsageError(
            f"every value of the calibration images is {images.least:g}, which gives no range:"
            " use images like those the model will see"
        )
