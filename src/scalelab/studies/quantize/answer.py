"""What is derived from the record of a quantized model: paired differences, speedups, and the layer to blame.

**Blame.** A layer's own signal-to-noise ratio does not show what it does to the logits: a channel with a large range
can drown the rounding of all others in its own signal. So every layer is put into int8 alone, the rest in float, and
the noise is measured where it counts, in the logits. Its power over that of all layers together is the layer's share.
Rounding errors of different layers are nearly uncorrelated, so the powers add up to about that of the whole.

One weight that is g times as large as the next of its channel makes the steps of all others g times as wide and their
noise g² times as large. The test samples need not show that, where the channel means little to them or where the
outlier itself drowns the rest. So layers are ranked by their share times g², where g is unusual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.paired import PairedCounts, count_pairs, estimate_paired_difference, measure_agreement
from scalelab.analysis.stats import estimate_median, estimate_ratio
from scalelab.records.quantized import LayerReport, Quantized, Stage, Timing

OUTLIER = 3.0
"""A weight this many times the next of its channel is unusual in a trained layer: 1.1 to 1.5 is normal."""
INT8, MIXED, RUNTIME, EAGER = "int8", "mixed", "onnxruntime", "eager"
"""Names of stages."""
FLOAT_RUNTIMES = ("onnxruntime-float32", "eager-float32")
"""The reference is the first of these that was timed."""


@dataclass(frozen=True, kw_only=True)
class StageAnswer:
    """One way to run the model, compared with float."""

    stage: Stage
    counts: PairedCounts | None
    """None without labels."""
    difference: Estimate | None
    """Of accuracies; None for the float model itself."""
    agreement: Estimate | None


def compare_stages(quantized: Quantized) -> list[StageAnswer]:
    """Every stage beside the first."""
    reference = quantized.stages[0] if quantized.stages else None
    answers = []
    for stage in quantized.stages:
        assert reference is not None
        counts = count_pairs(stage.predictions, reference.predictions, quantized.labels)
        is_reference = stage is reference
        answers.append(
            StageAnswer(
                stage=stage,
                counts=counts,
                difference=None if is_reference or counts is None else estimate_paired_difference(counts),
                agreement=None if is_reference else measure_agreement(stage.predictions, reference.predictions),
            )
        )
    return answers


def find_stage(answers: Sequence[StageAnswer], *names: str) -> StageAnswer | None:
    """The first of these that was executed."""
    found = {answer.stage.name: answer for answer in answers}
    return next((found[name] for name in names if name in found), None)


@dataclass(frozen=True, kw_only=True)
class Latency:
    """How long one runtime takes for a batch, and how many times faster it is than the float reference."""

    runtime: str
    batch: int
    seconds: Estimate
    speedup: Estimate | None = None
    """None for the reference itself."""


def find_latencies(quantized: Quantized) -> list[Latency]:
    """Of every runtime at every batch size, compared round by round."""
    timings = {(timing.runtime, timing.batch): timing for timing in quantized.timings if timing.seconds}
    return [_compare_timing(timing, timings) for timing in timings.values()]


def _compare_timing(timing: Timing, timings: dict[tuple[str, int], Timing]) -> Latency:
    rounds = [[seconds] for seconds in timing.seconds]
    reference = find_reference(timings, timing.batch)
    speedup = None
    if reference is not None and reference.runtime != timing.runtime:
        speedup = estimate_ratio([[seconds] for seconds in reference.seconds], rounds)
    return Latency(runtime=timing.runtime, batch=timing.batch, seconds=estimate_median(rounds), speedup=speedup)


def find_reference(timings: dict[tuple[str, int], Timing], batch: int) -> Timing | None:
    """The float runtime that others of the same batch size are compared with."""
    return next((timings[name, batch] for name in FLOAT_RUNTIMES if (name, batch) in timings), None)


def find_size(quantized: Quantized, ending: str) -> int | None:
    """The bytes of the stored model whose name ends so."""
    return next((num_bytes for name, num_bytes in quantized.sizes if name.endswith(ending)), None)


@dataclass(frozen=True, kw_only=True)
class LayerBlame:
    """What one layer contributes to the cost of int8."""

    layer: LayerReport
    noise_share: float | None
    """Of the noise in the logits that all layers make, each alone; None if it makes none or was not tried."""
    score: float
    """The ranking: the share times the square of how far a weight outlier stands out."""
    only: float | None
    """Accuracy with only this layer in int8, less that of float, on the samples of the trial."""
    without: float | None
    """The same with all layers but this one in int8."""


def rank_layers(quantized: Quantized) -> list[LayerBlame]:
    """The layers that round, the worst first; layers without a measurement last, in their order."""
    noises = {layer.name: _measure_noise(layer) for layer in quantized.layers}
    total = sum(noise for noise in noises.values() if noise is not None)
    shares = {name: noise / total if noise is not None and total else None for name, noise in noises.items()}
    blames = [
        LayerBlame(
            layer=layer,
            noise_share=shares[layer.name],
            score=(shares[layer.name] or 0.0) * (find_outlier(layer) or 1.0) ** 2,
            only=_find_change(layer.correct_only, layer.num_tested, quantized.correct_float),
            without=_find_change(layer.correct_without, layer.num_tested, quantized.correct_float),
        )
        for layer in quantized.layers
    ]
    return sorted(blames, key=lambda blame: blame.score, reverse=True)


def find_outlier(layer: LayerReport) -> float | None:
    """The factor by which one weight stands out in its channel; None if none does."""
    return layer.weight_gap if layer.weight_gap is not None and layer.weight_gap >= OUTLIER else None


def _measure_noise(layer: LayerReport) -> float | None:
    """Its noise in the logits as a share of their power."""
    return None if layer.output_sqnr is None else float(10 ** (-layer.output_sqnr / 10))


def _find_change(correct: int | None, num_tested: int | None, before: int | None) -> float | None:
    return None if correct is None or before is None or not num_tested else (correct - before) / num_tested


def count_multiply_adds(quantized: Quantized) -> int:
    """Of one sample, all layers."""
    return sum(layer.multiply_adds for layer in quantized.layers)


def find_fallen_back(quantized: Quantized) -> Iterator[LayerReport]:
    """The layers that should have run in int8 and did not."""
    return (layer for layer in quantized.layers if layer.kernel == "float" and not layer.is_float)
