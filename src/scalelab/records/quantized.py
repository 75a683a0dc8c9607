"""What quantizing a model left behind: raw predictions, times, histograms and layers, as a rank reports them.

Everything that a report says of it (accuracy, agreement, intervals, ratios) is derived from these records, where torch
need not be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SMALL_NET = 20_000_000
"""Multiply-adds of a sample below which calls of kernels, not products, are what a batch of one takes."""
HistogramKind = Literal["weights", "before", "after"]
"""Of a layer's weights, or of its results before and after its ReLU."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How often a layer's numbers lie where, and the range that was chosen for them."""

    layer: str
    kind: HistogramKind
    low: float
    """Where the first bin begins, and the last one ends."""
    high: float
    counts: tuple[int, ...]
    least: float
    """The least and the largest number that was seen."""
    largest: float
    mean: float
    deviation: float
    chosen_low: float | None = None
    chosen_high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One way to execute the model, with the class that it gave every test sample, in their order."""

    name: str
    """`float`, `int8`, `weights`, `weights+activations` …: stable, for exports."""
    title: str
    predictions: tuple[int, ...]
    note: str = ""
    """What is special about it, in words."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The latencies of one runtime at one batch size, in the order in which they were measured."""

    runtime: str
    """`onnxruntime-float32`, `onnxruntime-int8`, `eager-float32`, `eager-int8` …"""
    batch: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What int8 does to one layer; None is unknown."""

    name: str
    op: str
    num_weights: int = 0
    multiply_adds: int = 0
    """Of one sample."""
    scale: float | None = None
    """Of its result."""
    weight_scales: tuple[float, ...] = ()
    output_scale: float | None = None
    """What its int32 sums are multiplied by to become int8; in the lab only."""
    bias: tuple[int, ...] = ()
    """As int32, in the units of its sums; in the lab only."""
    weight_gap: float | None = None
    """By what factor the largest weight of a channel exceeds the next; of the channel where that is most."""
    sqnr: float | None = None
    """Signal to quantization noise of its result, in decibels, with everything before it in int8 too."""
    sqnr_alone: float | None = None
    """The same with only this layer in int8."""
    output_sqnr: float | None = None
    """Of the network's result, with only this layer in int8: what it does to the answer. None if it does nothing."""
    clipped_share: float | None = None
    """Of its results, those that lie outside of the range."""
    dead_outputs: int | None = None
    """Output channels that are the same number for every sample."""
    tied_outputs: int | None = None
    """Test samples whose largest logit is shared by two classes; of the last layer only."""
    correct_only: int | None = None
    """Right predictions among the samples of `num_tested` with only this layer in int8."""
    correct_without: int | None = None
    """The same with all layers but this one in int8."""
    num_tested: int | None = None
    kernel: str = ""
    """The kernel that really ran, by onnxruntime's profile; `float` where it fell back."""
    seconds: float | None = None
    """In int8, of one batch, by the same profile."""
    float_seconds: float | None = None
    is_float: bool = False
    """Whether it was kept in float."""


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A model before and after."""

    labels: tuple[int, ...]
    """The true classes of the test samples."""
    stages: tuple[Stage, ...]
    """The first is the model as it was, in float."""
    layers: tuple[LayerReport, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    timings: tuple[Timing, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    """What was stored, by name, and its bytes: `float32.onnx`, `int8.onnx` …"""
    calibration: str = ""
    """With which data, how, in words."""
    num_calibrated: int = 0
    tested_on: str = ""
    """Which samples the predictions are of, in words, where that is not the test data."""
    correct_float: int | None = None
    """Right predictions in float, and with all layers in int8, among the samples that layers were tried alone on."""
    correct_int8: int | None = None
    kept_float: tuple[str, ...] = ()
    """The layers that `--mixed` kept in float, in the order in which it chose them."""
    compared_logits: int | None = None
    """Logits of the exported network that were compared with the simulation; None: nothing was exported."""
    different_logits: int | None = None
    remarks: tuple[str, ...] = ()
    """What a reader should know: a kernel that fell back to float, a dead channel."""
