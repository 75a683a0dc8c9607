"""What the fifth assignment published: a small convolutional network on CIFAR-10, in int8 by hand.

lenet without biases for Q1 to Q4, with a bias on its last layer for Q5; two epochs of SGD at 0.001 with momentum 0.9,
batch 4, pixels from −1 to 1. Accuracies are on the 10,000 test images.

The checks recompute its claims from its own numbers.

What a scale of K and a clamp at 127 do to the largest activation follows from these two numbers. What happened to the
bias follows from the accuracies: more rounding cannot repair what less rounding has cost.
"""

from __future__ import annotations

from collections.abc import Iterator

from scalelab.analysis.paired import estimate_share
from scalelab.recipes.recipe import Check, read_published

PRINTED = read_published("quantization")

BATCH, EPOCHS = 4, 2
CALIBRATION_IMAGES = 400
TEST_IMAGES = 10_000
NUM_LAYERS = 5
"""Not printed: of the assignment's code, and of CIFAR-10."""

WEIGHTS_PERCENT = PRINTED["Q2"]["weights"].text
"""Q2: integer weights; the float accuracy was not printed."""
ACTIVATIONS_PERCENT = PRINTED["Q4"]["activations"].text
"""Q4: integer weights and activations."""
BIAS_FLOAT_PERCENT, BIAS_RAW_PERCENT, BIAS_ALL_PERCENT = (
    PRINTED["Q5"][name].text for name in ("float", "weights", "everything")
)
"""Q5: float; integer weights with an unscaled bias; all integers, the bias in int32."""

PEAK, CLAMP = (int(PRINTED["Q4"][name].number) for name in ("peak", "clamp"))
"""What the code scales the largest activation to, and where it clamps."""


def read_percent(printed: str) -> float:
    return float(printed) / 100


def find_saturated_share(peak: int) -> float:
    """The part of the range from 0 to the largest activation that becomes the clamp."""
    return max(0.0, 1 - (CLAMP + 0.5) / peak) if peak > CLAMP else 0.0


def find_largest_error(peak: int) -> float:
    """The worst that rounding and clamping do to a number within the range, as a share of the largest one."""
    return max(0.5 / peak, 1 - CLAMP / peak)


def find_points_lost(printed: str) -> float:
    """Q5: against its float network."""
    return float(BIAS_FLOAT_PERCENT) - float(printed)


def make_checks() -> list[Check]:
    return [_check_peak(), *_check_bias(), _check_loss()]


def _check_peak() -> Check:
    peak, clamp = PEAK, CLAMP
    return Check(
        id="Q4",
        claim=f"activations are scaled to int8 by {peak} / max|a| and clamped to [−128, {clamp}]",
        computed=f"the upper {100 * find_saturated_share(peak):.0f} % of the range saturates at {clamp}: the largest"
        f" activation is off by {100 * find_largest_error(peak):.0f} %. With {clamp} / max|a| no calibrated activation"
        f" is clamped, and the largest error is {100 * find_largest_error(clamp):.1f} %",
        holds=find_saturated_share(peak) == 0,
    )


def _check_bias() -> Iterator[Check]:
    raw, whole = (find_points_lost(printed) for printed in (BIAS_RAW_PERCENT, BIAS_ALL_PERCENT))
    factor = float(CLAMP) ** NUM_LAYERS
    yield Check(
        id="Q5",
        claim=f"integer weights cost {raw:.2f} points: {BIAS_FLOAT_PERCENT} → {BIAS_RAW_PERCENT} %",
        computed=f"with activations rounded too it is {whole:.2f}, and more rounding cannot help: {raw - whole:.2f}"
        f" points would come from the bias, added unscaled to logits that {NUM_LAYERS} layers with weights below 1"
        f" scale by at least 127^{NUM_LAYERS} = {factor:.1e}",
        holds=raw <= whole,
    )
    apart = float(WEIGHTS_PERCENT) - float(BIAS_RAW_PERCENT)
    yield Check(
        id="Q5",
        claim=f"quantizing only the weights gives {BIAS_RAW_PERCENT} %",
        computed=f"Q2 quantizes only the weights too, without a bias, and reaches {WEIGHTS_PERCENT} %: {apart:.1f}"
        " points more, so the weights are not what cost them",
        holds=apart <= 0,
    )


def _check_loss() -> Check:
    lost = find_points_lost(BIAS_ALL_PERCENT)
    num = TEST_IMAGES
    count = round(read_percent(BIAS_FLOAT_PERCENT) * num)
    width = estimate_share(count, num).half_width or 0.0
    return Check(
        id="Q5",
        claim=f"int8 loses {lost:.2f} points: {BIAS_FLOAT_PERCENT} → {BIAS_ALL_PERCENT} %",
        computed=f"{round(lost * num / 100)} of {num:,} images; each accuracy is known to ± {100 * width:.2f} points,"
        " so only a paired comparison, image by image, could resolve it",
        holds=True,
    )
