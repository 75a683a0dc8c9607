"""What the quantization lab concludes, confirmed or not with this run's numbers and a reason.

A normal distribution has no excess kurtosis, a uniform one −1.2, and the estimate from n numbers has a standard error
of √(24/n) (Joanes and Gill 1998): weights are drawn from a uniform distribution before training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.evidence import UNTOLD, compare_estimates, say
from scalelab.records.quantized import Histogram, Quantized
from scalelab.studies.quantize.answer import StageAnswer
from scalelab.studies.quantize.findings import format_change
from scalelab.units import format_count, format_share

LEVEL = 0.5
"""Excess kurtosis below which a distribution counts as bell-shaped."""
CENTRED = 0.1
"""Standard deviations that the mean of a centred distribution may be from zero."""
NORMAL_BEYOND = 0.0027
"""Of a normal distribution, beyond three standard deviations."""
SMALL_DROP, TOLERATED = 0.01, 0.02
"""Points of accuracy, as a share: what a small drop is, and how wide an interval around none may be."""
NEAR = 0.1
"""Of the largest activation: what is called near zero."""


def list_middles(histogram: Histogram) -> list[tuple[float, int]]:
    """The middle and the count of every bin."""
    width = (histogram.high - histogram.low) / len(histogram.counts)
    return [(histogram.low + width * (number + 0.5), count) for number, count in enumerate(histogram.counts)]


def find_share(histogram: Histogram, least: float, most: float) -> float:
    """The share of values in bins whose middle lies between two limits."""
    within = sum(count for middle, count in list_middles(histogram) if least <= middle <= most)
    return within / max(1, sum(histogram.counts))


def find_outside(histogram: Histogram) -> float:
    """The share beyond three standard deviations of the mean."""
    three = 3 * histogram.deviation
    return 1 - find_share(histogram, histogram.mean - three, histogram.mean + three)


def find_kurtosis(histogram: Histogram) -> tuple[float, float]:
    """The excess kurtosis from bins, and twice its standard error."""
    count = max(1, sum(histogram.counts))
    mean = sum(middle * number for middle, number in list_middles(histogram)) / count
    second = sum((middle - mean) ** 2 * number for middle, number in list_middles(histogram)) / count
    fourth = sum((middle - mean) ** 4 * number for middle, number in list_middles(histogram)) / count
    return (fourth / second**2 - 3 if second else 0.0), 2 * math.sqrt(24 / count)


def describe_shape(histogram: Histogram) -> str:
    """`flatter than a bell (−1.15 ± 0.04)`."""
    kurtosis, width = find_kurtosis(histogram)
    words = "bell-shaped" if abs(kurtosis) + width <= LEVEL else "of a shape that too few numbers leave open"
    if kurtosis - width > LEVEL:
        words = "with heavier tails than a bell"
    elif kurtosis + width < -LEVEL:
        words = "flatter than a bell"
    sign = "−" if kurtosis < 0 else ""
    return f"{words} ({sign}{abs(kurtosis):.2f} ± {width:.2f})"


def format_signed(number: float) -> str:
    return f"{number:+.2f}".replace("-", "−")


def answer_weights(histograms: Sequence[Histogram]) -> dict[str, str]:
    if not histograms:
        return {}
    centres = {one.layer: one.mean / one.deviation if one.deviation else 0.0 for one in histograms}
    is_centred = all(abs(centre) < CENTRED for centre in centres.values())
    farthest = max(centres, key=lambda layer: abs(centres[layer]))
    bells = [one.layer for one in histograms if describe_shape(one).startswith("bell")]
    shapes = "; ".join(f"{one.layer} {describe_shape(one)}" for one in histograms)
    outside = {one.layer: find_outside(one) for one in histograms}
    listed = ", ".join(f"{format_share(share)} in {layer}" for layer, share in outside.items())
    spans = {one.layer: max(-one.least, one.largest) / (3 * one.deviation or 1.0) for one in histograms}
    sides = {one.layer: min(-one.least, one.largest) / max(-one.least, one.largest, 1e-30) for one in histograms}
    lopsided = min(sides, key=sides.__getitem__)
    few = max(outside.values()) <= 2 * NORMAL_BEYOND
    return {
        "shape": f"Bell-shaped in {len(bells)} of {len(histograms)} layers, {'' if is_centred else 'not all '}centred"
        f" around zero: the mean is at most {abs(centres[farthest]):.2f} σ from it ({farthest}). By excess kurtosis (0"
        f" for a normal, −1.2 for a uniform distribution, which is what initialization draws from): {shapes}.",
        "outliers": f"{'Yes' if few else 'Not everywhere'}: beyond 3σ lie {listed} (a normal distribution:"
        f" {format_share(NORMAL_BEYOND)}). The largest weight is {max(spans.values()):.1f} × 3σ.",
        "symmetric": f"{'Yes' if sides[lopsided] > 0.5 else 'Not for every layer'}: the shorter side reaches"
        f" {format_share(sides[lopsided])} of the longer one in {lopsided}, the least symmetric layer; a symmetric"
        " scale leaves the rest of that side unused. One scale per layer is fixed by its largest weight.",
    }


def answer_integers(found: Mapping[str, StageAnswer]) -> dict[str, str]:
    weights, sigma = found.get("weights"), found.get("weights-3sigma")
    if weights is None or sigma is None:
        return {}
    return {
        "range": f"By the largest weight, int8 {say_change(weights)}; by 3σ it {say_change(sigma)}. 3σ has finer steps"
        f" for most weights and clamps those outside. {compare_stages(weights, sigma)}",
        "tolerates": f"{judge_drop(weights)}: with int8 weights the network {say_change(weights)}. Rounding moves a"
        " weight by at most half of 1/127 of the layer's largest.",
    }


def say_change(answer: StageAnswer) -> str:
    """`loses 1.60 points of accuracy (−3.1 to −0.2)`; a change that may be none in images, `not resolved`."""
    change, counts = answer.difference, answer.counts
    if change is None:
        return "cannot be judged"
    more = counts.won - counts.lost if counts else 0
    if change.low is None or change.high is None or not change.low < 0 < change.high or not more:
        return format_change(change)
    ends = " to ".join(format_signed(100 * end) for end in (change.low, change.high))
    images = f"{format_count(abs(more), 'image')} {'more' if more > 0 else 'fewer'}"
    return f"gets {images} right ({ends} points: not resolved)"


def judge_drop(answer: StageAnswer) -> str:
    """By the interval of the change in accuracy."""
    change = answer.difference
    if not isinstance(change, Estimate) or change.low is None or change.high is None:
        return UNTOLD
    if change.low > -SMALL_DROP:
        return f"Yes, it loses less than {100 * SMALL_DROP:g} point"
    if change.high < -SMALL_DROP:
        return f"No, it loses more than {100 * SMALL_DROP:g} point"
    is_near = change.low <= 0 <= change.high and change.low >= -TOLERATED
    return f"Yes, within {-100 * change.low:.2f} points" if is_near else UNTOLD


def compare_stages(one: StageAnswer, other: StageAnswer) -> str:
    """Whether two stages differ, image by image."""
    pairs = list(zip(one.stage.predictions, other.stage.predictions, strict=True))
    different = sum(mine != theirs for mine, theirs in pairs)
    return f"The two give {different:,} of {len(pairs):,} images another class."


def answer_activations(before: Sequence[Histogram], after: Mapping[str, Histogram]) -> dict[str, str]:
    if not before:
        return {}
    shapes = "; ".join(
        f"{one.layer} mean {format_signed(one.mean / one.deviation if one.deviation else 0.0)} σ, {describe_shape(one)}"
        for one in before
    )
    hidden = [after[one.layer] for one in before if one.layer in after and after[one.layer].least >= 0]
    near = ", ".join(f"{format_share(find_share(one, -math.inf, NEAR * one.largest))} in {one.layer}" for one in hidden)
    return {
        "before": f"By mean and excess kurtosis: {shapes}.",
        "after": f"Non-negative in {', '.join(one.layer for one in hidden) or 'no layer'}: ReLU sets negative numbers"
        f" to 0. Below {format_share(NEAR)} of the largest lie {near or 'none'}: few activations use the upper"
        " integers.",
    }


def answer_forward(quantized: Quantized, found: Mapping[str, StageAnswer]) -> dict[str, str]:
    weights, both = found.get("weights"), found.get("int8-255")
    if weights is None or both is None:
        return {}
    correct = {
        name: sum(map(int.__eq__, found[name].stage.predictions, quantized.labels)) for name in ("weights", "int8-255")
    }
    lost = (correct["weights"] - correct["int8-255"]) / max(1, len(quantized.labels))
    return {
        "drop": f"Against int8 weights alone it {'loses' if lost >= 0 else 'gains'} {abs(100 * lost):.2f} points here"
        f" (published: 0.93); against float it {say_change(both)}. Not only because activations are rounded at every"
        " layer: K is the integer that stands for the largest activation, and K = 255 with a clamp at 127 cuts off the"
        " upper half of the range. With K = 127 the network"
        f" {say_change(found['int8']) if 'int8' in found else 'was not run'}."
    }


def answer_bias(found: Mapping[str, StageAnswer]) -> dict[str, str]:
    raw, scaled, everything = (found.get(name) for name in ("weights-raw-bias", "weights", "int8-255"))
    if raw is None or scaled is None or everything is None:
        return {}
    accuracy = "; ".join(
        f"{name} {say('accuracy', answer.counts.accuracy if answer.counts else None)}"
        for name, answer in (("unscaled", raw), ("scaled", scaled), ("all in integers", everything))
    )
    return {
        "bias": f"{judge_bias(raw, scaled)} Accuracy by the bias: {accuracy}. With int8 weights and an"
        f" unscaled bias the network {say_change(raw)}, with the bias in the units of the sums it"
        f" {say_change(scaled)}: the sums are many orders of magnitude larger than an unscaled bias, which vanishes."
    }


def judge_bias(raw: StageAnswer, scaled: StageAnswer) -> str:
    """Which of the two loses more, by intervals of their changes."""
    changes = [answer.difference for answer in (raw, scaled)]
    if changes[0] is not None and changes[0].value >= 0:
        return "Nothing was lost with an unscaled bias, so nothing could be recovered."
    if not all(isinstance(change, Estimate) for change in changes):
        return f"{UNTOLD}."
    verdict = compare_estimates(*(change for change in changes if isinstance(change, Estimate)))
    return {
        -1: "Yes, but what is recovered was lost by the unscaled bias, not by the weights.",
        0: f"{UNTOLD}: the intervals of both changes overlap.",
        1: "No: the unscaled bias does better.",
    }[verdict]
