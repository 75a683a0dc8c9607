"""What the quantization lab concludes, confirmed or not with this run's numbers and a reason.

A change in accuracy has one of two intervals, and says which: over networks trained from other seeds, or, of a single
network, over images that might have been tested instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.paired import count_pairs, estimate_paired_difference
from scalelab.analysis.stats import estimate_location
from scalelab.recipes.evidence import UNTOLD, say
from scalelab.recipes.quantization.published import (
    ACTIVATIONS_PERCENT,
    BIAS_ALL_PERCENT,
    BIAS_RAW_PERCENT,
    WEIGHTS_PERCENT,
)
from scalelab.recipes.quantization.shapes import (
    describe_saturation,
    explain_flat,
    find_outside,
    find_share,
    group_shapes,
    judge_shapes,
)
from scalelab.records.quantized import Histogram, LayerReport, Quantized
from scalelab.studies.quantize.answer import StageAnswer
from scalelab.units import format_count, format_share

LARGEST = 127
BIASES = {
    "in_float": "float",
    "with_an_unscaled_bias": "weights-raw-bias",
    "with_a_scaled_one": "weights",
    "all_in_integers_with_K_=_127": "int8",
    "with_K_=_255": "int8-255",
}
"""Stages of Q5, by what its answer calls them."""
NORMAL_BEYOND = 0.0027
"""Of a normal distribution, beyond three standard deviations."""
SMALL_DROP, TOLERATED = 0.01, 0.02
"""Points of accuracy, as a share: what a small drop is, and how wide an interval around none may be."""
NEAR = 0.1
"""Of the largest activation: what is called near zero."""


def format_signed(number: float) -> str:
    return f"{number:+.2f}".replace("-", "−") if abs(number) >= 0.005 else "0.00"


def answer_weights(histograms: Sequence[Histogram]) -> dict[str, str]:
    if not histograms:
        return {}
    outside = {one.layer: find_outside(one) for one in histograms}
    listed = ", ".join(f"{format_share(share)} in {layer}" for layer, share in outside.items())
    sides = {one.layer: min(-one.least, one.largest) / max(-one.least, one.largest, 1e-30) for one in histograms}
    lopsided = min(sides, key=sides.__getitem__)
    few = max(outside.values()) <= 2 * NORMAL_BEYOND
    reach = max(max(-one.least, one.largest) for one in histograms)
    return {
        "shape": f"{judge_shapes(histograms)}.{explain_flat(histograms)}",
        "outliers": f"{'Yes' if few else 'Not everywhere'}: all weights lie within ± {reach:.2f}, and beyond 3σ lie"
        f" {listed} (a normal distribution: {format_share(NORMAL_BEYOND)})."
        f" {describe_reach(measure_spans(histograms))}",
        "symmetric": f"{'Yes' if sides[lopsided] > 0.5 else 'Not for every layer'}: the shorter side reaches"
        f" {format_share(sides[lopsided])} of the longer one in {lopsided}, the least symmetric layer; a symmetric"
        " scale leaves the rest of that side unused. One scale per layer is fixed by its largest weight.",
    }


def measure_spans(histograms: Sequence[Histogram]) -> dict[str, float]:
    """The largest weight of every layer, in three standard deviations."""
    return {one.layer: max(-one.least, one.largest) / (3 * one.deviation or 1.0) for one in histograms}


def describe_reach(spans: Mapping[str, float]) -> str:
    widest, tightest = max(spans, key=spans.__getitem__), min(spans, key=spans.__getitem__)
    return f"The largest weight is {spans[widest]:.1f} × 3σ in {widest} and {spans[tightest]:.1f} × 3σ in {tightest}."


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


def say_pooled(change: Estimate | None, networks: Sequence[Quantized]) -> str:
    """`−1.41 points (−3.38 to +0.27 over 8 seeds)`."""
    if change is None:
        return "unknown"
    base = f"{len(networks)} seeds" if len(networks) > 1 else "images"
    ends = "" if change.low is None or change.high is None else f" ({format_ends(change)} over {base})"
    return f"{format_signed(100 * change.value)} points{ends}"


def count_right(networks: Sequence[Quantized], **stages: str) -> str:
    """`Correct, of 355 images: 341 in float, 340 in int8.`, of the network in the tables."""
    one = networks[0]
    found = {stage.name: sum(map(int.__eq__, stage.predictions, one.labels)) for stage in one.stages}
    listed = ", ".join(f"{found[name]:,} {words.replace('_', ' ')}" for words, name in stages.items() if name in found)
    return f"Correct, of {len(one.labels):,} images: {listed}."


def answer_integers(found: Mapping[str, StageAnswer], networks: Sequence[Quantized] = ()) -> dict[str, str]:
    weights, sigma = found.get("weights"), found.get("weights-3sigma")
    if weights is None or sigma is None or not networks:
        return {}
    change, clamped = (pool_change(networks, stage, "float") for stage in ("weights", "weights-3sigma"))
    apart = pool_change(networks, "weights-3sigma", "weights")
    right = count_right(networks, in_float="float", with_int8_weights="weights")
    choice = "3σ, which is more accurate here" if is_above(apart) else "The total range, which clamps no weight"
    return {
        "range": f"{choice}: against float, the accuracy changes by {say_pooled(change, networks)} with the total range"
        f" and by {say_pooled(clamped, networks)} with 3σ, {judge_apart(apart, networks)}. {compare_ranges(networks)}"
        f"{compare_stages(weights, sigma)}",
        "tolerates": f"{judge_drop(change)}. {describe_weights(networks)} {right} Rounding moves a weight by"
        " at most 1/254 of the layer's largest.",
    }


def is_above(change: Estimate | None) -> bool:
    return change is not None and change.is_above(0)


def judge_apart(apart: Estimate | None, networks: Sequence[Quantized]) -> str:
    """What 3σ changes against the total range."""
    if apart is None or apart.low is None or apart.high is None:
        return "which this run does not compare"
    worse = "so 3σ costs accuracy" if apart.high < 0 else "so 3σ gains accuracy" if apart.low > 0 else ""
    paired = ", paired by seed" if len(networks) > 1 else ""
    return f"{worse or 'and no difference between the two is shown'}: {say_pooled(apart, networks)} apart{paired}"


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


def describe_weights(networks: Sequence[Quantized]) -> str:
    change = pool_change(networks, "weights", "float")
    return f"With int8 weights the accuracy changes by {say_pooled(change, networks)}."


def describe(answer: StageAnswer) -> str:
    """`loses 1.10 points of accuracy (−1.42 to −0.72 over images) and classifies 97.34 % of images as float does`."""
    same = None if answer.agreement is None else answer.agreement.value
    return f"{say_change(answer)} and classifies {say('accuracy', same)} of images as float does"


def say_change(answer: StageAnswer) -> str:
    """Of one network: `loses 1.60 points of accuracy (−3.1 to −0.2 over images)`; a change that may be none in images.

    Its interval is of other images, where that of `say_pooled` is of other seeds.
    """
    change, counts = answer.difference, answer.counts
    if change is None:
        return "cannot be judged"
    ends = "" if change.low is None or change.high is None else f"{format_ends(change)} points over images"
    more = counts.won - counts.lost if counts else 0
    if ends and (change.low or 0.0) < 0 < (change.high or 0.0) and more:
        images = f"{format_count(abs(more), 'image')} {'more' if more > 0 else 'fewer'} than float"
        return f"is right on {images} ({ends})"
    verb = "loses" if change.value < 0 else "gains"
    size = f"{verb} {100 * abs(change.value):.2f} points of accuracy" if change.value else "keeps the accuracy"
    return f"{size}{f' ({ends})' if ends else ''}"


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
    shapes = group_shapes(before)
    hidden = [after[one.layer] for one in before if one.layer in after and after[one.layer].least >= 0]
    linear = ", ".join(one.layer for one in before if one.layer in after and after[one.layer].least < 0)
    without = f"; no ReLU follows {linear}" if linear else ""
    shares = {one.layer: find_share(one, -math.inf, NEAR * one.largest) for one in hidden}
    is_near = bool(shares) and min(shares.values()) > 0.5
    near = ", ".join(f"{format_share(share)} in {layer}" for layer, share in shares.items())
    return {
        "before": f"{judge_shapes(before, 'by the limits of Q1')}. {shapes}",
        "after": f"{'Yes' if is_near else 'Not in every layer'}: non-negative in"
        f" {', '.join(one.layer for one in hidden) or 'no layer'}, as ReLU sets negative numbers to 0"
        f"{without}. Below {format_share(NEAR)} of the largest lie {near or 'none'}: few activations use the upper"
        " integers.",
    }


def answer_forward(networks: Sequence[Quantized], histograms: Sequence[Histogram] = ()) -> dict[str, str]:
    """What integer activations cost beside integer weights, and how much of it is the clamp of K = 255."""
    change = pool_change(networks, "int8-255", "weights")
    if change is None:
        return {}
    low, high = change.low or 0.0, change.high or 0.0
    published = format_signed(float(ACTIVATIONS_PERCENT) - float(WEIGHTS_PERCENT))
    drop = (
        f"{say_pooled(change, networks)} against int8 weights alone (K = 255 as in the published code, which gave"
        f" {published})"
    )
    verdict = f"This run does not resolve a drop: {drop}"
    if high < 0:
        size = "small" if low > -TOLERATED else "not small" if high < -TOLERATED else "of unclear size"
        verdict = f"A drop, {size} (limit: {100 * TOLERATED:g} points): {drop}"
    elif low > 0:
        verdict = f"No, a gain: {drop}"
    return {
        "drop": f"{verdict}. {count_right(networks, with_int8_weights='weights', with_activations='int8-255')} K is the"
        " integer that the largest activation is scaled to: 255 with a clamp at 127 cuts off the upper half of the"
        f" range, 127 only rounds. {judge_clamp(networks)}"
        f"{f' {describe_saturation(histograms)} What each of them costs is not measured apart.' if histograms else ''}"
    }


def judge_clamp(networks: Sequence[Quantized]) -> str:
    """Whether rounding or the clamp costs accuracy: K = 127 against int8 weights, then K = 255 against K = 127."""
    rounding, clamp = pool_change(networks, "int8", "weights"), pool_change(networks, "int8-255", "int8")
    if rounding is None or clamp is None:
        return ""
    is_clamp = clamp.is_below(0)
    is_rounding = rounding.is_below(0)
    cause = {
        (True, False): "so the clamp costs accuracy, and rounding activations nothing that can be seen",
        (True, True): "so both cost accuracy",
        (False, True): "so rounding costs accuracy, and the clamp nothing that can be seen",
        (False, False): "so neither cost is beyond its interval",
    }[is_clamp, is_rounding]
    return (
        f"Rounding alone (K = 127) changes the accuracy by {say_pooled(rounding, networks)}, the clamp of K = 255 by"
        f" {say_pooled(clamp, networks)}: {cause}."
    )


def describe_alone(found: Mapping[str, StageAnswer], networks: Sequence[Quantized]) -> str:
    """The network of the tables: of several, it is one, whose images decide less than all of them."""
    one, rounded = found["int8-255"], found["int8"]
    is_open = one.difference is not None and (one.difference.low or 0.0) <= 0 <= (one.difference.high or 0.0)
    alone = (
        f"The {len(networks[0].labels):,} images of one network cannot decide whether int8 costs accuracy: with"
        if is_open
        else "With"
    )
    if len(networks) < 2:
        alone = "With"
    return (
        f"{alone} K = 255 and the clamp at 127, the network in the tables {describe(one)}; with K = 127 it"
        f" {say_change(rounded)}."
    )


def format_ends(change: Estimate) -> str:
    return " to ".join(format_signed(100 * end) for end in (change.low or 0.0, change.high or 0.0))


def answer_bias(
    found: Mapping[str, StageAnswer], networks: Sequence[Quantized], layers: Sequence[LayerReport] = ()
) -> dict[str, str]:
    if not {"weights-raw-bias", "weights", "int8-255"} <= set(found):
        return {}
    change = pool_change(networks, "weights", "weights-raw-bias")
    is_gain = change is not None and change.is_above(0)
    so = "So what scaling recovers was lost with the bias, not by rounding weights. " if is_gain else ""
    return {
        "bias": f"{judge_bias(networks)} {count_right(networks, **BIASES)} {weigh_bias(layers)}{so}The published"
        " numbers suggest that what was recovered"
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
    if change.is_above(0):
        verdict = "Yes"
    elif change.is_below(0):
        verdict = "No, the unscaled bias does better"
    elif change.low is not None and change.high is not None and max(-change.low, change.high) < SMALL_DROP:
        verdict = f"No, it changes by less than {100 * SMALL_DROP:g} point"
    return f"{verdict}. {describe_bias(networks)} The bias decides {decided:,} of {num:,} images."


def describe_bias(networks: Sequence[Quantized]) -> str:
    scaled, lost = (
        say_pooled(pool_change(networks, "weights", other), networks) for other in ("weights-raw-bias", "float")
    )
    said = f"Scaling the bias changes the accuracy by {scaled}, rounding the weights, with the bias scaled, by {lost}."
    return f"{said}{compare_last(networks)}"


def compare_last(networks: Sequence[Quantized]) -> str:
    """What the published last stage, all integers, does beside scaled biases alone: there it was the better one."""
    change = pool_change(networks, "int8-255", "weights")
    if change is None or change.low is None or change.high is None:
        return ""
    words = "is worse" if change.high < 0 else "is better" if change.low > 0 else "does not clearly differ"
    return (
        f" All in integers (K = 255, as published) {words}, by {say_pooled(change, networks)} against a scaled bias and"
        f" float activations (published: {BIAS_ALL_PERCENT} % all in integers, {BIAS_RAW_PERCENT} % with an unscaled"
        " bias)."
    )


def describe_ties(quantized: Quantized, found: Mapping[str, StageAnswer]) -> Iterator[str]:
    tied = next((layer.tied_outputs for layer in quantized.layers if layer.tied_outputs is not None), None)
    if tied is None or "int8-accumulators" not in found:
        return
    yield (
        f"In {tied:,} of {len(quantized.labels):,} images two int8 logits tie for the largest. With"
        f" the int32 sums of the last layer as logits, the network {describe(found['int8-accumulators'])}."
    )


def describe_export(quantized: Quantized) -> Iterator[str]:
    if quantized.compared_logits:
        different = quantized.different_logits or 0
        yield (
            f"The exported ONNX network, run by onnxruntime, gives {different or 'no'} other logits than the simulation"
            f" (of {quantized.compared_logits:,})."
        )
