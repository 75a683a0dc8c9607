"""What the fifth assignment published: a small convolutional network on CIFAR-10, in int8 by hand.

lenet without biases for Q1 to Q4, with a bias on its last layer for Q5; two epochs of SGD at 0.001 with momentum 0.9,
batch 4, pixels from −1 to 1. Accuracies are on the 10,000 test images.
"""

from __future__ import annotations

BATCH, EPOCHS = 4, 2
CALIBRATION_IMAGES = 400
TEST_IMAGES = 10_000

WEIGHTS_PERCENT = "54.1"
"""Q2: integer weights; the float accuracy was not printed."""
ACTIVATIONS_PERCENT = "53.17"
"""Q4: integer weights and activations."""
BIAS_FLOAT_PERCENT, BIAS_RAW_PERCENT, BIAS_ALL_PERCENT = "54.66", "51.4", "54.49"
"""Q5: float; integer weights with an unscaled bias; all integers, the bias in int32."""

PEAK, CLAMP = 255, 127
"""What the code scales the largest activation to, and where it clamps."""
NUM_LAYERS = 5


def read_percent(printed: str) -> float:
    return float(printed) / 100
