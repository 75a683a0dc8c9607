"""What the fifth assignment published: a small convolutional network on CIFAR-10, in int8 by hand.

lenet without biases for Q1 to Q4, the same with a bias on its last layer for Q5; two epochs of SGD at 0.001 with
momentum 0.9, batch 4, pixels from −1 to 1. Accuracies are of the 10,000 test images.
"""

from __future__ import annotations

BATCH, EPOCHS = 4, 2
CALIBRATION_IMAGES = 400
TEST_IMAGES = 10_000

WEIGHTS_PERCENT = "54.1"
"""Q2: integer weights; that of the float network was not printed."""
ACTIVATIONS_PERCENT = "53.17"
"""Q4: integer weights and activations."""
BIAS_FLOAT_PERCENT, BIAS_RAW_PERCENT, BIAS_ALL_PERCENT = "54.66", "51.4", "54.49"
"""Q5: float; integer weights with the bias as it was; everything in integers, the bias in int32."""

PEAK, CLAMP = 255, 127
"""What the code scales the largest activation to, and where it then clamps."""
NUM_LAYERS = 5


def read_percent(printed: str) -> float:
    return float(printed) / 100
