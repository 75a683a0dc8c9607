"""The shapes of weights and activations, from their histograms: centred or not, a bell or not.

A normal distribution has no excess kurtosis, a uniform one −1.2, and the estimate from n numbers has a standard error
of √(24/n) (Joanes and Gill 1998): weights are drawn from a uniform distribution before training. Kurtosis alone does
not see a plateau or a second hump, so the distance of Kolmogorov and Smirnov from a normal distribution is limited too,
to half of what a uniform distribution has (0.057). A mean within a fifth of a standard deviation of zero is near it:
the smallest effect that has a name (Cohen 1988).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.quantization.published import CLAMP, PEAK
from scalelab.records.quantized import Histogram
from scalelab.report.charts.column_charts import keep_charts
from scalelab.report.document import Chart
from scalelab.studies.quantize.report import draw_layer
from scalelab.units import format_share

LEVEL = 0.5
"""Excess kurtosis within which a distribution counts as roughly bell-shaped."""
UNIFORM = -1.2
"""Excess kurtosis of a uniform distribution."""
FARTHEST = 0.03
"""Distance from the normal distribution within which one counts as a bell."""
BELL = (
    f"excess kurtosis within ± {LEVEL:g} of a normal distribution's 0, and a Kolmogorov–Smirnov distance to it of at"
    f" most {FARTHEST:g}"
)
CENTRED = 0.2
"""Standard deviations that the mean of a centred distribution may be from zero."""


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


def measure_kurtosis(histogram: Histogram) -> Estimate:
    """The same with an interval of two standard errors."""
    value, width = find_kurtosis(histogram)
    return Estimate(value=value, low=value - width, high=value + width)


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


def is_open(histogram: Histogram) -> bool:
    """Whether its numbers are too few to tell its kurtosis from a bell's limits."""
    kurtosis, width = find_kurtosis(histogram)
    return abs(kurtosis) - width <= LEVEL < abs(kurtosis) + width


def group_shapes(histograms: Sequence[Histogram]) -> str:
    """Which layers have which shape, with kurtosis and distance; `Heavy tails (kurtosis over 0.5): conv2 (0.70, …).`"""
    groups: dict[str, list[str]] = {}
    for one in histograms:
        kurtosis, width = find_kurtosis(one)
        words = "Roughly a bell" if is_bell(one) else "Spikes or humps (by the distance only)"
        if is_open(one):
            words = "Too few numbers to judge"
        elif kurtosis - width > LEVEL:
            words = f"Heavy tails or a sharp peak (kurtosis over {LEVEL:g})"
        elif is_flat(one):
            words = f"Flat (kurtosis under −{LEVEL:g})"
        groups.setdefault(words, []).append(f"{one.layer} ({kurtosis:.2f}, {find_distance(one):.3f})".replace("-", "−"))
    listed = "; ".join(f"{words}: {', '.join(layers)}" for words, layers in groups.items())
    return f"{listed} (excess kurtosis, distance)."


def is_flat(histogram: Histogram) -> bool:
    kurtosis, width = find_kurtosis(histogram)
    return kurtosis + width < -LEVEL


def explain_flat(histograms: Sequence[Histogram]) -> str:
    """How near flat distributions are to the uniform one that initialization draws from; empty where none is flat."""
    flat = {one.layer: find_kurtosis(one) for one in histograms if is_flat(one)}
    if not flat:
        return ""
    uniform = [layer for layer, (kurtosis, width) in flat.items() if abs(kurtosis - UNIFORM) <= width]
    between = [layer for layer in flat if layer not in uniform]
    said = [
        *([f"{', '.join(uniform)} cannot be told from the uniform distribution"] if uniform else []),
        *([f"{', '.join(between)} lie between a normal distribution and the uniform one"] if between else []),
    ]
    return f" {' and '.join(said)} that initialization draws from ({UNIFORM:g}).".replace("-", "−")


def judge_shapes(histograms: Sequence[Histogram], limits: str = BELL) -> str:
    """Whether distributions are centred, and whether they are bells, with the limits of both."""
    bells = [one.layer for one in histograms if is_bell(one)]
    centred = [one.layer for one in histograms if abs(find_centre(one)) <= CENTRED]
    farthest = max(histograms, key=lambda one: abs(find_centre(one)))
    num, unjudged = len(histograms), [one.layer for one in histograms if is_open(one) and not is_bell(one)]
    few = f"; {', '.join(unjudged)} have too few numbers to judge" if unjudged else ""
    return (
        f"Centred: {count_layers(centred, num)} (mean within {CENTRED:g} σ of zero; the farthest is"
        f" {abs(find_centre(farthest)):.2f} σ, {farthest.layer}). Bell-shaped ({limits}):"
        f" {count_layers(bells, num - len(unjudged))}{few}"
    )


def count_layers(layers: Sequence[str], num: int) -> str:
    """`yes, all 5 layers`, `no layer of 5`, `only conv2 of 5 layers`."""
    if not num:
        return "this run does not show it"
    if len(layers) == num:
        return f"yes, {f'all {num} layers' if num > 1 else layers[0]}"
    return f"only {', '.join(layers)} of {num} layers" if layers else f"no, none of {num} layers" if num > 1 else "no"


def find_largest(histogram: Histogram) -> float:
    return max(-histogram.least, histogram.largest)


def describe_saturation(histograms: Sequence[Histogram]) -> str:
    """What K = 255 clamps of the input and of every layer's output, from the histograms that set the scales."""
    shares = {one.layer: find_share_beyond(one, PEAK) for one in histograms}
    listed = ", ".join(f"{format_share(share)} of {layer}" for layer, share in shares.items())
    dark = "; the input's are mostly negative, the background of the images" if is_mostly_dark(histograms) else ""
    return f"K = {PEAK} clamps what is beyond {CLAMP}/{PEAK} of max|a|: {listed}{dark}."


def is_mostly_dark(histograms: Sequence[Histogram]) -> bool:
    """Whether most of the input lies below minus half of its largest number, as the background of digits does."""
    inputs = [one for one in histograms if one.layer == "input"]
    return any(find_share(one, -math.inf, -find_largest(one) / 2) > 0.5 for one in inputs)


def find_share_beyond(histogram: Histogram, peak: int) -> float:
    """The share of values in bins whose middle is beyond the clamp."""
    limit = find_largest(histogram) * CLAMP / peak
    beyond = sum(count for middle, count in list_middles(histogram) if abs(middle) > limit)
    return beyond / max(1, sum(histogram.counts))


def draw_layers(histograms: Sequence[Histogram]) -> tuple[Chart, ...]:
    """A narrow chart per layer: of weights, whose shape is asked for, or before and after ReLU, most of which is 0."""
    found: dict[str, dict[str, Histogram]] = {}
    for one in histograms:
        found.setdefault(one.layer, {})[one.kind] = one
    drawn = (
        draw_layer(layer, kinds, is_log="weights" not in kinds, is_labelled=False) for layer, kinds in found.items()
    )
    return keep_charts(*(chart for charts in drawn for chart in charts))
