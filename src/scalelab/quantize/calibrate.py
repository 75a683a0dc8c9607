"""What numbers every layer gives on the calibration images, as histograms that can be merged.

Kernels add up in another order for another batch size, and the last bits of a result then differ. So every sample is
run by itself, in a batch of one and in memory of its own: what is counted for it depends on nothing but the sample,
and the histograms, and with them the scales, are the same bit for bit whatever the batch size, the order of the
samples or their split over ranks, on one kind of machine. All of it is on one thread: a kernel that is shared out over
several adds up in another order too, and a batch of one is too little work to share (on a machine with other work to
do, lenet took 20 times as long on two threads as on one). Counting is done for many samples at once, which changes
nothing. Memory is bounded by the histograms (about half a megabyte per layer) and a buffer of four megabytes per layer.

Counted are the layers with a grid of their own; max pooling, flattening and a ReLU by itself share that of their input.
Ranks must share out the samples without overlap (a sampler that repeats samples to fill up the last batch counts those
twice).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import distributed

from scalelab.errors import UsageError
from scalelab.quantize.histogram import Histogram, count_values, merge_histograms
from scalelab.quantize.network import PASSING, Network, run_float
from scalelab.quantize.ranges import Range, RangeSettings, choose_range
from scalelab.quantize.timing import one_thread

BUFFER_VALUES = 1 << 20
"""How many numbers of a layer are counted at once."""
ACTIVATION_RANGES = RangeSettings(method="mse")
"""The default; `recipe.py` says why."""
NO_SAMPLE = "there are no calibration samples: pass at least one batch; a few hundred samples are usual"


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """What was counted, and how ranges are to be chosen from it."""

    histograms: Mapping[str, Histogram]
    """Of the results of the layers that have a grid of their own, after the ReLU."""
    num_samples: int
    settings: RangeSettings = ACTIVATION_RANGES

    @functools.cached_property
    def ranges(self) -> Mapping[str, Range]:
        """The range that was chosen for each of them, symmetric where something negative was seen."""
        return {
            name: choose_range(histogram, self.settings, is_symmetric=histogram.least < 0)
            for name, histogram in self.histograms.items()
        }


def calibrate(network: Network, batches: Iterable[Any], settings: RangeSettings | None = None) -> Calibration:
    """Count what every layer gives. A batch is a tensor of images, or a pair that starts with one."""
    recorder = Recorder(names=[layer.name for layer in network.layers if layer.op not in PASSING])
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
    return Calibration(histograms=histograms, num_samples=num_samples, settings=settings or ACTIVATION_RANGES)


def merge_calibrations(calibrations: Sequence[Calibration]) -> Calibration:
    """As if all samples had been counted in one place."""
    first = calibrations[0]
    if any(other.histograms.keys() != first.histograms.keys() for other in calibrations):
        raise UsageError("cannot merge calibrations of different networks: their layer names differ")
    merged = {name: merge_histograms(each.histograms[name] for each in calibrations) for name in first.histograms}
    return replace(first, histograms=merged, num_samples=sum(each.num_samples for each in calibrations))


def merge_over_ranks(calibration: Calibration) -> Calibration:
    """The same on every rank of the default process group; alone, what was given."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return calibration
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, calibration)
    return merge_calibrations(gathered)


@dataclass(kw_only=True)
class Recorder:
    """Collects results until there are enough to count."""

    names: list[str]
    waiting: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    num_waiting: dict[str, int] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def record(self, results: Mapping[str, torch.Tensor]) -> None:
        for name in self.names:
            self.waiting.setdefault(name, []).append(results[name].flatten())
            self.num_waiting[name] = self.num_waiting.get(name, 0) + results[name].numel()
            if self.num_waiting[name] >= BUFFER_VALUES:
                self.count(name)

    def count(self, name: str) -> None:
        counted = count_values(torch.cat(self.waiting.pop(name)))
        self.num_waiting[name] = 0
        self.histograms[name] = merge_histograms([self.histograms.get(name, Histogram()), counted])

    def finish(self) -> dict[str, Histogram]:
        for name in list(self.waiting):
            self.count(name)
        return {name: self.histograms[name] for name in self.names if name in self.histograms}


def number_batches(network: Network, batches: Iterable[Any]) -> Iterator[tuple[int, torch.Tensor]]:
    """The images of every batch, with its number from 0, checked."""
    for number, batch in enumerate(batches):
        images = take_images(batch)
        if not isinstance(images, torch.Tensor) or tuple(images.shape[1:]) != network.input_shape:
            found = tuple(images.shape) if isinstance(images, torch.Tensor) else type(images).__name__
            raise UsageError(
                f"calibration batch {number} is {found}: it must be a tensor of shape"
                f" (samples, {', '.join(map(str, network.input_shape))}), or a pair that starts with one"
            )
        if not images.is_floating_point():
            raise UsageError(
                f"calibration batch {number} is {images.dtype}: use float32 images, normalised as in training"
            )
        yield number, images.detach().to("cpu", torch.float32)


def take_images(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (tuple, list)) and batch else batch


def check_finite(number: int, results: Mapping[str, torch.Tensor]) -> None:
    for name, values in results.items():
        if not torch.isfinite(values).all():
            kind = "NaN" if torch.isnan(values).any() else "infinite numbers"
            raise UsageError(
                f"calibration batch {number} produces {kind} in layer {name}: "
                + ("check how its images are read and normalised" if name == "input" else "the model overflows there")
            )


def check_counted(network: Network, histograms: Mapping[str, Histogram], num_samples: int) -> None:
    if num_samples == 0:
        raise UsageError(NO_SAMPLE)
    images = histograms[network.layers[0].name]
    if images.is_constant:
        raise UsageError(
            f"every value of the calibration images is {images.least:g}, which gives no range:"
            " use images like those the model will see"
        )
