"""What the quantization lab concludes, confirmed or not with this run's numbers and a reason.

A normal distribution has no excess kurtosis, a uniform one −1.2, and the estimate from n numbers has a standard error
of √(24/n) (Joanes and Gill 1998): weights are drawn from a uniform distribution before training. Kurtosis alone does
not see a plateau or a second hump, so the share of values that lie elsewhere than in a normal distribution (the
distance of Kolmogorov and Smirnov) is limited too, to half of what a uniform distribution has (0.057). A mean within a
fifth of a standard deviation of zero is near it: the smallest effect that has a name (Cohen 1988).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.paired import count_pairs, estimate_paired_difference
from scalelab.analysis.stats import estimate_location
from scalelab.recipes.evidence import UNTOLD, say
from scalelab.recipes.quantization.published import ACTIVATIONS_PERCENT, BIAS_RAW_PERCENT, WEIGHTS_PERCENT
from scalelab.records.quantized import Histogram, LayerReport, Quantized
from scalelab.studies.quantize.answer import StageAnswer
from scalelab.studies.quantize.findings import format_change
from scalelab.units import format_count, format_share

LARGEST = 127
LEVEL = 0.5
"""Excess kurtosis within which a distribution counts as roughly bell-shaped."""
FARTHEST = 0.03
"""Distance from the normal distribution within which one counts as a bell."""
CENTRED = 0.2
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


def find_moment(histogram: Histogram, power: int, around: float = 0.0) -> float:
    """The mean of a power of the distance from a place, from bins."""
    total = sum((middle - around) ** power * number for middle, number in list_middles(histogram))
    return total / max(1, sum(histogram.counts))


def find_kurtosis(histogram: Histogram) -> tuple[float, float]:
    """The excess kurtosis from bins, and twice its standard error."""
    mean = find_moment(histogram, 1)
    second, fourth = (find_moment(histogram, power, mean) for power in (2, 4))
    return (fourth / second**2 - 3 if second else 0.0), 2 * math.sqrt(24 / max(1, sum(histogram.counts)))


def find_distance(histogram: Histogram) -> float:
    """The largest difference from the shares of a normal distribution with its mean and deviation, over all bins."""
    mean, count = find_moment(histogram, 1), max(1, sum(histogram.counts))
    width = math.sqrt(2 * find_moment(histogram, 2, mean)) or 1.0
    half, below, farthest = (histogram.high - histogram.low) / len(histogram.counts) / 2, 0, 0.0
    for middle, number in list_middles(histogram):
        below += number
        farthest = max(farthest, abs(below / count - (1 + math.erf((middle + half - mean) / width)) / 2))
    return farthest


def is_bell(histogram: Histogram) -> bool:
    kurtosis, width = find_kurtosis(histogram)
    return abs(kurtosis) + width <= LEVEL and find_distance(histogram) <= FARTHEST


def find_centre(histogram: Histogram) -> float:
    """The mean in standard deviations."""
    return histogram.mean / histogram.deviation if histogram.deviation else 0.0


def describe_shape(histogram: Histogram) -> str:
    """`flatter than a bell (−1.15 ± 0.04)`."""
    kurtosis, width = find_kurtosis(histogram)
    words = "roughly bell-shaped" if is_bell(histogram) else "too few numbers to judge its shape"
    if abs(kurtosis) + width <= LEVEL and not is_bell(histogram):
        words = f"no bell though its kurtosis fits, as {format_share(find_distance(histogram))} lie elsewhere"
    if kurtosis - width > LEVEL:
        words = "heavier tails than a bell"
    elif kurtosis + width < -LEVEL:
        words = "flatter than a bell"
    sign = "−" if kurtosis < 0 else ""
    return f"{words} ({sign}{abs(kurtosis):.2f} ± {width:.2f})"


def judge_shapes(histograms: Sequence[Histogram]) -> str:
    """Whether distributions are centred bells, the limits of both, and which of them could be normal."""
    bells = [one.layer for one in histograms if is_bell(one)]
    centred = [one.layer for one in histograms if abs(find_centre(one)) <= CENTRED]
    both = [layer for layer in bells if layer in centred]
    num = len(histograms)
    farthest = max(histograms, key=lambda one: abs(find_centre(one)))
    some = f"In part: of {num} layers, {', '.join(both)} {'are' if len(both) > 1 else 'is'} both"
    verdict = "Yes" if len(both) == num else some if both else "No layer is both"
    return (
        f"{verdict}. Centred (mean within {CENTRED:g} σ of zero): {len(centred)} of {num}; the farthest mean is"
        f" {abs(find_centre(farthest)):.2f} σ from zero ({farthest.layer}). Bell-shaped (excess kurtosis within"
        f" ± {LEVEL:g}, a normal distribution has 0, and at most {format_share(FARTHEST)} elsewhere than in one):"
        f" {len(bells)} of {num}"
    )


def format_signed(number: float) -> str:
    return f"{number:+.2f}".replace("-", "−")


def answer_weights(histograms: Sequence[Histogram]) -> dict[str, str]:
    if not histograms:
        return {}
    shapes = "; ".join(f"{one.layer} {describe_shape(one)}" for one in histograms)
    outside = {one.layer: find_outside(one) for one in histograms}
    listed = ", ".join(f"{format_share(share)} in {layer}" for layer, share in outside.items())
    spans = {one.layer: max(-one.least, one.largest) / (3 * one.deviation or 1.0) for one in histograms}
    sides = {one.layer: min(-one.least, one.largest) / max(-one.least, one.largest, 1e-30) for one in histograms}
    lopsided = min(sides, key=sides.__getitem__)
    few = max(outside.values()) <= 2 * NORMAL_BEYOND
    return {
        "shape": f"{judge_shapes(histograms)}. By layer: {shapes}. Flat ones resemble the uniform distribution"
        " that initialization draws from (−1.2).",
        "outliers": f"{'Yes' if few else 'Not everywhere'}: beyond 3σ lie {listed} (a normal distribution:"
        f" {format_share(NORMAL_BEYOND)}). The largest weight is {max(spans.values()):.1f} × 3σ.",
        "symmetric": f"{'Yes' if sides[lopsided] > 0.5 else 'Not for every layer'}: the shorter side reaches"
        f" {format_share(sides[lopsided])} of the longer one in {lopsided}, the least symmetric layer; a symmetric"
        " scale leaves the rest of that side unused. One scale per layer is fixed by its largest weight.",
    }


def pool_change(networks: Sequence[Quantized], candidate: str, reference: str) -> Estimate | None:
    """The change in accuracy from one stage to another, over networks trained from other seeds.

    Its interval is of networks that might have been trained instead, and each change is of the same images; a single
    network has Newcombe's interval of other images. None where a stage is missing.
    """
    pairs = []
    for one in networks:
        stages = {stage.name: stage.predictions for stage in one.stages}
        if candidate in stages and reference in stages:
            pairs.append(count_pairs(stages[candidate], stages[reference], one.labels))
    known = [counts for counts in pairs if counts is not None]
    if len(known) < 2:
        return estimate_paired_difference(known[0]) if known else None
    return estimate_location([(counts.won - counts.lost) / counts.num_samples for counts in known])


def name_networks(networks: Sequence[Quantized]) -> str:
    return f", over {len(networks)} seeds" if len(networks) > 1 else ""


def say_pooled(change: Estimate | None) -> str:
    """`−1.41 points (−3.38 to +0.27)`."""
    if change is None:
        return "unknown"
    ends = "" if change.low is None or change.high is None else f" ({format_ends(change)})"
    return f"{format_points(100 * change.value)}{ends}"


def answer_integers(found: Mapping[str, StageAnswer], networks: Sequence[Quantized] = ()) -> dict[str, str]:
    weights, sigma = found.get("weights"), found.get("weights-3sigma")
    if weights is None or sigma is None:
        return {}
    return {
        "range": f"The total range, which clamps no weight: with it the network {say_change(weights)}; by 3σ it"
        f" {say_change(sigma)}. {compare_ranges(networks)}{compare_stages(weights, sigma)}",
        "tolerates": f"{judge_drop(pool_change(networks, 'weights', 'float') or weights.difference)}."
        f" {describe_pooled(networks) or describe_weights(weights)} Rounding moves a weight by at most 1/254 of the"
        " layer's largest.",
    }


def describe_pooled(networks: Sequence[Quantized]) -> str:
    if len(networks) < 2:
        return ""
    change = say_pooled(pool_change(networks, "weights", "float"))
    return f"Over {len(networks)} seeds, the accuracy changes by {change}, the 95 % interval of such networks."


def compare_ranges(networks: Sequence[Quantized]) -> str:
    """Where three deviations are narrower than the largest weight, and where they are not."""
    known = [one for one in networks[0].histograms if one.kind == "weights"] if networks else []
    narrow = [one.layer for one in known if 3 * one.deviation < max(-one.least, one.largest)]
    wide = [one.layer for one in known if one.layer not in narrow]
    said = [
        *([f"finer steps in {', '.join(narrow)}, where it clamps the weights outside"] if narrow else []),
        *([f"coarser steps in {', '.join(wide)}, whose weights do not reach it"] if wide else []),
    ]
    return f"3σ gives {', and '.join(said)}. " if said else ""


def describe_weights(answer: StageAnswer) -> str:
    return f"With int8 weights the network {describe(answer)}."


def describe(answer: StageAnswer) -> str:
    """`loses 1.10 points of accuracy (−1.42 to −0.72) and classifies 97.34 % of images as float does`."""
    same = None if answer.agreement is None else answer.agreement.value
    return f"{say_change(answer)} and classifies {say('accuracy', same)} of images as float does"


def say_change(answer: StageAnswer) -> str:
    """`loses 1.60 points of accuracy (−3.1 to −0.2)`; a change that may be none in images, `could be chance`."""
    change, counts = answer.difference, answer.counts
    if change is None:
        return "cannot be judged"
    more = counts.won - counts.lost if counts else 0
    if change.low is None or change.high is None or not change.low < 0 < change.high or not more:
        return format_change(change)
    images = f"{format_count(abs(more), 'image')} {'more' if more > 0 else 'fewer'} than float"
    return f"is right on {images} ({format_ends(change)} points: could be chance)"


def judge_drop(change: Estimate | None) -> str:
    """By the interval of the change in accuracy."""
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
    differs = [mine != theirs for mine, theirs in zip(one.stage.predictions, other.stage.predictions, strict=True)]
    return f"The two put {sum(differs):,} of {len(differs):,} images into different classes."


def answer_activations(before: Sequence[Histogram], after: Mapping[str, Histogram]) -> dict[str, str]:
    if not before:
        return {}
    shapes = "; ".join(f"{one.layer} mean {format_signed(find_centre(one))} σ, {describe_shape(one)}" for one in before)
    hidden = [after[one.layer] for one in before if one.layer in after and after[one.layer].least >= 0]
    linear = ", ".join(one.layer for one in before if one.layer in after and after[one.layer].least < 0)
    without = f"; no ReLU follows {linear}" if linear else ""
    shares = {one.layer: find_share(one, -math.inf, NEAR * one.largest) for one in hidden}
    is_near = bool(shares) and min(shares.values()) > 0.5
    near = ", ".join(f"{format_share(share)} in {layer}" for layer, share in shares.items())
    return {
        "before": f"{judge_shapes(before)}. By mean and excess kurtosis: {shapes}.",
        "after": f"{'Yes' if is_near else 'Not in every layer'}: non-negative in"
        f" {', '.join(one.layer for one in hidden) or 'no layer'}, as ReLU sets negative numbers to 0"
        f"{without}. Below {format_share(NEAR)} of the largest lie {near or 'none'}: few activations use the upper"
        " integers.",
    }


def answer_forward(networks: Sequence[Quantized]) -> dict[str, str]:
    """What integer activations cost beside integer weights, and how much of it is the clamp of K = 255."""
    change = pool_change(networks, "int8-255", "weights")
    if change is None:
        return {}
    low, high = change.low or 0.0, change.high or 0.0
    published = format_signed(float(ACTIVATIONS_PERCENT) - float(WEIGHTS_PERCENT))
    drop = (
        f"{say_pooled(change)} against int8 weights alone{name_networks(networks)} (K = 255 as in the published code,"
        f" which gave {published})"
    )
    verdict = f"This run does not resolve a drop: {drop}"
    if high < 0:
        size = "small" if low > -TOLERATED else "not small" if high < -TOLERATED else "of unclear size"
        verdict = f"A drop, {size}: {drop}"
    elif low > 0:
        verdict = f"No, a gain: {drop}"
    return {
        "drop": f"{verdict}. K stands for the largest activation: 255 with a clamp at 127 cuts off the upper half of"
        f" the range, 127 only rounds.{judge_clamp(networks)}"
    }


def judge_clamp(networks: Sequence[Quantized]) -> str:
    """Whether rounding or the clamp costs accuracy: K = 127 against int8 weights, then K = 255 against K = 127."""
    rounding, clamp = pool_change(networks, "int8", "weights"), pool_change(networks, "int8-255", "int8")
    if rounding is None or clamp is None:
        return ""
    is_clamp = clamp.high is not None and clamp.high < 0
    is_rounding = rounding.high is not None and rounding.high < 0
    cause = {
        (True, False): "so the clamp costs accuracy, and rounding activations nothing that can be seen",
        (True, True): "so both cost accuracy",
        (False, True): "so rounding costs accuracy, and the clamp nothing that can be seen",
        (False, False): "so neither cost is beyond its interval",
    }[is_clamp, is_rounding]
    return f" Rounding alone changes the accuracy by {say_pooled(rounding)}, the clamp by {say_pooled(clamp)}: {cause}."


def format_points(points: float) -> str:
    return f"{format_signed(points)} points"


def format_ends(change: Estimate) -> str:
    return " to ".join(format_signed(100 * end) for end in (change.low or 0.0, change.high or 0.0))


def answer_bias(
    found: Mapping[str, StageAnswer], networks: Sequence[Quantized], layers: Sequence[LayerReport] = ()
) -> dict[str, str]:
    if not {"weights-raw-bias", "weights", "int8-255"} <= set(found):
        return {}
    change = pool_change(networks, "weights", "weights-raw-bias")
    is_gain = change is not None and change.low is not None and change.low > 0
    so = "So what scaling recovers was lost with the bias, not by rounding weights. " if is_gain else ""
    return {
        "bias": f"{judge_bias(networks)} {weigh_bias(layers)}{so}The published numbers suggest that what was recovered"
        f" there was lost with the bias, not by rounding: int8 weights give {WEIGHTS_PERCENT} % without a bias (Q2),"
        f" {BIAS_RAW_PERCENT} % with an unscaled one (Q5), though of two networks."
    }


def weigh_bias(layers: Sequence[LayerReport]) -> str:
    """The largest bias beside the largest logit: scaled like it, and as it is beside logits of integer weights."""
    words = (
        "Integer weights make the logits many orders of magnitude larger, and an unscaled bias vanishes beside them. "
    )
    last = next((layer for layer in reversed(layers) if layer.bias), None)
    if last is None or not last.scale or not last.output_scale or not all(layer.weight_scales for layer in layers):
        return words
    bias = max(map(abs, last.bias)) * last.scale * last.output_scale
    logit, factor = LARGEST * last.scale, math.prod(1 / layer.weight_scales[0] for layer in layers)
    return (
        f"Integer weights make the logits Π n_w = {factor:.1e} times as large. Scaled like them, the largest bias"
        f" ({bias:.2g}) is {format_share(bias / logit)} of the largest logit ({logit:.3g}); unscaled, it is"
        f" {bias / logit / factor:.0e} of it, as if there were none. "
    )


def judge_bias(networks: Sequence[Quantized]) -> str:
    """Whether scaling the bias helps, image by image; nothing follows where the bias decides no image."""
    decided = num = 0
    for one in networks:
        stages = {stage.name: stage.predictions for stage in one.stages}
        without = stages.get("weights-no-bias", stages.get("weights-raw-bias", ()))
        pairs = list(zip(stages.get("weights", ()), without, strict=True))
        decided, num = decided + sum(mine != theirs for mine, theirs in pairs), num + len(pairs)
    change = pool_change(networks, "weights", "weights-raw-bias")
    if change is None:
        return f"{UNTOLD}."
    if not decided:
        return f"This data cannot show it: the bias changes the class of none of the {num:,} images."
    verdict = f"{UNTOLD}, the change could be chance"
    if change.low is not None and change.low > 0:
        verdict = "Yes"
    elif change.high is not None and change.high < 0:
        verdict = "No, the unscaled bias does better"
    elif change.low is not None and change.high is not None and max(-change.low, change.high) < SMALL_DROP:
        verdict = f"No, any gain here is below {100 * change.high + 0.005:.2f} points"
    lost = say_pooled(pool_change(networks, "weights", "float"))
    return (
        f"{verdict}: scaling the bias changes the accuracy by {say_pooled(change)}{name_networks(networks)}; the bias"
        f" decides {decided:,} of {num:,} images. Rounding the weights, with the bias scaled, changes it by {lost}."
    )


def describe_ties(quantized: Quantized, found: Mapping[str, StageAnswer]) -> Iterator[str]:
    tied = next((layer.tied_outputs for layer in quantized.layers if layer.tied_outputs is not None), None)
    if tied is None or "int8-accumulators" not in found:
        return
    yield (
        f"In {tied:,} of {len(quantized.labels):,} images two int8 logits are the largest, and the first one wins. With"
        f" the int32 sums of the last layer as logits, the network {describe(found['int8-accumulators'])}."
    )
    stages = (found[name].stage.predictions for name in ("float", "int8", "int8-accumulators"))
    other = [(true, sums) for true, rounded, sums in zip(*stages, strict=True) if rounded != true]
    if other:
        num_repaired = sum(sums == true for true, sums in other)
        yield (
            f"int8 classifies {format_count(len(other), 'image')} differently from float; with int32 sums"
            f" {num_repaired:,} of them agree again: that is what rounding logits to a byte costs."
        )


def describe_export(quantized: Quantized) -> Iterator[str]:
    if quantized.compared_logits:
        different = quantized.different_logits or 0
        yield (
            f"The exported ONNX network, run by onnxruntime, gives {different or 'no'} other logits than the simulation"
            f" (of {quantized.compared_logits:,})."
        )
